"""What does the client ask for? An endpoint, a body and the checked fields beside it in, a `ParsedRequest` out.

HTTP and gRPC produce the same value. Only the parts of a body that the gateway itself reads are checked here; the engine
checks the rest, and its own error reaches the client in its words. `lifecycle.admission` turns the request into a call,
`engine_body` writes it for the engine.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from tidegate_gateway.openai import bounded_json, endpoint, engine_body, error_table, request_fields
from tidegate_gateway.openai.endpoint import Endpoint, RequestSize
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy import immutable

MOST_FIELDS = 256
"""Fields at the top of a body; OpenAI's API has about forty."""
MOST_LISTS = 40
"""Fields at the top of a body whose value is a list or an object. The API of OpenAI and of vLLM has about thirty."""
MOST_PARTS = 120_000
"""Lists, objects and fields of a body."""
MOST_NAMED = 20
"""Models that an error lists."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request to one endpoint as the client made it, checked."""

    size: RequestSize
    endpoint: Endpoint
    body: dict[str, Any]
    """The request for the engine, without the fields that only the gateway may set."""
    model: str
    stream: bool
    wants_usage: bool
    """The client asked for usage in its stream."""
    fields: request_fields.RequestFields
    group: str | None = None
    """The relQuery of the call."""
    group_size: int = 0
    ignored: tuple[str, ...] = ()
    """Fields of the body, and headers, that only the gateway may set."""
    is_costly: bool = False
    """Its body has many values, which take much more memory than its JSON."""
    raw: bytes | None = None
    """The bytes for the engine, of a request that passes as it came; `body` is empty then."""

    @property
    def offers_tools(self) -> bool:
        """Its answer may invoke a tool of the client (`functions` is the form before tools)."""
        return "tools" in self.body or "functions" in self.body


def decoded(raw: bytes, *, is_counted: bool = False) -> Any:
    """The JSON value of a body, whose parts may be counted already (`large_body`). Raises `BadRequest`."""
    try:
        return orjson.loads(raw) if is_counted else bounded_json.loads(raw, most_parts=MOST_PARTS)
    except ValueError as error:
        raise not_taken(error) from error


def not_taken(error: ValueError) -> BadRequest:
    """The body is not JSON, or too much of it."""
    return BadRequest(f"the body is not JSON that the gateway takes: {error}")


def from_body(
    kind: endpoint.Endpoint,
    body: object,
    fields: request_fields.RequestFields,
    *,
    most_choices: int = endpoint.BOUND_CHOICES,
    is_costly: bool = False,
) -> ParsedRequest:
    """The request in a decoded body. Raises `BadRequest` with the field that is wrong and its allowed values."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if len(body) > MOST_FIELDS:
        raise BadRequest(f"the body has {len(body)} fields, and at most {MOST_FIELDS} are allowed")
    if len([name for name, value in body.items() if isinstance(value, list | dict)]) > MOST_LISTS:
        raise BadRequest(f"the body has more than {MOST_LISTS} fields that are lists or objects")
    stream = _flag(body, "stream")
    if stream and kind.stream is None:
        raise BadRequest(f"answers of {kind.path} are not streamed; leave stream out", param="stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    if options is not None and not stream:
        raise BadRequest("stream_options goes with stream: true", param="stream_options")
    return ParsedRequest(
        endpoint=kind,
        size=kind.read_size(body, most_choices),
        body=engine_body.without_engine_knobs(body),
        model=_model(body),
        stream=stream,
        wants_usage=bool(options and options.get("include_usage")),
        fields=fields,
        ignored=fields.ignored + engine_body.engine_knobs(body),
        is_costly=is_costly,
    )


def unknown_model(name: str, known: list[str]) -> error_table.GatewayError:
    named = ", ".join(known[:MOST_NAMED]) or "none yet"
    more = f", and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    return BadRequest(
        f"model {name[:80]!r} is not served here; GET /v1/models lists {named}{more}",
        param="model",
        code=error_table.MODEL_NOT_FOUND,
    )


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must be the name of a model; GET /v1/models lists them", param="model")
    return model


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false", param=key)
    return bool(value)
