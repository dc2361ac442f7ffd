"""What may a client submit as a relQuery? One typed `RelQuerySpec` from both wires: what all rows have in common.

The spec is stored with the rows, so that any gateway can make the call of a row from it (`call`). The first row is
parsed as a call when the relQuery is submitted: a field that no call may have is an error before anything is stored.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson

from tidegate_gateway.openai import chat_completions, completions, endpoint, engine_body, parsed_request, request_fields
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.relqueries import row_template

ENDPOINTS = {kind.path: kind for kind in (chat_completions.ENDPOINT, completions.ENDPOINT)}
OWN_FIELDS = ("id", "template", "rows", "rows_url", "endpoint", "deadline_ms", "stream")
NOT_IN_ROWS = ("messages", "prompt", "n", "stream_options", "best_of", "echo")
"""Fields of a call that the template decides, or that would give a row several answers."""
ELSEWHERE = {
    "tenant": "x-tidegate-tenant (in gRPC the field tenant of the message)",
    "slo_class": "x-tidegate-class (in gRPC the field slo_class of the message)",
    "class": "x-tidegate-class (in gRPC the field slo_class of the message)",
    "deadline": "deadline_ms, in milliseconds",
    "deadline_s": "deadline_ms, in milliseconds",
}
"""What a client may take for fields of the body, and what it means."""
NEAR = 0.8
"""From this likeness to one of `OWN_FIELDS` on, a further field is a mistake and no field of the calls. An engine's
`chat_template` is less like `template`."""
LONGEST_NEAR, MOST_NEAR = 16, 64
"""Characters of a name that is compared, and such names: a comparison takes some microseconds."""
MOST_SPEC_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RelQuerySpec:
    """What all rows of a relQuery have in common, checked."""

    model: str
    kind: endpoint.Endpoint
    template: row_template.Template
    given_template: object
    """As the client wrote it."""
    body: Mapping[str, Any]
    """Further fields of each call, such as max_tokens."""
    fields: request_fields.RequestFields
    id: str | None = None
    deadline_s: float | None = None
    stream: bool = True
    """The client wants the rows in the answer to its request; not stored."""

    def call(
        self, values: Sequence[str], *, group: str, rows: int, left_s: float | None = None
    ) -> parsed_request.ParsedRequest:
        """The call of a row, of which the relQuery has `left_s` seconds. Raises `BadRequest`."""
        body = {"model": self.model, **self.body}
        if self.kind is completions.ENDPOINT:
            body["prompt"] = self.template.prompt(values)
        else:
            body["messages"] = self.template.filled_messages(values)
        fields = dataclasses.replace(self.fields, deadline_s=left_s)
        request = parsed_request.from_body(self.kind, body, fields, most_choices=1)
        return dataclasses.replace(request, group=group, group_size=rows)

    def prompt_bytes(self, values: Sequence[str], most_bytes: int) -> int:
        """The bytes of a row's prompt as JSON, before it is made. Raises `BadRequest` above `most_bytes`."""
        found = self.template.prompt_bytes(values)
        if found > most_bytes:
            raise BadRequest(
                f"the prompt of this row has {found} bytes as JSON, and at most {most_bytes} are allowed; name large"
                " columns less often in the template, or send shorter values",
                param="template",
                code="body_too_large",
            )
        return found

    def stored(self) -> bytes:
        """The spec for the store. Raises `BadRequest` if it can be read and not written."""
        fields = self.fields
        written = {
            "model": self.model,
            "endpoint": self.kind.path,
            "template": self.given_template,
            "body": self.body,
            "tenant": fields.tenant,
            "slo_class": fields.slo_class,
            "urgency": fields.urgency,
            "ttft_s": fields.ttft_s,
            "tpot_s": fields.tpot_s,
            "deadline_s": self.deadline_s,
        }
        try:
            return orjson.dumps(written)
        except orjson.JSONEncodeError as error:  # orjson reads deeper than it writes
            raise BadRequest(engine_body.TOO_DEEP) from error

    @classmethod
    def from_store(cls, raw: bytes) -> Self:
        stored = orjson.loads(raw)
        names = ("tenant", "slo_class", "urgency", "ttft_s", "tpot_s")
        return cls(
            model=stored["model"],
            kind=ENDPOINTS[stored["endpoint"]],
            template=row_template.parse(stored["template"]),
            given_template=stored["template"],
            body=stored["body"],
            fields=request_fields.RequestFields(**{name: stored[name] for name in names}),
            deadline_s=stored["deadline_s"],
        )


def spec(document: Mapping[str, Any], fields: request_fields.RequestFields) -> RelQuerySpec:
    """The spec in a request's fields; the rows are read by `row_tables`. Raises `BadRequest`."""
    if fields.workflow is not None:
        raise BadRequest(
            f"a relQuery joins no workflow; leave {fields.names.workflow} out", param=fields.names.workflow
        )
    for name in NOT_IN_ROWS:
        if document.get(name) is not None and not (name == "n" and document[name] == 1):
            raise BadRequest(
                f"{name} is no field of a relQuery: each row has one call, made from the template", param=name
            )
    for name, instead in ELSEWHERE.items():
        if document.get(name) is not None:
            raise BadRequest(f"{name} is no field of a relQuery's body; send {instead}", param=name)
    further = (name for name in document if name not in OWN_FIELDS and len(name) <= LONGEST_NEAR)
    for name in itertools.islice(further, MOST_NEAR):
        if near := difflib.get_close_matches(name, OWN_FIELDS, n=1, cutoff=NEAR):
            raise BadRequest(f"{name} is no field of a relQuery; did you mean {near[0]}?", param=name)
    path = document.get("endpoint")
    if path is not None and (not isinstance(path, str) or path not in ENDPOINTS):
        raise BadRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    kind = ENDPOINTS.get(path or "", chat_completions.ENDPOINT)
    template = row_template.parse(document.get("template"))
    if kind is completions.ENDPOINT and template.text is None:
        raise BadRequest(f"a template of messages goes with {chat_completions.ENDPOINT.path}", param="template")
    stream = document.get("stream", True)
    if not isinstance(stream, bool):
        raise BadRequest("stream must be true or false", param="stream")
    deadline_ms = document.get("deadline_ms")
    own_s = None if deadline_ms is None else request_fields.duration_s(deadline_ms, "deadline_ms")
    if own_s is not None and fields.deadline_s not in (None, own_s):
        raise BadRequest(
            f"deadline_ms and {fields.names.deadline} have different values; send one", param="deadline_ms"
        )
    model = document.get("model")
    if not isinstance(model, str):
        raise BadRequest("model must be the name of a model; GET /v1/models lists them", param="model")
    roles = sum(len(message["role"]) for message, _ in template.messages)
    if len(model) + roles + template.own_bytes > MOST_SPEC_BYTES:
        raise too_large()  # texts of gRPC may be six times as long as JSON, which is not written
    found = RelQuerySpec(
        model=model,
        kind=kind,
        template=template,
        given_template=document["template"],
        body={key: value for key, value in document.items() if key not in (*OWN_FIELDS, "model", "n")},
        fields=fields,
        id=None if document.get("id") is None else request_fields.name(document["id"], "id"),
        deadline_s=fields.deadline_s if own_s is None else own_s,
        stream=stream,
    )
    if len(found.stored()) > MOST_SPEC_BYTES:
        raise too_large()
    found.call(["x"] * len(template.columns), group="", rows=1)
    return found


def too_large() -> BadRequest:
    return BadRequest(f"the request without its rows is larger than {MOST_SPEC_BYTES} bytes", param="template")
