"""What does this request become: which promises does it carry, and may it come in?

From an `Ask` to a `Job`: the tenant's entitlement bounds what it may claim (urgency) and how much it may use (tokens a
minute), its class fills in targets and bounds those that are claimed, its workflow gives it a budget, perception gives it a
size. Everything that can be refused before the dispatcher sees the call is refused here.

A claim may loosen what the class promises, never tighten it, and no call is due before the fastest engine could have
answered it: a claim that nobody can keep wins nothing over an honest one.
"""

import asyncio
import collections
import dataclasses
import functools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tidegate_gateway import errors, perceive, settings, sse, wire, workflows
from tidegate_gateway.serving import Job
from tidegate_policy.cost import CostModel
from tidegate_policy.model import DEFAULT_URGENCY, Call, CallId, DropReason

Spend = Callable[[str, int, int, bool], Awaitable[float]]
"""(tenant, tokens, tokens a minute, used already) -> seconds until the tenant may come again; 0 = the tokens are booked."""


class Admission:
    """Turns asks into jobs."""

    def __init__(
        self,
        told: settings.Settings,
        perception: perceive.Perception,
        flows: workflows.Workflows,
        *,
        spend: Spend,
        waiting: Callable[[], int],
        costs: Callable[[], list[CostModel]],
        models: Callable[[], list[str]],
    ) -> None:
        self._classes = {item.name: item for item in told.classes}
        self._default_class = told.default_class or ""
        self._tenants = {item.name: item for item in told.tenants}
        self._anyone = settings.Tenant()
        self._crowded = max(told.queue.max_requests // 2, 1)
        self._perception = perception
        self._flows = flows
        self._spend = spend
        self._waiting = waiting
        self._costs = costs
        self._models = models
        self._owed: collections.Counter[str] = collections.Counter()
        """Tokens of each tenant's minute to book yet; negative to give back."""
        self._owing = asyncio.Event()

    async def admit(self, now: float, ask: wire.Ask) -> Job:
        """The job that the ask becomes at `now`, in its workflow if it names one. Raises `GatewayError`."""
        models = self._models()
        if models and ask.model not in models:
            raise wire.unknown_model(ask.model, models)
        tenant = self._tenants.get(ask.tenant, self._anyone)
        if ask.slo_class is not None and self._classes and ask.slo_class not in self._classes:
            known = ", ".join(sorted(self._classes))
            raise errors.BadRequest(f"class {ask.slo_class!r} is unknown; known are {known}", param="x-tidegate-class")
        name = ask.slo_class or self._default_class
        slo_class = self._classes.get(name) or settings.SloClass(name=name)
        if slo_class.sheddable and self._waiting() >= self._crowded:
            raise errors.Refused(DropReason.SATURATED)
        call_id = CallId(f"tg-{secrets.token_hex(12)}")
        prompt_tokens = self._perception.prompt_tokens(ask.model, ask.characters, ask.messages)
        booked = await self._book(tenant, ask, name, prompt_tokens)
        try:
            member = None if ask.workflow is None else await self._flows.join(now, ask, call_id)
        except BaseException:
            if booked and tenant.tokens_per_minute is not None:
                await self._spend(tenant.name, -booked, tenant.tokens_per_minute, True)
            raise
        kind = _kind(ask, member, name)
        predicted, upper = self._perception.output_tokens(kind, ask.max_tokens)
        ttft_s, tpot_s = _latest(ask.ttft_s, slo_class.ttft_s), _latest(ask.tpot_s, slo_class.tpot_s)
        call = Call(
            id=call_id,
            arrival_s=now,
            prompt_tokens=prompt_tokens,
            output_predicted=predicted,
            output_upper=upper,
            sequences=ask.choices,
            model=ask.model,
            tenant=ask.tenant,
            slo_class=slo_class.name,
            weight=tenant.weight * slo_class.weight,
            urgency=max(DEFAULT_URGENCY if ask.urgency is None else ask.urgency, tenant.max_urgency),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            deadline_s=_least(member.deadline_s if member else None, now + ask.deadline_s if ask.deadline_s else None),
            left_s=member.left_s if member else 0.0,
            workflow=member.workflow if member else None,
            stage=ask.stage,
            session=ask.session,
        )
        due_s = _due_s(call, ask, slo_class, member)
        if due_s is not None:
            fastest_s = min((model.call_seconds(call) for model in self._costs()), default=0.0)
            call = dataclasses.replace(call, due_s=max(due_s, now + fastest_s))
        terms = _Terms(call=call, ask=ask, kind=kind, member=member, tenant=tenant, booked=booked)
        return Job(
            call=call,
            ask=ask,
            on_end=functools.partial(self._end, terms),
            on_cut=functools.partial(self._cut, terms),
        )

    async def run(self) -> None:
        """Settles what ended calls used beyond what was booked, or less, until cancelled."""
        while True:
            await self._owing.wait()
            self._owing.clear()
            while self._owed:
                tenant, tokens = self._owed.popitem()
                per_minute = self._tenants[tenant].tokens_per_minute
                if tokens and per_minute is not None:
                    await self._spend(tenant, tokens, per_minute, True)

    async def _book(self, tenant: settings.Tenant, ask: wire.Ask, slo_class: str, prompt_tokens: int) -> int:
        """Books what the call will probably use with a limited tenant; how much. Raises `Refused`."""
        if tenant.tokens_per_minute is None:
            return 0
        each, _ = self._perception.output_tokens(_kind(ask, None, slo_class), ask.max_tokens)
        tokens = prompt_tokens + each * ask.choices
        wait_s = await self._spend(tenant.name, tokens, tenant.tokens_per_minute, False)
        if wait_s > 0:
            raise errors.Refused(DropReason.TENANT_LIMIT, retry_after_s=wait_s)
        return tokens

    async def _end(self, terms: "_Terms", meter: sse.Meter | None, ok: bool) -> None:
        """The call ended, and used what `meter` says."""
        ask = terms.ask
        if ok and meter is not None and meter.prompt_tokens is not None and meter.output_tokens is not None:
            self._perception.on_usage(
                terms.kind,
                characters=ask.characters,
                messages=ask.messages,
                choices=ask.choices,
                prompt_tokens=meter.prompt_tokens,
                output_tokens=meter.output_tokens,
            )
        self._settle(terms, _used(terms.call, meter, otherwise=terms.booked if ok else 0))
        if terms.member is not None:
            await self._flows.ended(terms.member, ok=ok)

    def _cut(self, terms: "_Terms", meter: sse.Meter | None) -> None:
        self._settle(terms, _used(terms.call, meter, otherwise=terms.booked))
        if terms.member is not None:
            self._flows.cut(terms.member)

    def _settle(self, terms: "_Terms", used: int) -> None:
        if terms.tenant.tokens_per_minute is not None:
            self._owe(terms.tenant.name, used - terms.booked)

    def _owe(self, tenant: str, tokens: int) -> None:
        self._owed[tenant] += tokens
        self._owing.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What was agreed at admission and is settled at the end."""

    call: Call
    ask: wire.Ask
    kind: perceive.Kind
    member: workflows.Membership | None
    tenant: settings.Tenant
    booked: int
    """Tokens of the tenant's minute."""


def _used(call: Call, meter: sse.Meter | None, *, otherwise: int) -> int:
    """Tokens that a call has used, as far as its answer tells."""
    if meter is None or not meter.generated:
        return otherwise
    return (call.prompt_tokens if meter.prompt_tokens is None else meter.prompt_tokens) + meter.generated


def _kind(ask: wire.Ask, member: workflows.Membership | None, slo_class: str) -> perceive.Kind:
    """Whose answers this one's length is guessed from."""
    if member is not None:
        return (member.scope, member.stage, ask.model)
    return (ask.tenant, slo_class, ask.model)


def _due_s(
    call: Call, ask: wire.Ask, slo_class: settings.SloClass, member: workflows.Membership | None
) -> float | None:
    """The earliest of the stage's budget, the call's own deadline, and what its targets imply (H-MAS: D_r); its own two no
    earlier than those of its class."""
    claimed_s = _least(ask.deadline_s or slo_class.deadline_s, _implied_s(call.ttft_s, call.tpot_s, call))
    promised_s = _least(slo_class.deadline_s, _implied_s(slo_class.ttft_s, slo_class.tpot_s, call))
    own_s = _latest(claimed_s, promised_s)
    return _least(member.due_s if member else None, None if own_s is None else call.arrival_s + own_s)


def _implied_s(ttft_s: float | None, tpot_s: float | None, call: Call) -> float | None:
    """Seconds from arrival to the last token when both targets are just met."""
    return None if ttft_s is None or tpot_s is None else ttft_s + tpot_s * call.output_predicted


def _least(*instants: float | None) -> float | None:
    return min((instant for instant in instants if instant is not None), default=None)


def _latest(claimed_s: float | None, promised_s: float | None) -> float | None:
    return max((seconds for seconds in (claimed_s, promised_s) if seconds is not None), default=None)
