"""The index of prefixes follows what was sent, stays within its bounds, and keeps nothing of rejected calls and of engines
that left."""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate_policy.dispatch import prefix_index, prompt_blocks
from tidegate_policy.model import Call, CallId, EngineId

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
KV = 10_000


def call(*blocks: int, prompt: int = 1000, session: str | None = None, tenant: str = "", output: int = 1) -> Call:
    return Call(
        id=CallId("c"),
        arrived_at_s=0.0,
        prompt_tokens=prompt,
        output_predicted=output,
        tenant=tenant,
        session=session,
        blocks=blocks,
        block_tokens=100.0 if blocks else 0.0,
    )


def answered(index: prefix_index.PrefixIndex, sent: Call, engine: EngineId, kv_tokens: int) -> None:
    """The call is sent, and the engine answers it."""
    index.on_answered(sent, engine, kv_tokens, index.on_sent(sent, engine))


def test_each_engine_matches_the_longest_prefix_that_was_sent_to_it() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2, 3, 4), A, KV)
    answered(index, call(1, 2, 9), B, KV)
    answered(index, call(7), C, KV)
    assert index.cached_tokens(call(1, 2, 3, 5)) == {A: 300, B: 200}
    assert index.cached_tokens(call(1, 2, 9, 3)) == {A: 200, B: 300}
    assert index.cached_tokens(call(8, 2)) == {}


def test_a_part_of_a_prompt_is_computed_once_an_engine_has_answered_a_call_with_it() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2), A, KV)
    awaited = index.on_sent(call(1, 2, 3, 4), B)
    index.on_sent(call(1, 2, 3), A)
    assert index.cached_tokens(call(1, 2, 3, 4)) == {A: 300, B: 400}
    assert index.computed_tokens(call(1, 2, 3, 4)) == 200
    index.on_answered(call(1, 2, 3, 4), B, KV, awaited)
    assert index.computed_tokens(call(1, 2, 3, 4)) == 400
    assert index.computed_tokens(call(1, 2, 3, 4, prompt=400)) == 399
    assert index.computed_tokens(call(1, 9)) == 100
    assert index.computed_tokens(call(9)) == index.computed_tokens(call()) == 0


def test_a_session_without_hashes_is_computed_once_its_call_is_answered() -> None:
    index = prefix_index.PrefixIndex()
    first = call(session="s", prompt=500, output=20)
    awaited = index.on_sent(first, A)
    assert index.computed_tokens(call(session="s", prompt=800)) == 0
    index.on_answered(first, A, KV, awaited)
    assert index.computed_tokens(call(session="s", prompt=800)) == 520
    assert index.computed_tokens(call(session="s", prompt=300)) == 299


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2, prompt=200), A, KV)
    assert index.cached_tokens(call(1, 2, prompt=200)) == {A: 199}


def test_the_last_blocks_of_the_prompt_used_least_recently_are_forgotten_first() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2, 3, prompt=300, output=0), A, 600)
    answered(index, call(4, 5, 6, prompt=300, output=0), A, 600)
    answered(index, call(1, 2, 7, prompt=300, output=0), A, 600)
    assert index.cached_tokens(call(1, 2, 3)) == {A: 200}
    assert index.cached_tokens(call(1, 2, 7)) == {A: 300}
    assert index.cached_tokens(call(4, 5, 6)) == {A: 300}
    answered(index, call(8, prompt=100, output=0), A, 600)
    assert index.cached_tokens(call(4, 5, 6)) == {A: 200}


def test_answers_and_unshared_ends_of_prompts_take_room_too() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2, prompt=200), A, KV)
    answered(index, call(3, prompt=9000, output=2000), A, KV)
    assert index.cached_tokens(call(1, 2)) == {}
    assert index.cached_tokens(call(3)) == {A: 100}


def test_a_session_without_hashes_is_a_prefix_of_its_own() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(session="s", prompt=500, output=20), A, KV)
    assert index.cached_tokens(call(session="s", prompt=800)) == {A: 520}
    assert index.cached_tokens(call(session="s", prompt=300)) == {A: 299}
    assert index.cached_tokens(call(session="s", tenant="other", prompt=800)) == {}
    assert index.cached_tokens(call(session="t")) == index.cached_tokens(call()) == {}


def test_an_engine_that_lost_its_cache_holds_nothing_and_takes_no_memory() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2), A, KV)
    answered(index, call(1, 3), B, KV)
    index.on_cleared(A)
    assert index.cached_tokens(call(1, 2)) == {B: 100}
    answered(index, call(4), C, KV)
    assert index.cached_tokens(call(1, 3)) == {B: 200}
    index.on_cleared(B)
    index.on_cleared(C)
    assert index.entries == 0
    assert vars_are_empty(index)


def test_calls_with_one_beginning_follow_the_first_before_its_answer() -> None:
    index = prefix_index.PrefixIndex()
    first, second = index.on_sent(call(1, 2), A), index.on_sent(call(1, 3), A)
    assert index.cached_tokens(call(1, 2, 4)) == {A: 200}
    index.on_unanswered(A, first)
    assert index.cached_tokens(call(1, 2, 4)) == {A: 100}, "the second call brings the first block too"
    index.on_answered(call(1, 3), A, KV, second)
    assert index.cached_tokens(call(1, 3)) == {A: 200}
    session = index.on_sent(call(session="s", prompt=500, output=20), B)
    assert index.cached_tokens(call(session="s", prompt=800)) == {B: 799}
    index.on_answered(call(session="s", prompt=500, output=20), B, KV, session)
    assert index.cached_tokens(call(session="s", prompt=800)) == {B: 520}


def test_calls_that_engines_reject_leave_nothing_and_displace_nothing() -> None:
    index = prefix_index.PrefixIndex(100)
    index.untold(gateways=2)
    answered(index, call(1, 2, prompt=200), A, KV)
    assert len(index.untold(gateways=2)) == 1
    for number in range(50):
        huge = call(*range(100 * number + 10, 100 * number + 90), prompt=9000, output=10**6)
        awaited = index.on_sent(huge, A)
        assert index.cached_tokens(call(1, 2)) == {A: 200}, "also while it is at the engine"
        index.on_unanswered(A, awaited)
        assert index.cached_tokens(huge) == {}
    assert index.cached_tokens(call(1, 2)) == {A: 200}
    assert index.untold(gateways=2) == []
    index.on_unanswered(A, index.on_sent(call(1, 2, 3), A))
    assert index.cached_tokens(call(1, 2, 3)) == {A: 200}, "what another call brought stays"
    index.on_cleared(A)
    assert vars_are_empty(index)


def test_an_answer_after_the_engine_lost_its_cache_is_recorded_anew() -> None:
    index = prefix_index.PrefixIndex()
    before = index.on_sent(call(1, 2), A)
    index.on_cleared(A)
    assert vars_are_empty(index)
    after = index.on_sent(call(1, 2), A)
    index.on_answered(call(1, 2), A, KV, before)
    index.on_unanswered(A, after)
    assert index.cached_tokens(call(1, 2)) == {A: 200}
    index.on_cleared(A)
    assert vars_are_empty(index)


def test_a_failed_call_leaves_no_trust_in_its_prefix() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2), A, KV)
    index.on_failed(call(1, 2), A)
    assert index.cached_tokens(call(1, 2)) == {}


def test_prompts_that_another_gateway_sent_are_known_where_they_were_sent() -> None:
    here, there = prefix_index.PrefixIndex(), prefix_index.PrefixIndex()
    assert there.untold(gateways=2) == []
    answered(there, call(1, 2, 3), B, KV)
    for prompt in there.untold(gateways=2):
        here.record(prompt, KV)
    assert here.cached_tokens(call(1, 2, 4)) == there.cached_tokens(call(1, 2, 4)) == {B: 200}
    assert here.entries == there.entries
    assert there.untold(gateways=2) == [], "each prompt is told once"
    assert here.untold(gateways=2) == [], "what others told is not told again"


def test_a_gateway_that_is_alone_gathers_nothing_for_others() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2), A, KV)
    assert index.untold(gateways=1) == []
    answered(index, call(3), A, KV)
    assert index.untold(gateways=2) == []
    answered(index, call(4), A, KV)
    assert [prompt.blocks for prompt in index.untold(gateways=1)] == [(4,)]


def test_what_waits_for_other_gateways_is_bounded() -> None:
    index = prefix_index.PrefixIndex()
    index.untold(gateways=2)
    for number in range(3000):
        answered(index, call(*range(number * 100, number * 100 + number % 100)), A, KV)
    assert sum(len(prompt.blocks) + 1 for prompt in index.untold(gateways=2)) <= prefix_index.MOST_UNTOLD_BLOCKS + 1


def test_prompts_of_other_gateways_obey_the_bounds_of_the_record() -> None:
    index = prefix_index.PrefixIndex(100)
    for number in range(500):
        blocks = tuple(range(number * 50, number * 50 + 50))
        index.record(prefix_index.SentPrompt(engine=A, blocks=blocks, block_tokens=100.0, tokens=5100.0), 10**12)
        index.record(prefix_index.SentPrompt(engine=B, blocks=blocks, block_tokens=100.0, tokens=10**9), KV)
    assert index.entries <= 100
    assert index._records[B].tokens <= KV


def test_an_index_without_entries_records_nothing() -> None:
    index = prefix_index.PrefixIndex(0)
    answered(index, call(1, 2), A, KV)
    index.record(prefix_index.SentPrompt(engine=A, blocks=(1,), block_tokens=100.0, tokens=100.0), KV)
    assert index.untold(gateways=2) == []
    assert index.cached_tokens(call(1, 2)) == {}
    assert index.entries == 0


def test_prompts_that_never_repeat_take_bounded_memory() -> None:
    index = prefix_index.PrefixIndex(2000)
    tracemalloc.start()
    try:
        for number in range(4000):
            answered(index, call(*range(number * 10, number * 10 + 10), prompt=1000), (A, B)[number % 2], 10**12)
            if number == 1000:
                before, _ = tracemalloc.get_traced_memory()
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
    assert index.entries <= 2000


def test_tenants_adapters_and_salts_share_no_hash() -> None:
    salts = [("m", "t", ""), ("m", "u", ""), ("adapter", "t", ""), ("m", "t", "salt"), ("mt", "", ""), ("m",)]
    chains = [prompt_blocks.chain(salt, [b"one", b"two"]) for salt in salts]
    assert len({hashed for chain in chains for hashed in chain}) == 2 * len(salts)


@given(st.binary(max_size=6000), st.binary(max_size=3000), st.binary(max_size=3000))
@settings(max_examples=60)
def test_two_prompts_have_the_blocks_of_their_common_prefix_in_common(common: bytes, one: bytes, two: bytes) -> None:
    first, second = (prompt_blocks.chain((), prompt_blocks.of_bytes(common + end)) for end in (one, two))
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    exact = 0
    while exact < min(len(common + one), len(common + two)) and (common + one)[exact] == (common + two)[exact]:
        exact += 1
    assert shared == exact // prompt_blocks.BLOCK_BYTES
    assert not set(first[shared:]) & set(second[shared:])


def test_a_huge_prompt_has_a_bounded_number_of_blocks() -> None:
    assert len(list(prompt_blocks.of_bytes(bytes(10_000_000)))) == prompt_blocks.MAX_BLOCKS
    assert len(list(prompt_blocks.of_parts([(1, 10**9)]))) == prompt_blocks.MAX_BLOCKS


def test_parts_of_a_trace_are_cut_into_blocks_like_bytes() -> None:
    size = prompt_blocks.TRACE_BLOCK_TOKENS
    one = prompt_blocks.chain((), prompt_blocks.of_parts([(1, size + 10), (2, 2 * size)]))
    split = prompt_blocks.chain((), prompt_blocks.of_parts([(1, 10), (1, size), (2, 2 * size - 11)]))
    other = prompt_blocks.chain((), prompt_blocks.of_parts([(1, size + 11), (2, 2 * size)]))
    assert len(one) == 3
    assert split == one[:2]
    assert other[0] == one[0]
    assert not set(other[1:]) & set(one[1:])


def vars_are_empty(index: prefix_index.PrefixIndex) -> bool:
    return not (index._holders or index._records or index._names)


class Indexed(RuleBasedStateMachine):
    """Random events of three engines with small caches. Prompts are words over a small alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.index = prefix_index.PrefixIndex(60)
        self.sent: dict[EngineId, set[int]] = {A: set(), B: set(), C: set()}
        self.out: list[tuple[Call, EngineId, tuple[prefix_index.Key, ...]]] = []

    engines = st.sampled_from([A, B, C])
    words = st.lists(st.integers(0, 2), min_size=0, max_size=8)

    @staticmethod
    def hashed(word: list[int]) -> tuple[int, ...]:
        return prompt_blocks.chain((), [bytes([letter]) for letter in word])

    @rule(engine=engines, word=words, session=st.sampled_from([None, "s", "t"]))
    def sends(self, engine: EngineId, word: list[int], session: str | None) -> None:
        sent = call(*self.hashed(word), prompt=len(word) * 100 + 50, session=session)
        self.out.append((sent, engine, self.index.on_sent(sent, engine)))
        self.sent[engine].update(sent.blocks)
        found = self.index.cached_tokens(sent).get(engine, 0)
        assert found == min(len(word) * 100, sent.prompt_tokens - 1) or session

    @precondition(lambda self: self.out)
    @rule(chosen=st.integers(0, 1000), answers=st.booleans())
    def ends(self, chosen: int, answers: bool) -> None:
        sent, engine, awaited = self.out.pop(chosen % len(self.out))
        if answers:
            self.index.on_answered(sent, engine, 2000, awaited)
            self.sent[engine].update(sent.blocks)
        else:
            self.index.on_unanswered(engine, awaited)

    @rule(engine=engines, word=words)
    def fails(self, engine: EngineId, word: list[int]) -> None:
        self.index.on_failed(call(*self.hashed(word)), engine)

    @rule(engine=engines)
    def clears(self, engine: EngineId) -> None:
        self.index.on_cleared(engine)
        self.sent[engine] = set()

    @rule(word=words)
    def looks_up(self, word: list[int]) -> None:
        blocks = self.hashed(word)
        for engine, tokens in self.index.cached_tokens(call(*blocks)).items():
            assert set(blocks[: tokens // 100]) <= self.sent[engine]

    @invariant()
    def stays_within_its_bounds(self) -> None:
        assert self.index.entries <= 60
        assert all(record.tokens <= 2000 for record in self.index._records.values())
        held = {key for record in self.index._records.values() for key in (*record.entries, *record.awaited)}
        assert set(self.index._holders) <= held
        out = [key for _, _, awaited in self.out for key in awaited]
        assert sum(sum(record.awaited.values()) for record in self.index._records.values()) <= len(out)

    def teardown(self) -> None:
        for _, engine, awaited in self.out:
            self.index.on_unanswered(engine, awaited)
        assert not any(record.awaited for record in self.index._records.values())
        for engine in self.sent:
            self.index.on_cleared(engine)
        assert vars_are_empty(self.index)


TestIndexed = Indexed.TestCase
TestIndexed.settings = settings(max_examples=40, stateful_step_count=40)


def test_an_engine_without_a_prefix_cache_holds_nothing_until_it_has_one() -> None:
    index = prefix_index.PrefixIndex()
    answered(index, call(1, 2), A, KV)
    awaited = index.on_sent(call(1, 2, 3), A)
    index.on_prefix_cache(A, exists=False)
    index.on_answered(call(1, 2, 3), A, KV, awaited)
    answered(index, call(1, 2), A, KV)
    index.record(prefix_index.SentPrompt(engine=A, blocks=(1, 2), block_tokens=100.0, tokens=200), KV)
    answered(index, call(1), B, KV)
    assert index.cached_tokens(call(1, 2)) == {B: 100}
    assert index.entries == 2
    index.on_prefix_cache(A, exists=True)
    answered(index, call(1, 2), A, KV)
    assert index.cached_tokens(call(1, 2, 9)) == {A: 200, B: 100}
