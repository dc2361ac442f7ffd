"""The JSON objects of the gateway's HTTP API, as typed values (docs/http.md, docs/relqueries.md)."""

import datetime
from typing import Literal

import openai

Outcome = Literal["met", "late", "failed", "cancelled", "expired"]


class StageRecord(openai.BaseModel):
    """A stage of a workflow. Its share, time and slack are milliseconds, and None before its first call."""

    name: str
    state: str
    calls_running: int
    calls_done: int
    share_ms: int | None = None
    time_ms: int | None = None
    slack_ms: int | None = None


class WorkflowRecord(openai.BaseModel):
    """A workflow. `outcome` and `ended_at` are None while it runs."""

    id: str
    state: str
    outcome: Outcome | None = None
    deadline: datetime.datetime
    ended_at: datetime.datetime | None = None
    deadline_ms: int
    left_ms: int
    stages: list[StageRecord]


class RowError(openai.BaseModel):
    """The reason for which a row has no text."""

    message: str
    code: str | None = None


class RowResult(openai.BaseModel):
    """The result of one row of a relQuery. `row` counts from 0 in the order of the request."""

    row: int
    text: str | None = None
    finish_reason: str | None = None
    error: RowError | None = None


class RelQueryRecord(openai.BaseModel):
    """A relQuery. `status` is in_progress, completed, expired, cancelled or failed."""

    id: str
    status: str


class RowPage(openai.BaseModel):
    """The results that a relQuery has after a position; `last` is the next position."""

    data: list[RowResult]
    last: int
    has_more: bool
    relquery: RelQueryRecord
