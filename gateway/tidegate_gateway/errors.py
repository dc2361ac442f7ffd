"""Every way in which a call or a workflow request can be refused, in one table.

    GatewayError            a refusal: one row of the table plus a sentence
    ├── Refused             the dispatcher dropped the call (a `DropReason`)
    ├── BadRequest          the request is wrong; the sentence says where and what is right
    └── EngineTrouble       the engine that held the call failed it

Each code has one HTTP status, one gRPC status and one OpenAI error type; `web` and `rpc` only print what stands here.
The sentences say what to do next.
"""

import math
from dataclasses import dataclass

import orjson

from tidegate_policy.model import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    status: int
    grpc: str
    """Name of the `grpc.StatusCode`."""
    type: str
    """`error.type` of the OpenAI error object."""


TABLE: dict[str, Row] = {
    "invalid_request": Row(status=400, grpc="INVALID_ARGUMENT", type="invalid_request_error"),
    "model_not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "workflow_not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "stage_not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "method_not_allowed": Row(status=405, grpc="UNIMPLEMENTED", type="invalid_request_error"),
    "request_timeout": Row(status=408, grpc="DEADLINE_EXCEEDED", type="invalid_request_error"),
    "workflow_ended": Row(status=409, grpc="FAILED_PRECONDITION", type="invalid_request_error"),
    "workflow_exists": Row(status=409, grpc="ALREADY_EXISTS", type="invalid_request_error"),
    "stage_already_done": Row(status=409, grpc="FAILED_PRECONDITION", type="invalid_request_error"),
    "body_too_large": Row(status=413, grpc="RESOURCE_EXHAUSTED", type="invalid_request_error"),
    "path_too_long": Row(status=414, grpc="INVALID_ARGUMENT", type="invalid_request_error"),
    "idempotency_key_reused": Row(status=422, grpc="INVALID_ARGUMENT", type="invalid_request_error"),
    "headers_too_large": Row(status=431, grpc="RESOURCE_EXHAUSTED", type="invalid_request_error"),
    "internal_error": Row(status=500, grpc="INTERNAL", type="server_error"),
    "engine_failed": Row(status=502, grpc="UNAVAILABLE", type="server_error"),
    "engine_timeout": Row(status=504, grpc="DEADLINE_EXCEEDED", type="server_error"),
    DropReason.SATURATED: Row(status=429, grpc="RESOURCE_EXHAUSTED", type="rate_limit_error"),
    DropReason.TTL_EXPIRED: Row(status=429, grpc="RESOURCE_EXHAUSTED", type="rate_limit_error"),
    DropReason.DEADLINE_UNREACHABLE: Row(status=429, grpc="DEADLINE_EXCEEDED", type="rate_limit_error"),
    DropReason.TENANT_LIMIT: Row(status=429, grpc="RESOURCE_EXHAUSTED", type="rate_limit_error"),
    DropReason.EVICTED: Row(status=429, grpc="RESOURCE_EXHAUSTED", type="rate_limit_error"),
    DropReason.DRAINING: Row(status=503, grpc="UNAVAILABLE", type="server_error"),
    DropReason.NO_ENGINES: Row(status=503, grpc="UNAVAILABLE", type="server_error"),
    DropReason.STORE_UNAVAILABLE: Row(status=503, grpc="UNAVAILABLE", type="server_error"),
}

FINAL = {DropReason.DEADLINE_UNREACHABLE}
"""Shed for good: OpenAI clients, which repeat any 429, are told not to, as they are for a 409."""

SENTENCES: dict[DropReason, str] = {
    DropReason.SATURATED: "too many calls wait already; retry after the time in Retry-After",
    DropReason.TTL_EXPIRED: "no engine had room within the longest wait; retry after the time in Retry-After",
    DropReason.DEADLINE_UNREACHABLE: "the deadline passed before the call could start; send it again with a later one",
    DropReason.TENANT_LIMIT: "the tenant has used its tokens for this minute; retry after the time in Retry-After",
    DropReason.DRAINING: "this gateway is shutting down; retry, another one will answer",
    DropReason.NO_ENGINES: "no engine can take calls now; retry after the time in Retry-After",
    # Reserved: nothing sheds a call that waits, yet.
    DropReason.EVICTED: "the call gave way to more urgent ones; retry after the time in Retry-After",
    DropReason.STORE_UNAVAILABLE: (
        "the store does not answer, which workflows and shared policies need; retry after the time in Retry-After, with an"
        " Idempotency-Key so that it counts once, or send the call without a workflow"
    ),
}


class GatewayError(Exception):
    """A refusal that the client is told about."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = str(code)
        self.row = TABLE[code]
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The OpenAI error object."""
        error = {"message": self.message, "type": self.row.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        headers = {"x-should-retry": "false"} if self.row.status == 409 or self.code in FINAL else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


class Refused(GatewayError):
    """The call was shed; the closed set of reasons is the dispatcher's."""

    def __init__(self, reason: DropReason, *, retry_after_s: float = 1.0) -> None:
        super().__init__(reason, SENTENCES[reason], retry_after_s=retry_after_s)
        self.reason = reason

    def headers(self) -> dict[str, str]:
        return {**GatewayError.headers(self), "x-tidegate-reason": self.reason.value}


class BadRequest(GatewayError):
    """The request itself is wrong: retrying it unchanged cannot help."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(code, message, param=param)


def rejected(answer: bytes) -> BadRequest:
    """An engine's own refusal, in its words and in our shape."""
    message, param = engines_words(answer)
    return BadRequest(f"the engine refuses: {message}", param=param)


def engines_words(answer: bytes) -> tuple[str, str | None]:
    """Message and parameter of an engine's error object, whatever it may be."""
    try:
        told = orjson.loads(answer)
        told = told.get("error", told)
        message, param = told.get("message", told), told.get("param")
    except (orjson.JSONDecodeError, AttributeError):
        message, param = answer[:500].decode(errors="replace"), None
    return str(message)[:500], param if isinstance(param, str) else None


class EngineTrouble(GatewayError):
    """The engine failed the call in a way that another attempt might not."""

    def __init__(self, message: str, *, code: str = "engine_failed", advice: str = "send the call again") -> None:
        super().__init__(code, f"{message}; {advice}", retry_after_s=1.0)


def store_unavailable() -> Refused:
    return Refused(DropReason.STORE_UNAVAILABLE, retry_after_s=2.0)
