"""Calls whose prompts begin alike go where that beginning is cached, and prompts that must not be reused share nothing."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_engine
from tidegate_gateway.openai import chat_completions, completions, prompt_prefix
from tidegate_policy.dispatch import prefix_index, prompt_blocks
from tidegate_policy.model import Call, CallId, EngineId

BLOCK = prompt_blocks.BLOCK_BYTES
SYSTEM = {"role": "system", "content": "You answer questions about the database. " * 200}
TOOLS = [{"type": "function", "function": {"name": f"tool-{number}", "description": "x" * 200}} for number in range(9)]


def chat(*messages: dict[str, Any], model: str = "m", **more: Any) -> prompt_prefix.PromptPrefix:
    body = {"model": model, "messages": list(messages), **more}
    return prompt_prefix.read(chat_completions.ENDPOINT, body, model, chat_completions.read_size(body, 16))


def completion(prompt: Any, **more: Any) -> prompt_prefix.PromptPrefix:
    body = {"model": "m", "prompt": prompt, **more}
    return prompt_prefix.read(completions.ENDPOINT, body, "m", completions.read_size(body, 16))


def common(one: prompt_prefix.PromptPrefix, two: prompt_prefix.PromptPrefix) -> int:
    return len(set(one.blocks) & set(two.blocks))


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_two_questions_after_one_system_prompt_have_its_blocks_in_common() -> None:
    one, two = chat(SYSTEM, ask("first" * 500)), chat(SYSTEM, ask("second" * 500))
    assert common(one, two) == len(SYSTEM["content"]) // BLOCK
    assert one.blocks[:3] == two.blocks[:3]


def test_the_next_turn_of_a_conversation_starts_with_the_blocks_of_the_last_one() -> None:
    first = chat(SYSTEM, ask("a" * 3000))
    second = chat(SYSTEM, ask("a" * 3000), {"role": "assistant", "content": "b" * 900}, ask("c"))
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert len(second.blocks) > len(first.blocks)


@pytest.mark.parametrize("more", [{"model": "adapter"}, {"cache_salt": "s"}, {"tools": TOOLS}])
def test_another_adapter_salt_or_list_of_tools_shares_no_block(more: dict[str, Any]) -> None:
    assert chat(SYSTEM).blocks
    assert not common(chat(SYSTEM), chat(SYSTEM, **more))


def test_a_block_holds_its_share_of_the_prompt() -> None:
    assert completion("x" * (10 * BLOCK - 2)).share == pytest.approx(0.1)
    huge = completion("x" * (1000 * BLOCK))
    assert len(huge.blocks) == prompt_blocks.MAX_BLOCKS
    assert huge.share == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize("letter", ["x", "\x01", '"', "\N{SNOWMAN}"])
@pytest.mark.parametrize("length", [-1, 0, 1, BLOCK * 300])
def test_a_long_message_has_the_blocks_of_its_whole_json_and_little_of_it_is_written(
    letter: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {"role": "user", "content": letter * (prompt_prefix.MOST_BYTES + length), "name": "n"}
    whole, most = orjson.dumps(message), (len(orjson.dumps(letter)) - 2) * prompt_prefix.MOST_BYTES + 100
    written, dumps = list[int](), orjson.dumps
    monkeypatch.setattr(orjson, "dumps", lambda value: (written.append(len(raw := dumps(value))), raw)[1])
    found = chat(message, ask("more"))
    assert found.blocks == prompt_blocks.chain(("m", ""), prompt_blocks.of_bytes(whole))
    assert found.share == pytest.approx(BLOCK / len(whole), rel=0.001)
    assert sum(written) <= most


def test_short_prompts_have_no_blocks() -> None:
    assert chat(ask("hello")).blocks == ()
    assert completion("x" * (BLOCK - 3)).blocks == ()


def test_token_ids_and_several_prompts_have_blocks_too() -> None:
    ids = list(range(2000))
    assert common(completion(ids), completion([*ids, 1, 2, 3])) >= 3
    assert completion([ids, [1]]).blocks == completion(ids).blocks
    assert completion(["y" * 5000, "z"]).blocks == completion("y" * 5000).blocks


def test_a_prompt_that_is_nested_too_deeply_has_no_blocks() -> None:
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    assert chat({"role": "user", "content": "x" * 5000, "extra": deep}).blocks == ()


JSON = st.recursive(st.none() | st.booleans() | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3))


@given(st.dictionaries(st.sampled_from(["tools", "cache_salt", "x"]), JSON), st.text(max_size=3000))
@settings(max_examples=50)
def test_no_body_raises_and_blocks_are_bounded(more: dict[str, Any], text: str) -> None:
    found = chat(ask(text), **more)
    assert len(found.blocks) <= prompt_blocks.MAX_BLOCKS
    assert 0 <= found.share * len(found.blocks) <= 1.0


def test_a_gateway_and_virtual_time_find_the_same_matches() -> None:
    """The bytes of a prompt and the parts of a trace that stand for them give the same cached share on each engine."""
    words = ["a", "ab", "abc", "abd", "b"]
    tokens = prompt_blocks.TRACE_BLOCK_TOKENS
    matches = []
    for kind in ("bytes", "parts"):
        index = prefix_index.PrefixIndex()
        calls = []
        for word in words:
            if kind == "bytes":
                blocks = prompt_blocks.of_bytes("".join(letter * BLOCK for letter in word).encode())
            else:
                blocks = prompt_blocks.of_parts([(ord(letter), tokens) for letter in word])
            hashes = prompt_blocks.chain(("m",), blocks)
            calls.append(
                Call(
                    id=CallId(word),
                    arrived_at_s=0.0,
                    prompt_tokens=tokens * len(word) + 1,
                    output_predicted=1,
                    blocks=hashes,
                    block_tokens=tokens,
                )
            )
        for number, call in enumerate(calls):
            index.on_sent(call, EngineId(f"e{number}"))
        matches.append([index.cached_tokens(call) for call in calls])
    assert matches[0] == matches[1]
    assert matches[0][2] == {EngineId(f"e{number}"): tokens * depth for number, depth in enumerate((1, 2, 3, 2))}


async def test_calls_with_one_beginning_go_to_the_engine_that_has_it(up: Any) -> None:
    cost = {"step_s": 0.001, "prefill_s": 0.001}
    async with (
        fake_engine.engine(prompt_tokens=2000) as busy,
        fake_engine.engine(prompt_tokens=2000) as other,
        up(
            {"url": busy.url, "name": "1", "cost": cost},
            {"url": other.url, "name": "2", "cost": cost},
            dispatch={"learnCosts": False},
        ) as client,
    ):
        await client.ask(messages=[ask("an idle pool")])
        assert (len(busy.bodies), len(other.bodies)) == (1, 0), "among equals the first engine is chosen"
        busy.status = 503
        await client.ask(messages=[SYSTEM, ask("the first engine fails this call")])
        busy.status = 200
        for number in range(3):
            await client.ask(messages=[SYSTEM, ask(f"question {number}")])
        await client.ask(messages=[{**SYSTEM, "content": "1" + SYSTEM["content"]}])
        assert (len(busy.bodies), len(other.bodies)) == (3, 4)
        for engine in list(client.gateway.core.engines):
            client.gateway.placements.on_engine_restarted(engine.facts.id)
        assert client.gateway.core.dispatcher.prefixes.entries == 0
        await client.ask(messages=[SYSTEM, ask("no cache is left")])
        assert (len(busy.bodies), len(other.bodies)) == (4, 4)


async def test_an_engine_whose_counters_start_again_has_an_empty_cache(up: Any, until: Any) -> None:
    async with fake_engine.engine(prompt_tokens=2000) as engine, up(engine) as client:
        await client.ask(messages=[SYSTEM])
        index = client.gateway.core.dispatcher.prefixes
        assert index.entries
        (health,) = client.gateway.discovery.known.values()
        engine.generated = 1000
        await until(lambda: health.load.generated == 1000)
        engine.generated = 0
        await until(lambda: index.entries == 0)


async def test_isolated_tenants_get_salts_of_their_own(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, dispatch={"isolateTenants": True}) as client:
        for tenant in ("a", "b", "a"):
            status, _, _ = await client.ask(messages=[SYSTEM], headers={"x-tidegate-tenant": tenant})
            assert status == 200
        await client.ask(messages=[SYSTEM], cache_salt="own", headers={"x-tidegate-tenant": "a"})
        salts = [body["cache_salt"] for body in engine.bodies]
        assert salts[0] == salts[2]
        assert len(set(salts)) == 3


async def test_a_rejected_call_leaves_no_prefix_and_is_no_offered_load(up: Any) -> None:
    async with fake_engine.engine(prompt_tokens=2000) as engine, up(engine) as client:
        core = client.gateway.core
        engine.status = 400
        for number in range(5):
            status, *_ = await client.ask(messages=[SYSTEM, ask(f"wrong {number}")])
            assert status == 400
        assert core.dispatcher.prefixes.entries == 0
        assert core.offered.load.calls == 0
        engine.status = 200
        await client.ask(messages=[SYSTEM, ask("right")])
        assert core.dispatcher.prefixes.entries > 1
        assert core.offered.load.calls == 1
