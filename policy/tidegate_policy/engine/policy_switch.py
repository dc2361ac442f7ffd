"""A switch to another policy: the new policy learns of the calls in the engine before it takes over.

With many waiting calls most of this work is to tell the policy of their arrivals. It needs only calls, which do not change,
so `learn` may run without the driver's lock while the engine makes steps. The engine core notes the calls that change
meanwhile, and `complete` corrects what the policy knows of them, under the lock.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from tidegate_policy import policies
from tidegate_policy.engine import guarded_policy
from tidegate_policy.engine.batch import Batch
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.model import CallId
from tidegate_policy.policies import token_counts


class PolicySwitch:
    """A switch that has begun. An engine has at most one."""

    def __init__(
        self, now: float, make: Callable[[], guarded_policy.GuardedPolicy], calls: Mapping[CallId, KnownCall]
    ) -> None:
        """`make` makes the new policy. `calls` are those in the engine now."""
        self._now = now
        self._make = make
        self._policy = make()
        self._hears = policies.hears(self._policy.unguarded)
        self._calls = dict(calls) if self._hears else {}
        self._changed: dict[CallId, None] = {}
        """The calls that came, changed or left after the switch began."""
        self._error: Exception | None = None

    def note(self, call_id: CallId) -> None:
        """A call came, changed or left the engine."""
        if self._hears:
            self._changed[call_id] = None

    def learn(self) -> None:
        """Tells the policy of the arrivals of all calls. It reads nothing that the engine changes."""
        items = [known.item for known in self._calls.values()]
        self._error = guarded_policy.failure_of(
            lambda: policies.replay_arrivals(self._policy.unguarded, self._now, items)
        )

    def complete(
        self, now: float, calls: Mapping[CallId, KnownCall], batch: Batch, tokens: token_counts.TokenCounts
    ) -> guarded_policy.GuardedPolicy:
        """The policy, which now knows `calls`. If it raises, the result is a further one of `make`, which is told of each
        event under guard, so that a fault costs it one event."""
        policy = self._policy
        if not self._hears:
            return policy
        served = _served(calls, batch, tokens)
        error = self._error or guarded_policy.failure_of(lambda: self._catch_up(now, calls, served))
        if error is not None:
            policy.failed("replay", error)
            policy = self._make()
            policies.replay(policy, now, [known.item for known in calls.values()], served)
        return policy

    def _catch_up(self, now: float, calls: Mapping[CallId, KnownCall], served: Sequence[policies.History]) -> None:
        policy = self._policy.unguarded
        for call_id in self._changed:
            if call_id in self._calls:
                policy.on_end(now, call_id)
            if call_id in calls:
                policy.on_arrival(now, calls[call_id].item)
        policies.replay_service(policy, now, served)


def _served(
    calls: Mapping[CallId, KnownCall], batch: Batch, tokens: token_counts.TokenCounts
) -> list[policies.History]:
    """The calls that run, in the order of their starts, and those that ran and wait again."""
    running = batch.running
    return [
        policies.History(calls[call_id].item, calls[call_id].computed, call_id not in running)
        for call_id in dict.fromkeys(chain(running, tokens))
    ]
