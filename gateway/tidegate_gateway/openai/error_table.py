"""Every error that a client can get for a call or a workflow request, in one table.

    GatewayError            an error: one row of the table and a sentence
    ├── Shed                the gateway shed the call (a `DropReason`)
    ├── BadRequest          the request is wrong; the sentence says where, and which values are allowed
    └── EngineTrouble       the engine of the call failed

Each code has one HTTP status, one gRPC status and one OpenAI error type. The edges only write them. Each sentence tells the
client what to do next, and is correct for HTTP and for gRPC.
"""

import contextlib
import math
import re
from dataclasses import dataclass
from typing import Literal

import orjson

from tidegate_gateway.openai import bounded_json
from tidegate_policy.model import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    status: int
    grpc: str
    """Name of the `grpc.StatusCode`."""
    type: str
    """`error.type` of the OpenAI error object."""


MODEL_NOT_FOUND = "model_not_found"

TABLE: dict[str, Row] = {
    "invalid_request": Row(status=400, grpc="INVALID_ARGUMENT", type="invalid_request_error"),
    "invalid_api_key": Row(status=401, grpc="UNAUTHENTICATED", type="invalid_request_error"),
    "forbidden": Row(status=403, grpc="PERMISSION_DENIED", type="permission_error"),
    MODEL_NOT_FOUND: Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "workflow_not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "relquery_not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "stage_not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "not_found": Row(status=404, grpc="NOT_FOUND", type="invalid_request_error"),
    "method_not_allowed": Row(status=405, grpc="UNIMPLEMENTED", type="invalid_request_error"),
    "request_timeout": Row(status=408, grpc="DEADLINE_EXCEEDED", type="invalid_request_error"),
    "workflow_ended": Row(status=409, grpc="FAILED_PRECONDITION", type="invalid_request_error"),
    "workflow_exists": Row(status=409, grpc="ALREADY_EXISTS", type="invalid_request_error"),
    "relquery_exists": Row(status=409, grpc="ALREADY_EXISTS", type="invalid_request_error"),
    "stage_already_done": Row(status=409, grpc="FAILED_PRECONDITION", type="invalid_request_error"),
    "body_too_large": Row(status=413, grpc="RESOURCE_EXHAUSTED", type="invalid_request_error"),
    "path_too_long": Row(status=414, grpc="INVALID_ARGUMENT", type="invalid_request_error"),
    "idempotency_key_reused": Row(status=422, grpc="INVALID_ARGUMENT", type="invalid_request_error"),
    "headers_too_large": Row(status=431, grpc="RESOURCE_EXHAUSTED", type="invalid_request_error"),
    "internal_error": Row(status=500, grpc="INTERNAL", type="server_error"),
    "engine_failed": Row(status=502, grpc="UNAVAILABLE", type="server_error"),
    "engine_timeout": Row(status=504, grpc="DEADLINE_EXCEEDED", type="server_error"),
    "keys_unavailable": Row(status=503, grpc="UNAVAILABLE", type="server_error"),
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
"""The HTTP answer carries `x-should-retry: false`, which tells OpenAI clients not to repeat the call. They repeat every
other 429."""

_RETRY_LATER = "send the call again after the delay that Retry-After (in gRPC: RetryInfo) gives"

SENTENCES: dict[DropReason, str] = {
    DropReason.SATURATED: f"too many calls are already waiting; {_RETRY_LATER}",
    DropReason.TTL_EXPIRED: f"the call has waited for the longest allowed time, and no engine had room; {_RETRY_LATER}",
    DropReason.DEADLINE_UNREACHABLE: (
        "the deadline passed before the call could start; send the call again with a later deadline"
    ),
    DropReason.TENANT_LIMIT: f"the tenant has used its tokens for this minute; {_RETRY_LATER}",
    DropReason.DRAINING: "this gateway is shutting down; send the call again, so that another gateway can serve it",
    DropReason.NO_ENGINES: f"no engine can take calls now; {_RETRY_LATER}",
    DropReason.EVICTED: f"the queue is full, and the call made room for a tenant with fewer calls in it; {_RETRY_LATER}",
    DropReason.STORE_UNAVAILABLE: (
        "the store does not answer, and workflows, relQueries and shared policies need it; send the request again after"
        " the delay that Retry-After (in gRPC: RetryInfo) gives, with an idempotency key so that the request counts once,"
        " or send the call without a workflow"
    ),
}


class GatewayError(Exception):
    """An error that the client gets."""

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
        if self.row.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(whole_seconds(self.retry_after_s))
        return headers


def whole_seconds(retry_after_s: float) -> int:
    """The delay that a client is told: never a shorter one, which would be refused again."""
    return max(1, math.ceil(retry_after_s))


def mistake_of_the_gateway() -> GatewayError:
    """What the client is told of an unexpected exception, which is logged."""
    return GatewayError("internal_error", "the gateway failed on this request; its log says why")


class Shed(GatewayError):
    """The gateway shed the call; the dispatcher's `DropReason` lists all reasons."""

    def __init__(self, reason: DropReason, *, retry_after_s: float = 1.0, message: str | None = None) -> None:
        super().__init__(reason, message or SENTENCES[reason], retry_after_s=retry_after_s)
        self.reason = reason

    def headers(self) -> dict[str, str]:
        return {**GatewayError.headers(self), "x-tidegate-reason": self.reason.value}


class BadRequest(GatewayError):
    """The request itself is wrong, so the same request fails again."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(code, message, param=param)


def rejected(answer: bytes) -> BadRequest:
    """The gateway's error for a request that an engine rejects. It contains the engine's message."""
    message, param = engine_message(answer)
    return BadRequest(f"the engine rejects the request: {message}", param=param)


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
"""Line breaks and escapes, which the log or the terminal of a client could follow."""


def engine_message(answer: bytes) -> tuple[str, str | None]:
    """Message and parameter of an engine's error object, or the first bytes of any other answer. A message that is no text
    is not made one: that of a long list takes seconds."""
    message = param = None
    if len(answer) <= bounded_json.UNCOUNTED_BYTES:
        with contextlib.suppress(ValueError, AttributeError):
            error = bounded_json.of_engine(answer)
            error = error.get("error", error)
            message, param = error.get("message"), error.get("param")
    if not isinstance(message, str):
        return _CONTROLS.sub(" ", answer[:500].decode(errors="replace")), None
    return _CONTROLS.sub(" ", message[:500]), param if isinstance(param, str) else None


Failure = Literal["busy", "gone", "failed", "late", "rejected", "too-long"]
"""How an engine failed a call: `busy`: its own queue was full. `gone`: its connection broke. `failed`: its answer was an
error. `late`: its answer did not begin in time. `rejected`: it rejects call after call. `too-long`: it was still working on
an answer that is not streamed when the time limit ended."""


class EngineTrouble(GatewayError):
    """The engine failed while it had the call. After some failures the gateway tries another engine."""

    def __init__(
        self,
        message: str,
        *,
        failure: Failure = "failed",
        code: str = "engine_failed",
        advice: str = "send the call again",
    ) -> None:
        super().__init__(code, f"{message}; {advice}", retry_after_s=1.0)
        self.failure = failure


def no_store() -> Shed:
    """The gateway was started without a store."""
    absent = (
        "this gateway has no store, so it keeps no workflows and no relQueries; set store.url in its settings, or"
        " send calls without a workflow"
    )
    return Shed(DropReason.STORE_UNAVAILABLE, retry_after_s=60.0, message=absent)


def store_unavailable() -> Shed:
    return Shed(DropReason.STORE_UNAVAILABLE, retry_after_s=2.0)
