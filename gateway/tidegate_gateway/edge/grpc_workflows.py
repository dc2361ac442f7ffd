"""Workflows over gRPC; each method has the meaning of its HTTP route."""

from tidegate_gateway.edge import grpc_answers, grpc_requests
from tidegate_gateway.openai import error_table
from tidegate_gateway.store import store_contract
from tidegate_gateway.workflows import workflow_service, workflow_view
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

Context = grpc_answers.Context


class Workflows(inference_pb2_grpc.WorkflowsServicer):
    """Workflows."""

    def __init__(self, workflows: workflow_service.Workflows, write_s: float) -> None:
        self._workflows = workflows
        self._write_s = write_s

    async def Create(self, request: inference_pb2.CreateWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        async def create(by: workflow_service.Requester) -> store_contract.Record:
            return await self._workflows.create(grpc_requests.declaration(request), by)

        return await grpc_answers.answer(context, create, _workflow, request.idempotency_key)

    async def Get(self, request: inference_pb2.GetWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        return await grpc_answers.answer(context, lambda by: self._workflows.get(request.id, by), _workflow)

    async def List(
        self, request: inference_pb2.ListWorkflowsRequest, context: Context
    ) -> inference_pb2.ListWorkflowsResponse:
        try:
            by, limit = (
                grpc_requests.requester(grpc_answers.metadata(context)),
                request.limit or workflow_service.LISTED,
            )
            shown, more = await self._workflows.listed(request.state or None, limit, by, _workflow)
        except error_table.GatewayError as error:
            await grpc_answers.abort(context, error)
        return inference_pb2.ListWorkflowsResponse(workflows=shown, has_more=more)

    async def CompleteStage(
        self, request: inference_pb2.CompleteStageRequest, context: Context
    ) -> inference_pb2.Workflow:
        return await grpc_answers.answer(
            context,
            lambda by: self._workflows.complete_stage(request.id, request.stage, by),
            _workflow,
            request.idempotency_key,
        )

    async def Complete(
        self, request: inference_pb2.CompleteWorkflowRequest, context: Context
    ) -> inference_pb2.Workflow:
        return await grpc_answers.answer(
            context, lambda by: self._workflows.complete(request.id, by), _workflow, request.idempotency_key
        )

    async def Cancel(self, request: inference_pb2.CancelWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        return await grpc_answers.answer(context, lambda by: self._workflows.cancel(request.id, by), _workflow)

    async def Watch(self, request: inference_pb2.GetWorkflowRequest, context: Context) -> None:
        try:
            by = grpc_requests.requester(grpc_answers.metadata(context))
            async for record in self._workflows.watch(request.id, by):
                if record is not None:
                    await grpc_answers.write(context, self._write_s, _workflow(record))
        except error_table.GatewayError as error:
            await grpc_answers.abort(context, error)


def _workflow(record: store_contract.Record) -> inference_pb2.Workflow:
    return inference_pb2.Workflow(
        id=record.client_id,
        state=record.state,
        template=record.template,
        tenant=record.tenant,
        deadline_ms=record.deadline_ms - record.created_ms,
        left_ms=workflow_view.left_ms(record),
        outcome=record.outcome or "",
        ended_at="" if record.ended_ms is None else workflow_view.instant(record.ended_ms),
        stages=[
            inference_pb2.Stage(
                name=stage.name,
                state=workflow_view.stage_state(record, stage),
                after=stage.after,
                parallel=stage.parallel,
                calls_running=stage.running,
                calls_done=stage.done,
                share_ms=stage.share_ms,
                time_ms=workflow_view.time_ms(record, stage),
                slack_ms=workflow_view.slack_ms(record, stage),
            )
            for stage in record.stages
        ],
    )
