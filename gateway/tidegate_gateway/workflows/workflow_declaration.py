"""What may a client declare as a workflow? One typed `WorkflowDeclaration` from both wires, checked against the settings.

`from_json` reads the body of an HTTP request, `edge.grpc_requests` a gRPC message. `declared` checks the declaration, fills
in a template of the settings, and gives the workflow its id.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_gateway import gateway_settings, settings_decoder, stage_declaration
from tidegate_gateway.openai import request_fields
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.store import store_contract

FIELDS = frozenset({"id", "template", "deadline_ms", "tenant", "stages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowDeclaration:
    """A workflow as a client declares it; each field has its type and its allowed values."""

    id: str | None = None
    """None = the gateway chooses one."""
    template: str | None = None
    deadline_s: float | None = None
    tenant: str | None = None
    stages: tuple[stage_declaration.StageDeclaration, ...] = ()


def from_json(body: Mapping[str, Any]) -> WorkflowDeclaration:
    """The declaration in a request's body. Raises `BadRequest` with the field that is wrong."""
    unknown = sorted(set(body) - FIELDS)
    if unknown:
        name = unknown[0][:64]
        raise BadRequest(f"{name} is no field of a workflow; {settings_decoder.suggestion(name, FIELDS)}", param=name)
    template, tenant = body.get("template"), body.get("tenant")
    if template is not None and not isinstance(template, str):
        raise BadRequest("template must be the name of a template", param="template")
    return WorkflowDeclaration(
        id=None if body.get("id") is None else request_fields.name(body["id"], "id"),
        template=template or None,
        deadline_s=deadline_s(body.get("deadline_ms")),
        tenant=tenant if tenant is None or tenant == "" else request_fields.text(tenant, "tenant"),
        stages=_stages(body.get("stages")),
    )


def declared(
    declaration: WorkflowDeclaration, tenant: str | None, templates: Mapping[str, gateway_settings.Template]
) -> store_contract.NewWorkflow:
    """The workflow of a declaration; `tenant` is the one that the request itself names. Raises `BadRequest`."""
    template = _template(declaration.template, templates)
    seconds = declaration.deadline_s
    if seconds is None and template is not None:
        seconds = template.deadline_s
    if seconds is None:
        raise BadRequest(
            "deadline_ms is required: milliseconds from now until the last stage must be done", param="deadline_ms"
        )
    named = (tenant or "") if declaration.tenant is None else declaration.tenant
    if tenant is not None and named != tenant:
        raise BadRequest("tenant must be the one that the request's headers or metadata name", param="tenant")
    return store_contract.NewWorkflow(
        id=f"wf-{secrets.token_hex(10)}" if declaration.id is None else declaration.id,
        deadline_ms=max(1, round(seconds * 1000)),
        template=template.name if template is not None else "",
        tenant=named,
        stages=declaration.stages or (template.stages if template is not None else ()),
    )


def deadline_s(value: object) -> float | None:
    """The deadline of a declaration, given in milliseconds. Raises `BadRequest`."""
    return None if value is None else request_fields.duration_s(value, "deadline_ms")


def stage(
    name: object, after: Iterable[object], parallel: object, repeat: object, where: str
) -> stage_declaration.StageDeclaration:
    """One stage of a declaration. Raises `BadRequest`."""
    return stage_declaration.StageDeclaration(
        name=request_fields.name(name, f"{where}.name"),
        after=tuple(request_fields.name(before, f"{where}.after") for before in after),
        parallel=_count(parallel, f"{where}.parallel"),
        repeat=_count(repeat, f"{where}.repeat") or 1,
    )


def _count(value: object, where: str) -> int | None:
    most = stage_declaration.MOST_PARALLEL
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadRequest(f"{where} must be a whole number from 1 to {most}", param=where)
    return value


def check_stages(stages: tuple[stage_declaration.StageDeclaration, ...]) -> None:
    """Raises `BadRequest` for stages that cannot be one workflow."""
    try:
        stage_declaration.check(stages)
    except stage_declaration.BadStages as error:
        raise bad_stages(error) from error


def bad_stages(error: stage_declaration.BadStages) -> BadRequest:
    """The error for a client whose stages cannot be one workflow."""
    return BadRequest(f"stages{error.where} {error}", param=f"stages{error.where}")


def _stages(value: object) -> tuple[stage_declaration.StageDeclaration, ...]:
    """The stages of a body. Their number and the lengths of their lists are checked before anything else."""
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise BadRequest("stages must be a list of stages", param="stages")
    if len(value) > stage_declaration.MOST_STAGES:
        raise BadRequest(f"stages must be a list of at most {stage_declaration.MOST_STAGES} stages", param="stages")
    after_lists: list[list[object]] = []
    for i, item in enumerate(value):
        where = f"stages[{i}]"
        if not isinstance(item, dict) or set(item) - {"name", "after", "parallel", "repeat"}:
            raise BadRequest(f"{where} must be an object with name, after, parallel and repeat", param=where)
        after = item.get("after")
        if after is not None and not isinstance(after, list):
            raise BadRequest(f"{where}.after must be a list of stage names", param=f"{where}.after")
        after_lists.append(after or [])
    try:
        stage_declaration.check_sizes(after_lists)
    except stage_declaration.BadStages as error:
        raise bad_stages(error) from error
    stages = tuple(
        stage(item.get("name"), after_lists[i], item.get("parallel"), item.get("repeat"), f"stages[{i}]")
        for i, item in enumerate(value)
    )
    check_stages(stages)
    return stages


def _template(name: str | None, templates: Mapping[str, gateway_settings.Template]) -> gateway_settings.Template | None:
    if name is None:
        return None
    if name not in templates:
        known = ", ".join(sorted(templates)) or "none"
        raise BadRequest(f"template {name[:64]!r} is unknown; known are {known}", param="template")
    return templates[name]
