"""EngineControl's view of a simulated engine: the same `Governor` contract as the vLLM scheduler's.

Control calls come from gRPC threads; the engine lives in an event loop. Each call is carried into the loop and waits for
its result, so it is in force when it returns.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import TypeVar

from tidegate_engine import governor
from tidegate_policy import window
from tidegate_policy.qos import Qos
from tidegate_sim import realtime

LOOP_PATIENCE_S = 10.0
T = TypeVar("T")


class LoopGovernor:
    """Governs a `RealtimeEngine` from any thread but the loop's own."""

    def __init__(self, engine: realtime.RealtimeEngine, profile: str, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._profile = profile
        self._loop = loop
        self._reason = "start"
        self._since_s = time.monotonic()

    def set_policy(self, name: str, reason: str) -> governor.Switched:
        previous, reordered = self._in_loop(lambda: (self._engine.policy, self._engine.set_policy(name)))
        self._reason, self._since_s = reason[: governor.KEPT_REASON], time.monotonic()
        return governor.Switched(policy=name, previous=previous, reordered=reordered)

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> governor.Controls:
        def apply() -> governor.Controls:
            cost = self._engine.cost
            if max_running is not None:
                self._engine.max_running = min(max_running or cost.max_batch, cost.max_batch)
            if max_step_tokens is not None:
                self._engine.max_step_tokens = min(max_step_tokens or cost.max_step_tokens, cost.max_step_tokens)
            return self._controls()

        return self._in_loop(apply)

    def state(self) -> governor.State:
        engine = self._engine
        return self._in_loop(
            lambda: governor.State(
                policy=engine.policy,
                policy_reason=self._reason,
                policy_age_s=time.monotonic() - self._since_s,
                controls=self._controls(),
                running=engine.running,
                waiting=engine.waiting,
                kv_usage=engine.kv_usage,
                waiting_ids=tuple(engine.waiting_ids(governor.SHOWN_WAITING)),
                simulated_profile=self._profile,
            )
        )

    def watch(self) -> governor.Watch:
        return _Watch(self, self._engine, self._in_loop(self._engine.record))

    def _controls(self) -> governor.Controls:
        cost, engine = self._engine.cost, self._engine
        return governor.Controls(
            max_running=engine.max_running if engine.max_running < cost.max_batch else 0,
            max_step_tokens=engine.max_step_tokens if engine.max_step_tokens < cost.max_step_tokens else 0,
        )

    def _in_loop(self, what: Callable[[], T]) -> T:
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def carry_out() -> None:
            try:
                done.set_result(what())
            except Exception as error:  # noqa: BLE001  # raised again in the thread that asked
                done.set_exception(error)

        self._loop.call_soon_threadsafe(carry_out)
        return done.result(LOOP_PATIENCE_S)


class _Watch:
    def __init__(self, owner: LoopGovernor, engine: realtime.RealtimeEngine, recorder: window.Recorder) -> None:
        self._owner = owner
        self._engine = engine
        self._recorder = recorder
        self._busy_s = engine.busy_s

    def cut(self) -> tuple[str, Qos, float]:
        def read() -> tuple[str, Qos, float]:
            busy_s, self._busy_s = self._engine.busy_s - self._busy_s, self._engine.busy_s
            return self._engine.policy, self._engine.cut(self._recorder), busy_s

        return self._owner._in_loop(read)

    def close(self) -> None:
        self._owner._in_loop(lambda: self._engine.forget(self._recorder))
