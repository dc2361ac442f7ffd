"""What follows from the end of a call? Learning, the tenant's minute, and the call's end in its workflow.

The end of a workflow's call is recorded before the last bytes of its answer go out: a client has seen nothing that is not
recorded.
"""

from tidegate_gateway import perceive
from tidegate_gateway.lifecycle import admission, engine_directory, tenant_tokens
from tidegate_gateway.observe import call_record
from tidegate_gateway.workflows import workflow_service
from tidegate_policy.model import Call


class Settlement:
    """Settles calls that ended."""

    def __init__(
        self,
        predictor: perceive.Perception,
        tokens: tenant_tokens.TenantTokens,
        workflows: workflow_service.Workflows,
        directory: engine_directory.EngineDirectory,
    ) -> None:
        self._predictor = predictor
        self._tokens = tokens
        self._workflows = workflows
        self._directory = directory

    async def ended(
        self, admitted: admission.AdmittedRequest, record: call_record.CallRecord, *, ok: bool
    ) -> None:
        """The call ended, with a whole answer or without one; awaited before the client can know."""
        if ok and record.prompt_tokens is not None and record.output_tokens is not None:
            self._predictor.on_usage(
                record.scope,
                characters=record.characters,
                messages=record.messages,
                choices=record.choices,
                prompt_tokens=record.prompt_tokens,
                output_tokens=record.output_tokens,
            )
        if ok:
            self._directory.on_answer(record)
        used = _used(admitted.call, record, otherwise=admitted.booked if ok else 0)
        self._tokens.settle(admitted.tenant, used=used, booked=admitted.booked)
        if admitted.membership is not None:
            await self._workflows.ended(admitted.membership, ok=ok)

    def cut(self, admitted: admission.AdmittedRequest, record: call_record.CallRecord) -> None:
        """The client went away before the answer was whole."""
        used = _used(admitted.call, record, otherwise=admitted.booked)
        self._tokens.settle(admitted.tenant, used=used, booked=admitted.booked)
        if admitted.membership is not None:
            self._workflows.cut(admitted.membership)


def _used(call: Call, record: call_record.CallRecord, *, otherwise: int) -> int:
    """Tokens that a call has used, as far as its answer tells."""
    if not record.tokens:
        return otherwise
    return (call.prompt_tokens if record.prompt_tokens is None else record.prompt_tokens) + record.tokens
