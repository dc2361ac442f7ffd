"""Engines that are down, hang or break off: the client gets an answer from another, or a clear error."""

import asyncio
import contextlib
from typing import Any

import pytest
from troubled_engines import preferring, refused_url, stream

import fake_engine
from tidegate_gateway import http_client

PATIENT = {"timeout": "10s"}
"""Health checks that no slow machine fails: the other engine must be there to be asked."""


async def test_a_dead_engine_is_left_out(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, {"url": refused_url()}, seen=False) as client:
        await until(lambda: client.accepting())
        for _ in range(5):
            assert (await client.ask())[0] == 200
        assert engine.served == 5


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_another_engine_is_tried_before_the_first_token(up: Any, status: int) -> None:
    async with (
        fake_engine.engine(status=status) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good)) as client,
    ):
        for _ in range(4):
            assert (await client.ask())[0] == 200
            assert (await stream(client))[-1] == "[DONE]"
        assert good.served == 8
        assert len(bad.bodies) >= 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422, 302])
async def test_an_engine_that_rejects_every_call_is_ejected(up: Any, until: Any, status: int) -> None:
    """It answers at once, so it would draw all calls."""
    async with (
        fake_engine.engine(status=status) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good), health=PATIENT) as client,
    ):
        answers = list[int]()

        async def ejected() -> bool:
            answers.append((await client.ask())[0])
            return not client.all_accepting()

        await until(ejected)
        answers += [(await client.ask())[0] for _ in range(5)]
        assert len(answers) - answers.count(200) <= 2, "the first two rejections are believed"
        assert answers[-5:] == [200] * 5
        assert (await stream(client))[-1] == "[DONE]"


async def test_an_engine_that_rejects_every_second_call_harms_few(up: Any) -> None:
    async with (
        fake_engine.engine() as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good), health=PATIENT) as client,
    ):
        statuses = []
        for number in range(30):
            bad.status = (200, 400)[number % 2]
            statuses.append((await client.ask())[0])
        assert statuses.count(400) <= 2


async def test_calls_that_every_engine_rejects_eject_none(up: Any) -> None:
    async with (
        fake_engine.engine(status=400) as one,
        fake_engine.engine(status=400) as other,
        up(*preferring(one, other), health=PATIENT) as client,
    ):
        for _ in range(12):
            status, answer, _ = await client.ask()
            assert (status, answer["error"]["message"]) == (400, "the engine rejects the request: as set by the test")
        assert client.all_accepting()
        assert 0 < len(other.bodies) <= 4  # it is asked for its opinion now and then
        one.status = other.status = 200
        assert (await client.ask())[0] == 200


async def test_an_engine_that_answers_what_others_reject_does_not_eject_them(up: Any) -> None:
    """Many tenants send calls that are wrong, and one engine answers those too."""
    async with (
        fake_engine.engine() as one,
        fake_engine.engine() as two,
        fake_engine.engine() as liar,
        up(one, two, liar, dispatch={"rule": "round-robin"}, health=PATIENT) as client,
    ):
        for turn in range(8):
            one.status = two.status = 400
            for number in range(12):
                await client.ask(headers={"x-tidegate-tenant": f"hostile-{number % 4}"})
            one.status = two.status = 200
            answers = [(await client.ask(headers={"x-tidegate-tenant": "honest"}))[0] for _ in range(3)]
            assert answers == [200] * 3
            assert client.all_accepting(), turn
        liar.status = 500
        assert [(await client.ask(headers={"x-tidegate-tenant": "honest"}))[0] for _ in range(9)] == [200] * 9


async def test_a_rejection_stands_if_no_other_engine_tells_more(up: Any) -> None:
    async with (
        fake_engine.engine(status=400) as one,
        fake_engine.engine(status=500) as other,
        up(*preferring(one, other)) as client,
    ):
        assert {(await client.ask())[0] for _ in range(6)} == {400}


async def test_a_rejection_that_stands_gives_its_connection_back_once(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the rejection and the failure of the second engine another call takes the connection."""
    taken, release = list[bool](), http_client.Connection.release

    def released(connection: http_client.Connection) -> None:
        taken.append(connection.busy)
        release(connection)

    monkeypatch.setattr(http_client.Connection, "release", released)
    async with (
        fake_engine.engine(status=400) as one,
        fake_engine.engine(status=500) as other,
        up(*preferring(one, other)) as client,
    ):
        for _ in range(6):
            assert (await client.ask())[0] == 400
        assert len(other.bodies) >= 1
    assert all(taken), "a connection that is released is one that carries a request"


async def test_a_rejection_does_not_wait_for_an_engine_that_is_full(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(status=400) as one,
        fake_engine.engine(tokens=2, first_s=3600) as full,
        up(*preferring(one, full), dispatch={"cap": 1}, timeouts={"firstToken": "2h"}) as client,
    ):
        one.status = 500  # so that the next call goes to the other engine, and stays there
        held = asyncio.create_task(client.ask())
        await until(lambda: full.running == 1)
        one.status = 400
        await until(lambda: client.all_accepting())
        async with asyncio.timeout(10):
            assert [(await client.ask())[0] for _ in range(5)] == [400] * 5
        held.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await held


async def test_failing_engines_are_ejected_and_come_back(up: Any, until: Any) -> None:
    dispatch = {"rule": "round-robin"}
    async with (
        fake_engine.engine(status=500) as bad,
        fake_engine.engine() as good,
        up(bad, good, dispatch=dispatch) as client,
    ):

        async def ejected() -> bool:
            assert (await client.ask())[0] == 200
            return not client.all_accepting()

        await until(ejected)
        bad.status = 200

        async def back() -> bool:
            await client.ask()
            return bad.served > 0

        await until(back)


async def test_a_full_engine_is_not_ejected(up: Any) -> None:
    async with (
        fake_engine.engine(status=503) as full,
        fake_engine.engine() as good,
        up(*preferring(full, good)) as client,
    ):
        for _ in range(10):
            assert (await client.ask())[0] == 200
        assert client.all_accepting()


async def test_the_only_engines_failure_is_a_clear_error(up: Any) -> None:
    async with fake_engine.engine(status=500) as bad, up(bad) as client:
        status, answer, headers = await client.ask()
        assert (status, answer["error"]["code"]) == (502, "engine_failed")
        assert int(headers["retry-after"]) >= 1
        assert "500" in answer["error"]["message"]


async def test_a_pool_of_full_engines_is_saturated(up: Any) -> None:
    async with fake_engine.engine(status=503) as one, fake_engine.engine(status=503) as two:
        for engines in ([one], [one, two]):
            async with up(*engines) as client:
                status, answer, headers = await client.ask()
                assert (status, answer["error"]["code"], headers["x-tidegate-reason"]) == (
                    429,
                    "saturated",
                    "saturated",
                )


async def test_an_engine_that_never_begins_is_given_up_and_another_answers(up: Any) -> None:
    timeouts = {"firstToken": "300ms"}
    async with (
        fake_engine.engine(hang=True) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good), timeouts=timeouts) as client,
    ):
        assert (await client.ask())[0] == 200
        assert len(bad.bodies) == 1
        assert bad.running == 0, "the call that was given up is stopped in the engine"


async def test_a_long_answer_that_is_not_streamed_is_waited_for_while_its_engine_generates(up: Any) -> None:
    async with (
        fake_engine.engine(tokens=40, token_s=0.05) as slow,
        fake_engine.engine(tokens=40, token_s=0.05) as spare,
        up(*preferring(slow, spare), timeouts={"firstToken": "500ms"}) as client,
    ):
        assert (await client.ask(max_tokens=1))[0] == 200  # so that the prediction is far off
        status, answer, headers = await client.ask()
        assert (status, answer["usage"]["completion_tokens"]) == (200, 40)
        assert headers["x-tidegate-engine"] == slow.url.removeprefix("http://")
        assert (len(slow.bodies), len(spare.bodies)) == (2, 0)


async def test_an_answer_that_is_not_streamed_has_an_end_that_no_engine_is_blamed_for(up: Any) -> None:
    async with (
        fake_engine.engine(tokens=1000, token_s=0.02) as slow,
        fake_engine.engine(tokens=1000, token_s=0.02) as spare,
        up(
            *preferring(slow, spare),
            health={"interval": "50ms", "timeout": "500ms"},  # two looks show that the engine works, well before 300 ms
            timeouts={"firstToken": "300ms", "answer": "1s"},
        ) as client,
    ):
        status, answer, _ = await client.ask()
        assert (status, answer["error"]["code"]) == (504, "engine_timeout")
        assert "stream it" in answer["error"]["message"]
        assert (len(slow.bodies), len(spare.bodies)) == (1, 0)
        assert all(engine.record.failures == 0 for engine in client.gateway.core.engines)


async def test_a_lone_engine_that_hangs_is_a_504_or_503_not_a_hang(up: Any) -> None:
    async with fake_engine.engine(hang=True) as engine:
        costly = {"url": engine.url, "cost": {"step_s": 0.0001, "prefill_s": 0.00001}}
        async with up(costly, timeouts={"firstToken": "200ms"}) as client, asyncio.timeout(10):
            status, answer, _ = await client.ask()
            assert (status, answer["error"]["code"]) == (504, "engine_timeout")


async def test_a_stream_that_stalls_ends_with_an_error_event(up: Any, until: Any) -> None:
    async with fake_engine.engine(hang_after=2) as engine, up(engine, timeouts={"nextToken": "200ms"}) as client:
        events = await stream(client)
        assert [event["choices"][0]["text"] for event in events[:2]] == ["w0 ", "w1 "]
        assert events[2]["error"]["code"] == "engine_timeout"
        assert events[3:] == ["[DONE]"]
        await until(lambda: engine.running == 0)


async def test_a_stream_that_hides_what_the_model_thinks_may_be_silent_for_as_long_as_a_whole_answer(up: Any) -> None:
    async with fake_engine.engine(token_s=0.5) as engine, up(engine, timeouts={"nextToken": "100ms"}) as client:
        assert (await stream(client, include_reasoning=False, max_tokens=3))[-1] == "[DONE]"
        assert (await stream(client, max_tokens=3))[-2]["error"]["code"] == "engine_timeout"


async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_spliced_tokens(up: Any) -> None:
    async with (
        fake_engine.engine(break_after=2) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good)) as client,
    ):
        events = await stream(client)
        assert [event["choices"][0]["text"] for event in events[:2]] == ["w0 ", "w1 "]
        assert events[2]["error"]["code"] == "engine_failed"
        assert events[3:] == ["[DONE]"]
        assert good.bodies == []


async def test_an_engine_that_breaks_every_stream_is_ejected(up: Any) -> None:
    async with (
        fake_engine.engine(break_after=2) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good)) as client,
    ):
        for _ in range(3):
            await stream(client)
        assert len(client.accepting()) == 1
        assert len(bad.bodies) == 3
        assert (await stream(client))[-1] == "[DONE]"
        assert len(good.bodies) == 1


async def test_an_engine_that_serves_another_model_gets_no_calls(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        fake_engine.engine(model="other") as other,
        up(engine, other, model="fake", seen=False) as client,
    ):
        await until(lambda: client.gateway.problems()[0] == "ready")
        await until(lambda: all(known.checks for known in client.gateway.discovery.known.values()))
        for _ in range(4):
            assert (await client.ask())[0] == 200
        assert other.bodies == []
        reasons = {shown["name"]: shown["reason"] for shown in client.state()["engines"]}
        assert reasons[other.url.removeprefix("http://")] == "serves other, not fake"


async def test_calls_leave_an_engine_that_stops_answering(up: Any, until: Any) -> None:
    """The health check notices before the watchdog would."""
    async with (
        fake_engine.engine(hang=True) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good)) as client,
        asyncio.TaskGroup() as group,
    ):
        call = group.create_task(client.ask())
        await until(lambda: bad.running == 1)
        bad.healthy = False
        assert (await call)[0] == 200
        assert good.served == 1


async def test_an_engine_in_doubt_takes_calls_only_if_every_other_is_too(up: Any, until: Any) -> None:
    health = {"unhealthyAfter": 1000, "timeout": "2s"}
    async with (
        fake_engine.engine() as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good), health=health) as client,
    ):
        bad.deaf = True
        await until(lambda: len(client.accepting()) == 1)
        for _ in range(4):
            assert (await client.ask())[0] == 200
        assert (bad.served, good.served) == (0, 4)
        good.deaf = True
        await until(lambda: client.all_accepting())
        assert (await client.ask())[0] == 200


async def test_every_call_of_an_engine_that_dies_is_answered_by_another(up: Any, until: Any) -> None:
    calls = 24
    async with fake_engine.engine(first_s=3600.0) as bad, fake_engine.engine() as good:
        async with up(bad, good, dispatch={"rule": "round-robin"}) as client, asyncio.TaskGroup() as group:
            asked = [group.create_task(client.ask()) for _ in range(calls)]
            await until(lambda: bad.running == calls // 2)
            bad.abort()
            answers = [await task for task in asked]
        assert [status for status, _, _ in answers] == [200] * calls
        assert good.served == calls


@pytest.mark.parametrize("status", [404, 501])
async def test_an_endpoint_that_an_engine_does_not_have_is_no_failure_of_the_engine(up: Any, status: int) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        engine.status = status
        for _ in range(8):
            assert (await client.ask())[0] == 400
        engine.status = 200
        assert client.all_accepting()
        assert (await client.ask())[0] == 200
