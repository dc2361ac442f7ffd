"""The client of a gateway's admin port, against a server that answers as a gateway does, and as one does not."""

import pytest
from aiohttp import ClientSession, TCPConnector, abc, web

from tidegate_operator import gateways

STATE = {
    "policy": {"name": "edf", "source": "override", "reason": "set by hand", "left_s": 60},
    "dispatch": {"rule": "score", "alpha": 0.3, "beta": 1.0},
}


class Pool:
    name, namespace = "chat", "prod"


class Loopback(abc.AbstractResolver):
    """Resolves the gateways' Service, and nothing else, to a port on loopback."""

    def __init__(self, port):
        self._port = port

    async def resolve(self, host, port=0, family=0):
        assert (host, port) == ("chat-gateway-internal.prod.svc", 8001)
        return [{"hostname": host, "host": "127.0.0.1", "port": self._port, "family": 2, "proto": 0, "flags": 0}]

    async def close(self):
        pass


@pytest.fixture
async def served():
    """A list of requests, and a function that makes a client to a server with the given answer."""
    requests, cleanups = [], []

    async def serve(state):
        async def handle(request):
            requests.append((request.method, request.path, await request.json() if request.can_read_body else None))
            return state if isinstance(state, web.Response) else web.json_response(state)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        cleanups.append(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        session = ClientSession(connector=TCPConnector(resolver=Loopback(runner.addresses[0][1])))
        cleanups.append(session.close)
        return gateways.Gateways(session)

    yield serve, requests
    for cleanup in reversed(cleanups):
        await cleanup()


async def test_it_reads_who_chose_the_policy(served):
    serve, _ = served
    view = await (await serve(STATE)).look(Pool)
    assert view == gateways.View(policy="edf", overridden=True, reason="set by hand", alpha=0.3)


async def test_it_tells_what_steering_chose(served):
    serve, requests = served
    await (await serve({})).tell(Pool, "sjf", "x" * 1000)
    assert requests == [("PUT", "/admin/policy", {"policy": "sjf", "reason": "x" * 256, "source": "steered"})]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(web.Response(status=503), id="an error"),
        pytest.param(web.Response(text="<html>"), id="no JSON"),
        pytest.param({"policy": None}, id="another shape"),
        pytest.param([], id="a list"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_none(served, answer):
    serve, _ = served
    assert await (await serve(answer)).look(Pool) is None
