"""A gateway whose wall clock is wrong, and steps back and forth, disturbs no deadline, lease or limit."""

import asyncio
import itertools
from typing import Any

WORKFLOWS, AT_ONCE = 60, 12
STAGES = [{"name": "plan"}, {"name": "draft", "after": ["plan"]}, {"name": "check", "after": ["draft"]}]
CALL = {"model": "sim", "prompt": "hello", "max_tokens": 8}
TEN_MINUTES_S = 600.0
DEADLINE_MS = 120_000
"""Less than the clock's error: a gateway that believed its clock would let every workflow expire, or none."""


async def test_a_wall_clock_that_steps_by_ten_minutes_changes_nothing(
    rig: Any, until: Any, free_port: Any, figure: Any
) -> None:
    kept = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    engines = [await rig.engine(), await rig.engine()]
    error = rig.folder / "clock-error"

    def set_error(error_s: float) -> None:
        """At once: a process may read it at any moment."""
        new = error.with_suffix(".new")
        new.write_text(str(error_s))
        new.replace(error)

    set_error(TEN_MINUTES_S)
    limits = {"tenants": [{"name": "bounded", "tokensPerMinute": 120}]}
    gateways = [await rig.gateway(engines, kept.url, **limits)]
    gateways.append(await rig.gateway(engines, kept.url, clock_error=error, **limits))
    urls = itertools.cycle(gateway.url for gateway in gateways)
    names, states, stepping = iter(range(WORKFLOWS)), [], True

    async def send(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        async with rig.http.request(method, next(urls) + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def step() -> None:
        for error_s in itertools.cycle([TEN_MINUTES_S, -TEN_MINUTES_S, 0.0]):
            if not stepping:
                return
            set_error(error_s)
            await asyncio.sleep(0.05)

    async def client() -> None:
        for _ in names:
            status, flow = await send("POST", "/v1/workflows", {"deadline_ms": DEADLINE_MS, "stages": STAGES})
            assert status == 201, flow
            for stage in STAGES:
                told = {"x-tidegate-workflow": flow["id"], "x-tidegate-stage": str(stage["name"])}
                status, answer = await send("POST", "/v1/completions", CALL, **told)
                assert status == 200, answer

            async def ended(flow: Any = flow) -> Any:
                _, record = await send("GET", f"/v1/workflows/{flow['id']}")
                return record if record["state"] != "running" else None

            states.append((await until(ended))["state"])

    async with asyncio.TaskGroup() as group:
        stepping_task = group.create_task(step())
        clients = [group.create_task(client()) for _ in range(AT_ONCE)]
        await asyncio.wait(clients)
        stepping = False
        await stepping_task
    done = states.count("done")
    figure(f"clock steps by 10 min: of {WORKFLOWS} workflows done", str(done), goal="all", met=done == WORKFLOWS)
    assert states == ["done"] * WORKFLOWS

    bounded = {"x-tidegate-tenant": "bounded"}
    answers = []
    for error_s in (0.0, TEN_MINUTES_S, -TEN_MINUTES_S, TEN_MINUTES_S) * 5:
        set_error(error_s)
        answers.append((await send("POST", "/v1/completions", CALL | {"max_tokens": 100}, **bounded))[0])
    assert answers[0] == 200
    assert answers[-4:] == [429] * 4, "only time refills tokens: 40 s for a further call"
