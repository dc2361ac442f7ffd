"""How many seconds a step, a call and a backlog take on one kind of engine.

There is one set of coefficients for each model, accelerator and tensor-parallel degree. Sets are shipped as data
(`profiles/`) and refined from streams (`predict.engine_cost`). Every other module computes with these seconds.
This module knows nothing of queues.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from tidegate_policy.model import Backlog, Call

MICROSECONDS = 1_000_000
LARGEST = 1e12
"""Of a coefficient or a limit. Beyond it, the products of several would not be finite."""


class BadProfile(ValueError):
    """A cost profile has a missing, unknown or impossible field; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of one engine kind: a vLLM step takes
    `prefill_s*uncached + attention_s*attended + decode_s*decodes + context_s*context + step_s` seconds
    (RelServe eq 9, Semantic eq 3-4, for a mixed chunked-prefill step).
    """

    step_s: float
    """Fixed seconds of every step: reading the weights, launching, collectives."""
    prefill_s: float
    """Seconds for each uncached prompt token in the step."""
    attention_s: float = 0.0
    """Seconds for each (prompt token, preceding token) pair attended to in the step."""
    decode_s: float = 0.0
    """Seconds for each decoding sequence in the step."""
    context_s: float = 0.0
    """Seconds for each KV token read by decoding sequences in the step."""
    swap_s: float = 0.0
    """Seconds to move the KV of one token to or from host memory; 0 = the engine does not offload."""
    kv_tokens: int = 1_000_000
    """KV capacity in tokens: card memory minus weights minus reserve."""
    max_batch: int = 256
    """Sequences that run together at most (`--max-num-seqs`)."""
    max_step_tokens: int = 8192
    """Tokens scheduled in one step at most (`--max-num-batched-tokens`)."""

    @property
    def batched_decode_s(self) -> float:
        """Seconds of the engine's time that an output token takes in a full batch, KV reads aside."""
        return self.decode_s + self.step_s / self.max_batch

    def step_seconds(self, *, uncached: int, attended: int = 0, decodes: int, context: int) -> float:
        """Seconds of one step.

        `uncached`: prompt tokens computed; `attended`: sum over them of the tokens each attends to; `decodes`: sequences
        that decode; `context`: sum of their context lengths.
        """
        return (
            self.step_s
            + self.prefill_s * uncached
            + self.attention_s * attended
            + self.decode_s * decodes
            + self.context_s * context
        )

    def prefill_seconds(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill a prompt of which `cached_tokens` are in the prefix cache, fixed step time included."""
        uncached = max(prompt_tokens - cached_tokens, 1)
        attended = _attended(prompt_tokens) - _attended(prompt_tokens - uncached)
        steps = math.ceil(uncached / self.max_step_tokens)
        return self.prefill_s * uncached + self.attention_s * attended + self.step_s * steps

    def shared_seconds(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """The fixed step time in `prefill_seconds` that the prompts of other calls can share: the part of its steps that
        this prompt does not fill."""
        filled = max(prompt_tokens - cached_tokens, 1) / self.max_step_tokens
        return self.step_s * (math.ceil(filled) - filled)

    def avoided_seconds(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Seconds of `prefill_seconds` that the prefix cache avoids."""
        cached = min(cached_tokens, prompt_tokens - 1)
        steps = math.ceil(prompt_tokens / self.max_step_tokens) - math.ceil(
            (prompt_tokens - cached) / self.max_step_tokens
        )
        return self.prefill_s * cached + self.attention_s * _attended(cached) + self.step_s * steps

    def decode_seconds(
        self, prompt_tokens: int, output_tokens: int, *, beside: int = 0, beside_context: int = 0
    ) -> float:
        """Seconds to decode `output_tokens` (the first comes from prefill) next to `beside` other decoding sequences
        that hold `beside_context` tokens of context."""
        steps = max(output_tokens - 1, 0)
        own_context = steps * prompt_tokens + _attended(steps)
        each = self.step_s + self.decode_s * (beside + 1) + self.context_s * beside_context
        return steps * each + self.context_s * own_context

    def call_seconds(self, call: Call, cached_tokens: int = 0) -> float:
        """`t_comp`: seconds of the call alone on the engine, its sequences side by side (HexGen eq 2)."""
        return self.alone_seconds(
            call.prompt_tokens, call.output_predicted, sequences=call.sequences, cached_tokens=cached_tokens
        )

    def alone_seconds(
        self, prompt_tokens: int, output_tokens: int, *, sequences: int = 1, cached_tokens: int = 0
    ) -> float:
        """`call_seconds` of a call with these sizes."""
        twins = sequences - 1
        return self.prefill_seconds(prompt_tokens, cached_tokens) + self.decode_seconds(
            prompt_tokens, output_tokens, beside=twins, beside_context=twins * prompt_tokens
        )

    def remaining_seconds(self, call: Call, *, output_tokens: int, uncached_tokens: int) -> float:
        """Seconds from here to the last token of a call that has delivered `output_tokens`, alone on the engine.

        `uncached_tokens`: tokens to compute before it decodes (all of them after an eviction without a cache, Semantic
        Alg 4); 0 = it decodes."""
        context, left = call.prompt_tokens + output_tokens, call.output_left(output_tokens)
        if uncached_tokens <= 0:
            return self.decode_seconds(context, left + 1)
        return self.prefill_seconds(context, context - uncached_tokens) + self.decode_seconds(context, left)

    def charge(self, call: Call, cached_tokens: int = 0) -> Backlog:
        """What a call adds to an engine's backlog: the work that batching cannot share, and its decode steps."""
        return self._charge(call, self.prefill_seconds(call.prompt_tokens, cached_tokens))

    def service_and_charge(self, call: Call, cached_tokens: int = 0) -> tuple[float, Backlog]:
        """`call_seconds` and `charge` of a call, with the prefill computed once."""
        twins = call.sequences - 1
        prefill_s = self.prefill_seconds(call.prompt_tokens, cached_tokens)
        service_s = prefill_s + self.decode_seconds(
            call.prompt_tokens, call.output_predicted, beside=twins, beside_context=twins * call.prompt_tokens
        )
        return service_s, self._charge(call, prefill_s)

    def _charge(self, call: Call, prefill_s: float) -> Backlog:
        work_us = round(prefill_s * MICROSECONDS) + self._decode_work_us(
            call, call.prompt_tokens, call.output_predicted
        )
        return Backlog(calls=call.sequences, work_us=work_us, output_tokens=call.output_predicted * call.sequences)

    def decode_charge(self, call: Call, tokens_done: int) -> Backlog:
        """What is left of a call's charge once its prompt is done and `tokens_done` tokens of all its sequences have come
        out."""
        left = max(call.output_predicted * call.sequences - tokens_done, 0)
        each = math.ceil(left / call.sequences)
        work_us = self._decode_work_us(call, call.prompt_tokens + tokens_done // call.sequences, each)
        return Backlog(calls=call.sequences, work_us=work_us, output_tokens=left)

    def _decode_work_us(self, call: Call, context_tokens: int, tokens: int) -> int:
        """Microseconds that batching cannot share, for `tokens` further tokens of each sequence of a call."""
        alone_s = self.decode_seconds(context_tokens, tokens + 1)
        return round((alone_s - self.step_s * tokens) * call.sequences * MICROSECONDS)

    def backlog_seconds(self, backlog: Backlog) -> float:
        """Seconds until the backlog is done when the engine batches as much as it may.

        HexGen eq 3 adds up serial times; here only the unshareable work adds up, and the fixed step time is paid once
        for each step of a batch of up to `max_batch` calls.
        """
        if backlog.calls <= 0:
            return 0.0
        steps = backlog.output_tokens / min(backlog.calls, self.max_batch)
        return backlog.work_us / MICROSECONDS + self.step_s * steps


def scaled(model: CostModel, factor: float) -> CostModel:
    """The same engine, `factor` times as slow."""
    return replace(
        model,
        step_s=model.step_s * factor,
        prefill_s=model.prefill_s * factor,
        attention_s=model.attention_s * factor,
        decode_s=model.decode_s * factor,
        context_s=model.context_s * factor,
        swap_s=model.swap_s * factor,
    )


def _attended(tokens: int) -> int:
    """Tokens attended to by the first `tokens` tokens of a sequence, each seeing those before it."""
    return tokens * (tokens + 1) // 2


def mean_call_seconds(models: Sequence[CostModel], call: Call) -> float:
    """`mean_comp` of HexGen eq 5: the call's seconds averaged over `models`, those of the live engines.

    Engines that share one cost model object are priced once. `models` must not be empty.
    """
    prices: dict[int, float] = {}
    total = 0.0
    for model in models:
        price = prices.get(id(model))
        if price is None:
            price = prices[id(model)] = model.call_seconds(call)
        total += price
    return total / len(models)


def from_mapping(profile: Mapping[str, object]) -> CostModel:
    """A cost model from a profile's `cost` mapping. Raises `BadProfile` naming the field that is wrong."""
    known = {field.name: field for field in fields(CostModel)}
    unknown = sorted(set(profile) - set(known))
    if unknown:
        raise BadProfile(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")
    values: dict[str, float] = {}
    for name, value in profile.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            raise BadProfile(
                f"{name} must be a finite number that is not negative, at most {LARGEST:g}, not {_shown(value)}"
            )
        values[name] = int(value) if name in ("kv_tokens", "max_batch", "max_step_tokens") else float(value)
    for name in ("step_s", "prefill_s"):
        if not values.get(name):
            raise BadProfile(f"{name} is required and greater than zero")
    for name in ("kv_tokens", "max_batch", "max_step_tokens"):
        if values.get(name, 1) < 1:
            raise BadProfile(f"{name} must be at least 1")
    return CostModel(**values)  # type: ignore[arg-type]  # the three integer fields are converted above


def _shown(value: object) -> str:
    try:
        return f"{value!r:.40}"
    except ValueError:  # Python writes no longer numbers
        return "one with thousands of digits"
