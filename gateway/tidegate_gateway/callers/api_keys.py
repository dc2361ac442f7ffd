"""Which tenant does an API key belong to? A file says it, which is read again when it changes (docs/http.md).

The file has the SHA-256 of each key and never the key. Keys are random and long, so a fast hash without salt suffices:
none of them can be guessed (docs/decisions/0021).
"""

import asyncio
import hashlib
import hmac
import logging
import re
from dataclasses import dataclass

from tidegate_gateway import settings_decoder, settings_file
from tidegate_gateway.callers import caller
from tidegate_gateway.openai import error_table, request_fields
from tidegate_gateway.settings_decoder import BadSettings
from tidegate_profiles import plain_yaml

logger = logging.getLogger("tidegate.gateway")

LONGEST_KEY = 512
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX_BYTES = 8
"""The table finds a candidate by these bytes of the hash; the whole hash is then compared in constant time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key in the file."""

    sha256: str
    """The SHA-256 of the key in hexadecimal digits."""
    tenant: str
    """The tenant of the callers with this key; its entitlements are in `tenants` of the settings. `*` = any tenant."""
    classes: tuple[str, ...] | None = None
    """The classes that these callers may name; null = all. A call that names none is of the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    keys: tuple[ApiKey, ...]


Table = dict[bytes, tuple[bytes, caller.Caller]]
"""By the beginning of a hash: the whole hash, and the caller with this key."""


class ApiKeys:
    """The keys in a file."""

    def __init__(self, path: str) -> None:
        """Raises `BadSettings` for a file that cannot be used."""
        self._path = path
        self._raw = settings_file.named(path, "auth.keysFile")
        self._callers = parsed(self._raw)

    @property
    def count(self) -> int:
        """The number of keys."""
        return len(self._callers)

    def caller_of(self, key: str) -> caller.Caller:
        """The caller with this key. Raises `GatewayError`."""
        if len(key) <= LONGEST_KEY:
            digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            whole, found = self._callers.get(digest[:_PREFIX_BYTES], (b"", None))
            if found is not None and hmac.compare_digest(whole, digest):
                return found
        raise caller.unauthenticated("this API key is not known here")

    async def reload(self) -> None:
        """Takes the keys that the file has now. Raises `BadSettings`; then the keys stay as they were."""
        raw = await asyncio.to_thread(settings_file.named, self._path, "auth.keysFile")
        if raw != self._raw:
            self._callers = await asyncio.to_thread(parsed, raw)
            self._raw = raw
            level = logging.INFO if self._callers else logging.WARNING  # then no caller is known
            logger.log(level, "the file of API keys has changed: %d keys", len(self._callers))


def parsed(raw: bytes) -> Table:
    """The callers in a file. Raises `BadSettings`."""
    try:
        document = plain_yaml.load(raw)
        if document is None:
            raise BadSettings("the file of auth.keysFile is empty; `keys: []` knows no key")
    except plain_yaml.NotPlain as error:
        raise BadSettings(f"the file of auth.keysFile {error}") from error  # the cause would quote the file
    try:
        return _table(document)
    except BadSettings as error:
        raise BadSettings(*(f"the file of auth.keysFile: {problem}" for problem in error.problems)) from error


def _table(document: object) -> Table:
    callers: Table = {}
    for i, key in enumerate(settings_decoder.decode(KeyFile, document, "").keys):
        if not _DIGEST.fullmatch(key.sha256):
            raise BadSettings(f"keys[{i}].sha256 must be the SHA-256 of a key: 64 hexadecimal digits in lower case")
        try:
            tenant = request_fields.text(key.tenant, "tenant")
        except error_table.BadRequest as error:
            raise BadSettings(f"keys[{i}].{error.message}") from error
        digest = bytes.fromhex(key.sha256)
        if digest[:_PREFIX_BYTES] in callers:
            raise BadSettings(f"keys[{i}].sha256 comes twice")
        callers[digest[:_PREFIX_BYTES]] = (digest, caller.Caller(tenant=tenant, classes=key.classes))
    return callers
