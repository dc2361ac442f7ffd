"""What does this request become: which promises does it carry, and may it come in?

From an `Ask` to a `Job`: the tenant's entitlement bounds what it may claim (urgency) and how much it may use (tokens a
minute), its class fills in targets, its workflow gives it a budget, perception gives it a size. Everything that can be
refused before the dispatcher sees the call is refused here.
"""

import functools
import secrets
from collections.abc import Awaitable, Callable

from tidegate_gateway import errors, perceive, settings, sse, wire, workflows
from tidegate_gateway.serving import Job
from tidegate_policy.model import DEFAULT_URGENCY, Call, CallId, DropReason

Spend = Callable[[str, int, int], Awaitable[float]]
"""(tenant, tokens, tokens a minute) -> seconds until the tenant may come again; 0 = now, and the tokens are booked."""


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
        self._models = models

    async def admit(self, now: float, ask: wire.Ask) -> Job:
        """The job that the ask becomes at `now`, in its workflow if it names one. Raises `GatewayError`."""
        models = self._models()
        if models and ask.model not in models:
            raise wire.unknown_model(ask.model, models)
        tenant = self._tenants.get(ask.tenant, self._anyone)
        name = ask.slo_class or self._default_class
        slo_class = self._classes.get(name) or settings.SloClass(name=name)
        if slo_class.sheddable and self._waiting() >= self._crowded:
            raise errors.Refused(DropReason.SATURATED)
        call_id = CallId(f"tg-{secrets.token_hex(12)}")
        prompt_tokens = self._perception.prompt_tokens(ask.model, ask.characters, ask.messages)
        if tenant.tokens_per_minute is not None:
            wait_s = await self._spend(tenant.name, prompt_tokens, tenant.tokens_per_minute)
            if wait_s > 0:
                raise errors.Refused(DropReason.TENANT_LIMIT, retry_after_s=wait_s)
        member = None if ask.workflow is None else await self._flows.join(now, ask, call_id)
        kind = self._kind(ask, member, slo_class)
        predicted, upper = self._perception.output_tokens(kind, ask.max_tokens, ask.choices)
        ttft_s, tpot_s = ask.ttft_s or slo_class.ttft_s, ask.tpot_s or slo_class.tpot_s
        call = Call(
            id=call_id,
            arrival_s=now,
            prompt_tokens=prompt_tokens,
            output_predicted=predicted,
            output_upper=upper,
            model=ask.model,
            tenant=ask.tenant,
            slo_class=slo_class.name,
            weight=tenant.weight * slo_class.weight,
            urgency=max(DEFAULT_URGENCY if ask.urgency is None else ask.urgency, tenant.max_urgency),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            due_s=_due_s(now, ask, slo_class, member, ttft_s, tpot_s, predicted),
            deadline_s=_least(member.deadline_s if member else None, now + ask.deadline_s if ask.deadline_s else None),
            left_s=member.left_s if member else 0.0,
            workflow=member.workflow if member else None,
            stage=ask.stage,
            session=ask.session,
        )
        return Job(
            call=call,
            ask=ask,
            on_end=functools.partial(self._flows.ended, member) if member else None,
            on_cut=functools.partial(self._flows.cut, member) if member else None,
            on_usage=functools.partial(self._learn, kind, ask),
        )

    def _kind(self, ask: wire.Ask, member: workflows.Membership | None, slo_class: settings.SloClass) -> perceive.Kind:
        if member is not None:
            return (member.scope, member.stage, ask.model)
        return (ask.tenant, slo_class.name, ask.model)

    def _learn(self, kind: perceive.Kind, ask: wire.Ask, meter: sse.Meter) -> None:
        if meter.prompt_tokens is not None and meter.output_tokens is not None:
            self._perception.on_usage(
                kind,
                characters=ask.characters,
                messages=ask.messages,
                choices=ask.choices,
                prompt_tokens=meter.prompt_tokens,
                output_tokens=meter.output_tokens,
            )


def _due_s(
    now: float,
    ask: wire.Ask,
    slo_class: settings.SloClass,
    member: workflows.Membership | None,
    ttft_s: float | None,
    tpot_s: float | None,
    predicted: int,
) -> float | None:
    """The earliest of the stage's budget, the call's own deadline, and what its targets imply (H-MAS: D_r)."""
    own_s = ask.deadline_s or slo_class.deadline_s
    implied_s = ttft_s + tpot_s * predicted if ttft_s is not None and tpot_s is not None else None
    return _least(
        member.due_s if member else None,
        None if own_s is None else now + own_s,
        None if implied_s is None else now + implied_s,
    )


def _least(*instants: float | None) -> float | None:
    return min((instant for instant in instants if instant is not None), default=None)
