"""Teaches a gateway core what earlier calls were like, from another trace than the one that is run.

A gateway that has been up for a while has learned output lengths and the work behind each stage. The scheduler under test
never sees a true length of the trace that it runs.
"""

from collections.abc import Iterable, Sequence

from tidegate_policy import cost, gateway_core
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict.output_length import CHARACTERS_PER_TOKEN, LengthObservation
from tidegate_sim.trace_format import TraceCall


def learn(
    core: gateway_core.GatewayCore, calls: Sequence[TraceCall], models: Sequence[cost.CostModel], *, model: str
) -> None:
    """Shows the core `calls`, whose workflows have finished, on a pool of engines with the cost models `models`."""
    rest_s = _rest_s(calls, models)
    for call in calls:
        second = (call.stage or "main") if call.workflow else call.slo_class
        core.lengths.observe(
            (call.tenant, second, model),
            LengthObservation(
                characters=round(call.prompt_tokens * CHARACTERS_PER_TOKEN),
                messages=0,
                sequences=1,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.output_tokens,
            ),
        )
        if call.workflow:
            core.remaining_work.observe((call.tenant, second), rest_s[call.id])


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
