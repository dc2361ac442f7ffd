"""`tidegate top`: the state of a running gateway in a terminal, as the page at `/` shows it in a browser.

It needs nothing but a terminal with ANSI escapes, so it works over SSH. Without a terminal it prints the state once.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import aiohttp

from tidegate_cli import api_key, base_url, terminal_text, top_view
from tidegate_cli.command_errors import Failed, Usage

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0
SHORTEST_S, LONGEST_S = 0.2, 3600.0
SHOW, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's other screen without a cursor, and back."""
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=URL,
        help=f"the gateway (default: %(default)s); {api_key.NAME} in the environment is its API key, or the token of the "
        "pool for the admin port",
    )
    parser.add_argument("--once", action="store_true", help="print the state once, as without a terminal")
    parser.add_argument("--json", action="store_true", help="print the state once, as one JSON object")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks (1)")


def run(options: argparse.Namespace) -> int:
    if not 0 < options.interval <= LONGEST_S:
        raise Usage(f"--interval must be more than 0 and at most {LONGEST_S:.0f}")
    url = base_url.of(options.url)
    if options.json or options.once or not sys.stdout.isatty():
        state = asyncio.run(_once(url))
        if options.json:
            sys.stdout.write(json.dumps(state) + "\n")
        else:
            width = shutil.get_terminal_size((160, 50)).columns if sys.stdout.isatty() else 200
            paint = terminal_text.Painter(colours=_has_colours())
            sys.stdout.write("\n".join(top_view.lines(state, paint, width=width)) + "\n")
        return 0
    sys.stdout.write(SHOW)
    try:
        asyncio.run(_until_stopped(_live(url, max(options.interval, SHORTEST_S))))
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
    return 0


async def _until_stopped(work: Coroutine[None, None, None]) -> None:
    """Does the work until a signal ends it, such as Ctrl-C or the end of the SSH connection."""
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _once(url: str) -> dict[str, Any]:
    async with _session() as session:
        return await _state(session, url)


async def _live(url: str, interval_s: float) -> None:
    """Shows the state until cancelled. A gateway that restarts is shown again."""
    paint = terminal_text.Painter(colours=_has_colours())
    shown: list[str] = []
    async with _session() as session:
        shown = _lines(await _state(session, url), paint)
        while True:
            sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\r\n" for line in shown) + CLEAR_REST)
            sys.stdout.flush()
            await asyncio.sleep(interval_s)
            try:
                shown = _lines(await _state(session, url), paint)
            except Failed as error:
                shown = [paint("bad", terminal_text.plain(error)), *shown[1:]]


def _lines(state: dict[str, Any], paint: terminal_text.Painter) -> list[str]:
    size = shutil.get_terminal_size()
    return top_view.lines(state, paint, width=size.columns, height=size.lines)[: size.lines - 1]


def _has_colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=api_key.headers(), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def _state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Raises `Failed` with what to do next."""
    try:
        async with session.get(f"{url.rstrip('/')}/v1/state") as response:
            answer = await response.json()
            if response.status == 401:
                raise Failed(f"{answer['error']['message']}; set {api_key.NAME}")
            if response.status == 404:
                raise Failed(
                    f"{url} has no /v1/state; listen.statusPage may be off there, the admin port always has it"
                )
            if response.status != 200:
                raise Failed(answer["error"]["message"])
            state: dict[str, Any] = answer
            return state
    except aiohttp.ContentTypeError as error:
        raise Failed(f"{url} is no gateway: its /v1/state is no JSON; give the gateway's address with --url") from error
    except aiohttp.ClientResponseError as error:  # its text has the bytes of another protocol
        raise Failed(
            f"what listens at {url} does not speak HTTP/1.1; give the gateway's HTTP port (listen.port, 8000) or admin port"
            " with --url, not its gRPC port"
        ) from error
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise Failed(
            f"no gateway answers at {url} ({error or 'no answer in time'}); start one (tidegate up) or give its address"
            " with --url"
        ) from error
