"""The addresses on which ports listen."""

EVERY_ADDRESS = "::"
"""Every address of this machine, of IPv6 and of IPv4."""
BACKLOG = 4096
"""Connections that wait until they are accepted; the kernel asks clients beyond them to try again after a second."""


def bound(host: str) -> str | None:
    """What asyncio's servers take for the host: None for every address, because "::" alone would leave out IPv4."""
    return None if host == EVERY_ADDRESS else host


def shown(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
