"""What `tools/kubernetes/e2e` runs inside the cluster: `python client.py COMMAND ARGUMENT...`, one JSON line out.

Needs aiohttp and grpcio, which the project's own image has.
"""

import asyncio
import json
import os
import random
import sys
import time
from typing import Any

import aiohttp
import grpc

from tidegate_control import pool_token
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

PATIENCE = aiohttp.ClientTimeout(total=120)


async def chat(url: str, model: str, text: str) -> dict[str, Any]:
    """One chat completion, and the same streamed."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0}
    async with aiohttp.ClientSession(timeout=PATIENCE) as session:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            whole = {"status": answer.status, "engine": answer.headers.get("x-tidegate-engine"), **await answer.json()}
            served = answer.headers.get("x-gateway-destination-endpoint-served")
        pieces = []
        async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": True}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    text = whole["choices"][0]["message"]["content"] if whole["status"] == 200 else str(whole)
    through_envoy = {} if served is None else {"served": served}
    return {
        "status": whole["status"],
        "engine": whole["engine"],
        "text": text,
        "streamed": "".join(pieces),
        **through_envoy,
    }


async def refused(url: str, model: str, tenant: str) -> dict[str, Any]:
    """The last answer to the calls of a tenant that sends until it is refused, thrice at most."""
    body = {"model": model, "messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 8}
    async with aiohttp.ClientSession(timeout=PATIENCE, headers={"x-tidegate-tenant": tenant}) as session:
        for _ in range(3):
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                names = ("x-tidegate-reason", "retry-after", "server")
                last = {"status": answer.status, **{name: answer.headers.get(name) for name in names}}
                last["said"] = await answer.json()
            if last["status"] != 200:
                break
    return last


async def workflow(url: str, model: str) -> dict[str, Any]:
    """A workflow from its template: each stage's calls, in order, then what the gateway says of it."""
    async with aiohttp.ClientSession(timeout=PATIENCE) as session:
        async with session.post(f"{url}/v1/workflows", json={"template": "report"}) as answer:
            created = await answer.json()
            if answer.status >= 300:
                return {"status": answer.status, "said": created}
        for stage, calls in (("plan", 1), ("write", 2), ("check", 1)):
            body = {"model": model, "messages": [{"role": "user", "content": stage}], "max_tokens": 8}
            headers = {"x-tidegate-workflow": created["id"], "x-tidegate-stage": stage}
            await asyncio.gather(*(_post(session, url, body, headers) for _ in range(calls)))
        async with session.get(f"{url}/v1/workflows/{created['id']}") as answer:
            return {"status": answer.status, **await answer.json()}


async def load(url: str, model: str, seconds: str) -> dict[str, Any]:
    """Long and short calls mixed, more at once than the engines have memory for, until the time is over."""
    until, counts = time.monotonic() + float(seconds), {"ok": 0, "refused": 0}
    chance = random.Random(1)

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < until:
            words, tokens = (2000, 150) if chance.random() < 0.5 else (20, 4)
            body = {"model": model, "messages": [{"role": "user", "content": "word " * words}], "max_tokens": tokens}
            status = await _post(session, url, body, {"x-tidegate-class": "interactive"})
            counts["ok" if status == 200 else "refused"] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=PATIENCE, connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(80):
            group.create_task(client(session))
    return counts


async def phases(url: str, model: str, seconds: str) -> dict[str, Any]:
    """Chats, then long jobs among the chats, then lookups with deadlines, each for as many seconds. Answers by phase."""
    kinds = {"chat": (20, 30, "interactive"), "long": (1500, 200, "batch"), "deadline": (40, 40, "urgent")}
    counts: dict[str, dict[int, int]] = {}

    async def client(session: aiohttp.ClientSession, kind: str, seen: dict[int, int], until: float) -> None:
        words, tokens, slo_class = kinds[kind]
        while time.monotonic() < until:
            body = {"model": model, "messages": [{"role": "user", "content": "word " * words}], "max_tokens": tokens}
            status = await _post(session, url, body, {"x-tidegate-class": slo_class})
            seen[status] = seen.get(status, 0) + 1
            if status != 200:
                await asyncio.sleep(0.5)  # the call was shed: the client tries again later

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=PATIENCE, connector=connector) as session:
        for name, clients in {
            "chat": {"chat": 8},
            "chat and long jobs": {"chat": 30, "long": 50},
            "deadlines": {"deadline": 40},
        }.items():
            seen, until = counts.setdefault(name, {}), time.monotonic() + float(seconds)
            async with asyncio.TaskGroup() as group:
                for kind, count in clients.items():
                    for _ in range(count):
                        group.create_task(client(session, kind, seen, until))
    return counts


async def steady(url: str, model: str, slo_class: str, *phases: str) -> list[dict[str, Any]]:
    """Calls at a steady rate, whole and streamed by turns, however long the answers take. Each phase is
    RATE:WORDS:TOKENS and lasts until a line arrives on standard input. For each phase: answers by status
    and reason, calls whose engine a gateway has chosen, streams without an end, and the longest time of a call."""
    headers = {"x-tidegate-class": slo_class} if slo_class else {}
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def call(session: aiohttp.ClientSession, phase: str, seen: dict[str, Any], *, stream: bool) -> None:
        _, words, tokens = phase.split(":")
        text = "word " * int(words)
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": int(tokens)}
        started = time.monotonic()
        try:
            async with session.post(
                f"{url}/v1/chat/completions", json={**body, "stream": stream}, headers=headers
            ) as answer:
                said = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            status = type(error).__name__
        else:
            status = " ".join(filter(None, (str(answer.status), answer.headers.get("x-tidegate-reason"))))
            seen["chosen"] += "x-tidegate-engine" in answer.headers
            seen["broken"] += stream and answer.status == 200 and not said.rstrip().endswith(b"data: [DONE]")
        seen["status"][status] = seen["status"].get(status, 0) + 1
        seen["longest_s"] = round(max(seen["longest_s"], time.monotonic() - started), 2)

    counts: list[dict[str, Any]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=PATIENCE, connector=connector) as session, asyncio.TaskGroup() as group:
        for phase in phases:
            counts.append({"status": {}, "chosen": 0, "broken": 0, "longest_s": 0.0})
            due_s, sent, ending = time.monotonic(), 0, asyncio.ensure_future(lines.readline())
            while not ending.done():
                group.create_task(call(session, phase, counts[-1], stream=sent % 2 == 1))
                sent += 1
                due_s += 1 / float(phase.split(":")[0])
                await asyncio.wait([ending], timeout=max(due_s - time.monotonic(), 0.0))
    return counts


async def states(*addresses: str) -> dict[str, Any]:
    """What EngineControl says at each address. The pod of a gateway has the token of the pool."""
    found, metadata = {}, tuple(pool_token.header(pool_token.from_environment(os.environ)).items())
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            state = await control_pb2_grpc.EngineControlStub(channel).GetState(
                control_pb2.GetStateRequest(), timeout=10, metadata=metadata
            )
            found[address] = {
                "policy": state.policy,
                "reason": state.policy_reason,
                "fallback": state.fallback_reason,
                "version": state.engine_version,
            }
    return found


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]) -> int:
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


if __name__ == "__main__":
    commands: dict[str, Any] = {
        "chat": chat, "workflow": workflow, "load": load, "phases": phases, "steady": steady, "refused": refused,
        "states": states,
    }  # fmt: skip
    print(json.dumps(asyncio.run(commands[sys.argv[1]](*sys.argv[2:]))))
