"""Which promises does a request carry, and may it come in? A `ParsedRequest` becomes an `AdmittedRequest`.

The tenant's entitlement bounds the urgency that the request claims and the tokens that it uses. Its class fills in targets
and bounds claimed ones. Its workflow gives it a budget, and the predictor gives it a size. Every error that does not need
the dispatcher is raised here.

A claim may loosen the promise of its class and never tightens it. No call is due before the fastest engine could have
answered it, so an impossible claim wins nothing over an honest one.
"""

import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from tidegate_gateway import gateway_settings, perceive
from tidegate_gateway.lifecycle import engine_directory, tenant_tokens
from tidegate_gateway.observe import call_record
from tidegate_gateway.openai import error_table, parsed_request
from tidegate_gateway.workflows import stage_budget, workflow_service
from tidegate_policy import dispatcher
from tidegate_policy.model import DEFAULT_URGENCY, Call, CallId, DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A call, and what was agreed at its admission and is settled at its end."""

    call: Call
    request: parsed_request.ParsedRequest
    membership: workflow_service.Membership | None
    tenant: gateway_settings.Tenant
    booked: int
    """Tokens that were booked in the tenant's minute."""


class Admission:
    """Admits requests."""

    def __init__(
        self,
        settings: gateway_settings.Settings,
        *,
        predictor: perceive.Perception,
        workflows: workflow_service.Workflows,
        tokens: tenant_tokens.TenantTokens,
        core: dispatcher.Dispatcher,
        directory: engine_directory.EngineDirectory,
        clock: Callable[[], float],
    ) -> None:
        self._classes = {item.name: item for item in settings.classes}
        self._default_class = settings.default_class or ""
        self._tenants = {item.name: item for item in settings.tenants}
        self._anyone = gateway_settings.Tenant()
        self._crowded = max(settings.queue.max_requests // 2, 1)
        self._grace_s = settings.store.grace_s
        self._predictor = predictor
        self._workflows = workflows
        self._tokens = tokens
        self._core = core
        self._directory = directory
        self._clock = clock

    async def admit(
        self, now: float, request: parsed_request.ParsedRequest, record: call_record.CallRecord
    ) -> AdmittedRequest:
        """Admits the request at `now`, into its workflow if it names one. Raises `GatewayError`."""
        fields, size = request.fields, request.size
        models = self._directory.models
        if models and request.model not in models:
            raise parsed_request.unknown_model(request.model, models)
        tenant = self._tenants.get(fields.tenant, self._anyone)
        slo_class = self._class(request)
        if slo_class.sheddable and self._core.waiting >= self._crowded:
            raise error_table.Shed(DropReason.SATURATED)
        call_id = CallId(f"tg-{secrets.token_hex(12)}")
        prompt_tokens = self._predictor.prompt_tokens(request.model, size.characters, size.messages)
        booked = await self._book(tenant, request, slo_class.name, prompt_tokens)
        try:
            membership = None if fields.workflow is None else await self._workflows.join(request, call_id)
        except BaseException:
            if booked:
                await self._tokens.give_back(tenant, booked)
            raise
        record.scope = _scope(request, membership, slo_class.name)
        call = self._call(now, call_id, request, slo_class, tenant, membership, record.scope, prompt_tokens)
        record.call, record.admitted_at_s = call, self._clock()
        return AdmittedRequest(call=call, request=request, membership=membership, tenant=tenant, booked=booked)

    def _class(self, request: parsed_request.ParsedRequest) -> gateway_settings.SloClass:
        named = request.fields.slo_class
        if named is not None and self._classes and named not in self._classes:
            known = ", ".join(sorted(self._classes))
            param = request.fields.names.slo_class
            raise error_table.BadRequest(f"class {named!r} is unknown; known are {known}", param=param)
        name = named or self._default_class
        return self._classes.get(name) or gateway_settings.SloClass(name=name)

    async def _book(
        self, tenant: gateway_settings.Tenant, request: parsed_request.ParsedRequest, slo_class: str, prompt_tokens: int
    ) -> int:
        """Books the expected tokens of the call with a limited tenant; their number. Raises `Shed`."""
        if tenant.tokens_per_minute is None:
            return 0
        each, _ = self._predictor.output_tokens(_scope(request, None, slo_class), request.size.max_tokens)
        tokens = prompt_tokens + each * request.size.choices
        await self._tokens.book(tenant, tokens)
        return tokens

    def _call(
        self,
        now: float,
        call_id: CallId,
        request: parsed_request.ParsedRequest,
        slo_class: gateway_settings.SloClass,
        tenant: gateway_settings.Tenant,
        membership: workflow_service.Membership | None,
        scope: perceive.Kind,
        prompt_tokens: int,
    ) -> Call:
        fields, size = request.fields, request.size
        grant = None
        if membership is not None:
            costs = self._directory.costs()
            grant = stage_budget.grant(now, membership, self._predictor, costs, request.model, grace_s=self._grace_s)
        predicted, upper = self._predictor.output_tokens(scope, size.max_tokens)
        own_deadline_at_s = now + fields.deadline_s if fields.deadline_s else None
        call = Call(
            id=call_id,
            arrival_s=now,
            prompt_tokens=prompt_tokens,
            output_predicted=predicted,
            output_upper=upper,
            sequences=size.choices,
            model=request.model,
            tenant=fields.tenant,
            slo_class=slo_class.name,
            weight=tenant.weight * slo_class.weight,
            urgency=max(DEFAULT_URGENCY if fields.urgency is None else fields.urgency, tenant.max_urgency),
            ttft_s=_latest(fields.ttft_s, slo_class.ttft_s),
            tpot_s=_latest(fields.tpot_s, slo_class.tpot_s),
            deadline_s=_least(grant.deadline_at_s if grant else None, own_deadline_at_s),
            left_s=grant.rest_s if grant else 0.0,
            workflow=membership.workflow if membership else None,
            stage=fields.stage,
            session=fields.session,
        )
        due_at_s = _due_at_s(call, fields.deadline_s, slo_class, grant)
        if due_at_s is None:
            return call
        fastest_s = min((model.call_seconds(call) for model in self._directory.costs()), default=0.0)
        return dataclasses.replace(call, due_s=max(due_at_s, now + fastest_s))


def _scope(
    request: parsed_request.ParsedRequest, membership: workflow_service.Membership | None, slo_class: str
) -> perceive.Kind:
    """The scope whose calls are like this one."""
    if membership is not None:
        return (membership.scope, membership.stage, request.model)
    return (request.fields.tenant, slo_class, request.model)


def _due_at_s(
    call: Call, deadline_s: float | None, slo_class: gateway_settings.SloClass, grant: stage_budget.StageGrant | None
) -> float | None:
    """The earliest of the stage's budget, the call's own deadline and the instant that its targets imply (H-MAS: D_r).

    The call's own two are no earlier than those of its class.
    """
    claimed_s = _least(deadline_s or slo_class.deadline_s, _implied_s(call.ttft_s, call.tpot_s, call))
    promised_s = _least(slo_class.deadline_s, _implied_s(slo_class.ttft_s, slo_class.tpot_s, call))
    own_s = _latest(claimed_s, promised_s)
    return _least(grant.due_at_s if grant else None, None if own_s is None else call.arrival_s + own_s)


def _implied_s(ttft_s: float | None, tpot_s: float | None, call: Call) -> float | None:
    """Seconds from arrival to the last token when both targets are just met."""
    return None if ttft_s is None or tpot_s is None else ttft_s + tpot_s * call.output_predicted


def _least(*instants: float | None) -> float | None:
    return min((instant for instant in instants if instant is not None), default=None)


def _latest(claimed_s: float | None, promised_s: float | None) -> float | None:
    return max((seconds for seconds in (claimed_s, promised_s) if seconds is not None), default=None)
