"""What does a step of an engine cost? Learned by the gateway from the streams that the engine answers.

Each step gives one token to each running sequence, so the tokens of one stream count the steps of its engine. Between its
first and its last token the gateway knows the seconds, the steps, the prompts whose first token came, and the tokens of
all other streams: one equation for the five coefficients of `cost.CostModel` (`coefficients`). A call that found its
engine idle gives a second equation, its own prefill.

The profile of the engine is the first estimate. Without a profile it is the cost of the other engines (`guess`), so that an
engine that comes or restarts draws no more than its part of the calls before it has answered any. A prompt that is half
computed when a window begins or ends makes the equation uncertain by a part of its time, and it weighs less. The work of
other gateways is estimated from the number of their calls. The engine's usage corrects what a prompt was predicted to be.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict.coefficients import Coefficients

STARTING = CostModel(step_s=0.02, prefill_s=1e-4, decode_s=2e-4, max_batch=64)
"""A mid-sized card, for engines without a profile in a pool where nothing is known of any engine."""
DOUBT, STARTING_DOUBT = 0.5, 3.0
"""Relative uncertainty of a profile, and of a guess."""
FORGETTING = 0.995
"""Weight of the past at each equation: the last 200 equations count."""
TRUSTING = 32
"""Equations before the first outlier."""
FIRST_EQUATIONS = 3
"""Equations before the estimate is used."""
NOISE = 0.04
"""Error of an equation relative to its seconds, when all work in it is known."""
PARTIAL = 0.3
"""Standard deviation of the computed share of a prompt that is being computed: uniform between 0 and 1."""
DISBELIEF = 1.0
"""Share of the prompts believed to be cached that an engine may have computed all the same: its cache may have lost them,
or the call before may still have been computing them. It makes an equation uncertain."""
FAR_OFF = 1.5
"""The factor by which the prediction of a prompt must be wrong before its work is corrected at the end of the call."""
CHANGED = 0.02
"""An estimate is used when it differs by this share from the one in use, so that prices are not computed for nothing."""
SPACING_S = 0.05
"""Between two equations of an engine, so that the time of learning is bounded at any rate of calls."""
LEAST_STEPS = 4
"""Shorter streams show little more than what their neighbours' prompts do."""
MOST_STEP_S = 60.0
"""Mean seconds of a step beyond which a time is no measurement: the client did not read."""


@dataclass(slots=True)
class _Work:
    """Work that an engine has done since the gateway knows it, as far as streams show it."""

    uncached: float = 0.0
    attended: float = 0.0
    believed: float = 0.0
    """Prompt tokens that were believed to be in the engine's cache."""
    decodes: float = 0.0
    context: float = 0.0


@dataclass(slots=True)
class _Stream:
    """A call at the engine."""

    prompt_tokens: int
    uncached: int
    attended: int
    sequences: int
    sent_at_s: float
    alone: bool
    """The engine had no other call when this one was sent."""
    before: _Work
    """The work of the engine when the call was sent."""
    partial_before: int
    """Tokens of the largest prompt that was being computed then."""
    first_at_s: float = 0.0
    """0 = no token has come."""
    tokens: int = 0
    first: _Work = field(default_factory=_Work)
    """The work of the engine when the first token came."""
    partial: int = 0
    """Tokens of the largest prompt that was being computed then."""
    crowd: float = 1.0
    """Calls at the engine for each call of this gateway."""


class EngineCost:
    """The estimate of one engine. `cost` is the present cost model."""

    __slots__ = ("_coefficients", "_next_at_s", "_prefilling", "_streams", "_work", "cost", "first")

    def __init__(self, first: CostModel | None, guess: CostModel = STARTING) -> None:
        self.first = first
        """The profile; None = the engine has none."""
        self.cost = first or guess
        doubt = STARTING_DOUBT if first is None else DOUBT
        self._coefficients = Coefficients(self.cost, doubt=doubt, forgetting=FORGETTING, trusting=TRUSTING)
        self._work = _Work()
        self._next_at_s = -math.inf
        self._streams: dict[CallId, _Stream] = {}
        self._prefilling: dict[CallId, int] = {}
        """Uncached tokens of the calls of which no token has come."""

    @property
    def learned(self) -> int:
        """Equations that were learned."""
        return self._coefficients.learned

    @property
    def is_known(self) -> bool:
        """`cost` is a profile, or was learned."""
        return self.first is not None or self.learned >= FIRST_EQUATIONS

    @property
    def mean_error(self) -> float:
        """Mean relative error of the latest predictions of the seconds of an equation."""
        return self._coefficients.mean_error

    def on_sent(self, now: float, call: Call, cached_tokens: int, *, others: int) -> None:
        """The call goes to the engine, at which other gateways have `others` sequences."""
        prompt, cached = call.prompt_tokens, min(cached_tokens, call.prompt_tokens - 1)
        stream = _Stream(
            prompt_tokens=prompt,
            uncached=prompt - cached,
            attended=(prompt * (prompt + 1) - cached * (cached + 1)) // 2,
            sequences=call.sequences,
            sent_at_s=now,
            alone=not others and not self._streams,
            before=replace(self._work),
            partial_before=max(self._prefilling.values(), default=0),
        )
        self._streams[call.id] = stream
        self._prefilling[call.id] = stream.uncached

    def on_tokens(self, now: float, call_id: CallId, tokens: int, crowd: float) -> None:
        """`tokens` tokens of the call have come so far, of all its sequences. `crowd` is the number of sequences at the
        engine for each one of this gateway."""
        stream = self._streams.get(call_id)
        if stream is None or tokens <= stream.tokens:
            return
        if not stream.first_at_s:
            self._prefilling.pop(call_id, None)
            self._first_token(now, stream, crowd)
        self._decoded(stream, tokens)

    def on_end(
        self,
        now: float,
        call_id: CallId,
        output_tokens: int,
        crowd: float,
        *,
        streamed: bool,
        prompt_tokens: int | None = None,
    ) -> bool:
        """The whole answer came, and the engine counted `prompt_tokens`; None = as predicted. Returns whether `cost` has
        changed."""
        stream = self._streams.get(call_id)
        if stream is None:
            return False
        if prompt_tokens is not None:
            self._correct(stream, prompt_tokens)
        self._streams.pop(call_id, None)
        self._prefilling.pop(call_id, None)
        if not stream.first_at_s:
            self._first_token(now, stream, crowd)
        steps = output_tokens // stream.sequences - 1
        prefill_steps = -(-stream.uncached // self.cost.max_step_tokens)
        if streamed:
            began_at_s, before, partial, crowds = stream.first_at_s, stream.first, stream.partial, stream.crowd
            self._learn_prefill(stream, prefill_steps)
        else:  # The answer came in one piece, so its prefill and its decoding are one time.
            began_at_s, before, partial, crowds = stream.sent_at_s, stream.before, stream.partial_before, crowd
            steps += prefill_steps
        self._decoded(stream, output_tokens)
        seconds = now - began_at_s
        if steps < LEAST_STEPS or not 0 < seconds < MOST_STEP_S * steps or now < self._next_at_s:
            return False
        self._next_at_s = now + SPACING_S
        crowd = (crowd + crowds) / 2
        own = max(output_tokens - stream.sequences, 0)
        others = max(self._work.decodes - before.decodes - own, 0.0)
        # The work of this gateway's other calls stands for that of all gateways.
        terms = (
            float(steps),
            crowd * (self._work.uncached - before.uncached),
            crowd * (self._work.attended - before.attended),
            own + crowd * others,
            crowd * (self._work.context - before.context),
        )
        partial += max(self._prefilling.values(), default=0)
        believed = self._work.believed - before.believed
        noise_s = NOISE * seconds + self.cost.prefill_s * (PARTIAL * partial + DISBELIEF * believed) * crowd
        self._coefficients.observe(terms, seconds, noise_s, NOISE)
        return self._renew()

    def forget(self, call_id: CallId) -> None:
        """The call left the engine without a whole answer."""
        self._streams.pop(call_id, None)
        self._prefilling.pop(call_id, None)

    def _first_token(self, now: float, stream: _Stream, crowd: float) -> None:
        self._work.uncached += stream.uncached
        self._work.attended += stream.attended
        self._work.believed += stream.prompt_tokens - stream.uncached
        stream.tokens = stream.sequences
        stream.first_at_s, stream.first, stream.crowd = now, replace(self._work), crowd
        stream.partial = max(self._prefilling.values(), default=0)

    def _correct(self, stream: _Stream, prompt: int) -> None:
        """The engine counted `prompt` tokens for the call. Where the prediction was far off, the work that was counted
        since its first token is corrected, also for the calls that came or began their answers after it."""
        predicted, uncached, attended = stream.prompt_tokens, stream.uncached, stream.attended
        if not prompt or predicted / FAR_OFF <= prompt <= predicted * FAR_OFF:
            return
        stream.prompt_tokens, stream.uncached = prompt, max(round(prompt * uncached / predicted), 1)
        cached = prompt - stream.uncached
        stream.attended = (prompt * (prompt + 1) - cached * (cached + 1)) // 2
        if not stream.first_at_s:
            return
        since = [self._work]
        for other in self._streams.values():
            if other.sent_at_s >= stream.first_at_s:
                since.append(other.before)
            if other.first_at_s >= stream.first_at_s:
                since.append(other.first)
        for work in since:
            work.uncached += stream.uncached - uncached
            work.attended += stream.attended - attended
            work.believed += prompt - stream.uncached - (predicted - uncached)
        self._work.context += (stream.tokens - stream.sequences) * (prompt - predicted)

    def _learn_prefill(self, stream: _Stream, steps: int) -> None:
        """The time to the first token of a call that had the engine for itself."""
        seconds = stream.first_at_s - stream.sent_at_s
        if stream.alone and stream.crowd <= 1.0 and stream.sequences == 1 and 0 < seconds < MOST_STEP_S * steps:
            terms = (float(steps), float(stream.uncached), float(stream.attended), 0.0, 0.0)
            noise_s = NOISE * seconds + PARTIAL * self.cost.prefill_s * min(stream.partial, self.cost.max_step_tokens)
            self._coefficients.observe(terms, seconds, noise_s, NOISE)

    def _decoded(self, stream: _Stream, tokens: int) -> None:
        """Counts the tokens that came since the last time. Prefill gave the first one of each sequence."""
        fresh = tokens - stream.tokens
        if fresh <= 0:
            return
        work = self._work
        work.decodes += fresh
        work.context += fresh * (stream.prompt_tokens + (tokens + stream.tokens) / (2 * stream.sequences))
        stream.tokens = tokens

    def _renew(self) -> bool:
        if self.learned < FIRST_EQUATIONS:
            return False
        found = self._coefficients.model()
        if close(found, self.cost, CHANGED):
            return False
        self.cost = found
        return True


def guess(known: Iterable[CostModel]) -> CostModel:
    """What an engine without a profile is believed to cost beside engines whose costs are known: the coefficients of the
    middle one, of two the slower one; `STARTING` without any."""
    costs = sorted(known, key=_reference_s)
    if not costs:
        return STARTING
    middle = costs[len(costs) // 2]
    return replace(
        STARTING,
        step_s=middle.step_s,
        prefill_s=middle.prefill_s,
        attention_s=middle.attention_s,
        decode_s=middle.decode_s,
        context_s=middle.context_s,
    )


def _reference_s(model: CostModel) -> float:
    """Seconds of a prompt of 2,000 tokens and 200 steps with 16 sequences."""
    prompt_s = model.step_seconds(uncached=2000, attended=2_000_000, decodes=0, context=0)
    return prompt_s + 200 * model.step_seconds(uncached=0, attended=0, decodes=16, context=32_000)


def close(one: CostModel, other: CostModel, share: float) -> bool:
    """Whether two models price a prompt of 4,000 tokens, and a step of 16 sequences of that length, alike."""
    if (one.kv_tokens, one.max_batch, one.max_step_tokens) != (other.kv_tokens, other.max_batch, other.max_step_tokens):
        return False
    for uncached, attended, decodes, context in ((4000, 8_000_000, 0, 0), (0, 0, 16, 64_000), (0, 0, 1, 1000)):
        first, second = [
            model.step_seconds(uncached=uncached, attended=attended, decodes=decodes, context=context)
            for model in (one, other)
        ]
        if abs(first - second) > share * second:
            return False
    return True
