"""Whether the engine holds the KV blocks of a session while the session's client runs a tool, and for how long.

A call that invokes a tool ends; the session returns later with a longer prompt. `wastes` compares the expected waste of
holding, discarding and swapping the context (AugServe eq 4-8, after InferCept). `SessionHolds` is the ledger of what is
held. It is bounded in tokens and in time. Holds give way to every call that needs memory, waiting or running (AugServe
eq 31 with gamma = 1). The driver owns the blocks; this module decides only. A gateway predicts the tool after a call, its
time and its return (`predict.tool_use`). What the call's labels do not say is learned from the sessions that the engine
sees, tenant by tenant (`predict.tenant_tools`). A session is one of its tenant: another tenant may use the same name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict.tenant_tools import TenantTools
from tidegate_policy.predict.tool_times import UNKNOWN_TOOL, Return

RATE_WINDOW_S = 10.0
"""Seconds over which the rate of KV allocation is averaged."""


class AllocationRate:
    """The rate of KV allocation, as an exponential average over `RATE_WINDOW_S`."""

    def __init__(self, now: float) -> None:
        self.per_s = 0.0
        """Tokens."""
        self._last_at_s = now

    def observe(self, now: float, tokens: int) -> None:
        """A step allocated so many tokens."""
        elapsed_s = max(now - self._last_at_s, 1e-6)
        self._last_at_s = now
        weight = min(elapsed_s / RATE_WINDOW_S, 1.0)
        self.per_s += weight * (tokens / elapsed_s - self.per_s)


class Handling(StrEnum):
    """The ways to treat the context of a session while its tool runs."""

    PRESERVE = "preserve"
    DISCARD = "discard"
    SWAP = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The bounds of the ledger."""

    max_share: float = 0.5
    """Share of the KV cache that may be held."""
    max_s: float = 60.0
    """The longest hold. A session that never returns costs this long at most."""
    patience: float = 2.0
    """A hold ends this many times the expected tool time after it began, `max_s` at the latest."""


def settings(max_share: float) -> Settings | None:
    """The settings for a share of the KV cache; None = nothing is held. Raises `ValueError`."""
    if not 0 <= max_share <= 1:
        raise ValueError(f"the held share of the KV cache must be between 0 and 1, not {max_share:g}")
    return Settings(max_share=max_share) if max_share else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wastes:
    """Token-seconds of KV memory that each handling is expected to waste."""

    preserve: float
    discard: float
    swap: float | None
    """None = the engine cannot swap."""

    def best(self) -> Handling:
        """The handling with the least waste (AugServe eq 7-8)."""
        swap = float("inf") if self.swap is None else self.swap
        if self.preserve <= min(self.discard, swap):
            return Handling.PRESERVE
        return Handling.SWAP if swap < self.discard else Handling.DISCARD


def wastes(
    cost: CostModel,
    *,
    context_tokens: int,
    other_tokens: int,
    expected: Return,
    limit_s: float,
    evicted_share: float,
) -> Wastes:
    """The expected waste of each handling of a context of `context_tokens`.

    Preserving occupies the context until the return, or until `limit_s` if the session does not return (eq 4). After a
    discard the return recomputes what was evicted meanwhile, while the context and the other running calls'
    `other_tokens` occupy memory (eq 5). `evicted_share` is the expected part of a discarded context that is gone at the
    return: vLLM keeps freed blocks until it needs them. Swapping moves the context twice (eq 6)."""
    again_s = cost.prefill_seconds(context_tokens) * evicted_share
    swap_s = 2 * cost.swap_s * context_tokens
    return Wastes(
        preserve=context_tokens * (expected.share * expected.tool_s + (1 - expected.share) * limit_s),
        discard=expected.share * again_s * (context_tokens + other_tokens),
        swap=expected.share * swap_s * cost.max_step_tokens if cost.swap_s else None,
    )


@dataclass(slots=True, kw_only=True)
class _Hold:
    session: tuple[str, str]
    """Its tenant and its name."""
    tokens: int
    until_s: float


@dataclass(slots=True, kw_only=True)
class SessionHolds:
    """The ledger of held contexts, by the call that ended."""

    capacity_tokens: int
    """Tokens of the whole KV cache."""
    settings: Settings = field(default_factory=Settings)
    tools: TenantTools = field(default_factory=TenantTools)
    held_tokens: int = 0
    _holds: dict[CallId, _Hold] = field(default_factory=dict)
    _of_session: dict[tuple[str, str], CallId] = field(default_factory=dict)
    _returning: dict[CallId, CallId] = field(default_factory=dict)
    """The hold that each returned call will use, by the returned call."""

    def __len__(self) -> int:
        return len(self._holds)

    def on_call_end(
        self,
        now: float,
        call: Call,
        *,
        output_tokens: int,
        context_tokens: int,
        other_tokens: int,
        free_tokens: int,
        allocated_per_s: float,
        cost: CostModel,
    ) -> Handling:
        """The handling of the context of a call that finished. PRESERVE means that the driver must hold the context's
        blocks until `expired`, `release_one`, `on_used` or `clear` names the call.

        `free_tokens` and `allocated_per_s` say how soon vLLM would reuse freed blocks."""
        if call.session is None:
            return Handling.DISCARD
        session, context = (call.tenant, call.session), call.prompt_tokens + output_tokens
        self.tools.on_call_end(now, *session, call.tool or UNKNOWN_TOOL, context)
        expected = self._expected(call)
        limit_s = min(self.settings.patience * expected.tool_s + 1.0, self.settings.max_s)
        evicted_share = min(expected.tool_s * allocated_per_s / max(free_tokens, 1), 1.0)
        best = wastes(
            cost,
            context_tokens=context_tokens,
            other_tokens=other_tokens,
            expected=expected,
            limit_s=limit_s,
            evicted_share=evicted_share,
        ).best()
        fits = self.held_tokens + context_tokens <= self.settings.max_share * self.capacity_tokens
        if best is Handling.PRESERVE and not fits:
            return Handling.DISCARD
        if best is Handling.PRESERVE:
            self._holds[call.id] = _Hold(session=session, tokens=context_tokens, until_s=now + limit_s)
            if (before := self._of_session.get(session)) is not None:
                self._holds[before].until_s = now  # two calls of the session ended one after the other
            self._of_session[session] = call.id
            self.held_tokens += context_tokens
        return best

    def on_arrival(self, now: float, call: Call) -> None:
        """A call arrived; if its session has a held context, the call will use it."""
        if call.session is None:
            return
        gap = self.tools.on_arrival(now, call.tenant, call.session)
        if gap is not None:
            self.tools.observe(call.tenant, gap, call.prompt_tokens)
        held = self._of_session.pop((call.tenant, call.session), None)
        if held is not None:
            self._returning[call.id] = held

    def on_used(self, call_ids: Iterable[CallId]) -> list[CallId]:
        """The holds that these calls made unnecessary: the calls run, or they ended."""
        if not self._returning:
            return []
        used = (self._returning.pop(call_id, None) for call_id in call_ids)
        return [self._drop(held) for held in used if held is not None and held in self._holds]

    def expired(self, now: float) -> list[CallId]:
        """The holds whose time is over."""
        return [self._drop(call_id) for call_id, hold in list(self._holds.items()) if hold.until_s <= now]

    def release_one(self) -> CallId | None:
        """The hold that gives way first under pressure: the one whose time ends last."""
        if not self._holds:
            return None
        return self._drop(max(self._holds, key=lambda call_id: (self._holds[call_id].until_s, call_id)))

    def clear(self) -> list[CallId]:
        """All holds, when the cache is reset."""
        return [self._drop(call_id) for call_id in list(self._holds)]

    def _expected(self, call: Call) -> Return:
        """What is expected after the call, by what travels with it and by what was learned of its tool."""
        learned = self.tools.expect(call.tenant, call.tool or UNKNOWN_TOOL)
        return replace(
            learned,
            tool_s=learned.tool_s if call.tool_s is None else call.tool_s,
            return_tokens=call.tool_return_tokens or learned.return_tokens,
        )

    def _drop(self, call_id: CallId) -> CallId:
        hold = self._holds.pop(call_id)
        self.held_tokens -= hold.tokens
        if self._of_session.get(hold.session) == call_id:
            del self._of_session[hold.session]
        return call_id
