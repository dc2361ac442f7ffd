"""Tidegate for programs that use the OpenAI SDK: workflows with deadlines, targets of calls, and relQueries.

The clients of the SDK do not change: this package adds headers to their calls and reads outcomes (docs/client.md).
It needs `openai` and nothing else of Tidegate.
"""

from tidegate_client.answers import RelQueryRecord, RowError, RowResult, StageRecord, WorkflowRecord
from tidegate_client.call_headers import headers
from tidegate_client.relquery_errors import RelQueryIncomplete
from tidegate_client.relquery_rows import async_relquery, relquery
from tidegate_client.workflow_context import AsyncWorkflow, Stage, Workflow

__all__ = [
    "AsyncWorkflow",
    "RelQueryIncomplete",
    "RelQueryRecord",
    "RowError",
    "RowResult",
    "Stage",
    "StageRecord",
    "Workflow",
    "WorkflowRecord",
    "async_relquery",
    "headers",
    "relquery",
]
