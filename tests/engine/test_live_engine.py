"""Real vLLM, a real model, our scheduler in it."""

import asyncio
import json
import time

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import aiohttp
import grpc

from tidegate_engine.live_engine import until
from tidegate_proto.v1 import control_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SEQUENCES = 8
"""The engine's `--max-num-seqs`."""
WAITING = 200
APART_MS = 60_000
"""Budgets differ by more than arrivals can."""


def bound(stub, **controls):
    asked = control_pb2.Controls(**controls)
    return stub.SetControls(control_pb2.SetControlsRequest(controls=asked)).controls


async def stream(session, engine, name, prompt, **fields):
    """Streams a greedy completion; returns its text and the instant of its first token."""
    body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "stream": True, **fields}
    first_s, text = None, ""
    async with session.post(f"{engine.http}/v1/completions", json=body, headers={"x-request-id": name}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic()
                text += json.loads(line[6:])["choices"][0]["text"]
    return text, first_s


def names(state):
    """The labels that the test gave to the waiting requests: vLLM's ids are `cmpl-NAME-0-SUFFIX`."""
    return [waiting_id.split("-")[1] for waiting_id in state.waiting_ids]


def now(control):
    return control.GetState(control_pb2.GetStateRequest())


async def settled(control, condition, seconds, complaint):
    await asyncio.to_thread(until, lambda: condition(now(control)), seconds, complaint)


async def test_a_policy_switched_while_200_wait_starts_them_in_the_order_computed_independently(engine, control):
    bound(control, max_running=1)
    place = {f"call{index:03}": (index * 77) % WAITING for index in range(WAITING)}  # a permutation
    expected = sorted(place, key=place.__getitem__)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        plug = asyncio.create_task(stream(session, engine, "plug", "Once", max_tokens=1500, ignore_eos=True))
        await settled(control, lambda state: state.running == 1, 30, "the plug never ran")
        calls = {
            name: asyncio.create_task(
                stream(
                    session,
                    engine,
                    name,
                    f"Count on from {index}: {index},",
                    max_tokens=4,
                    vllm_xargs={"tg.budget_ms": (place[name] + 1) * APART_MS, "tg.out_pred": 4},
                )
            )
            for index, name in enumerate(place)
        }
        await settled(control, lambda state: state.waiting == WAITING, 60, "not all of them wait")
        before = names(now(control))
        switched = control.SetPolicy(control_pb2.SetPolicyRequest(policy="urgency", reason="the test"))
        after = names(now(control))
        plug.cancel()
        bound(control, max_running=0)
        still_waiting = await asyncio.to_thread(watch_starts, control)
        answers = {name: await call for name, call in calls.items()}

    assert (switched.previous, switched.policy, switched.reordered) == ("fcfs", "urgency", WAITING)
    assert sorted(before) == sorted(expected)
    assert before != expected
    assert after == expected
    for seen in still_waiting:  # whoever has started is a head of the expected order, at every look
        assert seen == expected[len(expected) - len(seen) :]
    assert len(still_waiting) > WAITING // SEQUENCES // 4
    firsts = [answers[name][1] for name in expected]
    for index, first_s in enumerate(firsts[: -2 * SEQUENCES]):
        assert first_s < min(firsts[index + 2 * SEQUENCES :])
    assert all(text for text, _ in answers.values())


def watch_starts(control):
    """Who waits, looked at again and again until nobody does."""
    looks = []

    def look():
        state = now(control)
        looks.append(names(state))
        return state.waiting == 0

    until(look, 300, "they never all started")
    return looks


def test_greedy_answers_are_those_of_vllms_own_scheduler(engine, control, stock, greedy):
    control.SetPolicy(control_pb2.SetPolicyRequest(policy="urgency"))
    assert greedy(engine) == stock.answers


async def test_a_client_that_hangs_up_frees_the_engine_within_five_seconds(engine, control):
    async with aiohttp.ClientSession() as session:
        calls = [
            asyncio.create_task(stream(session, engine, f"long{n}", "Once", max_tokens=1500, ignore_eos=True))
            for n in range(SEQUENCES + 4)
        ]
        await settled(control, lambda s: (s.running, s.waiting) == (SEQUENCES, 4), 60, "they never ran and waited")
        for call in calls:
            call.cancel()
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        await asyncio.to_thread(
            until, lambda: all(engine.gauge(name) == 0 for name in gauges), 5, "requests of nobody still run or wait"
        )


async def test_bounds_are_in_force_when_they_are_acknowledged(engine, control):
    assert bound(control, max_running=2).max_running == 2
    assert bound(control, max_step_tokens=1).max_step_tokens == 2, "each running sequence keeps a token a step"
    assert bound(control, max_running=10_000, max_step_tokens=0).max_running == SEQUENCES
    bound(control, max_running=2)
    async with aiohttp.ClientSession() as session:
        calls = [
            asyncio.create_task(stream(session, engine, f"bounded{n}", "Once", max_tokens=64, ignore_eos=True))
            for n in range(6)
        ]
        peak = 0
        while not all(call.done() for call in calls):
            peak = max(peak, (await asyncio.to_thread(now, control)).running)
        await asyncio.gather(*calls)  # a call that fails says why
    assert peak == 2


def test_a_bypass_lifts_the_bounds_until_the_next_policy(control):
    bound(control, max_running=2)
    control.SetPolicy(control_pb2.SetPolicyRequest(policy="fcfs", reason="an emergency", bypass=True))
    state = now(control)
    assert (state.policy, state.bypass, state.controls.max_running) == ("fcfs", True, 0)
    control.SetPolicy(control_pb2.SetPolicyRequest(policy="urgency"))
    state = now(control)
    assert (state.policy, state.bypass, state.controls.max_running) == ("urgency", False, 2)
    bound(control, max_running=0)


def test_an_unknown_policy_is_rejected_with_the_list_of_known_policies(control):
    with pytest.raises(grpc.RpcError, match="unknown policy 'fastest'; known are augmented, cfs, edf, fcfs") as refusal:
        control.SetPolicy(control_pb2.SetPolicyRequest(policy="fastest"))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watcher_hears_what_was_delivered(engine, control):
    watch = control.WatchQos(control_pb2.WatchQosRequest(period_s=0.5))
    next_report = iter(watch).__next__
    await asyncio.to_thread(next_report)  # the watch is on
    async with aiohttp.ClientSession() as session:
        for budget_ms in (1, 600_000):
            labels = {
                "tg.tenant": "search",
                "tg.class": "batch",
                "tg.weight": 3,
                "tg.budget_ms": budget_ms,
                "tg.out_pred": 5,
            }
            await stream(session, engine, "seen", "Once", max_tokens=5, ignore_eos=True, vllm_xargs=labels)
    reports = []
    while sum(report.finished for report in reports) < 2:
        reports.append(await asyncio.to_thread(next_report))
    watch.cancel()
    assert sum(report.arrived for report in reports) == 2
    assert (sum(report.with_target for report in reports), sum(report.missed for report in reports)) == (2, 1)
    assert sum(sum(report.ttft.counts) for report in reports) == 2
    served = [tenant for report in reports for tenant in report.tenants if tenant.served_tokens]
    assert {tenant.tenant: tenant.weight for tenant in served} == {"search": 3.0}
    assert sum(tenant.served_tokens for tenant in served) == 10
    classes = [item for report in reports for item in report.classes]
    assert {item.slo_class for item in classes} == {"batch"}
    assert (sum(item.with_target for item in classes), sum(item.missed for item in classes)) == (2, 1)


def test_vllms_metrics_page_has_the_engines_own_metrics(engine):
    assert engine.gauge("tidegate_engine_schedule_seconds_count") > 0
    assert engine.gauge("tidegate_engine_step_seconds_count") > 0
    assert engine.gauge("tidegate_engine_preemptions_total") >= 0
    assert engine.gauge("tidegate_engine_calls_total") > 0
    assert engine.gauge("tidegate_engine_ttft_seconds_count") > 0
    assert engine.gauge("tidegate_engine_kv_held_bytes") == 0
