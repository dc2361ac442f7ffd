"""Teaches a gateway core what earlier calls were like, from another trace than the one that is run.

A gateway that has been up for a while has learned output lengths and the work behind each stage. The scheduler under test
never sees a true length of the trace that it runs.
"""

from collections.abc import Iterable, Sequence

from tidegate_policy import cost, gateway_core
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict import output_length, text_density, tool_use
from tidegate_sim.trace_format import TraceCall


def learn(
    core: gateway_core.GatewayCore, calls: Sequence[TraceCall], models: Sequence[cost.CostModel], *, model: str
) -> None:
    """Shows the core `calls`, whose workflows have finished, on a pool of engines with the cost models `models`."""
    rest_s = _rest_s(calls, models)
    called = {call.id: call for call in calls}
    for call in calls:
        second = (call.stage or "main") if call.workflow else call.slo_class
        kind = (call.tenant, "", second, model)
        core.lengths.observe(
            kind,
            output_length.LengthObservation(
                tenant=call.tenant,
                characters=round(call.prompt_tokens * text_density.USUAL),
                messages=0,
                sequences=1,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.output_tokens,
            ),
        )
        _learn_tool(core, call, called.get(call.after[0]) if call.after else None, kind)
        if call.workflow:
            core.remaining_work.observe((call.tenant, "", second), rest_s[call.id])


def _learn_tool(
    core: gateway_core.GatewayCore, call: TraceCall, before: TraceCall | None, kind: output_length.Kind
) -> None:
    """The tool that `call` invokes, and the time and the return of the one between `before` and `call`."""
    if call.session is None:
        return
    core.tools.on_answer(kind, _tool(before), _tool(call))
    if before is not None and before.tool is not None:
        context = before.prompt_tokens + before.output_tokens
        core.tools.on_away(0.0, call.tenant, call.session, before.tool.name, context)
        gap = core.tools.on_arrival(before.tool.duration_s, call.tenant, call.session)
        core.tools.on_leave(call.tenant, call.session)
        if gap is not None:
            core.tools.observe(call.tenant, gap, call.prompt_tokens)


def _tool(call: TraceCall | None) -> str:
    return tool_use.NO_TOOL if call is None or call.tool is None else call.tool.name


def _rest_s(calls: Iterable[TraceCall], models: Sequence[cost.CostModel]) -> dict[str, float]:
    """Seconds of the longest path behind each call. A call stands after the calls that it follows, so one pass from the end
    suffices."""
    rest: dict[str, float] = {}
    for call in reversed(list(calls)):
        own_s = cost.mean_call_seconds(models, _alone(call)) + rest.setdefault(call.id, 0.0)
        for before in call.after:
            rest[before] = max(rest.get(before, 0.0), own_s)
    return rest


def _alone(call: TraceCall) -> Call:
    return Call(
        id=CallId(call.id), arrived_at_s=0.0, prompt_tokens=call.prompt_tokens, output_predicted=call.output_tokens
    )
