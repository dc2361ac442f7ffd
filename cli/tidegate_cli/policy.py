"""`tidegate policy get|set`: the admin API of a running gateway from the command line."""

import argparse
import asyncio
import json
import re
import sys
from typing import Any

import aiohttp

from tidegate_cli.errors import Failed, Usage
from tidegate_policy import orders

_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", default="http://127.0.0.1:8001", metavar="URL", help="the gateway's admin address")
    parser.add_argument("--json", action="store_true", help="print the gateway's own answer")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="get|set")
    verbs.add_parser("get", help="the active policy and why")
    setting = verbs.add_parser("set", help="hold a policy until the override expires")
    setting.add_argument("name", help=f"one of {', '.join(sorted(orders.ORDERS))}, or auto to hand back to the rules")
    setting.add_argument("--for", dest="duration", default="10m", metavar="10m", help="how long (s, m, h)")


def run(options: argparse.Namespace) -> int:
    body: dict[str, Any] | None = None
    if options.verb == "set":
        if options.name not in {*orders.ORDERS, "auto"}:
            raise Usage(f"unknown policy {options.name!r}; known are auto, {', '.join(sorted(orders.ORDERS))}")
        body = (
            {"policy": None} if options.name == "auto" else {"policy": options.name, "for_s": seconds(options.duration)}
        )
    answer = asyncio.run(_ask(options.admin, body))
    if options.json:
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0
    left = f", {answer['left_s']:.0f} s left" if answer.get("left_s") is not None else ""
    sys.stdout.write(f"{answer['name']}  ({answer['source']}{left}: {answer['reason'] or 'no reason given'})\n")
    return 0


def seconds(text: str) -> int:
    """`90s`, `10m`, `2h` as seconds. Raises `Usage`."""
    match = re.fullmatch(r"(\d{1,6})([smh])", text)
    if match is None or not int(match[1]):
        raise Usage(f"{text!r} is not a duration; write it as 90s, 10m or 2h")
    return int(match[1]) * _UNITS_S[match[2]]


async def _ask(admin: str, body: dict[str, Any] | None) -> dict[str, Any]:
    url = f"{admin.rstrip('/')}/admin/policy"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            request = session.get(url) if body is None else session.put(url, json=body)
            async with request as response:
                answer: dict[str, Any] = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Failed(f"no gateway answers at {admin}: {error}; give its admin address with --admin") from error
    if "error" in answer:
        raise Failed(answer["error"]["message"])
    return answer
