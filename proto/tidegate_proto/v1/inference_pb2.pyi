from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "stop", "seed", "request_id", "tenant", "slo_class", "urgency", "deadline_ms", "slo_ttft_ms", "slo_tpot_ms", "workflow", "stage", "session")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    messages: Messages
    max_tokens: int
    temperature: float
    top_p: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    request_id: str
    tenant: str
    slo_class: str
    urgency: int
    deadline_ms: int
    slo_ttft_ms: int
    slo_tpot_ms: int
    workflow: str
    stage: str
    session: str
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., slo_class: _Optional[str] = ..., urgency: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., slo_ttft_ms: _Optional[int] = ..., slo_tpot_ms: _Optional[int] = ..., workflow: _Optional[str] = ..., stage: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("path", "body", "request_id", "tenant", "slo_class", "urgency", "deadline_ms", "slo_ttft_ms", "slo_tpot_ms", "workflow", "stage", "session")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    body: bytes
    request_id: str
    tenant: str
    slo_class: str
    urgency: int
    deadline_ms: int
    slo_ttft_ms: int
    slo_tpot_ms: int
    workflow: str
    stage: str
    session: str
    def __init__(self, path: _Optional[str] = ..., body: _Optional[bytes] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., slo_class: _Optional[str] = ..., urgency: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., slo_ttft_ms: _Optional[int] = ..., slo_tpot_ms: _Optional[int] = ..., workflow: _Optional[str] = ..., stage: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class CallResponse(_message.Message):
    __slots__ = ("accepted", "body")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    body: bytes
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., body: _Optional[bytes] = ...) -> None: ...

class SubmitRelQueryRequest(_message.Message):
    __slots__ = ("model", "text", "messages", "list", "file", "rows_url", "endpoint", "max_tokens", "more_fields", "id", "idempotency_key", "tenant", "slo_class", "urgency", "deadline_ms", "slo_ttft_ms", "slo_tpot_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ROWS_URL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELDS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    messages: Messages
    list: RowList
    file: RowFile
    rows_url: str
    endpoint: str
    max_tokens: int
    more_fields: str
    id: str
    idempotency_key: str
    tenant: str
    slo_class: str
    urgency: int
    deadline_ms: int
    slo_ttft_ms: int
    slo_tpot_ms: int
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., list: _Optional[_Union[RowList, _Mapping]] = ..., file: _Optional[_Union[RowFile, _Mapping]] = ..., rows_url: _Optional[str] = ..., endpoint: _Optional[str] = ..., max_tokens: _Optional[int] = ..., more_fields: _Optional[str] = ..., id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., tenant: _Optional[str] = ..., slo_class: _Optional[str] = ..., urgency: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., slo_ttft_ms: _Optional[int] = ..., slo_tpot_ms: _Optional[int] = ...) -> None: ...

class RowList(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    def __init__(self, rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RowFile(_message.Message):
    __slots__ = ("format", "content")
    class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FORMAT_UNSPECIFIED: _ClassVar[RowFile.Format]
        CSV: _ClassVar[RowFile.Format]
        JSON_LINES: _ClassVar[RowFile.Format]
    FORMAT_UNSPECIFIED: RowFile.Format
    CSV: RowFile.Format
    JSON_LINES: RowFile.Format
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    format: RowFile.Format
    content: bytes
    def __init__(self, format: _Optional[_Union[RowFile.Format, str]] = ..., content: _Optional[bytes] = ...) -> None: ...

class GetRelQueryRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RowsRequest(_message.Message):
    __slots__ = ("id", "after")
    ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    id: str
    after: int
    def __init__(self, id: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class RelQueryEvent(_message.Message):
    __slots__ = ("relquery", "row")
    RELQUERY_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    relquery: RelQuery
    row: RowResult
    def __init__(self, relquery: _Optional[_Union[RelQuery, _Mapping]] = ..., row: _Optional[_Union[RowResult, _Mapping]] = ...) -> None: ...

class RelQuery(_message.Message):
    __slots__ = ("id", "status", "model", "tenant", "total", "completed", "failed", "left_ms", "created_at", "expires_at", "ended_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    status: str
    model: str
    tenant: str
    total: int
    completed: int
    failed: int
    left_ms: int
    created_at: str
    expires_at: str
    ended_at: str
    def __init__(self, id: _Optional[str] = ..., status: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., total: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., left_ms: _Optional[int] = ..., created_at: _Optional[str] = ..., expires_at: _Optional[str] = ..., ended_at: _Optional[str] = ...) -> None: ...

class RowResult(_message.Message):
    __slots__ = ("number", "row", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error", "json")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    number: int
    row: int
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    error: RowError
    json: bytes
    def __init__(self, number: _Optional[int] = ..., row: _Optional[int] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., error: _Optional[_Union[RowError, _Mapping]] = ..., json: _Optional[bytes] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("code", "message", "param")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Messages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "text", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    text: str
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., text: _Optional[str] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "engine", "queue_ms", "slack_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    SLACK_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engine: str
    queue_ms: int
    slack_ms: int
    def __init__(self, request_id: _Optional[str] = ..., engine: _Optional[str] = ..., queue_ms: _Optional[int] = ..., slack_ms: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "prompt_tokens", "completion_tokens")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, finish_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class StageSpec(_message.Message):
    __slots__ = ("name", "after", "parallel", "repeat")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    name: str
    after: _containers.RepeatedScalarFieldContainer[str]
    parallel: int
    repeat: int
    def __init__(self, name: _Optional[str] = ..., after: _Optional[_Iterable[str]] = ..., parallel: _Optional[int] = ..., repeat: _Optional[int] = ...) -> None: ...

class CreateWorkflowRequest(_message.Message):
    __slots__ = ("template", "deadline_ms", "tenant", "stages", "idempotency_key", "id")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    template: str
    deadline_ms: int
    tenant: str
    stages: _containers.RepeatedCompositeFieldContainer[StageSpec]
    idempotency_key: str
    id: str
    def __init__(self, template: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StageSpec, _Mapping]]] = ..., idempotency_key: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class GetWorkflowRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListWorkflowsRequest(_message.Message):
    __slots__ = ("state", "limit")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    state: str
    limit: int
    def __init__(self, state: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListWorkflowsResponse(_message.Message):
    __slots__ = ("workflows", "has_more")
    WORKFLOWS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    workflows: _containers.RepeatedCompositeFieldContainer[Workflow]
    has_more: bool
    def __init__(self, workflows: _Optional[_Iterable[_Union[Workflow, _Mapping]]] = ..., has_more: _Optional[bool] = ...) -> None: ...

class CompleteStageRequest(_message.Message):
    __slots__ = ("id", "stage", "idempotency_key")
    ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    stage: str
    idempotency_key: str
    def __init__(self, id: _Optional[str] = ..., stage: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class CompleteWorkflowRequest(_message.Message):
    __slots__ = ("id", "idempotency_key")
    ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    idempotency_key: str
    def __init__(self, id: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class CancelWorkflowRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Workflow(_message.Message):
    __slots__ = ("id", "state", "template", "tenant", "deadline_ms", "left_ms", "stages", "outcome", "ended_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    template: str
    tenant: str
    deadline_ms: int
    left_ms: int
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    outcome: str
    ended_at: str
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., template: _Optional[str] = ..., tenant: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., left_ms: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., outcome: _Optional[str] = ..., ended_at: _Optional[str] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("name", "state", "after", "parallel", "calls_running", "calls_done", "share_ms", "time_ms", "slack_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CALLS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    CALLS_DONE_FIELD_NUMBER: _ClassVar[int]
    SHARE_MS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    SLACK_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    after: _containers.RepeatedScalarFieldContainer[str]
    parallel: int
    calls_running: int
    calls_done: int
    share_ms: int
    time_ms: int
    slack_ms: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., after: _Optional[_Iterable[str]] = ..., parallel: _Optional[int] = ..., calls_running: _Optional[int] = ..., calls_done: _Optional[int] = ..., share_ms: _Optional[int] = ..., time_ms: _Optional[int] = ..., slack_ms: _Optional[int] = ...) -> None: ...
