"""The two kinds of virtual engines: vLLM's scheduler as it is, and the fast model of it.

vLLM is imported when the first engine with its scheduler is created, so that runs of the fast model alone start at once and
need no vLLM.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from tidegate_control import control_contract
from tidegate_policy.model import Call, CallId
from tidegate_sim import engine_limits, virtual_time

Model = Literal["vllm", "fast"]
MODELS: tuple[Model, ...] = get_args(Model)
_CLASSES = {
    "vllm": ("tidegate_sim.virtual_engine", "VirtualEngine"),
    "fast": ("tidegate_sim.fast_virtual_engine", "FastEngine"),
}


class Engine(Protocol):
    """A virtual engine of either kind."""

    steps: int
    busy_s: float
    queued: int
    preemptions: int
    starts: dict[CallId, float]

    def submit(
        self,
        call: Call,
        output_tokens: int,
        prefixes: Sequence[engine_limits.Prefix] = (),
        output_prefix: int | None = None,
    ) -> None:
        """Receives a call that produces `output_tokens`."""

    def load(self) -> engine_limits.EngineLoad:
        """The load at this instant."""

    def watch(self) -> control_contract.Watch:
        """The engine's QoS windows."""

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float], *, bypass: bool = False) -> None:
        """As SetPolicy of EngineControl. A `bypass` lasts until the next switch."""


def create(model: Model, clock: virtual_time.Loop, *arguments: Any, **named: Any) -> Engine:
    """An engine; the arguments are those of `virtual_engine.VirtualEngine`."""
    module, name = _CLASSES[model]
    engine: Engine = getattr(importlib.import_module(module), name)(clock, *arguments, **named)
    return engine
