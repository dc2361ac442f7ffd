"""What reaches an engine passes bounds: a field that may harm an engine is a 400 that names it, or needs a switch."""

import asyncio
import json
from typing import Any

import pytest

import fake_engine
from tidegate_gateway.openai import (
    chat_completions,
    completions,
    embeddings,
    engine_fields,
    media_address,
    responses,
)
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.admit import entitlements

HELLO = [{"role": "user", "content": "hello"}]
SECRET = "http://169.254.169.254/latest/meta-data/"


def image(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"items": value}
    return value


REFUSED = [
    ("messages[0].content", {"messages": image(SECRET)}),
    ("messages[0].content", {"messages": image("file:///etc/passwd")}),
    ("messages[0].content", {"messages": image("https://pictures.example/a.png")}),
    ("messages[0].content", {"messages": image("ht\ttp://127.0.0.1/")}),
    ("messages[0].content", {"messages": image("/etc/passwd")}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "video", "video": "fi\tle:///x"}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"image_url": SECRET}]}]}),
    *[
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"text": "x", name: SECRET}]}]})
        for name in ("image_url", "audio_url", "video_url")
    ],
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "video", "video": SECRET}]}]}),
    (
        "messages[0].content",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": [SECRET]}]}]},
    ),
    ("input[0].content", {"input": image(SECRET)}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("chat_template_kwargs.chat_template", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    ("prompt_embeds", {"prompt_embeds": "AAAA"}),
    ("best_of", {"best_of": 10}),
    ("use_beam_search", {"use_beam_search": True}),
    ("use_beam_search", {"use_beam_search": 1}),
    ("logprobs", {"logprobs": 1_000_000}),
    ("logprobs", {"logprobs": "1000000"}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("logprob_token_ids", {"logprob_token_ids": [1] * 21}),
    ("prompt_logprob_token_ids", {"prompt_logprob_token_ids": [[1]] * 21}),
    ("stream_interval", {"stream_interval": 1_000_000}),
    ("stream_interval", {"stream_interval": True}),
    ("stop", {"stop": ["x"] * 10_000}),
    ("stop", {"stop": "x" * 5000}),
    ("stop", {"stop": [1]}),
    ("bad_words", {"bad_words": ["x"] * 1000}),
    ("stop_token_ids", {"stop_token_ids": [1] * 2000}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"x": "y" * 100_000}}}),
    ("structured_outputs", {"structured_outputs": {"json": deep(100)}}),
    ("guided_regex", {"guided_regex": "a" * 100_000}),
    ("tools", {"tools": [deep(100)]}),
    ("tools[0].server_url", {"tools": [{"type": "mcp", "server_url": SECRET}]}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": 1e25}),
    ("seed", {"seed": "1"}),
    ("mm_processor_kwargs", {"mm_processor_kwargs": {"num_frames": 10**9}}),
    ("logits_processors", {"logits_processors": ["os.system"]}),
    ("x_unknown", {"x_unknown": 2**63}),
    ("x_unknown", {"x_unknown": "y" * 1_000_000}),
    ("x_unknown", {"x_unknown": deep(300)}),
]


async def test_bodies_that_would_take_long_to_check_are_400(up: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [image] * 9000}]
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for fields, says in (
            ({f"f{number}": 1 for number in range(300)}, "at most 256 are allowed"),
            ({"messages": messages}, "messages[0].content: the parts that are not text have more than 20000 values"),
        ):
            status, answer, _ = await client.ask(**fields)
            assert (status, answer["error"]["code"]) == (400, "invalid_request")
            assert says in answer["error"]["message"]
        assert not engine.bodies
        status, _, _ = await client.ask(messages=[{"role": "user", "content": [image] * 900}])
        assert status == 200


async def test_a_field_that_may_harm_an_engine_is_400_and_named(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for param, fields in REFUSED:
            status, answer, _ = await client.ask(**fields)
            error = answer.get("error", {})
            assert (status, error.get("param"), error.get("code")) == (400, param, "invalid_request")
        assert engine.bodies == []


async def test_fields_of_openai_and_unknown_ones_pass_unchanged(up: Any) -> None:
    fields: dict[str, Any] = {
        "seed": -(2**63),
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 20,
        "temperature": 0.3,
        "response_format": {"type": "json_schema", "json_schema": deep(20)},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": deep(10)}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "best_of": 1,
        "use_beam_search": False,
        "x_number": 2**63 - 1,
        "x_text": "anything",
        "x_list": [1, {"a": [None]}],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "http://10.0.0.1"}}]},
            {"role": "tool", "content": [{"type": "text", "text": "file:///x", "cache": 1}]},
            *image("data:image/png;base64,AAAA"),
        ],
    }
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        assert (await client.ask(**fields))[0] == 200
        assert {name: engine.bodies[0][name] for name in fields} == fields


async def test_the_arguments_of_vllm_carry_no_field_of_the_gateway(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        knobs = {"kv_transfer_params": "x", "ec_transfer_params": {"peer_host": "x"}, "kv_cache_report_mode": "full"}
        given = {**knobs, "tg.urgency": 0, "mine": 1}
        assert (await client.ask(vllm_xargs=given, **knobs))[0] == 200
        arguments = engine.bodies[0]["vllm_xargs"]
        assert (arguments["mine"], {*knobs} & {*arguments, *engine.bodies[0]}) == (1, set())
        assert arguments["tg.urgency"] != 0


async def test_a_class_permits_what_its_switches_name(up: Any) -> None:
    settings = {
        "classes": [{"name": "pictures", "allow": ["remote_images"]}, {"name": "plain"}],
        "defaultClass": "plain",
    }
    public = image("https://pictures.example/a.png?x=1")
    async with fake_engine.engine() as engine, up(engine, store=False, **settings) as client:
        for name, status in (("pictures", 200), ("plain", 400)):
            assert (await client.ask(messages=public, headers={"x-tidegate-class": name}))[0] == status
        assert (await client.ask(messages=public))[0] == 400
        answer = await client.ask(messages=image(SECRET), headers={"x-tidegate-class": "pictures"})
        assert answer[0] == 400
        answer = await client.ask(chat_template="x", headers={"x-tidegate-class": "pictures"})
        assert (answer[0], answer[1]["error"]["param"]) == (400, "chat_template")


async def test_the_switches_of_the_settings_hold_for_all_calls(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False, allow=["chat_template"]) as client:
        assert (await client.ask(chat_template="x"))[0] == 200


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/", "http://a.localhost/", "http://127.0.0.1/", "http://127.1/", "http://2130706433/",
        "http://0x7f000001/", "http://0177.0.0.1/", "http://10.0.0.1/", "http://192.168.1.1/", "http://172.16.0.1/",
        "http://100.64.0.1/", "http://169.254.169.254/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://metadata/",
        "http://metadata.google.internal/", "http://engine.default.svc/", "http://engine.default.svc.cluster.local:8000/",
        "http://user@good.example/", "http://good.example\\@127.0.0.1/", "http://good.example@127.0.0.1/", "http:///etc",
        "http://good.example /", " file:///etc/passwd", "FILE:/etc/passwd", "ftp://good.example/", "http:127.0.0.1",
        "HTTP://LOCALHOST./", "https://127.0.0.1.:1/", "gopher://x.example/", "ht\ttp://127.0.0.1/", "http\n://127.0.0.1/",
        "h" + "\t" * 100 + "ttp://127.0.0.1/", "fi\tle:///etc/passwd", "//127.0.0.1/", "/etc/passwd", "\u00a0http://127.0.0.1/",
        "\uff48ttp://127.0.0.1/",
    ],
)  # fmt: skip
def test_an_address_that_is_no_public_host_is_never_permitted(url: str) -> None:
    with pytest.raises(BadRequest):
        media_address.check(url, "url", {"remote_images"})


@pytest.mark.parametrize(
    "url", ["https://a.example/x.png", "http://8.8.8.8/x?y#z", "HTTPS://A.example:8443", "data:,x"]
)
def test_an_address_of_a_public_host_is_permitted(url: str) -> None:
    media_address.check(url, "url", {"remote_images"})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (responses.ENDPOINT, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": SECRET}]}]}),
        (responses.ENDPOINT, {"input": [{"type": "computer_call_output", "output": {"image_url": SECRET}}]}),
        (responses.ENDPOINT, {"input": [{"type": "input_image", "image_url": SECRET}]}),
        (responses.ENDPOINT, {"input": [{"role": "user", "content": {"type": "input_image", "image_url": SECRET}}]}),
        (embeddings.ENDPOINT, {"input": "x", "messages": image(SECRET)}),
        (completions.ENDPOINT, {"prompt": "x", "messages": image(SECRET)}),
        (chat_completions.ENDPOINT, {"messages": [{"role": "u", "content": [{"type": "x", "image_embeds": "AA"}]}]}),
    ],
)
def test_every_endpoint_is_checked(kind: Any, body: dict[str, Any]) -> None:
    rules = engine_fields.EngineFields([entitlements.SloClass(name="a")], "a", ())
    with pytest.raises(BadRequest):
        rules.check(kind, body, None)


async def test_a_relquery_with_a_refused_field_is_not_stored(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        body = {"model": "fake", "template": "{{a}}", "rows": [{"a": "1"}], "seed": 2**63}
        status, answer, _ = await client.send("POST", "/v1/relqueries", json=body)
        assert (status, answer["error"]["param"]) == (400, "seed")


async def test_an_encoded_slash_is_no_separator(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for path in ("/v1%2Fmodels", "/v1%2fmodels", "/v1/workflows%2Fa", "/v1%252Fmodels", "/%2Fv1/models"):
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            assert (await exchange(client, head)).startswith(b"HTTP/1.1 404"), path
        answer = await exchange(client, b"GET /v1/models/a%2Fb HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"model 'a/b' is not served" in answer


async def test_te_with_transfer_encoding_is_400(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await exchange(client, head + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"TE together with Transfer-Encoding" in answer


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"Transfer-Encoding: gzip, chunked", b"no Transfer-Encoding but chunked"),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", b"Transfer-Encoding"),
        (
            b"Content-Type: text/plain\r\nContent-Type: application/json\r\nContent-Length: 2",
            b"content-type comes twice",
        ),
    ],
)
async def test_two_framings_or_types_are_400(up: Any, lines: bytes, why: bytes) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n\r\n" % lines
        answer = await exchange(client, head + b"{}")
        assert answer.startswith(b"HTTP/1.1 400")
        assert why in answer


async def test_a_body_in_chunks_of_one_byte_is_400_before_it_holds_the_others_up(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await exchange(client, head + 20_000 * b"1\r\nx\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"chunks that are too small" in answer
        call = json.dumps({"model": "fake", "prompt": "x", "user": "x" * 800}).encode()
        few = b"".join(b"1\r\n%c\r\n" % byte for byte in call)
        whole = await exchange(client, head.replace(b"Host", b"Connection: close\r\nHost") + few + b"0\r\n\r\n")
        assert whole.startswith(b"HTTP/1.1 200")


async def exchange(client: Any, raw: bytes) -> bytes:
    """The whole answer to bytes over a connection of their own."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    return answer
