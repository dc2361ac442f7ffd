"""Which tenant does a token of an identity provider belong to? (JSON Web Tokens, RFC 7519, RFC 8725)

PyJWT checks the signature with a public key of the issuer, and the claims `iss`, `aud`, `exp` and `nbf`. Signatures with a
shared secret, and tokens without one, are refused: the public keys would be their secret. A token that was verified is
remembered until it expires or the public keys change, because a signature costs more than the rest of a request.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from typing import Any

import jwt

from tidegate_gateway import access_settings, http_client, settings_file
from tidegate_gateway.callers import caller
from tidegate_gateway.openai import bounded_json, error_table, request_fields
from tidegate_gateway.settings_decoder import BadSettings

logger = logging.getLogger("tidegate.gateway")

LONGEST_TOKEN = 8_000
"""A header is not much longer (docs/http.md, Sizes)."""
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
LEEWAY_S = 30.0
"""The clocks of the issuer and of the gateway may differ by this much."""
REMEMBERED = 10_000
FETCH_S, FETCHED_BYTES = 10.0, 1 << 20
MOST_KEYS = 100
MOST_PARTS = 10_000
"""Lists, objects and fields of a key set above 64 KiB."""
LONGEST_PART = {"kty": 16, "use": 16, "alg": 16, "kid": 1024, "crv": 16, "x": 128, "y": 128, "n": 1400, "e": 8}
"""The public members of a key (RFC 7518), and the characters of each at most: 8,192 bits of a modulus."""
LATEST_S = 253_402_300_799
"""The last second of the year 9999, since 1970. A later time in a claim was meant in another unit."""
TIMES = ("exp", "nbf", "iat")
RETRY_S = 5.0
"""Between two attempts to read the public keys, while there are none."""


class WebTokens:
    """The tokens of one issuer."""

    def __init__(self, settings: access_settings.Jwt) -> None:
        """Raises `BadSettings` for a file that cannot be used. An address is first read by `refresh`."""
        self._settings = settings
        self._raw = b""
        self._keys: dict[str | None, jwt.PyJWK] = {}
        """The public keys by their `kid`."""
        self._unknown_key = asyncio.Event()
        """A token named a key that is not known: its issuer may have published a new one."""
        self._known: dict[bytes, tuple[float, caller.Caller]] = {}
        """By the SHA-256 of a verified token: when it expires, in seconds of the wall clock, and its caller."""
        if settings.jwks_file is not None:
            self._take(settings_file.named(settings.jwks_file, "auth.jwt.jwksFile"))
        self._has_failed = False
        """A token could not be read for a reason that nobody thought of; the log has the first one."""

    @property
    def has_keys(self) -> bool:
        """Whether tokens can be verified."""
        return bool(self._keys)

    async def until_next_refresh(self) -> None:
        """Waits until the public keys must be read again: after the refresh time, or sooner if a token named an unknown
        key, but not at once."""
        refresh_s = self._settings.refresh_s
        await asyncio.sleep(min(RETRY_S, refresh_s))
        if self._keys and refresh_s > RETRY_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(refresh_s - RETRY_S):
                    await self._unknown_key.wait()
        self._unknown_key.clear()

    def caller_of(self, token: str) -> caller.Caller:
        """The caller with this token. Raises `GatewayError`."""
        if len(token) > LONGEST_TOKEN or not token.isascii():
            raise caller.unauthenticated(f"a token has at most {LONGEST_TOKEN} characters, all of them ASCII")
        digest = hashlib.sha256(token.encode()).digest()
        expires_at_s, found = self._known.get(digest, (0.0, None))
        if found is not None and time.time() < expires_at_s:
            return found
        try:
            claims = self._verified(token)
            found = self._bound(claims)
        except error_table.GatewayError:
            raise
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("a token cannot be read; further ones like it are refused without a line here")
            raise caller.unauthenticated("the token cannot be read; get a new one from its issuer") from error
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[digest] = (float(claims["exp"]) + LEEWAY_S, found)
        return found

    async def refresh(self) -> None:
        """Reads the public keys again. Raises `BadSettings`; then the keys stay as they were."""
        if self._settings.jwks_file is not None:
            raw = await asyncio.to_thread(settings_file.named, self._settings.jwks_file, "auth.jwt.jwksFile")
        else:
            raw = await _fetched(self._settings.jwks_url or "")
        if raw != self._raw:
            self._take(raw)
            logger.info("%d public keys of %s", len(self._keys), self._settings.issuer)

    def _take(self, raw: bytes) -> None:
        self._keys, self._raw = _parsed(raw), raw
        self._known.clear()

    def _verified(self, token: str) -> dict[str, Any]:
        """The claims of a token. Raises `GatewayError`."""
        if not self._keys:
            raise error_table.GatewayError(
                "keys_unavailable",
                "the public keys of the token's issuer could not be read yet; send the request again later",
                retry_after_s=RETRY_S,
            )
        try:
            name = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(name) or (next(iter(self._keys.values())) if name is None else None)
            if key is None:
                self._unknown_key.set()
                raise caller.unauthenticated("the token is signed with a key that its issuer does not publish")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise caller.unauthenticated("the token has expired; get a new one from its issuer") from error
        except (jwt.PyJWTError, ValueError, OverflowError) as error:  # an infinite time overflows
            raise caller.unauthenticated(f"the token is not valid here: {str(error)[:200]}") from error
        for name in TIMES:
            if name in claims and not _is_time(claims[name]):
                raise caller.unauthenticated(
                    f"the claim {name} of the token must be a number of seconds since 1970, before the year 10000"
                )
        return claims

    def _bound(self, claims: dict[str, Any]) -> caller.Caller:
        """The caller of verified claims. Raises `GatewayError`."""
        name = self._settings.tenant_claim
        try:
            tenant = request_fields.text(claims.get(name), name)
        except error_table.BadRequest as error:
            raise caller.forbidden(f"the claim that holds the tenant cannot be used: {error.message}") from error
        if tenant == caller.ANY_TENANT:
            raise caller.forbidden(f"the claim {name} names no single tenant")
        if (listed := self._settings.classes_claim) is None:
            return caller.Caller(tenant=tenant, classes=None)
        classes = claims.get(listed, [])
        classes = classes.split() if isinstance(classes, str) else classes
        if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
            raise caller.forbidden(f"the claim {listed} must be a list of classes")
        return caller.Caller(tenant=tenant, classes=tuple(classes))


def _is_time(claim: object) -> bool:
    """A claim is a NumericDate (RFC 7519, 2) of a year that a calendar has; a text of digits is none."""
    return isinstance(claim, (int, float)) and not isinstance(claim, bool) and -LATEST_S <= claim <= LATEST_S


def _parsed(raw: bytes) -> dict[str | None, jwt.PyJWK]:
    """The public keys of a JSON Web Key Set that can verify a signature. Raises `BadSettings`."""
    try:
        listed = bounded_json.loads(raw, most_parts=MOST_PARTS)["keys"]
        found = jwt.PyJWKSet.from_dict({"keys": [_public(each) for each in listed[:MOST_KEYS]]}).keys
    except (ValueError, jwt.PyJWTError, AttributeError, TypeError, LookupError) as error:
        raise BadSettings(f"the public keys of auth.jwt are no JSON Web Key Set ({type(error).__name__})") from error
    if len(listed) > MOST_KEYS:
        raise BadSettings(f"auth.jwt: the JSON Web Key Set has {len(listed)} keys; {MOST_KEYS} are read at most")
    keys = {
        key.key_id: key for key in found if key.algorithm_name in ALGORITHMS and key.public_key_use in (None, "sig")
    }
    if not keys:
        raise BadSettings(f"auth.jwt: the JSON Web Key Set has no key for a signature by {', '.join(ALGORITHMS)}")
    return keys


def _public(key: dict[str, Any]) -> dict[str, Any]:
    """The public part of a key; nothing of one for another algorithm, which PyJWT then leaves out. Work with numbers of any
    length would take any time, and so would a private key without its primes."""
    if "alg" in key and key["alg"] not in ALGORITHMS:
        return {}
    public = {name: key[name] for name in LONGEST_PART if name in key}
    fits = all(isinstance(value, str) and len(value) <= LONGEST_PART[name] for name, value in public.items())
    return public if fits else {}


async def _fetched(url: str) -> bytes:
    """The document at `url`. Raises `BadSettings`."""
    connections = http_client.Connections(connect_s=FETCH_S)
    try:
        async with asyncio.timeout(FETCH_S):
            status, document = await connections.page(url, most_bytes=FETCHED_BYTES)
    except TimeoutError as error:
        raise BadSettings(f"auth.jwt.jwksUrl does not answer within {FETCH_S:.3g} s") from error
    except OSError as error:
        raise BadSettings(f"auth.jwt.jwksUrl cannot be read: {error}") from error
    finally:
        connections.close()
    if status != 200:
        raise BadSettings(f"auth.jwt.jwksUrl answered with status {status}")
    return document
