import asyncio
import contextlib
import itertools

from tidegate_operator import workqueue


class Expected(Exception):
    pass


async def served(work, *, ends_at_s, add, at_once=4):
    """Runs `work(key)` on a workqueue that `add` fills, until that instant of the loop's clock."""
    listed = workqueue.Workqueue(expected=Expected)
    add(listed)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(ends_at_s):
            await listed.run(work, at_once=at_once)


def recorder(result=None):
    """Work that records (instant, key) of each call."""
    calls = []

    async def work(key):
        calls.append((asyncio.get_running_loop().time(), key))
        return result

    return work, calls


def test_a_key_added_twice_is_worked_on_once(in_virtual_time):
    work, calls = recorder()

    def add(listed):
        listed.add("a")
        listed.add("a", delay_s=5)

    in_virtual_time(served(work, ends_at_s=100, add=add))
    assert calls == [(0, "a")]


def test_a_key_is_due_at_the_earlier_of_two_due_times(in_virtual_time):
    work, calls = recorder()

    def add(listed):
        listed.add("a", delay_s=9)
        listed.add("a", delay_s=3)

    in_virtual_time(served(work, ends_at_s=100, add=add))
    assert calls == [(3, "a")]


def test_work_that_returns_a_delay_is_repeated_after_it(in_virtual_time):
    work, calls = recorder(result=10)
    in_virtual_time(served(work, ends_at_s=35, add=lambda listed: listed.add("a")))
    assert [at for at, _ in calls] == [0, 10, 20, 30]


def test_no_two_workers_have_the_same_key(in_virtual_time):
    active, most, count = set(), [], [0]

    async def run():
        listed = workqueue.Workqueue(expected=Expected)

        async def work(key):
            assert key not in active
            active.add(key)
            listed.add(key)  # something happens to it meanwhile
            most.append(len(active))
            count[0] += 1
            await asyncio.sleep(1)
            active.discard(key)

        for key in "abc":
            listed.add(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.5):
                await listed.run(work, at_once=2)

    in_virtual_time(run())
    assert max(most) == 2
    assert count[0] == 22  # no worker is idle: two workers, ten seconds and a half


def test_a_key_added_during_its_work_is_worked_on_again(in_virtual_time):
    calls = []

    async def run():
        listed = workqueue.Workqueue(expected=Expected)

        async def work(key):
            calls.append(asyncio.get_running_loop().time())
            if len(calls) == 1:
                listed.add(key)
                await asyncio.sleep(3)

        listed.add("a")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(100):
                await listed.run(work)

    in_virtual_time(run())
    assert calls == [0, 3]


def test_failing_work_is_repeated_with_growing_delays_and_other_keys_continue(in_virtual_time):
    calls = []

    async def work(key):
        calls.append((asyncio.get_running_loop().time(), key))
        if key == "bad":
            raise Expected("no")

    def add(listed):
        listed.add("bad")
        listed.add("good", delay_s=2)

    in_virtual_time(served(work, ends_at_s=400, add=add))
    bad = [at for at, key in calls if key == "bad"]
    gaps = [b - a for a, b in itertools.pairwise(bad)]
    assert gaps[:4] == [0.5, 1, 2, 4]
    assert max(gaps) == workqueue.LAST_RETRY_S
    assert (2, "good") in calls


def test_a_defect_in_the_work_on_one_key_does_not_stop_the_others(in_virtual_time, caplog):
    calls = []

    async def work(key):
        if key == "bad":
            raise ZeroDivisionError
        calls.append(key)

    def add(listed):
        listed.add("bad")
        listed.add("good", delay_s=1)

    in_virtual_time(served(work, ends_at_s=1.5, add=add, at_once=1))
    assert calls == ["good"]
    assert "ZeroDivisionError" in caplog.text


def test_a_pause_that_the_api_server_asks_for_is_kept_whatever_is_added(in_virtual_time):
    class Busy(Expected):
        retry_after_s = 30.0

    calls = []

    async def work(key):
        calls.append((asyncio.get_running_loop().time(), key))
        if key == "busy" and len(calls) < 4:
            raise Busy

    async def story():
        loop = asyncio.get_running_loop()

        def add(listed):
            listed.add("busy")
            for at_s in (1, 10, 29):
                loop.call_later(at_s, listed.add, "busy")
                loop.call_later(at_s, listed.add, "other")

        await served(work, ends_at_s=100, add=add)

    in_virtual_time(story())
    assert [at for at, key in calls if key == "busy"] == [0, 30]
    assert [at for at, key in calls if key == "other"] == [1, 10, 29]


def test_success_resets_the_delay(in_virtual_time):
    calls = []

    async def work(key):
        calls.append(asyncio.get_running_loop().time())
        if len(calls) in (1, 2, 4):
            raise Expected("no")
        return 100

    in_virtual_time(served(work, ends_at_s=150, add=lambda listed: listed.add("a")))
    assert calls[:5] == [0, 0.5, 1.5, 101.5, 102]


def test_a_key_added_during_its_work_does_not_delay_the_others(in_virtual_time):
    calls = []

    async def run():
        listed = workqueue.Workqueue(expected=Expected)

        async def work(key):
            calls.append((asyncio.get_running_loop().time(), key))
            if key == "slow" and len(calls) == 1:
                listed.add("slow")
                await asyncio.sleep(5)

        listed.add("slow")
        listed.add("other", delay_s=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await listed.run(work)

    in_virtual_time(run())
    assert calls == [(0, "slow"), (1, "other"), (5, "slow")]
