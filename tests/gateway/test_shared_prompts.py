"""Gateways of one pool tell each other which prompts they sent where."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

import fake_engine
from tidegate_gateway import gateway_settings
from tidegate_gateway.store import prompt_stream, valkey_store
from tidegate_policy.dispatch import prefix_index
from tidegate_policy.model import EngineId

ENGINE = EngineId("e1")
Two = tuple[prompt_stream.PromptStream, prompt_stream.PromptStream]


def sent(*blocks: int, engine: EngineId = ENGINE) -> prefix_index.SentPrompt:
    return prefix_index.SentPrompt(engine=engine, blocks=blocks, block_tokens=256.0, tokens=1000.5)


@pytest.fixture
async def stores(valkey_url: str) -> AsyncIterator[tuple[valkey_store.Valkey, valkey_store.Valkey]]:
    settings = gateway_settings.Store(url=valkey_url, pool=secrets.token_hex(4), timeout_s=5.0)
    both = valkey_store.Valkey(settings, gateway="g1"), valkey_store.Valkey(settings, gateway="g2")
    yield both
    for store in both:
        await store.close()


@pytest.fixture
async def two(stores: tuple[valkey_store.Valkey, valkey_store.Valkey]) -> Two:
    one, other = map(prompt_stream.PromptStream, stores)
    await one.exchange([])
    await other.exchange([])
    return one, other


async def test_each_gateway_reads_once_what_the_others_sent(two: Two) -> None:
    one, other = two
    largest = (1 << 64) - 1
    assert await one.exchange([sent(largest, 2), sent(3)]) == []
    assert await one.exchange([]) == [], "a gateway does not hear of its own calls"
    assert await other.exchange([sent(4)]) == [sent(largest, 2), sent(3)]
    assert await other.exchange([]) == []
    assert await one.exchange([]) == [sent(4)]


async def test_a_gateway_that_starts_reads_what_is_sent_from_then_on(
    two: Two, stores: tuple[valkey_store.Valkey, valkey_store.Valkey]
) -> None:
    one, _ = two
    await one.exchange([sent(1)])
    late = prompt_stream.PromptStream(stores[1])
    assert await late.exchange([]) == []
    await one.exchange([sent(2)])
    assert await late.exchange([]) == [sent(2)]


async def test_the_stream_is_bounded_and_expires(two: Two, stores: tuple[valkey_store.Valkey, Any]) -> None:
    one, other = two
    for number in range(prompt_stream.MOST_ENTRIES * 4):
        await one.exchange([sent(number)])
    store = stores[0]
    assert await store.client.xlen(store.key("prompts")) <= 2 * prompt_stream.MOST_ENTRIES
    assert 0 < await store.client.pttl(store.key("prompts")) <= prompt_stream.LIVES_MS
    found = await other.exchange([])
    assert 0 < len(found) <= prompt_stream.MOST_ENTRIES, "the rest follows, or is lost, and nothing is false"


async def test_a_stream_that_begins_again_before_the_last_entry_is_read(
    two: Two, stores: tuple[valkey_store.Valkey, Any]
) -> None:
    """The store's clock was set back while the stream had expired."""
    one, other = two
    await one.exchange([sent(1)])
    assert await other.exchange([]) == [sent(1)]
    store = stores[0]
    ((_, entry),) = await store.client.xrange(store.key("prompts"))
    await store.client.delete(store.key("prompts"))
    for number in (1, 2):
        await store.client.xadd(store.key("prompts"), entry, id=f"{number}-0")
    assert await other.exchange([]) == []
    assert await other.exchange([]) == [sent(1), sent(1)]
    assert await other.exchange([]) == []


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[1]", b'[["e", [1], "x", 2]]', b'[["e", 7, 1, 2]]', b'{"a": 1}', b'[["e", [null], 1, 2]]']
)
async def test_an_entry_that_cannot_be_read_is_left_out(
    two: Two, stores: tuple[valkey_store.Valkey, Any], payload: bytes
) -> None:
    one, other = two
    store = stores[0]
    await store.client.xadd(store.key("prompts"), {"by": "g9", "sent": payload})
    await store.client.xadd(store.key("prompts"), {"other": payload})
    await one.exchange([sent(1)])
    assert await other.exchange([]) == [sent(1)]


async def test_a_call_of_one_gateway_warms_the_engine_for_the_others(up: Any, until: Any) -> None:
    pool = secrets.token_hex(4)
    text = "A long prompt that many calls share. " * 200
    async with fake_engine.engine() as engine, up(engine, pool=pool) as one, up(engine, pool=pool) as other:
        body = {"model": engine.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        name = next(iter(one.gateway.core.engines)).facts.id

        async def heard() -> bool:
            async with one.http.post(f"{one.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
            return other.gateway.core.dispatcher.prefixes.entries > 1

        await until(heard)
        index = one.gateway.core.dispatcher.prefixes
        held = {key for key in index._holders if isinstance(key, int) and key >= 0}
        assert held
        assert held <= set(other.gateway.core.dispatcher.prefixes._holders)
        assert other.gateway.core.dispatcher.prefixes._records[name].tokens > 0
