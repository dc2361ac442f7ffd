"""May an engine fetch the image, video or sound at this address?

`data:` addresses carry their content and pass. Addresses of public hosts need the switch `remote_images`. Other schemes,
and private, link-local and loopback hosts, are always errors. A public name may still resolve to a private address: only
the network and the engine can prevent that (SECURITY.md).
"""

import ipaddress
import re
from collections.abc import Collection

from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.admit import entitlements

_SCHEME = re.compile(r"[\x00-\x20\s]*+([A-Za-z](?:[\t\r\n]*+[A-Za-z0-9+.-]){0,31}+)[\t\r\n]*+:")
"""Many parsers take tabs and line ends out of an address before they read it. No part gives back what it has taken, so
a text of millions of tabs takes milliseconds."""
_REMOTE = re.compile(r"https?://([A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*)?", re.IGNORECASE)
"""A host and no user; the rest has no blank and no backslash, which parsers read in different ways."""
_PRIVATE_NAMES = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "svc", "arpa")
FETCHED = ("http", "https", "file", "ftp", "ftps")


def check(value: str, where: str, allowed: Collection[entitlements.Feature], *, only_fetched: bool = False) -> None:
    """Raises `BadRequest` unless an engine may fetch it. `only_fetched` = a text without a scheme that engines fetch is
    no address."""
    match = _SCHEME.match(value)
    scheme = "" if match is None else "".join(match[1].split()).lower()
    if scheme == "data" or (only_fetched and scheme not in FETCHED):
        return
    if scheme not in ("http", "https"):
        raise BadRequest(f"{where}: an address must start with data: or https://", param=where)
    if "remote_images" not in allowed:
        raise BadRequest(
            f"{where}: engines fetch no addresses here; send the content as a data: address. The settings of the gateway"
            " permit public hosts with allow: [remote_images], for all calls or for those of a class",
            param=where,
        )
    remote = _REMOTE.fullmatch(value)
    if remote is None or not _is_public(remote[1].lower().removesuffix(".")):
        raise BadRequest(f"{where}: the address must name a public host, without a user", param=where)


def _is_public(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_global
    except ValueError:
        pass
    last = host.rpartition(".")[2]
    if "." not in host or last[:1].isdigit():  # a name of the local network, or another way to write an IPv4 address
        return False
    return last not in _PRIVATE_NAMES and ".svc." not in f"{host}."
