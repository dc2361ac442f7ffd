"""The counts of `PoolShares` are those of the calls, whatever happens to calls and engines."""

import collections
import random
from dataclasses import replace
from typing import Any

import pytest
from test_dispatcher import FAST, Gate, call
from test_pool_shares import Live

from tidegate_policy import policies
from tidegate_policy.admit.retries import Failure
from tidegate_policy.dispatch.core_actions import Action, Send
from tidegate_policy.dispatch.engine_table import EngineFacts, Health
from tidegate_policy.model import Backlog, CallId, EngineId, WorkflowId

ENGINES = [EngineId(f"e{number}") for number in range(5)]
EVENTS = 250


class History:
    """Random events of a pool."""

    def __init__(self, rng: random.Random, limit: Any, most_waiting: int) -> None:
        self.rng = rng
        self.gate = Gate(
            rng.choice(sorted(policies.POLICIES)),
            max_inflight=limit,
            engines=4,
            max_waiting=most_waiting,
            ttl_s=rng.choice([3.0, 1000.0]),
        )
        self.now = 0.0
        self.count = 0
        self.inside: set[CallId] = set()
        self.out: dict[CallId, EngineId] = {}
        self.sets = [Live(*rng.sample(ENGINES, rng.randint(1, 4))) for _ in range(4)]

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert action.call.id in self.inside
            if isinstance(action, Send):
                self.out[action.call.id] = action.decision.engine
            else:
                self.inside.remove(action.call.id)

    def one_out(self) -> CallId:
        return self.rng.choice(sorted(self.out))

    def arrive(self) -> None:
        rng = self.rng
        self.count += 1
        fixed = frozenset(rng.sample(ENGINES[:4], rng.randint(1, 3)))
        arriving = replace(
            call(str(self.count), deadline_at_s=self.now + rng.uniform(0, 4) if rng.random() < 0.2 else None),
            tenant=rng.choice("abcd"),
            weight=rng.choice([1.0, 0.1, 10.0]),
            workflow=WorkflowId(rng.choice("uvwxyz")) if rng.random() < 0.3 else None,
            sequences=rng.choice([1, 1, 2]),
        )
        self.inside.add(arriving.id)
        self.do(self.gate.on_arrival(self.now, arriving, rng.choice([None, fixed, *self.sets])))

    def end(self) -> None:
        name = self.one_out()
        self.inside.remove(name)
        del self.out[name]
        self.do(self.gate.on_end(self.now, name))

    def fail(self) -> None:
        name = self.one_out()
        del self.out[name]
        self.do(self.gate.on_attempt_failed(self.now, name, self.rng.choice([*Failure])))

    def cancel(self, name: CallId) -> None:
        self.inside.remove(name)
        self.out.pop(name, None)
        self.do(self.gate.on_cancel(self.now, name))

    def change_engines(self) -> None:
        rng, gate, engine = self.rng, self.gate, self.rng.choice(ENGINES)
        if rng.random() < 0.3:
            self.do(gate.on_engine_gone(self.now, engine))
        elif rng.random() < 0.3:
            rng.choice(self.sets).engines = {*rng.sample(ENGINES, rng.randint(0, 4))}
        else:
            others = Backlog(calls=rng.choice([0, 0, 3]))
            health = rng.choice([*Health])
            self.do(gate.on_engine(self.now, EngineFacts(id=engine, cost=FAST, health=health, others=others)))

    def next(self) -> None:
        rng, gate = self.rng, self.gate
        self.now += rng.choice([0, 0, 0.001, 0.02, 0.2, 5.0 if rng.random() < 0.1 else 0])
        kind = rng.random()
        if kind < 0.45:
            self.arrive()
        elif kind < 0.62 and self.out:
            self.end()
        elif kind < 0.72 and self.out:
            self.fail()
        elif kind < 0.78 and self.inside:
            self.cancel(rng.choice(sorted(self.inside)))
        elif kind < 0.83:
            self.do(gate.on_tick(self.now))
        elif kind < 0.94:
            self.change_engines()
        elif kind < 0.96:
            gate.on_policy(self.now, policies.create(rng.choice(sorted(policies.POLICIES))))
        elif kind < 0.98:
            for _ in range(20):
                gate.tenants.observe(1.0, rng.choice([0.1, 0.3, 1.0]))
        elif self.out:
            self.do(gate.on_first_token(self.now, self.one_out()))

    def check(self) -> None:
        """Counts all calls anew."""
        gate, shares = self.gate, self.gate.tenants
        waiting = {each.id: each for each in gate.waiting_calls()}
        assert len(waiting) == gate.waiting
        assert {*waiting, *self.out} == self.inside
        in_gate = {item.call.id for item in gate.gate}
        held = {item.call.id for item in shares}
        in_queue = waiting.keys() - in_gate - held
        assert shares._part_of.keys() <= self.inside
        sent = {name: known.call for name, known in gate._out.items()}
        assert sent.keys() == self.out.keys()
        calls = waiting | sent
        for name in ("a", "b", "c", "d", "other"):
            assert shares._holders.with_more_than(name) == most_held(shares, name)
        whole = {item.call.id for item in shares._whole}
        assert entered(shares._whole) == counted(calls[name] for name in (*in_queue, *sent))
        for part in shares._parts.values():
            assert {*part.entered} == {name for name, its in shares._part_of.items() if its is part}
            assert {name for name, has in part.entered.items() if has} == part.entered.keys() & (in_queue | {*sent})
            assert {item.call.id for item in part.shares} == part.entered.keys() & (held - whole)
            assert {*part.queue} == part.entered.keys() & in_queue
            there = {name: known for name, known in sent.items() if self.out[name] in part.engines}
            assert part.at_engines == counted(there.values())
            own = [calls[name] for name, has in part.entered.items() if has]
            assert entered(part.shares) == counted(
                [*own, *(there[name] for name in there.keys() - part.entered.keys())]
            )


def most_held(shares: Any, arriving: str) -> str | None:
    """The tenant with the most held calls for its weight, if it has more than the one that arrives; of several the one that
    was not seen for longest."""
    held = collections.Counter(item.call.tenant for item in shares)
    seen = [name for name in shares._whole._tenants if name in held]
    assert len(seen) == len(held)
    for_weight = {name: held[name] / shares._whole._tenants[name].weight for name in seen}
    most = max(seen, key=for_weight.__getitem__, default=arriving)
    return None if for_weight.get(arriving, 0.0) >= for_weight.get(most, 0.0) else most


def entered(shares: Any) -> dict[str, int]:
    found = {name: tenant.sequences for name, tenant in shares._tenants.items() if tenant.sequences}
    assert shares._sequences == sum(found.values())
    return found


def counted(calls: Any) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for each in calls:
        found[each.tenant] += each.sequences
    return dict(found)


@pytest.mark.parametrize("limit", [2, "auto", None])
@pytest.mark.parametrize("most_waiting", [1000, 15])
@pytest.mark.parametrize("seed", range(6))
def test_the_counts_are_those_of_the_calls(limit: Any, most_waiting: int, seed: int) -> None:
    history = History(random.Random(f"{limit} {most_waiting} {seed}"), limit, most_waiting)
    for _ in range(EVENTS):
        history.next()
        history.check()
    for name in sorted(history.inside):
        if name in history.inside:
            history.cancel(name)
    history.check()
    assert not history.gate.tenants._part_of
