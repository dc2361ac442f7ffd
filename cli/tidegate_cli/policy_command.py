"""`tidegate policy get|set`: reads or overrides the active policy through the admin API of a running gateway.

The gateway stores the override, and the steering loop sets it on the engines. So `set` waits until every engine that can
change its policy has done so, and names the engines that have not. The token of the pool, which an admin port beyond
loopback requires, comes from the environment.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import http_exceptions

from tidegate_cli import base_url, terminal_text
from tidegate_cli.command_errors import Failed, Usage
from tidegate_control import pool_token
from tidegate_gateway import settings_decoder
from tidegate_policy import duration, policies

ADMIN = "http://127.0.0.1:8001"
PROPAGATION_S = 15.0
"""The steering loop observes every few seconds and may need this long to set an override on all engines."""
NOT_EVERYWHERE = (
    f"not every engine has it after {PROPAGATION_S:.0f} s; the operator (or `tidegate up`) sets the policy of engines, a "
    "gateway alone that of its own queue\n"
)
LONGEST_S = 7 * 24 * 3600
"""Of an override, as in the gateway."""
POLL_S = 0.5
WATCH_S = 1.0
IN_FORCE = "in force"
SHOWN_SWITCHES = 5
SO_FAR = "(first "
"""In the effect of a switch that is younger than a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, admin=ADMIN, as_json=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="get|set")
    getting = verbs.add_parser(
        "get", help="print the active policy, its reason, and the last switches with their effect"
    )
    getting.add_argument("--watch", action="store_true", help="then print each further switch, until Ctrl-C")
    setting = verbs.add_parser("set", help="override the policy until the override expires")
    setting.add_argument("name", help=f"one of {', '.join(sorted(policies.POLICIES))}, or auto to end the override")
    setting.add_argument(
        "--for",
        dest="duration",
        metavar="TIME",
        help=f"duration of the override: 90s, 10m (the default), 2h, at most {LONGEST_S // 3600}h",
    )
    for verb in (getting, setting):
        _add_common(verb, admin=argparse.SUPPRESS, as_json=argparse.SUPPRESS)


def _add_common(parser: argparse.ArgumentParser, *, admin: str, as_json: str | bool) -> None:
    """Options that are accepted before and after the verb."""
    parser.add_argument("--admin", default=admin, metavar="URL", help=f"the gateway's admin address ({ADMIN})")
    parser.add_argument("--json", action="store_true", default=as_json, help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    body: dict[str, Any] | None = None
    if options.verb == "set":
        if options.name not in {*policies.POLICIES, "auto"}:
            near = settings_decoder.suggestion(options.name, {*policies.POLICIES, "auto"})
            raise Usage(f"unknown policy {options.name!r}; {near}")
        body = {"policy": None if options.name == "auto" else options.name}
        if options.duration is not None and options.name == "auto":
            raise Usage("--for is the duration of an override; auto ends one")
        if options.duration is not None:
            body["for_s"] = _held_s(options.duration)
    admin = base_url.of(options.admin)
    answer, engines = asyncio.run(_ask(admin, body))
    _show(options, answer, engines)
    if options.verb == "get" and options.watch:
        asyncio.run(_watch(admin, answer, as_json=options.json))
    return 0


def _show(options: argparse.Namespace, answer: Mapping[str, Any], engines: Mapping[str, str]) -> None:
    if options.json:
        sys.stdout.write(json.dumps({**answer, "engines": engines}) + "\n")
        return
    left = f", {answer['left_s']:.0f} s left" if answer.get("left_s") is not None else ""
    said = ("", answer["source"], f"the {answer['source']}")
    reason = "" if answer["reason"] in said else f": {terminal_text.plain(answer['reason'])}"
    sys.stdout.write(f"{answer['name']}  ({answer['source']}{left}{reason})\n")
    sys.stdout.writelines(f"  {name}: {how}\n" for name, how in engines.items())
    if options.verb == "get":
        sys.stdout.writelines(switch_lines(answer.get("switches", ())))


def switch_lines(switches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The last switches, newest first, in the gateway's own words."""
    if switches:
        yield "last switches (docs/steering.md):\n"
    for each in switches[:SHOWN_SWITCHES]:
        yield from _explained(each)
        yield f"    {_span('effect', each, 'after'):23}{each['effect']}\n"


def _explained(each: Mapping[str, Any]) -> Iterator[str]:
    """A switch, and what was known when it was made."""
    yield _switch(each)
    if each.get("alternatives"):
        yield f"    alternatives:          {terminal_text.plain(', '.join(each['alternatives']))}\n"
    if each.get("expected"):
        yield f"    expected:              {terminal_text.plain(each['expected'])}\n"
    yield f"    {_span('evidence', each, 'before'):23}{each['evidence']}\n"


async def _watch(admin: str, answer: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints each switch that follows those in `answer`, and its effect a minute later. A gateway that does not answer is
    asked again."""
    known = {_identity(each) for each in answer.get("switches", ())}
    awaited: set[tuple[str, str]] = set()
    answers = True
    async with _session() as session:
        while True:
            sys.stdout.flush()
            await asyncio.sleep(WATCH_S)
            try:
                policy = await _answer(session, "GET", f"{admin}/admin/policy")
                answers = True
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if answers:
                    sys.stderr.write(
                        f"the gateway does not answer ({str(error) or 'no answer in time'}); it is asked again\n"
                    )
                answers = False
                continue
            for each in reversed(policy.get("switches", ())):
                name = _identity(each)
                if name not in known:
                    known.add(name)
                    awaited.add(name)
                    sys.stdout.writelines([json.dumps(each) + "\n"] if as_json else _explained(each))
                elif name in awaited and SO_FAR not in each["effect"] and not as_json:
                    awaited.remove(name)
                    sys.stdout.write(
                        f"  {each['at']}  {each['to']}: {_span('effect', each, 'after')} {each['effect']}\n"
                    )


def _identity(switch: Mapping[str, Any]) -> tuple[str, str]:
    return str(switch["at"]), str(switch["to"])


def _span(what: str, each: Mapping[str, Any], when: str) -> str:
    """The name of a line, with the seconds that it is about: 60, or fewer beside another switch or at the start."""
    return f"{what}, {each.get(when, {}).get('seconds', 60.0):.0f} s {when}:"


def _switch(each: Mapping[str, Any]) -> str:
    return (
        f"  {each['at']}  {each['from']} -> {each['to']}  ({each['source']}: {terminal_text.plain(each['reason'])})\n"
    )


def _held_s(text: str) -> float:
    try:
        seconds = duration.seconds(text)
    except ValueError as error:
        raise Usage(str(error)) from error
    if not 0 < seconds <= LONGEST_S:
        raise Usage(f"--for must be more than 0 and at most {LONGEST_S // 3600}h")
    return seconds


def standing(engine: Mapping[str, Any], policy: str) -> str:
    """Whether `policy` is in force on an engine, and if not, why. `engine` is an entry of `/admin/state`."""
    if engine["control"] is None:
        return "has no control port; its own policy stays"
    if engine["fallback"]:
        return f"keeps vLLM's own scheduler: {terminal_text.plain(engine['fallback'])}"
    if engine["policy"] is None:
        return "its control port does not answer"
    stated = terminal_text.plain(engine["policy"])
    if engine["reason"] is not None:
        return f"{terminal_text.plain(engine['reason'])}; its policy was {stated}"
    return IN_FORCE if engine["policy"] == policy else f"still {stated}"


async def _ask(admin: str, body: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The active policy, and its state on each engine. A `body` is sent to the gateway first."""
    try:
        async with _session() as session:
            if body is not None:
                await _answer(session, "PUT", f"{admin}/admin/policy", body)
            give_up = asyncio.get_running_loop().time() + (PROPAGATION_S if body else 0)
            while True:
                state = await _answer(session, "GET", f"{admin}/admin/state")
                policy: dict[str, Any] = state["policy"]
                engines = {engine["name"]: standing(engine, policy["name"]) for engine in state["engines"]}
                waited = {engines[engine["name"]] for engine in state["engines"] if engine["control"]}
                now = asyncio.get_running_loop().time()
                if waited <= {IN_FORCE}:
                    return policy, engines
                if now >= give_up:
                    if body:
                        sys.stderr.write(NOT_EVERYWHERE)
                    return policy, engines
                await asyncio.sleep(POLL_S)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise Failed(
            f"no gateway's admin API answers at {admin} ({_reason(error)}); "
            "give the admin address with --admin. `tidegate up` prints the admin port, which differs from the port of /v1"
        ) from error


def _reason(error: Exception) -> str:
    """What an error says; aiohttp's own text about an answer that is no HTTP has the bytes of the answer."""
    if isinstance(error, aiohttp.ClientResponseError) and isinstance(
        error.__cause__, http_exceptions.HttpProcessingError
    ):
        return "what answers there is no HTTP/1.1 server"
    return str(error) or "no answer in time"


def _session() -> aiohttp.ClientSession:
    """Requests with the token of the pool, if the environment has one. Raises `Usage`."""
    try:
        headers = pool_token.header(pool_token.from_environment(os.environ))
    except pool_token.BadToken as error:
        raise Usage(str(error)) from None
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10))


async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Raises `Failed` with the gateway's own error message."""
    async with session.request(method, url, json=body) as response:
        if response.status == 404:
            raise ValueError("404: the path does not exist")
        answer: dict[str, Any] = await response.json()
        if response.status == 401:
            raise Failed(f"{answer['error']['message']}; set {pool_token.VARIABLE}")
    if "error" in answer:
        raise Failed(answer["error"]["message"])
    return answer
