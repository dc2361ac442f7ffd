"""The election against a Lease in memory, in virtual time; `test_operator` runs it on the real API server."""

import asyncio
import copy
import datetime
import gc
import os
import signal

import pytest

from tidegate_operator import __main__ as program
from tidegate_operator import liveness
from tidegate_operator.cluster import ClusterError, RejectedError, lease


class MemoryLease:
    """One Lease with a resourceVersion, as the API server stores it. Its connection can be cut."""

    def __init__(self):
        self.body = None
        self.hangs = False
        self.down = False

    async def _reach(self):
        await asyncio.sleep(0.01)
        if self.hangs:
            await asyncio.sleep(3600)
        if self.down:
            raise ClusterError("down")

    async def read(self):
        await self._reach()
        return copy.deepcopy(self.body)

    async def write(self, body):
        await self._reach()
        current = (self.body or {}).get("metadata", {}).get("resourceVersion", "")
        if body.get("metadata", {}).get("resourceVersion", "") != current:
            return None
        self.body = {**copy.deepcopy(body), "metadata": {"resourceVersion": str(int(current or 0) + 1)}}
        return copy.deepcopy(self.body)


class Log:
    """The intervals in which each process acted, and whether two acted at the same time."""

    def __init__(self):
        self.acting = set()
        self.turns = []

    def work(self, who, seconds=float("inf")):
        async def act():
            assert not self.acting, f"{who} acts while {self.acting} does"
            self.acting.add(who)
            self.turns.append((who, asyncio.get_running_loop().time()))
            try:
                await asyncio.sleep(min(seconds, 1e6))
            finally:
                self.acting.discard(who)

        return act


async def alone(coroutines, *, for_s):
    """Runs the candidates together for a while; returns the result of each (None for one that still ran)."""
    tasks = [asyncio.create_task(item) for item in coroutines]
    await asyncio.wait(tasks, timeout=for_s)
    ends = [(task.exception() or "ended") if task.done() and not task.cancelled() else None for task in tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ends


def test_one_of_many_candidates_acts(in_virtual_time):
    shared, log = MemoryLease(), Log()
    candidates = [lease.hold(shared, identity=f"c{i}", work=log.work(f"c{i}")) for i in range(5)]
    in_virtual_time(alone(candidates, for_s=300))
    assert len(log.turns) == 1
    assert shared.body["spec"]["leaseTransitions"] == 1  # it was given back at the end


def test_the_next_process_acts_at_once_after_a_holder_has_shut_down(in_virtual_time):
    shared, log = MemoryLease(), Log()
    first = lease.hold(shared, identity="first", work=log.work("first", seconds=60))
    second = lease.hold(shared, identity="second", work=log.work("second"))
    ends = in_virtual_time(alone([first, second], for_s=120))
    assert ends == ["ended", None]
    assert [who for who, _ in log.turns] == ["first", "second"]
    assert log.turns[1][1] < 60 + 2 * lease.RETRY_S


async def later(coroutine):
    await asyncio.sleep(1)
    await coroutine


@pytest.mark.parametrize("trouble", ["down", "hangs"])
def test_a_holder_that_is_cut_off_stops_before_another_may_start(in_virtual_time, trouble):
    shared, log = MemoryLease(), Log()

    class Cut(MemoryLease):
        """The same Lease, seen through a connection that breaks after a minute."""

        async def read(self):
            await self._reach()
            return await shared.read()

        async def write(self, body):
            await self._reach()
            return await shared.write(body)

    own = Cut()

    async def story():
        asyncio.get_running_loop().call_later(60, lambda: setattr(own, trouble, True))
        first = lease.hold(own, identity="first", work=log.work("first"))
        second = lease.hold(shared, identity="second", work=log.work("second"))
        return await alone([first, later(second)], for_s=200)

    ends = in_virtual_time(story())
    assert isinstance(ends[0], lease.LostError)
    assert [who for who, _ in log.turns] == ["first", "second"]
    assert 60 + lease.DURATION_S - lease.RETRY_S < log.turns[1][1] < 60 + lease.DURATION_S + 3 * lease.RETRY_S


class WrongClock(MemoryLease):
    """The same Lease, as a process writes it whose wall clock is wrong by so many seconds."""

    def __init__(self, shared, error_s):
        super().__init__()
        self._shared, self._error = shared, datetime.timedelta(seconds=error_s)

    async def read(self):
        await self._reach()
        return await self._shared.read()

    async def write(self, body):
        await self._reach()
        wrong = (datetime.datetime.fromisoformat(body["spec"]["renewTime"]) + self._error).isoformat()
        return await self._shared.write({**body, "spec": {**body["spec"], "renewTime": wrong, "acquireTime": wrong}})


@pytest.mark.parametrize("error_s", [-600, 600])
@pytest.mark.parametrize("wrong", ["first", "second"])
def test_of_two_processes_whose_clocks_differ_by_ten_minutes_one_acts_at_a_time(in_virtual_time, wrong, error_s):
    shared, log = MemoryLease(), Log()
    of = {who: WrongClock(shared, error_s if who == wrong else 0) for who in ("first", "second")}

    async def story():
        asyncio.get_running_loop().call_later(600, lambda: setattr(of["first"], "down", True))
        holding = [lease.hold(of[who], identity=who, work=log.work(who)) for who in ("first", "second")]
        return await alone([holding[0], later(holding[1])], for_s=1200)

    assert isinstance(in_virtual_time(story())[0], lease.LostError)
    assert [who for who, _ in log.turns] == ["first", "second"]
    assert 600 + lease.DURATION_S - lease.RETRY_S < log.turns[1][1] < 600 + lease.DURATION_S + 3 * lease.RETRY_S


def test_an_api_server_that_asks_for_a_pause_gets_it_and_a_holder_that_may_not_renew_ends(in_virtual_time):
    """A pause that is shorter than the time for a renewal costs nothing. A longer one is not obeyed for that long."""

    class Busy(MemoryLease):
        pause_s, asked_at_s = 0, ()

        async def _reach(self):
            await super()._reach()
            self.asked_at_s = (*self.asked_at_s, asyncio.get_running_loop().time())
            if self.pause_s:
                raise ClusterError("too many requests", retry_after_s=self.pause_s, status=429)

    shared, log, answers = Busy(), Log(), []

    async def story():
        loop = asyncio.get_running_loop()
        for at_s, pause_s in ((60, 5), (64, 0), (120, 300)):
            loop.call_later(at_s, setattr, shared, "pause_s", pause_s)
        holding = lease.hold(
            shared, identity="a", work=log.work("a"), answered=lambda error: answers.append((loop.time(), error))
        )
        return await alone([holding], for_s=130 + lease.RENEW_S)

    (end,) = in_virtual_time(story())
    assert isinstance(end, lease.LostError)
    busy_at_s = [at for at in shared.asked_at_s if 60 <= at < 75]
    assert busy_at_s[1] - busy_at_s[0] >= 5
    assert len(log.turns) == 1
    late = [at for at in shared.asked_at_s if at > 120]
    assert len(late) == 3, "two renewals, and one attempt to release"
    assert late[1] - late[0] >= lease.LONGEST_PAUSE_S
    assert 115 < max(at for at, error in answers if error is None) < 121
    assert len([at for at, error in answers if error == 429 and at > 120]) == 2


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(lambda: ClusterError("too many", retry_after_s=600, status=429), id="429, Retry-After: 600"),
        pytest.param(lambda: RejectedError("leases is forbidden", status=403), id="403 without the RoleBinding"),
        pytest.param(lambda: ClusterError("etcd is gone", status=500), id="500"),
    ],
)
def test_a_process_that_gets_errors_for_half_an_hour_is_alive_and_not_ready_and_acts_soon_after(in_virtual_time, error):
    class Refusing(MemoryLease):
        error = None

        async def _reach(self):
            await super()._reach()
            if self.error is not None:
                raise self.error()

    shared, log, probes = Refusing(), Log(), []
    shared.error = error

    async def story():
        loop = asyncio.get_running_loop()
        pulse = liveness.Pulse(loop.time)

        async def watch():
            while True:
                await asyncio.sleep(60)
                live, _ = pulse.check(liveness.LIVE_S, with_errors=True)
                ready, sentence = pulse.check(liveness.READY_S, with_errors=False)
                probes.append((live, ready, f"HTTP status {error().status}" in sentence))

        loop.call_later(1790, setattr, shared, "error", None)
        holding = lease.hold(shared, identity="a", work=log.work("a"), answered=pulse.answered)
        return await alone([holding, watch()], for_s=1810)

    assert in_virtual_time(story()) == [None, None]
    assert probes == [(True, False, True)] * 29 + [(True, True, False)]
    assert 1790 < log.turns[0][1] < 1790 + lease.LONGEST_PAUSE_S + 1


def test_a_standby_that_was_asked_for_a_long_pause_still_takes_over_in_time(in_virtual_time):
    class Busy(MemoryLease):
        """The same Lease, through a server that asks for ten minutes once."""

        pause_s = 0

        async def read(self):
            await self._reach()
            if self.pause_s:
                pause_s, self.pause_s = self.pause_s, 0
                raise ClusterError("too many requests", retry_after_s=pause_s, status=429)
            return await shared.read()

        async def write(self, body):
            await self._reach()
            return await shared.write(body)

    shared, log = MemoryLease(), Log()
    first, second = Busy(), Busy()

    async def story():
        loop = asyncio.get_running_loop()
        loop.call_later(58, setattr, second, "pause_s", 600)
        loop.call_later(60, setattr, first, "down", True)
        holding = lease.hold(first, identity="first", work=log.work("first"))
        return await alone([holding, later(lease.hold(second, identity="second", work=log.work("second")))], for_s=200)

    in_virtual_time(story())
    assert [who for who, _ in log.turns] == ["first", "second"]
    assert log.turns[1][1] < 60 + lease.DURATION_S + lease.LONGEST_PAUSE_S + lease.RETRY_S


def test_a_short_outage_changes_nothing(in_virtual_time):
    shared, log = MemoryLease(), Log()

    async def story():
        loop = asyncio.get_running_loop()
        loop.call_later(60, lambda: setattr(shared, "down", True))
        loop.call_later(66, lambda: setattr(shared, "down", False))
        return await alone([lease.hold(shared, identity=who, work=log.work(who)) for who in "ab"], for_s=300)

    assert in_virtual_time(story()) == [None, None]
    assert len(log.turns) == 1


def test_an_error_of_the_work_is_raised_and_the_lease_is_released(in_virtual_time):
    shared = MemoryLease()

    async def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_virtual_time(lease.hold(shared, identity="a", work=broken))
    assert shared.body["spec"]["holderIdentity"] == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_waits_for_the_lease_ends_at_a_signal(number):
    """Python has no handler of SIGTERM of its own, and the kernel ignores such a signal for the first process of a
    container."""
    shared, log = MemoryLease(), Log()
    shared.body = {"metadata": {"resourceVersion": "1"}, "spec": {"holderIdentity": "other"}}

    async def story():
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), number)
        async with asyncio.timeout(10):
            await program.until_signal(lease.hold(shared, identity="waiting", work=log.work("waiting")))

    asyncio.run(story())
    assert log.turns == []
    assert shared.body["spec"]["holderIdentity"] == "other"


def test_full_collections_of_an_operator_leave_out_what_its_start_has_made():
    """They stop the event loop, which renews the Lease."""
    before = gc.get_threshold()
    try:
        program.keep_what_is_loaded()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == (*before[:2], program.FULL_COLLECTION)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
