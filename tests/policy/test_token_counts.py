"""Counts of tokens, and bounds of sizes, against a plain count and a look at every call."""

import random
from collections import Counter

from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.size_bounds import SizeBounds
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import ONE_OUTPUT, Computed, QueuedRequest
from tidegate_policy.policies.token_counts import TokenCounts


def test_tokens_are_those_of_a_plain_count() -> None:
    rng = random.Random(1)
    counts, prompts, outputs = TokenCounts(), Counter(), Counter()
    for _ in range(2000):
        names = [CallId(f"c{index}") for index in range(12)]
        step = {
            name: rng.choice((ONE_OUTPUT, Computed(0, 1), Computed(3, 0), Computed(4, 1), Computed(0, 3), Computed()))
            for name in rng.sample(names, rng.randrange(6))
        }
        before = {name for name in names if outputs[name]}
        others = counts.add(step)
        for name, (prompt_tokens, output_tokens) in step.items():
            prompts[name] += prompt_tokens
            outputs[name] += output_tokens
        assert others == [name for name, tokens in step.items() if tokens != (0, 1)]
        assert counts.newest() == [name for name in step if outputs[name] and name not in before]
        assert [counts.of(name) for name in names] == [(prompts[name], outputs[name]) for name in names]
        assert set(counts) == {name for name in names if prompts[name] or outputs[name]}
        if rng.random() < 0.3:
            gone = rng.choice(names)
            counts.forget(gone)
            del prompts[gone], outputs[gone]


def test_no_call_exceeds_the_bounds_and_they_fall_after_large_calls_have_left() -> None:
    rng = random.Random(2)
    counts, sizes = TokenCounts(), SizeBounds()
    calls: dict[CallId, KnownCall] = {}
    for number in range(600):
        huge = number < 20
        call = Call(
            id=CallId(f"c{number}"),
            arrived_at_s=0.0,
            prompt_tokens=9000 if huge else rng.randrange(1, 100),
            output_predicted=9000 if huge else rng.randrange(1, 100),
            output_upper=rng.choice((0, 120)),
        )
        calls[call.id] = known = KnownCall(QueuedRequest(call=call, service_s=1.0), counts)
        sizes.add(known, calls.values())
        if len(calls) > 30:
            del calls[next(iter(calls))]
        assert sizes.context_tokens >= max(each.call.prompt_tokens for each in calls.values())
        assert sizes.output_tokens >= max(
            max(each.call.output_predicted, each.call.output_upper) for each in calls.values()
        )
    assert sizes.context_tokens < 100
    assert sizes.output_tokens <= 120
