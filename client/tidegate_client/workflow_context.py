"""A workflow as a context manager: it begins with the block, its calls join it, and it ends with the block.

The deadline counts from the beginning of the block. If the block ends without an exception, the workflow is completed and
`record.outcome` is `met` or `late`. An exception cancels the workflow and its running calls.
"""

import dataclasses
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Self

import openai

from tidegate_client import call_headers
from tidegate_client.answers import Outcome, WorkflowRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A declared stage: it begins after the stages that it names, makes `parallel` calls at the same time, and repeats
    them at most `repeat` times."""

    name: str
    after: Sequence[str] = ()
    parallel: int | None = None
    repeat: int = 1


class _Declared(Generic[call_headers.Client]):
    """The part that both kinds of workflows share: the declaration, the client, and the last record."""

    _kind: ClassVar[type[openai.OpenAI | openai.AsyncOpenAI]]
    """Of the client."""

    def __init__(
        self,
        client: call_headers.Client,
        *,
        deadline_s: float | None = None,
        template: str | None = None,
        stages: Sequence[Stage] = (),
        id: str | None = None,
        tenant: str | None = None,
        slo_class: str | None = None,
        session: str | None = None,
    ) -> None:
        """A workflow has a deadline, or a template of the settings. Without declared stages it may have any stage.
        Raises `TypeError` and `ValueError` for arguments that cannot be a workflow."""
        self._check(client, stages)
        if deadline_s is None and template is None:
            raise ValueError("a workflow needs deadline_s, its seconds from the beginning, or template")
        self._headers = call_headers.headers(tenant=tenant, slo_class=slo_class, session=session)
        self._client: call_headers.Client = call_headers.with_headers(client, self._headers)
        self._declaration: dict[str, Any] = {
            name: value
            for name, value in (
                ("id", id),
                ("deadline_ms", call_headers.milliseconds("deadline_s", deadline_s)),
                ("template", template),
                ("stages", [_stage(stage) for stage in stages]),
            )
            if value
        }
        self._record: WorkflowRecord | None = None
        self._ends_at_s = 0.0

    @classmethod
    def _check(cls, client: object, stages: object) -> None:
        """Raises `TypeError` for a client of another kind, and for stages that are no `Stage`."""
        if not isinstance(client, cls._kind):
            raise TypeError(
                f"{cls.__name__} needs an openai.{cls._kind.__name__} as its first argument, not {client!r}"
            )
        for stage in stages if isinstance(stages, list | tuple) else [stages]:
            if not isinstance(stage, Stage):
                raise TypeError(f"stages must be a list of tidegate_client.Stage(name=...), and has {stage!r}")

    @property
    def record(self) -> WorkflowRecord:
        """The workflow as the gateway described it last; after the block, as it ended."""
        if self._record is None:
            raise RuntimeError("the workflow begins with its `with` block")
        return self._record

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def outcome(self) -> Outcome | None:
        """`met`, `late`, `failed`, `cancelled` or `expired`; None while the workflow runs."""
        return self.record.outcome

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, by the clock of this process; negative after it."""
        return self._ends_at_s - time.monotonic()

    def stage(self, name: str, *, urgency: int | None = None, deadline_s: float | None = None) -> call_headers.Client:
        """The client for the calls of a stage. An earlier deadline, from now, counts for these calls only."""
        joined = call_headers.headers(workflow=self.id, stage=name, urgency=urgency, deadline_s=deadline_s)
        return call_headers.with_headers(self._client, joined)

    def _path(self, *rest: str) -> str:
        return "/".join(["/workflows", *(urllib.parse.quote(part, safe="") for part in (self.id, *rest))])

    def _begun(self, record: WorkflowRecord) -> None:
        self._record = record
        self._ends_at_s = time.monotonic() + record.left_ms / 1000


class Workflow(_Declared[openai.OpenAI]):
    """A workflow of the calls of an `openai.OpenAI`. Its methods may be used by several threads."""

    _kind = openai.OpenAI

    def __enter__(self) -> Self:
        self._begun(self._client.post("/workflows", cast_to=WorkflowRecord, body=self._declaration))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            try:
                if kind is None:
                    self._record = self._client.post(self._path("complete"), cast_to=WorkflowRecord)
                else:
                    self._record = self._client.delete(self._path(), cast_to=WorkflowRecord)
            except openai.ConflictError:  # it had ended before
                self.refresh()
        except openai.APIError:
            if kind is None:  # else the exception of the block is raised
                raise

    def refresh(self) -> WorkflowRecord:
        """The workflow as it is now."""
        self._record = self._client.get(self._path(), cast_to=WorkflowRecord)
        return self._record

    def complete_stage(self, name: str) -> WorkflowRecord:
        """Completes a stage that makes no calls, such as that of a tool."""
        self._record = self._client.post(self._path("stages", name, "complete"), cast_to=WorkflowRecord)
        return self._record


class AsyncWorkflow(_Declared[openai.AsyncOpenAI]):
    """A workflow of the calls of an `openai.AsyncOpenAI`."""

    _kind = openai.AsyncOpenAI

    async def __aenter__(self) -> Self:
        self._begun(await self._client.post("/workflows", cast_to=WorkflowRecord, body=self._declaration))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            try:
                if kind is None:
                    self._record = await self._client.post(self._path("complete"), cast_to=WorkflowRecord)
                else:
                    self._record = await self._client.delete(self._path(), cast_to=WorkflowRecord)
            except openai.ConflictError:  # it had ended before
                await self.refresh()
        except openai.APIError:
            if kind is None:  # else the exception of the block is raised
                raise

    async def refresh(self) -> WorkflowRecord:
        """The workflow as it is now."""
        self._record = await self._client.get(self._path(), cast_to=WorkflowRecord)
        return self._record

    async def complete_stage(self, name: str) -> WorkflowRecord:
        """Completes a stage that makes no calls, such as that of a tool."""
        self._record = await self._client.post(self._path("stages", name, "complete"), cast_to=WorkflowRecord)
        return self._record


def _stage(stage: Stage) -> dict[str, Any]:
    declared: dict[str, Any] = {"name": stage.name, "after": list(stage.after), "repeat": stage.repeat}
    return declared if stage.parallel is None else declared | {"parallel": stage.parallel}
