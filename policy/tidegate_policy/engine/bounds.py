"""Keeps a plan within the engine's limits and above the floors without which an engine would stall.

Four floors hold. Each running call gets the tokens of one decode. A waiting call that may start finds the tokens that it
needs, also within the bound of one call. An engine in which no call runs may start at least one, also beside sessions that
keep places while they wait for input. A plan does not pause all calls that run.
"""

from tidegate_policy.engine.step import EngineLimits, StepPlan


def running_bound(limits: EngineLimits, wanted: int) -> int:
    """The bound on running calls that is in force when `wanted` is asked for; 0 = the engine's own limit."""
    return min(max(wanted, 1), limits.max_running) if wanted else limits.max_running


def token_bound(limits: EngineLimits, wanted: int, *, max_running: int, running: int) -> int:
    """The bound on the tokens of a step that is in force when `wanted` is asked for; 0 = the engine's own limit.

    `max_running` bounds the calls that may run, `running` calls run already."""
    sequences = max(max_running, running)
    decodes = sequences * limits.tokens_per_sequence
    last_start = (sequences - 1) * limits.tokens_per_sequence + limits.start_tokens
    return min(max(wanted or limits.max_step_tokens, decodes, last_start), limits.max_step_tokens)


def safe(plan: StepPlan, limits: EngineLimits, *, running: int, reserved: int = 0) -> StepPlan:
    """The plan, moved into the bounds. `running` calls run before the plan's preemptions, and `reserved` sessions keep a
    place of the batch while they wait for input."""
    max_running = running_bound(limits, max(plan.max_running, 1 + reserved))
    max_step_tokens = token_bound(limits, max(plan.max_step_tokens, 1), max_running=max_running, running=running)
    active = running - len(plan.preempt) - len(plan.paused.difference(plan.preempt))
    starts = plan.max_starts
    if starts is not None:
        starts = max(starts, 0 if active > 0 else 1)
    call_tokens = plan.max_call_tokens
    if call_tokens is not None:
        call_tokens = max(call_tokens, limits.tokens_per_sequence, limits.start_tokens)
    if active > 0 and (max_running, max_step_tokens, starts, call_tokens) == (
        plan.max_running,
        plan.max_step_tokens,
        plan.max_starts,
        plan.max_call_tokens,
    ):
        return plan
    return StepPlan(
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_starts=starts,
        max_call_tokens=call_tokens,
        preempt=plan.preempt,
        # A start can fail for lack of memory, so paused calls alone never make up a step.
        paused=plan.paused if active > 0 else frozenset(),
    )
