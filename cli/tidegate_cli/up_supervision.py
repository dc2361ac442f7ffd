"""Supervises the processes of `tidegate up`, and drives the same steering loop as the operator.

Processes that crash are restarted. A process that crashes too often ends the run.
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Mapping

from tidegate_cli import processes, terminal_text
from tidegate_cli.command_errors import Failed
from tidegate_control import bounded_http, steering_driver
from tidegate_operator import gateway_admin
from tidegate_policy import policies
from tidegate_policy.steer import guards, steering_loop

INTERVAL_S = 10.0
"""Time between two decisions of the selector. It is shorter than in a cluster, because a person usually watches."""
RESTARTS, RESTARTS_S = 3, 600.0
"""A process may crash and be restarted this many times within this many seconds."""
OBSERVATION_S = 2.0
"""Time between two observations, which notice emergencies and manual overrides."""


async def supervise(
    options: argparse.Namespace,
    controls: Mapping[str, str],
    family: processes.Family,
    interrupted: asyncio.Task[bool],
    *,
    token: str,
) -> None:
    """Serves until a signal arrives. `controls` has the name of each engine by the address of its EngineControl, which
    requires `token`. Raises `Failed` when a process crashes too often."""
    steered = asyncio.create_task(_steer(options, controls, token))
    kept = asyncio.create_task(_keep(family))
    try:
        await asyncio.wait({steered, kept, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if interrupted.done():
            return
        for task in (kept, steered):
            if task.done():
                task.result()
        raise Failed("the steering loop ended unexpectedly")
    finally:
        for task in (steered, kept):
            task.cancel()
        await asyncio.gather(steered, kept, return_exceptions=True)


async def _keep(family: processes.Family) -> None:
    """Restarts processes that crash, while the others keep serving. Raises `Failed` when a process crashes too often."""
    crashes: defaultdict[str, list[float]] = defaultdict(list)
    while True:
        child = await family.first_crash()
        now = time.monotonic()
        crashes[child.name] = [*(at for at in crashes[child.name] if now - at < RESTARTS_S), now]
        if len(crashes[child.name]) > RESTARTS:
            raise Failed(
                f"everything stops, because {child.name} crashed {RESTARTS + 1} times in a short time; it {child.end()}"
            )
        sys.stderr.write(f"{child.name} {child.end()}; it is restarted\n")
        await family.restart(child)


async def _steer(options: argparse.Namespace, controls: Mapping[str, str], token: str) -> None:
    settings = steering_loop.Settings(
        allow=tuple(sorted(policies.POLICIES)),
        interval_s=INTERVAL_S,
        guards=guards.GuardSettings(dwell_s=3 * INTERVAL_S),
    )
    held = (
        None if options.policy == "auto" else steering_loop.Override(policy=options.policy, reason="fixed by --policy")
    )
    driver = steering_driver.SteeringDriver(None, settings, now=time.time(), token=token)
    behind: Mapping[str, str] = {}
    waiting: guards.Held | None = None
    admin = gateway_admin.GatewayAdmin(bounded_http.Client())
    try:
        await driver.retarget(controls)
        while True:
            await asyncio.sleep(OBSERVATION_S)
            known, behind = behind, {controls[at]: why for at, why in driver.not_following().items()}
            sys.stderr.write(obedience(driver.active_policy, known, behind))
            await admin.ask([f"127.0.0.1:{options.admin_port}"])
            outcome = driver.observe(time.time(), admin.override() or held, monotonic_s=time.monotonic())
            if outcome.verdict.kind is not guards.Kind.KEEP:
                reason = terminal_text.plain(outcome.verdict.reason)
                sys.stderr.write(f"policy {outcome.verdict.policy}: {reason}\n")
            if outcome.judged is not None:
                sys.stderr.write(f"after the switch to {outcome.state.active}: {outcome.state.effect}\n")
            if outcome.held is not None and outcome.held != waiting:
                sys.stderr.write(f"{steering_driver.held_back(outcome.held)}\n")
            waiting = outcome.held
            await driver.enforce()
            state = outcome.state
            await admin.follow(
                state.active,
                steering_driver.explained(outcome),
                alternatives=state.alternatives,
                expected=state.expected,
            )
    finally:
        await driver.close()


def obedience(policy: str, known: Mapping[str, str], behind: Mapping[str, str]) -> str:
    """Lines about the engines that do not follow since the last observation, and about those that follow again. `known` and
    `behind` are the engines that did not follow at the last observation and at this one, with the reason."""
    lines = [
        f"engine {name} does not serve by {policy}: {behind[name]}" for name in sorted(behind.keys() - known.keys())
    ]
    lines += [f"engine {name} follows again" for name in sorted(known.keys() - behind.keys())]
    return "".join(f"{line}\n" for line in lines)
