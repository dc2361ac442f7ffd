"""The model of a pool: its address, its name and its API key, from the spec and from a Secret."""

import asyncio
import dataclasses
import types

import pytest
from aiohttp import web

import operator_doubles
from tidegate_control import bounded_http
from tidegate_operator import pool_adviser, spec
from tidegate_policy.steer import llm_choice

from . import test_render


@pytest.fixture
async def model():
    """A model that chooses `edf`; the keys and the names that it was asked with."""
    asked = []

    async def handler(request):
        asked.append((request.headers.get("Authorization"), (await request.json())["model"]))
        return web.json_response({"choices": [{"message": {"content": '{"policy": "edf"}'}}]})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield types.SimpleNamespace(url=f"http://{host}:{port}/v1", asked=asked)
    await runner.cleanup()


async def adviser(cluster, kubectl, namespace, rules, client, **policy):
    """The adviser of a pool as the API server stores it."""
    kubectl("create", "-f", "-", body=operator_doubles.pool(policy=policy))
    body = await cluster.pool(namespace, "chat")
    return pool_adviser.adviser(cluster, client, spec.parse(body, rules.known))


async def test_the_model_is_asked_with_the_key_of_the_secret(cluster, kubectl, namespace, rules, model):
    kubectl("create", "secret", "generic", "judge", "--from-literal=key=sesame")
    llm = {"url": model.url, "model": "judge", "keySecretRef": {"name": "judge"}}
    ask = await adviser(cluster, kubectl, namespace, rules, bounded_http.Client(), selector="llm", llm=llm)
    assert await ask([], ("edf",)) == llm_choice.Answer(policy="edf")
    assert model.asked == [("Bearer sesame", "judge")]


async def test_a_secret_that_cannot_be_read_is_named_and_no_model_is_asked(cluster, kubectl, namespace, rules, model):
    llm = {"url": model.url, "keySecretRef": {"name": "absent"}}
    ask = await adviser(cluster, kubectl, namespace, rules, bounded_http.Client(), selector="llm", llm=llm)
    answer = await ask([], ("edf",))
    assert answer.trouble == "Secret absent with the key key cannot be read"
    assert not model.asked


async def test_other_selectors_ask_no_model(cluster, kubectl, namespace, rules):
    assert await adviser(cluster, kubectl, namespace, rules, None, selector="rules") is None


SLOW_S = 60.0


@pytest.mark.parametrize(
    ("interval", "window", "timeout"),
    [("100ms", "20s", "1m"), ("30s", "200ms", "1m"), ("30s", "20s", "100ms")],
    ids=["the interval", "half of the window", "the time limit of the spec"],
)
async def test_a_model_has_the_time_before_the_decision_at_most(interval, window, timeout):
    """A pool with a longer time limit, which an earlier version stored, is steered on."""

    async def late(request):
        await asyncio.sleep(SLOW_S)
        return web.json_response({"choices": [{"message": {"content": '{"policy": "edf"}'}}]})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", late)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    stated = test_render.body()["spec"]["policy"]
    rollback = {**stated["rollback"], "window": window}
    llm = {"url": f"http://{host}:{port}/v1", "timeout": timeout}
    policy = {**stated, "selector": "llm", "interval": interval, "rollback": rollback, "llm": llm}
    known = dataclasses.replace(test_render.KNOWN, selectors=frozenset({"llm"}))
    pool = spec.parse(test_render.body(policy=policy), known)
    began_at_s = asyncio.get_running_loop().time()
    answer = await pool_adviser.adviser(None, bounded_http.Client(), pool)([], ("edf",))
    took_s = asyncio.get_running_loop().time() - began_at_s
    await runner.cleanup()
    assert answer.policy is None
    assert took_s < SLOW_S
