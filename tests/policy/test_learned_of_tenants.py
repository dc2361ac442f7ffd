"""What one tenant's calls teach the gateway core changes nothing of what is predicted for another tenant."""

import dataclasses
import random

import pytest

from tidegate_policy import cost, gateway_core
from tidegate_policy.admit import promises
from tidegate_policy.dispatch.engine_table import EngineFacts
from tidegate_policy.model import Call, CallId, DropReason, EngineId, WorkflowId
from tidegate_policy.predict import output_length

COST = cost.CostModel(step_s=0.02, prefill_s=1e-4, max_batch=4)
NAMES = 4600
"""More stages than the core remembers."""


class Pool:
    """A core with one engine, and calls that are answered at once."""

    def __init__(self) -> None:
        self.core = gateway_core.GatewayCore(gateway_core.CoreSettings(), random.Random(0))
        self.core.on_engine(0.0, EngineFacts(id=EngineId("e"), cost=COST))
        self._number = 0
        self._now = 0.0

    def arrive(
        self,
        tenant: str,
        *,
        stage: str | None = None,
        workflow: str = "w",
        template: str = "",
        group: str | None = None,
    ) -> Call:
        """A call is promised, and not sent yet."""
        self._number += 1
        facts = promises.CallFacts(
            id=CallId(str(self._number)),
            model="m",
            tenant=tenant,
            characters=400,
            workflow=None if stage is None else f"{tenant} {workflow}",
            stage=stage,
            group=group,
        )
        draft = self.core.draft(self._now, facts)
        assert not isinstance(draft, DropReason)
        return self.core.promise(draft, None if stage is None else self.grant(tenant, stage, workflow, template))

    def grant(self, tenant: str, stage: str, workflow: str = "w", template: str = "") -> promises.StageGrant:
        facts = gateway_core.WorkflowFacts(
            id=WorkflowId(f"{tenant} {workflow}"),
            tenant=tenant,
            template=template,
            deadline_at_s=20.0,
            cutoff_at_s=None,
            stages=(),
        )
        return self.core.stage_grant(0.0, facts, stage, "m")

    def predicted(self, tenant: str, stage: str | None = None) -> tuple[int, int]:
        """The output that is predicted of a call, and its upper bound."""
        call = self.arrive(tenant, stage=stage, workflow="asks")
        self.core.on_cancel(self._now, call.id)
        return call.output_predicted, call.output_upper

    def serve(self, tenant: str, output: int, **more: str) -> None:
        call = self.arrive(tenant, **more)
        self.core.on_arrival(self._now, call)
        self._now += 0.001
        self.core.on_end(self._now, call.id, gateway_core.CallResult(ok=True, prompt_tokens=100, output_tokens=output))

    def serve_workflow(self, tenant: str, output: int, stages: list[str], template: str = "") -> None:
        for stage in stages:
            self.serve(tenant, output, stage=stage, template=template)
        self.core.on_workflow_end(self._now, WorkflowId(f"{tenant} w"), ok=True)


@pytest.mark.parametrize("template", ["", "text2sql"])
def test_many_stages_of_one_tenant_leave_the_lengths_and_the_budgets_of_another_one(template: str) -> None:
    pool = Pool()
    for _ in range(30):
        pool.serve_workflow("victim", 200, ["plan", "write"], template)
    before = pool.grant("victim", "plan", template=template)
    assert before.rest_s > 0.0
    assert before.due_at_s < 20.0
    for index in range(NAMES):
        pool.serve("flood", 1, stage=f"stage {index}", template=template)
        if index % 900 == 899:  # the core learns from workflows of at most 1,000 calls
            pool.serve_workflow("flood", 1, ["last"], template)
    assert pool.grant("victim", "plan", template=template) == before
    assert pool.arrive("victim", stage="plan", template=template).output_predicted == 200


def test_odd_lengths_of_one_tenant_leave_the_upper_bounds_of_another_one() -> None:
    pool = Pool()
    for index in range(100):
        pool.serve("victim", 200 + index % 50)
    expected, upper = pool.predicted("victim")
    assert expected <= upper <= 260
    for index in range(600):
        pool.serve("odd", 6000 if index % 25 == 0 else 1)
    assert pool.predicted("odd")[1] > 5000
    assert pool.predicted("victim") == (expected, upper)


def test_a_busy_tenant_is_one_of_several_to_a_newcomer() -> None:
    pool = Pool()
    for _ in range(500):
        pool.serve("busy", 9000)
    assert pool.predicted("new") == (128, 0), "one tenant is no rule for others"
    for tenant in "abc":
        for _ in range(30):
            pool.serve(tenant, 40)
    expected, upper = pool.predicted("new")
    assert (expected, upper) == (40, 40)
    for tenant in "abc":
        pool.serve(tenant, 40, stage="rare")
        assert pool.predicted(tenant, "never seen") == (40, 40), "a tenant's own calls are nearer"
    assert pool.predicted("busy", "never seen")[0] == 9000


def test_the_budget_of_a_newcomer_follows_tenants_and_not_calls() -> None:
    pool = Pool()
    stages = (gateway_core.StageFacts(name="a"), gateway_core.StageFacts(name="b", after=("a",)))
    flow = gateway_core.WorkflowFacts(
        id=WorkflowId("w"), tenant="new", template="", deadline_at_s=20.0, cutoff_at_s=None, stages=stages
    )
    for _ in range(500):
        pool.serve("busy", 9000, stage="a")
    pool.serve("new", 30, stage="b")
    grant = pool.core.stage_grant(0.0, flow, "a", "m")
    assert grant.due_at_s == pytest.approx(10.0), "its other stages are as long as the one that is known"
    stranger = dataclasses.replace(flow, tenant="stranger")
    assert pool.core.stage_grant(0.0, stranger, "a", "m").due_at_s == pytest.approx(10.0)


def test_the_rows_of_relqueries_change_nothing_of_what_is_predicted_of_other_calls() -> None:
    pool = Pool()
    for _ in range(50):
        pool.serve("acme", 500)
    for _ in range(200):
        pool.serve("acme", 2, group="first")
    assert pool.predicted("acme")[0] == 500
    row = pool.arrive("acme", group="first")
    assert row.output_predicted == 2
    assert pool.arrive("acme", group="second").output_predicted == 500, (
        "a new relQuery begins like other calls of its class"
    )
    for _ in range(3):
        pool.serve("rows only", 2, group="first")
    assert pool.arrive("rows only", group="second").output_predicted == 2, "or with the mean of its tenant"
    facts = promises.CallFacts(id=CallId("chat"), model="m", tenant="acme", characters=400)
    draft = pool.core.draft(1.0, facts)
    assert isinstance(draft, promises.Draft)
    assert draft.tokens_to_book == draft.prompt_tokens + 500


def test_many_relqueries_of_one_tenant_take_bounded_memory_and_none_of_another_tenant() -> None:
    pool = Pool()
    for _ in range(30):
        pool.serve("victim", 200, group="its own")
    for index in range(NAMES):
        pool.serve("flood", 1, group=f"relQuery {index}")
    lengths = pool.core.lengths
    assert len(lengths._kinds) == len(lengths._sized) == output_length.MAX_KINDS
    assert not pool.core._waiting
    assert pool.arrive("victim", group="its own").output_predicted == 200
