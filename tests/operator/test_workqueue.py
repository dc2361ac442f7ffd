import asyncio
import contextlib
import itertools

from tidegate_operator import workqueue


class Expected(Exception):
    pass


class Busy(Expected):
    retry_after_s = 30.0


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


def test_such_a_pause_is_kept_for_a_key_that_is_added_during_the_work_too(in_virtual_time):
    calls = []

    async def story():
        listed = workqueue.Workqueue(expected=Expected)

        async def work(key):
            calls.append(asyncio.get_running_loop().time())
            listed.add(key)
            await asyncio.sleep(1)
            raise Busy

        listed.add("busy")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(70):
                await listed.run(work)

    in_virtual_time(story())
    assert calls == [0, 31, 62]


def test_work_that_something_else_cancels_is_repeated(in_virtual_time, caplog):
    calls = []

    async def work(key):
        calls.append(asyncio.get_running_loop().time())
        if len(calls) == 1:
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled

    in_virtual_time(served(work, ends_at_s=10, add=lambda listed: listed.add("a")))
    assert calls == [0, workqueue.FIRST_RETRY_S]
    assert "CancelledError" in caplog.text


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


def test_two_due_times_at_the_same_instant_are_one(in_virtual_time):
    work, calls = recorder(result=5)

    def add(listed):
        listed.add("a", delay_s=10)
        listed.add("a", delay_s=5)  # and its work makes it due at 10 again

    in_virtual_time(served(work, ends_at_s=12, add=add))
    assert [at for at, _ in calls] == [5, 10]


def grouped(work, keys, *, ends_at_s, at_once, most_of_one):
    """Runs `work` on a workqueue of "group/name" keys, which are due in this order."""

    async def run():
        listed = workqueue.Workqueue(expected=Expected, group=lambda key: key.split("/")[0])
        for key in keys:
            listed.add(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at_s):
                await listed.run(work, at_once=at_once, most_of_one=most_of_one)

    return run()


def test_slow_keys_of_one_group_leave_workers_to_the_others(in_virtual_time):
    calls = []

    async def work(key):
        calls.append((asyncio.get_running_loop().time(), key))
        if key.startswith("slow"):
            await asyncio.sleep(20)

    keys = [*(f"slow/{number}" for number in range(6)), "quick/0", "quick/1"]
    in_virtual_time(grouped(work, keys, ends_at_s=100, at_once=4, most_of_one=2))
    assert [at for at, key in calls if key.startswith("quick")] == [0, 0]
    assert [at for at, key in calls if key.startswith("slow")] == [0, 0, 20, 20, 40, 40]


def test_groups_take_turns_and_the_earliest_key_of_a_group_comes_first(in_virtual_time):
    calls = []

    async def work(key):
        calls.append(key)
        await asyncio.sleep(1)

    keys = [*(f"many/{number}" for number in range(4)), "two/0", "two/1", "one/0"]
    in_virtual_time(grouped(work, keys, ends_at_s=100, at_once=1, most_of_one=None))
    assert calls == ["many/0", "two/0", "one/0", "many/1", "two/1", "many/2", "many/3"]


def test_a_group_with_all_its_workers_busy_goes_on_when_one_ends(in_virtual_time):
    calls = []

    async def work(key):
        calls.append((asyncio.get_running_loop().time(), key))
        await asyncio.sleep(3 if key == "a/0" else 5)

    in_virtual_time(grouped(work, ["a/0", "a/1", "a/2"], ends_at_s=100, at_once=8, most_of_one=2))
    assert calls == [(0, "a/0"), (0, "a/1"), (3, "a/2")]


def test_the_reading_counts_the_due_keys_that_no_worker_has(in_virtual_time):
    async def run():
        listed = workqueue.Workqueue(expected=Expected, group=lambda key: key[0])
        listed.add("a1", delay_s=3)
        listed.add("b1", delay_s=50)

        async def work(key):
            listed.add(key)  # an active key that is due again waits for its own work
            await asyncio.sleep(100)

        running = asyncio.create_task(listed.run(work, at_once=4, most_of_one=1))
        await asyncio.sleep(4)
        listed.add("a2")
        await asyncio.sleep(6)
        seen = listed.reading()
        running.cancel()
        return seen

    assert in_virtual_time(run()) == workqueue.Reading(depth=1, age_s=6)


def test_the_work_of_a_choice_does_not_grow_with_the_keys_that_wait(in_virtual_time):
    asked = []

    def group(key):
        asked.append(key)
        return key % 3

    async def work(key):
        await asyncio.sleep(1)

    async def run():
        listed = workqueue.Workqueue(expected=Expected, group=group)
        for key in range(3000):
            listed.add(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(5000):
                await listed.run(work, at_once=8, most_of_one=4)

    in_virtual_time(run())
    assert len(asked) == 2 * 3000  # once when a key is due and once when its work ends
