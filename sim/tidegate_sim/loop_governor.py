"""EngineControl's view of a simulated engine: the `Governor` contract over an engine core that lives in an event loop.

Control calls come from gRPC threads. Each call runs inside the event loop, and the thread waits for its result, so a
command is in force when the call returns.
"""

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from tidegate_control import control_contract
from tidegate_policy.engine import engine_status
from tidegate_sim import realtime

ANSWER_TIMEOUT_S = 10.0
"""A busy event loop answers a control call within this time, or the call fails."""
T = TypeVar("T")


class LoopGovernor:
    """Governs a `RealtimeEngine` from any thread but the thread of its event loop."""

    def __init__(self, engine: realtime.RealtimeEngine, profile: str, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._profile = profile
        self._loop = loop

    def set_policy(
        self, name: str, reason: str, parameters: Mapping[str, float] | None = None, *, bypass: bool = False
    ) -> engine_status.Switched:
        return self.in_loop(
            lambda: self._engine.core.set_policy(time.monotonic(), name, parameters or {}, reason, bypass=bypass)
        )

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> engine_status.Controls:
        return self.in_loop(
            lambda: self._engine.core.set_controls(max_running=max_running, max_step_tokens=max_step_tokens)
        )

    def state(self, *, max_waiting_ids: int = engine_status.SHOWN_WAITING) -> engine_status.State:
        engine = self._engine
        found = self.in_loop(
            lambda: engine.core.state(time.monotonic(), kv_usage=engine.kv_usage, max_waiting_ids=max_waiting_ids)
        )
        return replace(found, simulated_profile=self._profile)

    def watch(self) -> control_contract.Watch:
        core = self._engine.core
        recorder = self.in_loop(lambda: core.watch(time.monotonic()))

        def close() -> None:
            """A stream that was cancelled may be closed after the engine and its event loop have ended."""
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(core.unwatch, recorder)

        return engine_status.Watch(cut=lambda: self.in_loop(lambda: core.cut(time.monotonic(), recorder)), close=close)

    def in_loop(self, function: Callable[[], T]) -> T:
        """Runs a function in the engine's event loop and returns its result, or raises its exception."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def carry_out() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001  # raised again in the thread that called
                done.set_exception(error)

        self._loop.call_soon_threadsafe(carry_out)
        return done.result(ANSWER_TIMEOUT_S)
