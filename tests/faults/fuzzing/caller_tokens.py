"""Tokens of an identity provider in `Authorization`, and the page with its public keys (JSON Web Tokens, RFC 7519).

The first byte of an input chooses what follows: the value of the header; the head and the claims of a token, each a line of
JSON, which this harness signs with the private key of the issuer; or a page of public keys.

Property: a caller whose tenant is a name, or `GatewayError`; without a signature of the issuer, the claims of this gateway
and a time to come there is no caller. A page gives public keys, or `BadSettings`.
"""

import base64
import json
import pathlib
import tempfile
import time

import orjson
from cryptography.hazmat.primitives.asymmetric import ed25519
from fuzzing import memory_gateway

from tidegate_gateway import access_settings
from tidegate_gateway.callers import authentication, web_tokens
from tidegate_gateway.openai import error_table, request_fields
from tidegate_gateway.settings_decoder import BadSettings

ISSUER, AUDIENCE = "https://login.example", "tidegate"
_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_FOREIGN = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))


def _base64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def _signed(head: bytes, claims: bytes, key: ed25519.Ed25519PrivateKey = _KEY) -> bytes:
    parts = _base64(head) + b"." + _base64(claims)
    return parts + b"." + _base64(key.sign(parts))


_POINT = _base64(_KEY.public_key().public_bytes_raw()).decode()
_KEY_SET = {
    "keys": [
        {"kty": "OKP", "crv": "Ed25519", "x": _POINT, "kid": "a", "alg": "EdDSA"},
        {"kty": "RSA", "use": "sig", "n": _base64(b"\xc5" * 256).decode(), "e": "AQAB", "kid": "b", "alg": "RS256"},
    ]
}  # fmt: skip
_HEAD = b'{"alg":"EdDSA","kid":"a","typ":"JWT"}'
_CLAIMS = b'{"iss":"https://login.example","aud":"tidegate","exp":4000000000,"nbf":1,"iat":1.5,"sub":"acme","classes":["chat"]}'
_OTHERS = (
    b'{"iss":"https://login.example","aud":["a","tidegate"],"exp":4e9,"sub":"b","classes":"a chat","cnf":{"a":[1]}}'
)
_NONE = _base64(b'{"alg":"none"}') + b"." + _base64(_CLAIMS) + b"."
SEEDS = [
    b"\0Bearer " + _signed(_HEAD, _CLAIMS, _FOREIGN),
    b"\0bearer " + _NONE,
    b"\1" + _HEAD + b"\n" + _CLAIMS,
    b"\1" + _HEAD + b"\n" + _OTHERS,
    b'\1{"alg":"EdDSA"}\n' + _CLAIMS,
    b'\1{"alg":"EdDSA","kid":"a","crit":["b64"],"b64":false}\n' + _CLAIMS,
    b"\2" + orjson.dumps(_KEY_SET),
]
DICTIONARY = (
    '"alg":', '"none"', '"HS256"', '"RS256"', '"ES256"', '"EdDSA"', '"kid":', '"crit":', '"b64":false', '"jwk":',
    '"jku":', '"x5c":', '"zip":"DEF"', '"iss":', '"aud":', '"exp":', '"nbf":', '"iat":', '"sub":', '"jti":',
    '"classes":', "null", "true", "1e999", "NaN", "-1", "[[[[", "\\\\ud800", "\\\\u0000", '"kty":"RSA"', '"kty":"EC"',
    '"kty":"oct"', '"kty":"OKP"', '"crv":"P-256"', '"crv":"X25519"', '"n":"', '"e":"', '"x":"', '"y":"', '"d":"',
    '"k":"', '"use":"enc"', '"keys":[', "Bearer ", ".", "=", "*",
)  # fmt: skip


def _settings(key_set: pathlib.Path) -> access_settings.Jwt:
    return access_settings.Jwt(issuer=ISSUER, audience=AUDIENCE, jwks_file=str(key_set), classes_claim="classes")


with tempfile.NamedTemporaryFile() as _file:
    _file.write(orjson.dumps(_KEY_SET))
    _file.flush()
    _CALLERS = authentication.Authentication(access_settings.Auth(jwt=_settings(pathlib.Path(_file.name))))


def _ask(header: str, claims: bytes | None) -> None:
    try:
        found = _CALLERS.caller_of([("authorization", header)])
    except error_table.GatewayError as error:
        error.body()
        return
    if claims is None:
        raise memory_gateway.Finding("a token without the signature of its issuer was taken")
    request_fields.text(found.tenant, "tenant")
    given = json.loads(claims)
    audience = given["aud"] if isinstance(given["aud"], list) else [given["aud"]]
    if given["iss"] != ISSUER or AUDIENCE not in audience or given["exp"] + web_tokens.LEEWAY_S < time.time():
        raise memory_gateway.Finding(f"a token with these claims was taken: {claims!r}")


async def _try(kind: int, raw: bytes) -> None:
    if kind == 0:
        header = raw.decode("latin-1")
        _ask(header, None)
    elif kind == 1:
        head, _, claims = raw.partition(b"\n")
        _ask("Bearer " + _signed(head, claims).decode(), claims)
    else:
        try:
            web_tokens._parsed(raw)
        except BadSettings as error:
            str(error)


def try_input(data: bytes) -> None:
    if data:
        memory_gateway.run(_try(data[0] % 3, data[1:]))
