"""The KV memory that the calls of a tenant take: shared blocks count once, and nothing stays."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy.admit.held_memory import HeldMemory, tokens_of
from tidegate_policy.model import Call, CallId

BLOCK = 256


def call(
    number: int, blocks: tuple[int, ...] = (), *, prompt: int = 1000, output: int = 100, sequences: int = 1
) -> Call:
    return Call(
        id=CallId(str(number)),
        arrived_at_s=0.0,
        prompt_tokens=prompt,
        output_predicted=output,
        sequences=sequences,
        blocks=blocks,
        block_tokens=float(BLOCK),
    )


def test_a_call_takes_its_prompt_and_half_of_each_answer() -> None:
    assert tokens_of(call(1)) == 1050
    assert tokens_of(call(1, sequences=4)) == 1200
    assert HeldMemory().add(call(1)) == 1050


def test_what_prompts_have_in_common_counts_once() -> None:
    held = HeldMemory()
    assert held.add(call(1, (1, 2, 3))) == 1050
    assert held.add(call(2, (1, 2, 4))) == 1050 - 2 * BLOCK
    assert held.remove(CallId("1")) == 1050 - 2 * BLOCK, "the other call still has the blocks"
    assert held.tokens == 1050
    assert held.remove(CallId("2")) == 1050
    assert held.remove(CallId("2")) == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.lists(st.integers(1, 6), max_size=4, unique=True), st.integers(0, 2000), st.booleans()
        ),
        max_size=40,
    )
)
def test_the_tokens_are_those_of_the_calls_that_are_held(events: list[tuple[int, list[int], int, bool]]) -> None:
    held = HeldMemory()
    calls: dict[int, Call] = {}
    for number, blocks, prompt, enters in events:
        before = held.tokens
        if enters:
            calls[number] = call(number, tuple(sorted(blocks)), prompt=prompt)
            assert held.add(calls[number]) == held.tokens - before
        else:
            calls.pop(number, None)
            assert held.remove(CallId(str(number))) == before - held.tokens
        own = sum(max(tokens_of(each) - BLOCK * len(each.blocks), 0) for each in calls.values())
        shared = Counter(block for each in calls.values() for block in each.blocks)
        assert held.tokens == own + BLOCK * len(shared)
