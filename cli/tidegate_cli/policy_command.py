"""`tidegate policy get|set`: the admin API of a running gateway from the command line.

The gateway keeps the choice and the steering loop carries it to the engines, so `set` waits until those that can take it
have, and says which did not.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

import aiohttp

from tidegate_cli.command_errors import Failed, Usage
from tidegate_policy import duration, policies

ADMIN = "http://127.0.0.1:8001"
CARRIED_S = 15.0
"""For the steering loop to carry a choice to the engines; it looks every few seconds."""
LOOK_S = 0.5
IN_FORCE = "in force"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, admin=ADMIN, as_json=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="get|set")
    getting = verbs.add_parser("get", help="the active policy and why")
    setting = verbs.add_parser("set", help="hold a policy until the override expires")
    setting.add_argument(
        "name", help=f"one of {', '.join(sorted(policies.POLICIES))}, or auto to hand back to the rules"
    )
    setting.add_argument("--for", dest="duration", metavar="TIME", help="how long: 90s, 10m (the default), 2h")
    for verb in (getting, setting):
        _add_common(verb, admin=argparse.SUPPRESS, as_json=argparse.SUPPRESS)


def _add_common(parser: argparse.ArgumentParser, *, admin: str, as_json: str | bool) -> None:
    """Before and after the verb."""
    parser.add_argument("--admin", default=admin, metavar="URL", help=f"the gateway's admin address ({ADMIN})")
    parser.add_argument("--json", action="store_true", default=as_json, help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    body: dict[str, Any] | None = None
    if options.verb == "set":
        if options.name not in {*policies.POLICIES, "auto"}:
            raise Usage(f"unknown policy {options.name!r}; known are auto, {', '.join(sorted(policies.POLICIES))}")
        body = {"policy": None if options.name == "auto" else options.name}
        if options.duration is not None:
            body["for_s"] = _held_s(options.duration)
    admin = options.admin if "://" in options.admin else f"http://{options.admin}"
    answer, engines = asyncio.run(_ask(admin.rstrip("/"), body))
    if options.json:
        sys.stdout.write(json.dumps({**answer, "engines": engines}) + "\n")
        return 0
    left = f", {answer['left_s']:.0f} s left" if answer.get("left_s") is not None else ""
    sys.stdout.write(f"{answer['name']}  ({answer['source']}{left}: {answer['reason'] or 'no reason given'})\n")
    sys.stdout.writelines(f"  {name}: {how}\n" for name, how in engines.items())
    return 0


def _held_s(text: str) -> float:
    try:
        return duration.seconds(text)
    except ValueError as error:
        raise Usage(str(error)) from error


def standing(engine: Mapping[str, Any], policy: str) -> str:
    """Whether `policy` orders this engine's queue, and if not why; `engine` is one of `/admin/state`."""
    if engine["control"] is None:
        return "has no control port; it keeps its own order"
    if engine["fallback"]:
        return f"keeps vLLM's own order: {engine['fallback']}"
    if engine["policy"] is None:
        return "its control port does not answer"
    return IN_FORCE if engine["policy"] == policy else f"still {engine['policy']}"


async def _ask(admin: str, body: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The active policy, and how each engine stands to it. With a body, first makes it so."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            if body is not None:
                await _answer(session, "PUT", f"{admin}/admin/policy", body)
            give_up = asyncio.get_running_loop().time() + (CARRIED_S if body and body["policy"] else 0)
            while True:
                state = await _answer(session, "GET", f"{admin}/admin/state")
                policy: dict[str, Any] = state["policy"]
                engines = {engine["name"]: standing(engine, policy["name"]) for engine in state["engines"]}
                waited = {engines[engine["name"]] for engine in state["engines"] if engine["control"]}
                if waited <= {IN_FORCE} or asyncio.get_running_loop().time() >= give_up:
                    return policy, engines
                await asyncio.sleep(LOOK_S)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise Failed(
            f"no gateway's admin API answers at {admin} ({error or 'too slow'}); "
            "give its admin address with --admin: `tidegate up` prints the port, and it is not that of /v1"
        ) from error


async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Raises `Failed` with the gateway's own refusal."""
    async with session.request(method, url, json=body) as response:
        if response.status == 404:
            raise ValueError("404: there is no such path")
        answer: dict[str, Any] = await response.json()
    if "error" in answer:
        raise Failed(answer["error"]["message"])
    return answer
