"""Which tenant does a caller belong to? API keys from a file, which is read again when it changes (docs/http.md).

The file has the SHA-256 of each key and never the key. Keys are random and long, so a fast hash without salt suffices:
none of them can be guessed (docs/decisions/0021). A caller's key binds its tenant: all later code reads the tenant of
the bound headers, as it does without keys.
"""

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

import yaml

from tidegate_gateway import gateway_settings, settings_decoder, settings_file
from tidegate_gateway.observe import background_loop
from tidegate_gateway.openai import error_table, http_headers, request_fields
from tidegate_gateway.settings_decoder import BadSettings

logger = logging.getLogger("tidegate.gateway")

ANY_TENANT = "*"
"""The tenant of a key whose caller names the tenant of each request, such as an authenticating proxy."""
LONGEST_KEY = 512
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX_BYTES = 8
"""The table finds a candidate by these bytes of the hash; the whole hash is then compared in constant time."""
_TENANTS = frozenset(http_headers.ALIASES["tenant"])
_CLASSES = frozenset(http_headers.ALIASES["slo_class"])

Pairs = Iterable[tuple[str, str]]
"""Headers or metadata; the names are in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key in the file."""

    sha256: str
    """The SHA-256 of the key in hexadecimal digits."""
    tenant: str
    """The tenant of the callers with this key; its entitlements are in `tenants` of the settings. `*` = any tenant."""
    classes: tuple[str, ...] | None = None
    """The classes that these callers may name; null = all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    keys: tuple[ApiKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A caller with a known key."""

    digest: bytes
    tenant: str
    classes: frozenset[str] | None

    def bound(self, pairs: Pairs) -> list[tuple[str, str]]:
        """The headers with the tenant of the key. Raises `GatewayError` for another tenant, or a class of others."""
        kept = []
        for pair in pairs:
            name, value = pair
            if name in _CLASSES:
                self.check_class(value, name)
            elif name in _TENANTS and self.tenant != ANY_TENANT:
                if value != self.tenant:
                    raise forbidden(f"{name} is not the tenant of this API key; leave it out", param=name)
                continue
            kept.append(pair)
        if self.tenant != ANY_TENANT:
            kept.append((http_headers.ALIASES["tenant"][0], self.tenant))
        return kept

    def check_class(self, slo_class: str, param: str) -> None:
        """Raises `GatewayError` if the caller must not name this class."""
        if slo_class and self.classes is not None and slo_class not in self.classes:
            known = ", ".join(sorted(self.classes)) or "none"
            raise forbidden(f"{param} must be a class of this API key: {known}", param=param)


class ApiKeys:
    """The keys of one gateway."""

    def __init__(self, settings: gateway_settings.Auth) -> None:
        """Raises `BadSettings` for a file that cannot be used."""
        self._path = settings.keys_file
        self._reload_s = settings.reload_s
        self._raw = b"" if self._path is None else settings_file.named(self._path, "auth.keysFile")
        self._callers = {} if self._path is None else parsed(self._raw)

    @property
    def required(self) -> bool:
        """Callers need a key."""
        return self._path is not None

    def caller(self, pairs: Pairs) -> Caller:
        """The caller whose key is in `Authorization`. Raises `GatewayError`."""
        given = [value for name, value in pairs if name == "authorization"]
        if len(given) != 1:
            raise _unauthenticated("send the header Authorization: Bearer and an API key, once")
        scheme, _, key = given[0].partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(key) <= LONGEST_KEY:
            raise _unauthenticated("Authorization must be Bearer and an API key")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = self._callers.get(digest[:_PREFIX_BYTES])
        if found is None or not hmac.compare_digest(found.digest, digest):
            raise _unauthenticated("this API key is not known here")
        return found

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Reads the file again when it changes. Keys of a file that cannot be used stay as they were."""
        while self.required:
            await asyncio.sleep(self._reload_s)
            await loops.step("api-keys", self.reload)

    async def reload(self) -> None:
        """Takes the keys that the file has now. Raises `BadSettings`."""
        if self._path is None:
            return
        raw = await asyncio.to_thread(settings_file.named, self._path, "auth.keysFile")
        if raw != self._raw:
            self._callers = await asyncio.to_thread(parsed, raw)
            self._raw = raw
            logger.info("the file of API keys has changed: %d keys", len(self._callers))


def parsed(raw: bytes) -> dict[bytes, Caller]:
    """The callers in a file, by the beginning of their hash. Raises `BadSettings`."""
    try:
        document = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise BadSettings("the file of auth.keysFile is not YAML") from error  # the error would quote the file
    callers: dict[bytes, Caller] = {}
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
        classes = None if key.classes is None else frozenset(key.classes)
        callers[digest[:_PREFIX_BYTES]] = Caller(digest=digest, tenant=tenant, classes=classes)
    return callers


def forbidden(message: str, *, param: str | None = None) -> error_table.GatewayError:
    return error_table.GatewayError("forbidden", message, param=param)


def _unauthenticated(message: str) -> error_table.GatewayError:
    return error_table.GatewayError("invalid_api_key", message)
