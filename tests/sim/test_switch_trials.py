"""Switches of the policy in virtual time: a bad one is taken back, and a good one under a rising load is not."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

from tidegate_policy import gateway_core, policies
from tidegate_policy.admit import entitlements
from tidegate_policy.cost import CostModel
from tidegate_policy.model import EngineId
from tidegate_policy.qos import Qos
from tidegate_policy.steer import guards, steering_loop, switch_regret
from tidegate_policy.steer.proposal import Memory, Proposal
from tidegate_sim import cell
from tidegate_sim.trace_format import TraceCall

COST = CostModel(
    step_s=0.02, prefill_s=1e-4, attention_s=1e-9, decode_s=1e-4, context_s=1e-7, kv_tokens=64_000, max_batch=8
)
"""A call of 20 tokens takes 0.45 s, and one of 400 tokens 8.5 s; eight run at a time."""
INVERTED = {"two-lane": {"threshold_s": 2.0, "fast_share": 0.01}}
"""Parameters that invert the policy: of a hundred starts, 99 are of long calls."""
LENGTH_S = 160.0
BACKLOG = 40
"""Calls that arrive at once at the start, so that a queue stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """A selector that always wants one policy while calls wait."""

    policy: str

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        if active == self.policy or not qos.waiting:
            return None
        return Proposal(policy=self.policy, reason="wanted", alternatives=(active,), expected="nothing")


def calls(rate: Callable[[float], float]) -> list[TraceCall]:
    """Short calls in even gaps, and one long call among eight. A first token is wanted within 6 s, or 20 s if long."""
    at_s = 0.0
    made: list[TraceCall] = []
    while at_s < LENGTH_S:
        long = len(made) % 8 == 3
        made.append(
            TraceCall(
                id=f"c{len(made)}",
                arrival_s=at_s,
                prompt_tokens=100,
                output_tokens=400 if long else 20,
                slo_class="long" if long else "short",
                ttft_slo_ms=20_000 if long else 6_000,
                tpot_slo_ms=200,
            )
        )
        at_s += 0.0 if len(made) < BACKLOG else 1 / rate(at_s)
    return made


def steered(trace: list[TraceCall], start: str, policy: str, parameters: dict[str, dict[str, float]]) -> cell.Outcome:
    """The trace under a loop that begins with `start` and wants `policy`."""
    classes = tuple(entitlements.SloClass(name=name) for name in ("long", "short"))
    settings = steering_loop.Settings(
        allow=(start, policy),
        interval_s=30.0,
        guards=guards.GuardSettings(),
        selector=Wants(policy=policy),
        parameters=parameters,
    )
    row = cell.Row(
        gateway=gateway_core.CoreSettings(policy=start, max_inflight=None, classes=classes),
        engine_policy=start,
        model="fast",
        steering=settings,
    )
    earlier = calls(lambda at_s: 3.0)
    return cell.Cell({EngineId("only"): COST}, row, earlier, seed=1).run(trace)


@pytest.mark.parametrize("rate", [5.5, 5.7, 5.9, 6.2])
def test_a_policy_that_inverts_the_order_is_rolled_back_within_its_trial(rate: float) -> None:
    outcome = steered(calls(lambda at_s: rate), policies.DEFAULT, "two-lane", INVERTED)
    switched_at_s = next(at_s for at_s, policy, _ in outcome.switches if policy == "two-lane")
    back_at_s = next(at_s for at_s, _, reason in outcome.switches if reason.startswith("rollback: after two-lane"))
    assert back_at_s - switched_at_s <= switch_regret.LONGEST_SETTLE_S + guards.GuardSettings().window_s


@pytest.mark.parametrize("last", [8.0, 10.0, 12.0])
def test_a_switch_to_short_calls_first_while_the_load_rises_stays(last: float) -> None:
    rising = calls(lambda at_s: 3.0 + (last - 3.0) * at_s / LENGTH_S)
    outcome = steered(rising, policies.DEFAULT, "sjf", {})
    assert [(policy, reason) for _, policy, reason in outcome.switches] == [("sjf", "wanted")]
