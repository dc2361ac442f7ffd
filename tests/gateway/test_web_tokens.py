"""Tokens of an identity provider: which are taken, whom they bind, and how the public keys are read and replaced."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import hypothesis
import interim_flood
import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

import fake_engine
from tidegate_gateway import access_settings, gateway_settings, settings_decoder
from tidegate_gateway.callers import authentication, web_tokens
from tidegate_gateway.openai.error_table import GatewayError
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

ISSUER, AUDIENCE = "https://login.example", "tidegate"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
FOREIGN = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def public(key: Any, kid: str, **more: str) -> dict[str, Any]:
    algorithm = {
        "RSA": jwt.algorithms.RSAAlgorithm,
        "EC": jwt.algorithms.ECAlgorithm,
        "OK": jwt.algorithms.OKPAlgorithm,
    }
    kind = (
        "RSA" if isinstance(key, rsa.RSAPrivateKey) else "EC" if isinstance(key, ec.EllipticCurvePrivateKey) else "OK"
    )
    return {**json.loads(algorithm[kind].to_jwk(key.public_key())), "kid": kid, **more}


KEY_SET = {"keys": [public(RSA, "rsa", alg="RS256"), public(EC, "ec", use="sig"), public(ED, "ed", alg="EdDSA")]}


def token(key: Any = RSA, kid: str | None = "rsa", algorithm: str = "RS256", **claims: Any) -> str:
    given = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 600, "sub": "acme", **claims}
    kept = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(kept, key, algorithm=algorithm, headers=None if kid is None else {"kid": kid})


@pytest.fixture
def key_set(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(KEY_SET))
    return path


def settings(path: pathlib.Path, **more: Any) -> dict[str, Any]:
    return {"issuer": ISSUER, "audience": AUDIENCE, "jwksFile": str(path), **more}


def bearer(secret: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}", **{name.replace("_", "-"): value for name, value in more.items()}}


def tokens(path: pathlib.Path, **more: Any) -> authentication.Authentication:
    given = access_settings.Jwt(issuer=ISSUER, audience=AUDIENCE, jwks_file=str(path), **more)
    return authentication.Authentication(access_settings.Auth(jwt=given))


def refusal(known: authentication.Authentication, secret: str) -> tuple[str, str]:
    with pytest.raises(GatewayError) as caught:
        known.caller_of([("authorization", f"Bearer {secret}")])
    return caught.value.code, caught.value.message


async def test_a_token_binds_the_tenant_on_both_wires(up: Any, key_set: pathlib.Path) -> None:
    given: dict[str, Any] = {
        "auth": {"jwt": settings(key_set, classesClaim="classes")},
        "classes": [{"name": "batch"}, {"name": "chat"}],
        "listen": {"grpcPort": 0},
    }
    async with (
        fake_engine.engine() as engine,
        up(engine, **given) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        good = token(classes=["batch"])
        assert (await client.ask(headers=bearer(good)))[0] == 200
        assert engine.bodies[-1]["vllm_xargs"]["tg.tenant"] == "acme"
        sent = len(engine.bodies)
        for headers, status in (
            ({}, 401),
            (bearer("no.such.token"), 401),
            (bearer(token(FOREIGN)), 401),
            (bearer(good, x_tidegate_tenant="other"), 403),
            (bearer(good, x_tidegate_class="chat"), 403),
        ):
            assert (await client.ask(headers=headers))[0] == status
        calls = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model="fake", prompt="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(calls.Generate(request, metadata=(("authorization", f"Bearer {token(FOREIGN)}"),))))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(engine.bodies) == sent
        made = token(EC, "ec", "ES256", classes=[])
        assert [answer async for answer in calls.Generate(request, metadata=(("authorization", f"Bearer {made}"),))]
        assert engine.bodies[-1]["vllm_xargs"]["tg.tenant"] == "acme"


def hmac_with_the_public_key() -> str:
    """The classic attack: the public key as a shared secret."""
    secret = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = token("x" * 32, "rsa", "HS256").rpartition(".")[0]
    signature = hmac.digest(secret, signed.encode(), "sha256")
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        (lambda: token(aud="another"), "Audience"),
        (lambda: token(iss="https://evil.example"), "issuer"),
        (lambda: token(exp=time.time() - 60), "expired"),
        (lambda: token(exp=None), "exp"),
        (lambda: token(exp=10**400), "a number of seconds since 1970"),
        (lambda: token(exp=str(int(time.time()) + 600)), "a number of seconds since 1970"),
        (lambda: token(exp=True), "expired"),
        (lambda: token(exp=int(time.time() * 1e6)), "a number of seconds since 1970"),
        (lambda: token(exp=float("inf")), "not valid"),
        (lambda: token(exp=float("nan")), "not valid"),
        (lambda: token(nbf=-(10**400)), "a number of seconds since 1970"),
        (lambda: token(nbf="1"), "a number of seconds since 1970"),
        (lambda: token(iat=-(10**400)), "a number of seconds since 1970"),
        (lambda: token(iat=[1]), "not valid"),
        (lambda: deep(), "not valid"),
        (lambda: token(aud=None), "aud"),
        (lambda: token(nbf=time.time() + 600), "not yet valid"),
        (lambda: token(kid="unknown"), "does not publish"),
        (lambda: token(FOREIGN), "Signature"),
        (lambda: token("", "rsa", "none"), "not valid"),
        (hmac_with_the_public_key, "not valid"),
        (lambda: token()[:-4] + "AAAA", "Signature"),
        (lambda: "a.b.c", "not valid"),
        (lambda: "..", "not valid"),
        (lambda: "\udcff.\udcff.x", "ASCII"),
        (lambda: token(padding="x" * web_tokens.LONGEST_TOKEN), "characters"),
        (lambda: "an-api-key", "not valid"),
    ],
)
def test_a_token_that_proves_nothing_is_refused_with_the_reason(key_set: pathlib.Path, secret: Any, says: str) -> None:
    code, message = refusal(tokens(key_set), secret())
    assert code == "invalid_api_key"
    assert says in message


async def test_an_issuer_that_sends_interim_answers_without_end_is_left() -> None:
    async with interim_flood.server() as url:
        settings = access_settings.Jwt(issuer=ISSUER, audience=AUDIENCE, jwks_url=url + "/keys")
        known = web_tokens.WebTokens(settings)
        async with asyncio.timeout(web_tokens.FETCH_S / 2):
            with pytest.raises(settings_decoder.BadSettings, match="without a byte of its body"):
                await known.refresh()


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just(10**400)
    | st.just(-(10**400)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(["exp", "nbf", "iat", "aud", "sub", "classes", "jti", "crit"]), ODD))
def test_odd_claims_of_a_signed_token_are_refused_or_taken_and_never_an_exception(
    key_set: pathlib.Path, caplog: pytest.LogCaptureFixture, claims: dict[str, Any]
) -> None:
    given_claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 600, "sub": "acme", **claims}
    secret = jws(json.dumps(given_claims).encode())
    known, codes = tokens(key_set, classes_claim="classes"), set[str]()
    for _ in range(2):  # the second time it may be remembered
        try:
            found = known.caller_of([("authorization", f"Bearer {secret}")])
        except GatewayError as error:
            codes.add(error.code)
        else:
            assert found.tenant == given_claims["sub"]
    assert codes <= {"invalid_api_key", "forbidden"}
    assert not caplog.records


def jws(payload: bytes) -> str:
    """A token with any content, signed by the issuer."""
    return jwt.PyJWS().encode(payload, ED, algorithm="EdDSA", headers={"kid": "ed"})


def deep() -> str:
    """A token whose head nobody has signed, with more levels than the decoder has."""
    return base64.urlsafe_b64encode(b"[" * 5000).rstrip(b"=").decode() + ".e30.AA"


def test_a_token_that_breaks_its_reader_is_refused_and_logged_once(
    key_set: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    known, good = tokens(key_set), token()
    monkeypatch.setattr(jwt, "decode", broken)
    for _ in range(3):
        assert refusal(known, good)[0] == "invalid_api_key"
    assert [record.message for record in caplog.records if "cannot be read" in record.message] == [
        "a token cannot be read; further ones like it are refused without a line here"
    ]


async def test_a_token_with_a_number_of_any_size_is_unauthenticated_on_both_wires(
    up: Any, key_set: pathlib.Path
) -> None:
    given = {"auth": {"jwt": settings(key_set)}, "listen": {"grpcPort": 0}}
    async with up(store=False, **given) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        odd = token(exp=10**400)
        status, answer, _ = await client.ask(headers=bearer(odd))
        assert status == 401
        assert "a number of seconds" in answer["error"]["message"]
        request = inference_pb2.GenerateRequest(model="fake", prompt="x")
        metadata = (("authorization", f"Bearer {odd}"),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("tenant", [None, "", "*", 7, ["acme"], "x" * 5000, "a\nb"])
def test_a_verified_token_without_a_usable_tenant_is_forbidden(key_set: pathlib.Path, tenant: Any) -> None:
    code, message = refusal(tokens(key_set, tenant_claim="tenant"), token(tenant=tenant))
    assert code == "forbidden"
    assert "tenant" in message


def test_every_kind_of_published_key_verifies_and_a_token_without_kid_takes_the_only_key(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(KEY_SET))
    known = tokens(path)
    for made in (token(), token(EC, "ec", "ES256"), token(ED, "ed", "EdDSA")):
        assert known.caller_of([("authorization", f"Bearer {made}")]).tenant == "acme"
    assert refusal(known, token(EC, None, "ES256"))[0] == "invalid_api_key"
    path.write_text(json.dumps({"keys": [public(EC, "ec")]}))
    assert tokens(path).caller_of([("authorization", f"Bearer {token(EC, None, 'ES256')}")]).tenant == "acme"


@pytest.mark.parametrize(("claim", "classes"), [("batch chat", ("batch", "chat")), (["batch"], ("batch",)), (None, ())])
def test_the_claim_of_the_classes_is_a_list_or_a_text(
    key_set: pathlib.Path, claim: Any, classes: tuple[str, ...]
) -> None:
    known = tokens(key_set, classes_claim="scope")
    assert known.caller_of([("authorization", f"Bearer {token(scope=claim)}")]).classes == classes
    assert refusal(known, token(scope={"a": 1}))[0] == "forbidden"


async def test_a_remembered_token_ends_when_it_expires(key_set: pathlib.Path, until: Any) -> None:
    known = tokens(key_set)
    made = token(exp=time.time() - web_tokens.LEEWAY_S + 1.5)
    assert known.caller_of([("authorization", f"Bearer {made}")]).tenant == "acme"

    def ended() -> bool:
        try:
            known.caller_of([("authorization", f"Bearer {made}")])
        except GatewayError as error:
            return "expired" in error.message
        return False

    await until(ended)


def test_api_keys_and_tokens_work_side_by_side(tmp_path: pathlib.Path, key_set: pathlib.Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{sha256: {hashlib.sha256(b'k-1').hexdigest()}, tenant: other}}]")
    given = access_settings.Jwt(issuer=ISSUER, audience=AUDIENCE, jwks_file=str(key_set))
    known = authentication.Authentication(access_settings.Auth(keys_file=str(keys), jwt=given))
    assert known.caller_of([("authorization", "Bearer k-1")]).tenant == "other"
    assert known.caller_of([("authorization", f"Bearer {token()}")]).tenant == "acme"
    assert refusal(known, "k-2") == ("invalid_api_key", "this API key is not known here")


class Provider:
    """An identity provider's address of public keys."""

    def __init__(self) -> None:
        self.answer: tuple[int, str] = (503, "")
        self.url = ""

    async def jwks(self, request: web.Request) -> web.StreamResponse:
        """The answer in two pieces, as a network may bring it."""
        status, text = self.answer
        answer = web.StreamResponse(status=status)
        await answer.prepare(request)
        for piece in (text[: len(text) // 2], text[len(text) // 2 :]):
            await answer.write(piece.encode())
            await asyncio.sleep(0.02)
        return answer


@contextlib.asynccontextmanager
async def provider() -> AsyncIterator[Provider]:
    served = Provider()
    app = web.Application()
    app.router.add_get("/jwks.json", served.jwks)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/jwks.json"
    try:
        yield served
    finally:
        await runner.cleanup()


async def test_public_keys_come_from_an_address_and_follow_its_rotation(up: Any, until: Any) -> None:
    async with provider() as served, fake_engine.engine() as engine:
        jwt_settings = {"issuer": ISSUER, "audience": AUDIENCE, "jwksUrl": served.url, "refresh": "50ms"}
        async with up(engine, auth={"jwt": jwt_settings}) as client:
            status, answer, headers = await client.ask(headers=bearer(token()))
            assert (status, answer["error"]["code"]) == (503, "keys_unavailable")
            assert (await client.send("GET", "/ready"))[0] == 503
            assert headers["retry-after"]

            async def status_of(made: str) -> int:
                return int((await client.ask(headers=bearer(made)))[0])

            async def taken() -> bool:
                return await status_of(token()) == 200

            served.answer = (200, json.dumps(KEY_SET))
            await until(taken)
            assert (await client.send("GET", "/ready"))[0] == 200
            for bad in ((200, "no JSON"), (200, "{}"), (500, ""), (200, '{"keys": []}'), (302, "")):
                served.answer = bad
                assert await taken()

            async def rotated() -> bool:
                return await status_of(token()) == 401

            served.answer = (200, json.dumps({"keys": [public(EC, "ec")]}))
            await until(rotated)
            assert await status_of(token(EC, "ec", "ES256")) == 200


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"audience": "x"}, "auth.jwt.issuer is required"),
        ({"issuer": "x", "jwksFile": "x"}, "auth.jwt.audience is required"),
        ({"issuer": "x", "audience": "x"}, "one of jwksFile and jwksUrl"),
        ({"issuer": "x", "audience": "x", "jwksFile": "x", "jwksUrl": "https://x/y"}, "one of jwksFile and jwksUrl"),
        ({"issuer": "x", "audience": "x", "jwksUrl": "http://login.example/y"}, "https://"),
        ({"issuer": "x", "audience": "x", "jwksUrl": "https://user@login.example/y"}, "https://"),
        ({"issuer": "x", "audience": "x", "jwksFile": "x", "refresh": "0s"}, "auth.jwt.refresh must be at least"),
    ],
)
def test_settings_of_tokens_that_are_incomplete_or_unsafe_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(settings_decoder.BadSettings, match=says):
        gateway_settings.from_mapping({"auth": {"jwt": given}})


async def test_a_token_with_an_unknown_key_has_the_public_keys_read_again(up: Any, until: Any) -> None:
    async with provider() as served, fake_engine.engine() as engine:
        served.answer = (200, json.dumps({"keys": [public(RSA, "rsa")]}))
        jwt_settings = {"issuer": ISSUER, "audience": AUDIENCE, "jwksUrl": served.url, "refresh": "1h"}
        async with up(engine, auth={"jwt": jwt_settings}) as client:

            async def taken(made: str) -> bool:
                return (await client.ask(headers=bearer(made)))[0] == 200

            await until(lambda: taken(token()))
            served.answer = (200, json.dumps(KEY_SET))
            await until(lambda: taken(token(EC, "ec", "ES256")), within_s=30.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}'])
def test_a_file_without_usable_public_keys_ends_the_start(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(text)
    with pytest.raises(settings_decoder.BadSettings, match=r"auth\.jwt"):
        tokens(path)


@pytest.mark.parametrize("algorithm", ["none", "HS256", "RSA-OAEP", ["RS256"], {}, 5, None])
def test_a_key_for_another_algorithm_does_not_spoil_its_set(tmp_path: pathlib.Path, algorithm: Any) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [{**public(RSA, "other"), "alg": algorithm}, *KEY_SET["keys"]]}))
    assert tokens(path).caller_of([("authorization", f"Bearer {token()}")]).tenant == "acme"


def test_a_private_key_that_was_published_is_read_as_its_public_part(tmp_path: pathlib.Path) -> None:
    """Its primes would be searched for seconds where the document lacks them."""
    private = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA))
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [{"kty": "RSA", "kid": "rsa", **{name: private[name] for name in "ned"}}]}))
    assert tokens(path).caller_of([("authorization", f"Bearer {token()}")]).tenant == "acme"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([public(RSA, f"key {number}") for number in range(web_tokens.MOST_KEYS + 1)], "101 keys"),
        ([{"kty": "RSA", "kid": "a", "n": "A" * 100_000, "e": "AQAB"}], "no JSON Web Key Set"),
        ([{**public(RSA, "a"), "e": "B" * 300}], "no JSON Web Key Set"),
        ([{**public(RSA, "a"), "kid": ["a"]}], "no JSON Web Key Set"),
        ([[]] * 100_000, "TooManyParts"),
    ],
    ids=["many", "long-modulus", "long-exponent", "odd-name", "lists"],
)
def test_keys_that_would_take_long_are_refused(tmp_path: pathlib.Path, keys: list[dict[str, Any]], says: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": keys}))
    with pytest.raises(settings_decoder.BadSettings, match=says):
        tokens(path)
