"""What may a client declare as a workflow? A request body in, a checked `NewWorkflow` out.

Names usable everywhere, a deadline within a week, stages that do not wait for each other; or a template of the settings.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from tidegate_gateway import gateway_settings
from tidegate_gateway.openai import parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.store import store_contract
from tidegate_policy import budget
from tidegate_policy.model import StageState


def declared(
    body: Mapping[str, Any], tenant: str | None, templates: Mapping[str, gateway_settings.Template]
) -> store_contract.NewWorkflow:
    """The workflow that a request body describes. Raises `BadRequest` with the field that is wrong."""
    unknown = sorted(set(body) - {"id", "template", "deadline_ms", "tenant", "stages"})
    if unknown:
        raise BadRequest(f"{unknown[0][:64]} is no field of a workflow", param=unknown[0][:64])
    template = _template(body.get("template"), templates)
    deadline_ms = body.get("deadline_ms")
    if deadline_ms is not None:
        deadline_s = parsed_request.duration_s(deadline_ms, "deadline_ms")
    elif template is not None and template.deadline_s is not None:
        deadline_s = template.deadline_s
    else:
        raise BadRequest(
            "deadline_ms is required: milliseconds from now until the last stage must be done", param="deadline_ms"
        )
    named = body.get("tenant")
    if named is None:
        named = tenant or ""
    elif named != "":
        named = parsed_request.text_of(named, "tenant")
    if tenant is not None and named != tenant:
        raise BadRequest("tenant must be the one that the request's headers or metadata name", param="tenant")
    return store_contract.NewWorkflow(
        id=f"wf-{secrets.token_hex(10)}" if body.get("id") is None else parsed_request.name_of(body["id"], "id"),
        deadline_ms=max(1, round(deadline_s * 1000)),
        template=template.name if template is not None else "",
        tenant=named,
        stages=_stages(body.get("stages"), template, store_contract.MOST_STAGES),
    )


def _template(name: object, templates: Mapping[str, gateway_settings.Template]) -> gateway_settings.Template | None:
    if name is None or name == "":
        return None
    if not isinstance(name, str) or name not in templates:
        known = ", ".join(sorted(templates)) or "none"
        raise BadRequest(f"template {str(name)[:64]!r} is unknown; known are {known}", param="template")
    return templates[name]


def _stages(value: object, template: gateway_settings.Template | None, most: int) -> tuple[store_contract.Stage, ...]:
    if value is None or value == []:
        items = template.stages if template is not None else ()
        return tuple(
            store_contract.Stage(name=item.name, after=item.after, parallel=_parallel(item), passes=item.repeat)
            for item in items
        )
    if not isinstance(value, list) or len(value) > most:
        raise BadRequest(f"stages must be a list of at most {most} stages", param="stages")
    stages = tuple(_stage(item, f"stages[{i}]") for i, item in enumerate(value))
    try:
        budget.declared(tuple(StageState(name=stage.name, after=stage.after) for stage in stages))
    except ValueError as error:
        raise BadRequest(f"stages: {error}", param="stages") from error
    return stages


def _parallel(item: gateway_settings.TemplateStage) -> int:
    """Calls at the same time, 0 = undeclared; a stage that repeats can be over only if its calls are counted."""
    if item.parallel is not None:
        return item.parallel
    return 1 if item.repeat > 1 else 0


def _stage(item: object, where: str) -> store_contract.Stage:
    if not isinstance(item, dict) or set(item) - {"name", "after", "parallel"}:
        raise BadRequest(f"{where} must be an object with name, after and parallel", param=where)
    after = [] if item.get("after") is None else item["after"]
    if not isinstance(after, list):
        raise BadRequest(f"{where}.after must be a list of stage names", param=f"{where}.after")
    parallel = item.get("parallel")
    if parallel is not None and (
        isinstance(parallel, bool) or not isinstance(parallel, int) or not 1 <= parallel <= 1000
    ):
        raise BadRequest(f"{where}.parallel must be a whole number from 1 to 1000", param=f"{where}.parallel")
    return store_contract.Stage(
        name=parsed_request.name_of(item.get("name"), f"{where}.name"),
        after=tuple(parsed_request.name_of(name, f"{where}.after") for name in after),
        parallel=parallel or 0,
    )
