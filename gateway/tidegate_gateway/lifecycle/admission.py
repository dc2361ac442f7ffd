"""May this request come in, and as which call? A `ParsedRequest` becomes an `AdmittedRequest`.

The gateway core decides (`draft`, `stage_grant`, `promise`). Between its steps this module does what waits for the store:
it books the tenant's tokens and enters the call into its workflow.
"""

import secrets
from collections.abc import Callable

from tidegate_gateway import loop_steps
from tidegate_gateway.lifecycle import engine_directory, tenant_tokens
from tidegate_gateway.observe import call_record
from tidegate_gateway.openai import engine_body, engine_fields, error_table, parsed_request, prompt_prefix
from tidegate_gateway.workflows import workflow_service
from tidegate_policy import gateway_core, immutable
from tidegate_policy.admit import entitlements, promises
from tidegate_policy.model import Call, CallId, DropReason

PACKED_CHARACTERS = 16 * 1024
"""Longer prompts, and those with images or sounds, wait as JSON."""
LARGE_CHARACTERS = 64 * 1024
"""The JSON of longer prompts, and of costly bodies, is made in a step of its own."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A call, and what was agreed at its admission and is settled at its end."""

    call: Call
    request: parsed_request.ParsedRequest
    membership: workflow_service.Membership | None
    tenant: entitlements.Tenant
    booked: int
    """Tokens that were booked in the tenant's minute."""
    share_s: float | None = None
    """The seconds that its workflow gave it; None = it is in none."""

    @property
    def sequence_tokens(self) -> int:
        """The tokens of one sequence of the call: its prompt, and what it may generate, where the client says that."""
        size = self.request.size
        return self.call.prompt_tokens // size.prompts + (size.max_tokens or 1)


class Admission:
    """Admits requests."""

    def __init__(
        self,
        core: gateway_core.GatewayCore,
        *,
        directory: engine_directory.EngineDirectory,
        workflows: workflow_service.Workflows,
        tokens: tenant_tokens.TenantTokens,
        fields: engine_fields.EngineFields,
        grace_s: float,
        isolate_tenants: bool,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._directory = directory
        self._workflows = workflows
        self._tokens = tokens
        self._fields = fields
        self._grace_s = grace_s
        self._isolate_tenants = isolate_tenants
        self._clock = clock
        self._steps = loop_steps.LoopSteps()

    async def admit(
        self, now: float, request: parsed_request.ParsedRequest, record: call_record.CallRecord
    ) -> AdmittedRequest:
        """Admits the request at `now`, into its workflow if it names one. Raises `GatewayError`."""
        models = self._directory.models
        if models and request.model not in models:
            raise parsed_request.unknown_model(request.model, models)
        self._fields.check(request.endpoint, request.body, request.fields.slo_class)
        call_id = CallId(f"tg-{secrets.token_hex(12)}")
        draft = self._draft(now, call_id, request, record)
        if request.is_costly or request.size.media or request.size.characters > PACKED_CHARACTERS:
            if request.is_costly or request.size.characters > LARGE_CHARACTERS:
                await self._steps.of(request.fields.tenant).next()
            engine_body.pack(request.body)
        booked = 0
        if draft.tenant.tokens_per_minute is not None:
            booked = draft.tokens_to_book
            await self._tokens.book(draft.tenant, booked)
        try:
            membership = None if request.fields.workflow is None else await self._workflows.join(request, call_id)
        except BaseException:
            self._tokens.settle(draft.tenant, used=0, booked=booked)
            raise
        grant = None if membership is None else self._grant(now, membership, request.model)
        call = self._core.promise(draft, grant)
        record.call, record.admitted_at_s = call, self._clock()
        return AdmittedRequest(
            call=call,
            request=request,
            membership=membership,
            tenant=draft.tenant,
            booked=booked,
            share_s=None if grant is None else grant.due_at_s - now,
        )

    def _draft(
        self, now: float, call_id: CallId, request: parsed_request.ParsedRequest, record: call_record.CallRecord
    ) -> promises.Draft:
        fields, size, longest = request.fields, request.size, self._directory.contexts.longest
        if self._isolate_tenants:
            prompt_prefix.isolate(request.body, fields.tenant)
        prefix = prompt_prefix.read(request.endpoint, request.body, request.model, size)
        facts = promises.CallFacts(
            id=call_id,
            model=request.model,
            tenant=fields.tenant,
            slo_class=fields.slo_class,
            claims=promises.Claims(
                urgency=fields.urgency, ttft_s=fields.ttft_s, tpot_s=fields.tpot_s, deadline_s=fields.deadline_s
            ),
            characters=size.characters,
            media=size.media,
            most_prompt_tokens=None if longest is None else longest * size.prompts,
            messages=size.messages,
            sequences=size.choices,
            max_tokens=size.max_tokens,
            session=fields.session,
            workflow=self._workflows.known_as(fields),
            stage=fields.stage,
            group=request.group,
            group_size=request.group_size,
            blocks=prefix.blocks,
            block_share=prefix.share,
            offers_tools=request.offers_tools,
        )
        try:
            record.has_target = self._core.has_target(facts)
            draft = self._core.draft(now, facts)
        except gateway_core.UnknownSloClass as error:
            raise error_table.BadRequest(str(error), param=fields.names.slo_class) from error
        if isinstance(draft, DropReason):
            raise error_table.Shed(draft)
        return draft

    def _grant(self, now: float, membership: workflow_service.Membership, model: str) -> promises.StageGrant:
        record = membership.record
        deadline_at_s = self._clock() + (record.deadline_ms - record.now_ms) / 1000
        facts = gateway_core.WorkflowFacts(
            id=membership.workflow,
            tenant=record.tenant,
            template=record.template,
            deadline_at_s=deadline_at_s,
            cutoff_at_s=deadline_at_s + self._grace_s,
            is_over=record.state != "running",
            stages=[
                gateway_core.StageFacts(
                    name=stage.name,
                    after=stage.after,
                    parallel=stage.parallel,
                    passes=stage.passes,
                    done_calls=stage.done,
                    over=stage.over,
                    declared=stage.declared,
                )
                for stage in record.stages
            ],
        )
        return self._core.stage_grant(now, facts, membership.stage, model)
