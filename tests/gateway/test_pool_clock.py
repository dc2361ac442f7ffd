"""The wall clock of a gateway may be wrong or step: `priority` moves within a bound."""

import asyncio
import secrets
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake_engine
from tidegate_gateway import running_gateway
from tidegate_gateway.coordination import pool_clock

START_S = 1_790_000_000.0
TEN_MINUTES_S = 600.0


class Clocks:
    """A monotonic clock, the wall clock of the gateway and that of the store."""

    def __init__(self) -> None:
        self.now = 50.0
        self.wall_error_s = self.store_error_s = 0.0
        self.pool = pool_clock.PoolClock(lambda: self.now, lambda: START_S + self.now + self.wall_error_s)

    def exchange(self, took_s: float = 0.002) -> None:
        sent_at_s = self.now
        store_s = START_S + self.now + took_s / 2 + self.store_error_s
        self.now += took_s
        self.pool.on_exchange(store_s, sent_at_s=sent_at_s, answered_at_s=self.now)


def test_a_wrong_wall_clock_counts_until_the_first_exchange_only() -> None:
    clocks = Clocks()
    clocks.wall_error_s = TEN_MINUTES_S
    clocks.pool = pool_clock.PoolClock(lambda: clocks.now, lambda: START_S + clocks.now + TEN_MINUTES_S)
    assert clocks.pool() == pytest.approx(START_S + clocks.now + TEN_MINUTES_S)
    clocks.exchange()
    assert clocks.pool() == pytest.approx(START_S + clocks.now, abs=0.001)


@given(
    steps=st.lists(
        st.tuples(st.floats(0.0, 30.0), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0.0, 0.9)), max_size=30
    )
)
def test_no_step_of_a_wall_clock_moves_the_instants_beyond_the_bound(steps: Any) -> None:
    clocks = Clocks()
    clocks.exchange()
    last, last_at_s = clocks.pool(), clocks.now
    for waited_s, wall_error_s, store_error_s, took_s in steps:
        clocks.now += waited_s
        clocks.wall_error_s, clocks.store_error_s = wall_error_s, store_error_s
        clocks.exchange(took_s)
        now, passed_s = clocks.pool(), clocks.now - last_at_s
        assert abs(now - last - passed_s) <= pool_clock.SLEW * passed_s + 1e-6
        last, last_at_s = now, clocks.now


def test_the_instants_follow_a_clock_that_was_set() -> None:
    clocks = Clocks()
    clocks.exchange()
    clocks.store_error_s = 5.0
    for _ in range(600):
        clocks.now += 1.0
        clocks.exchange()
    assert clocks.pool() == pytest.approx(START_S + clocks.now + 5.0, abs=0.01)


def test_an_exchange_that_took_long_says_nothing() -> None:
    clocks = Clocks()
    clocks.exchange()
    before_s = clocks.pool() - clocks.now
    clocks.store_error_s = 100.0
    clocks.exchange(took_s=pool_clock.LONGEST_EXCHANGE_S + 0.1)
    clocks.now += 1000.0
    assert clocks.pool() - clocks.now == pytest.approx(before_s)


async def test_gateways_with_wrong_clocks_give_calls_the_same_priorities(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = secrets.token_hex(4)
    async with fake_engine.engine() as engine, up(engine, pool=pool) as one:
        monkeypatch.setitem(
            running_gateway.Gateway.__init__.__kwdefaults__, "wall", lambda: time.time() + TEN_MINUTES_S
        )
        async with up(engine, pool=pool) as other:
            await until(lambda: all(each.gateway.pool_clock.knows_store for each in (one, other)))
            for _ in range(3):
                await asyncio.gather(one.ask(), other.ask())
        async with up(engine, store=False) as alone:
            await alone.ask()
    *agreed, wrong = [body["priority"] for body in engine.bodies]
    assert max(agreed) - min(agreed) < 30_000, "milliseconds"
    assert wrong - max(agreed) > 500_000, "without a store the gateway has its own clock alone"
