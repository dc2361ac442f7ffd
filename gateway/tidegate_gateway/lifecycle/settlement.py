"""What is settled when a call ends? The tenant's minute, and the call's end in its workflow.

The end of a workflow's call is recorded before the last bytes of its answer go out: a client has seen nothing that is not
recorded.
"""

from tidegate_gateway.lifecycle import admission, tenant_tokens
from tidegate_gateway.observe import call_record
from tidegate_gateway.workflows import workflow_service
from tidegate_policy import gateway_core


class Settlement:
    """Settles calls that ended."""

    def __init__(self, tokens: tenant_tokens.TenantTokens, workflows: workflow_service.Workflows) -> None:
        self._tokens = tokens
        self._workflows = workflows

    async def ended(self, admitted: admission.AdmittedRequest, record: call_record.CallRecord, *, ok: bool) -> None:
        """The call ended, with a whole answer or without one; awaited before the client can know."""
        self._settle(admitted, record, otherwise=admitted.booked if ok else 0)
        if admitted.membership is not None:
            await self._workflows.ended(admitted.membership, ok=ok, share_s=admitted.share_s)

    def cut(self, admitted: admission.AdmittedRequest, record: call_record.CallRecord) -> None:
        """The client went away before the answer was whole."""
        self._settle(admitted, record, otherwise=admitted.booked)
        if admitted.membership is not None:
            self._workflows.cut(admitted.membership)

    def _settle(self, admitted: admission.AdmittedRequest, record: call_record.CallRecord, *, otherwise: int) -> None:
        shown = gateway_core.CallResult(
            ok=False,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.tokens or None if record.output_tokens is None else record.output_tokens,
        )
        used = gateway_core.used_tokens(admitted.call, shown, otherwise=otherwise)
        self._tokens.settle(admitted.tenant, used=used, booked=admitted.booked)
