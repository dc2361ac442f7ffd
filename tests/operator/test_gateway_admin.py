"""The client of a gateway's admin port, against a server that answers as a gateway does, and as one does not."""

import pytest
from aiohttp import web

from tidegate_control import bounded_http
from tidegate_operator import gateway_admin
from tidegate_policy.steer import steering_loop


def state(policy="edf", source="settings", left_s=None, alpha=0.3):
    stated = {"name": policy, "source": source, "reason": "busy", "left_s": left_s}
    return {"policy": stated, "dispatch": {"rule": "score", "alpha": alpha, "beta": 1.0}}


class Gateway:
    """Answers every request with `answer` and records the requests."""

    def __init__(self):
        self.answer = state()
        self.received = []
        self.headers = []

    async def handle(self, request):
        self.headers.append(request.headers)
        if request.method == "PUT":
            self.received.append((request.path, await request.json()))
        return web.json_response(self.answer) if isinstance(self.answer, dict | list) else self.answer()


@pytest.fixture
async def gateway():
    return Gateway()


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def admin(gateway, clock):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    gateway.address = f"{host}:{port}"
    yield gateway_admin.GatewayAdmin(bounded_http.Client(), clock=clock)
    await runner.cleanup()


async def override(gateway, admin):
    await admin.ask([gateway.address])
    return admin.override()


async def test_a_policy_set_by_a_person_is_an_override(gateway, admin):
    gateway.answer = state("priority", "override")
    assert await override(gateway, admin) == steering_loop.Override(policy="priority", reason="busy")
    assert admin.alpha == 0.3


async def test_a_gateway_whose_dispatch_rule_reads_no_alpha_reports_none(gateway, admin):
    gateway.answer = state("priority", "override", alpha=None)
    assert await override(gateway, admin) == steering_loop.Override(policy="priority", reason="busy")
    assert admin.alpha is None


@pytest.mark.parametrize("source", ["settings", "steered"])
async def test_a_policy_set_by_steering_is_no_override(gateway, admin, source):
    gateway.answer = state("edf", source)
    assert await override(gateway, admin) is None


async def test_the_gateways_receive_a_policy_once(gateway, admin):
    await override(gateway, admin)
    await admin.follow("sjf", "x" * 1000, alternatives=("two-lane",), expected="y" * 1000)
    sent = {"policy": "sjf", "reason": "x" * 256, "source": "steered"}
    assert gateway.received == [("/admin/policy", {**sent, "alternatives": ["two-lane"], "expected": "y" * 256})]
    gateway.answer = state("sjf", "steered")
    await override(gateway, admin)
    await admin.follow("sjf", "busy")
    assert len(gateway.received) == 1


async def test_a_gateway_of_an_earlier_version_receives_the_policy_without_what_it_does_not_know(gateway, admin):
    await override(gateway, admin)
    gateway.answer = lambda: web.Response(status=400)
    await admin.follow("sjf", "busy", alternatives=("two-lane",), expected="short calls wait less")
    assert [sorted(body) for _, body in gateway.received] == [
        ["alternatives", "expected", "policy", "reason", "source"],
        ["policy", "reason", "source"],
    ]


async def test_the_gateways_receive_a_new_reason_of_the_same_policy(gateway, admin):
    gateway.answer = state("sjf", "steered")
    await override(gateway, admin)
    await admin.follow("sjf", "busy; last decision by the rules, because the answer is no JSON")
    assert [body["reason"] for _, body in gateway.received] == [
        "busy; last decision by the rules, because the answer is no JSON"
    ]


async def test_the_gateways_receive_no_policy_during_an_override(gateway, admin):
    gateway.answer = state("priority", "override")
    await override(gateway, admin)
    await admin.follow("sjf", "calm")
    assert gateway.received == []


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda: web.Response(status=503), id="an error"),
        pytest.param(lambda: web.Response(text="<html>"), id="no JSON"),
        pytest.param({"policy": None}, id="another shape"),
        pytest.param([], id="a list"),
    ],
)
async def test_an_override_lasts_until_its_end_while_no_gateway_gives_a_readable_answer(gateway, admin, clock, answer):
    gateway.answer = state("priority", "override", left_s=60)
    chosen = await override(gateway, admin)
    assert chosen == steering_loop.Override(policy="priority", reason="busy", ends_at_s=clock.now + 60)
    gateway.answer = answer
    clock.now += 59
    assert await override(gateway, admin) == chosen
    clock.now += 1
    assert await override(gateway, admin) is None
    assert admin.has_answered


async def test_a_prolonged_override_ends_at_its_new_end(gateway, admin, clock):
    gateway.answer = state("priority", "override", left_s=60)
    await override(gateway, admin)
    clock.now += 59
    gateway.answer = state("priority", "override", left_s=600)
    assert await override(gateway, admin) == steering_loop.Override(
        policy="priority", reason="busy", ends_at_s=clock.now + 600
    )


async def test_no_override_is_known_before_a_gateway_has_answered(gateway, admin):
    gateway.answer = lambda: web.Response(status=503)
    assert (await override(gateway, admin), admin.has_answered) == (None, False)
    gateway.answer = state("edf", "steered")
    assert (await override(gateway, admin), admin.has_answered) == (None, True)


async def test_a_gateway_that_rejects_a_call_answers_and_one_that_is_not_there_does_not(gateway, admin):
    gateway.answer = lambda: web.Response(status=503)
    await override(gateway, admin)
    assert admin.answers
    absent = gateway_admin.GatewayAdmin(bounded_http.Client())
    await absent.ask(["127.0.0.1:1"])
    assert not absent.answers


async def test_a_gateway_without_its_store_does_not_speak_for_one_that_has_it(gateway, admin):
    async def cut_off(request):
        return web.json_response(state("fcfs") | {"store": {"reachable": False}})

    app = web.Application()
    app.router.add_get("/admin/state", cut_off)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    gateway.answer = state("priority", "override") | {"store": {"reachable": True}}
    try:
        for gateways in ([f"{host}:{port}", gateway.address], [gateway.address, f"{host}:{port}"]):
            await admin.ask(gateways)
            assert admin.override() == steering_loop.Override(policy="priority", reason="busy")
        await admin.ask([f"{host}:{port}"])
        assert admin.override() is None
    finally:
        await runner.cleanup()


async def test_each_gateway_tells_whether_it_reaches_the_store(gateway, admin):
    address = gateway.address
    for told, reaches in (({"store": {"reachable": True}}, True), ({"store": {"reachable": False}}, False), ({}, None)):
        gateway.answer = state() | {"targets": {}} | told
        await admin.ask([address, "127.0.0.1:1"])
        assert admin.stores == {address: reaches}


async def test_a_gateway_that_never_answered_receives_no_policy(gateway, admin):
    gateway.answer = lambda: web.Response(status=503)
    await override(gateway, admin)
    await admin.follow("sjf", "calm")
    assert gateway.received == []


async def test_calls_carry_the_token_of_the_pool_and_a_rejection_is_noted(gateway, admin):
    known = gateway_admin.GatewayAdmin(bounded_http.Client(), token="a-token-of-the-pool")
    gateway.answer = lambda: web.json_response({"error": {}}, status=401)
    await known.ask([gateway.address])
    assert known.rejects_token
    assert not known.has_answered
    gateway.answer = state()
    await known.ask([gateway.address])
    await known.follow("sjf", "busy")
    assert not known.rejects_token
    assert {headers.get("authorization") for headers in gateway.headers} == {"Bearer a-token-of-the-pool"}
    assert len(gateway.headers) == 3


async def test_an_answer_that_would_take_long_to_read_is_not_read(gateway, admin):
    await override(gateway, admin)
    for more in ([{}] * 70_000, [0] * 600_000, ["x" * 3_000_000]):
        gateway.answer = state("sjf") | {"more": more}
        await admin.ask([gateway.address])
        assert admin.answers, "it answers, though what it says cannot be read"
        assert admin.stores == {}
    gateway.answer = state("sjf") | {"more": ["x" * 1_000_000], "targets": {str(number): {} for number in range(9)}}
    await admin.ask([gateway.address])
    assert admin.stores == {gateway.address: None}


async def test_a_redirect_is_not_followed(gateway, admin):
    gateway.answer = lambda: web.Response(status=307, headers={"location": "/elsewhere"})
    await admin.ask([gateway.address])
    assert admin.answers
    assert not admin.has_answered
    assert len(gateway.headers) == 1


async def test_the_targets_of_each_gateway_are_read_and_a_gateway_that_answers_nonsense_has_none(gateway, admin):
    address = gateway.address
    gateway.answer = state() | {"targets": {"chat": {"met": 9, "with_target": 10, "more": 1}}}
    await admin.ask([address, "127.0.0.1:1"])
    assert admin.targets() == {address: {"chat": (9, 10)}}
    assert (admin.others({"edf"}), admin.others({"sjf"})) == ({}, {address: "edf"})
    await admin.follow("sjf", "overload")
    assert admin.others({"sjf"}) == {}, "no gateway has had the time to follow"
    for nonsense in (state(), state() | {"targets": [1]}, state() | {"targets": {"chat": {"met": "x"}}}, []):
        gateway.answer = nonsense
        await admin.ask([address])
        assert admin.targets() == {}


async def test_gateways_tell_how_their_engines_serve_and_are_told_the_split(gateway, admin):
    address = gateway.address
    times = {"count": 2, "log_sum": -3.0}
    service = {"calls": 2, "errors": 1, "ttft": times, "tpot": times, "targets": {}}
    gateway.answer = {"engines": [{"name": "10.0.0.7:8000", "service": service}]}
    found = await admin.services([address, "127.0.0.1:1"])
    assert list(found) == [address]
    assert (found[address]["10.0.0.7:8000"].calls, found[address]["10.0.0.7:8000"].errors) == (2, 1)
    await admin.divide([address, "127.0.0.1:1"], ["10.0.0.7:8000"], 5)
    await admin.divide([address], (), None)
    split = {"engines": ["10.0.0.7:8000"], "weight": 5, "for_s": gateway_admin.DIVIDED_S}
    assert gateway.received == [("/admin/rollout", split), ("/admin/rollout", {"weight": None})]
    gateway.answer = {"engines": [{"name": "of an earlier version"}]}
    assert await admin.services([address]) == {}
