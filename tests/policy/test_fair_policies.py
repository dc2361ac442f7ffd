"""The policies that share the engine between tenants give each tenant its share of the work, and nothing for idle time."""

import random

import pytest
import small_engine

from tidegate_policy import policies
from tidegate_policy.model import CallId
from tidegate_policy.policies import policy_contract, tenant_accounts

FAIR = ["wfq", "stride", "lottery", "cfs", "rr"]


def create(name: str, seed: int = 3, **parameters: float) -> policies.Policy:
    return policies.create(name, parameters, small_engine.context(random=random.Random(seed)))


class Tenants:
    """Tenants that always have waiting calls, on one engine."""

    def __init__(self, policy: policies.Policy, places: int = 4) -> None:
        self.engine = small_engine.SmallEngine(policy, places=places)
        self.random = random.Random(11)
        self.count = 0

    def arrive(self, tenant: str, weight: float, tokens: tuple[int, int], wrong: float = 1.0) -> CallId:
        """A call whose real output is `wrong` times as long as predicted."""
        self.count += 1
        output = self.random.randint(*tokens)
        return self.engine.arrive(
            small_engine.call(
                f"{tenant}{self.count}",
                tenant=tenant,
                weight=weight,
                prompt_tokens=self.random.randint(*tokens) * 3,
                output_predicted=max(round(output / wrong), 1),
            ),
            output=output,
        ).call.id

    def busy(self, seconds: float, tenants: dict[str, tuple[float, tuple[int, int]]], wrong: float = 1.0) -> None:
        """Each tenant keeps eight calls waiting for this long."""
        end_s = self.engine.now + seconds
        while self.engine.now < end_s:
            waiting = [item.call.tenant for item in self.engine.queue]
            for tenant, (weight, tokens) in tenants.items():
                for _ in range(8 - waiting.count(tenant)):
                    self.arrive(tenant, weight, tokens, wrong)
            for _ in range(5):
                self.engine.step()


@pytest.mark.parametrize("name", FAIR)
def test_a_call_that_ends_after_its_preemption_leaves_no_tokens(name: str) -> None:
    """vLLM may preempt a call while a step computes a token for it. The token comes then, and may be the call's last."""
    policy = create(name)
    engine = small_engine.SmallEngine(policy, places=4)
    item = engine.arrive(small_engine.call("a"), output=50)
    engine.step()
    engine.preempt(item.call.id)
    policy.on_tokens(engine.now, {item.call.id: policy_contract.ONE_OUTPUT})
    engine.abort(item.call.id)
    assert not policy._tokens.outputs(item.call.id)


class Compared(tenant_accounts._Served):
    """A served call that counts how often it is compared with another one."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return self is other

    __hash__ = None  # type: ignore[assignment]


def test_calls_that_end_before_their_first_step_are_not_searched_among_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_accounts, "_Served", Compared)
    monkeypatch.setattr(Compared, "times", 0)
    policy = create("wfq")
    items = [policies.QueuedRequest(call=small_engine.call(f"c{number}"), service_s=1.0) for number in range(50)]
    for one in items:
        policy.on_arrival(0.0, one)
        policy.on_start(0.0, one)
    for one in reversed(items):
        policy.on_end(0.0, one.call.id)
    policy.on_tokens(0.0, {})
    assert Compared.times == 0
    assert {account.calls for account in policy.accounts.values()} == {0}


SMALL, LARGE = (5, 15), (40, 80)


@pytest.mark.parametrize("name", FAIR)
@pytest.mark.parametrize("wrong", [1.0, 4.0])
def test_work_is_in_the_proportion_of_the_weights_over_a_long_busy_period(name: str, wrong: float) -> None:
    tenants = Tenants(create(name))
    tenants.busy(150.0, {"a": (1.0, SMALL), "b": (2.0, LARGE), "c": (1.0, LARGE)}, wrong)
    work_s = tenants.engine.work_s
    shares = [work_s[tenant] / sum(work_s.values()) for tenant in "abc"]
    slack = 0.06 if name == "lottery" else 0.03
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=slack)


@pytest.mark.parametrize("name", ["wfq", "stride", "cfs", "rr"])
def test_the_distance_between_backlogged_tenants_is_bounded_at_every_instant(name: str) -> None:
    tenants = Tenants(create(name))
    load = {"a": (1.0, SMALL), "b": (2.0, LARGE)}
    longest_s = 3 * 80 * small_engine.COST.prefill_s + 80 * small_engine.STEP_S / small_engine.COST.max_batch
    quantum_s = 0.25 if name == "rr" else 0.05
    for _ in range(60):
        tenants.busy(1.0, load)
        received = {tenant: tenants.engine.work_s[tenant] / weight for tenant, (weight, _) in load.items()}
        bound_s = quantum_s + (tenants.engine.places + 2) * longest_s
        assert abs(received["a"] - received["b"]) <= bound_s


@pytest.mark.parametrize("name", FAIR)
def test_a_tenant_that_was_idle_has_no_credit(name: str) -> None:
    tenants = Tenants(create(name))
    tenants.busy(5.0, {"a": (1.0, SMALL), "b": (1.0, SMALL)})
    tenants.busy(60.0, {"a": (1.0, SMALL)})
    before = dict(tenants.engine.work_s)
    tenants.busy(20.0, {"a": (1.0, SMALL), "b": (1.0, SMALL)})
    gained = {tenant: tenants.engine.work_s[tenant] - before[tenant] for tenant in "ab"}
    assert gained["b"] / (gained["a"] + gained["b"]) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("name", ["wfq", "stride", "cfs", "rr"])
def test_a_tenant_that_goes_idle_for_an_instant_does_not_lose_its_debt(name: str) -> None:
    """A tenant with one long call at a time must not pass a backlogged tenant on each arrival."""
    engine = small_engine.SmallEngine(create(name), places=1)
    for number in range(3000):
        engine.arrive(small_engine.call(f"b{number}", tenant="b", prompt_tokens=60, output_predicted=20))
    for number in range(40):
        name_of = engine.arrive(
            small_engine.call(f"a{number}", tenant="a", prompt_tokens=600, output_predicted=200)
        ).call.id
        while name_of not in engine.ended:
            engine.step()
    assert engine.work_s["a"] / sum(engine.work_s.values()) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("name", FAIR)
def test_calls_of_one_tenant_start_in_the_order_of_arrival(name: str) -> None:
    engine = small_engine.SmallEngine(create(name), places=1)
    names = {tenant: [f"{tenant}{number}" for number in range(10)] for tenant in "ab"}
    for pair in zip(names["a"], names["b"], strict=True):
        for each in pair:
            engine.arrive(small_engine.call(each, tenant=each[0], output_predicted=1 + len(each)))
    engine.run(30.0)
    for tenant in "ab":
        assert [each for each in engine.started if each[0] == tenant] == names[tenant]


@pytest.mark.parametrize("name", FAIR)
def test_the_most_over_served_tenant_is_preempted_first_and_its_newest_call_before_its_others(name: str) -> None:
    engine = small_engine.SmallEngine(create(name), places=8)
    for number in range(6):
        engine.arrive(small_engine.call(f"greedy{number}", tenant="greedy", prompt_tokens=2000, output_predicted=200))
        engine.step()
    engine.arrive(small_engine.call("modest", tenant="modest", output_predicted=200))
    engine.step()
    victims = sorted(engine.running.values(), key=lambda each: engine.policy.rank(each.item), reverse=True)
    assert [each.item.call.id for each in victims][:2] == ["greedy5", "greedy4"]
    assert victims[-1].item.call.id == "modest"


@pytest.mark.parametrize("name", FAIR)
def test_a_blocked_call_costs_its_tenant_nothing(name: str) -> None:
    tenants = Tenants(create(name))
    tenants.engine.arrive(small_engine.call("blocked", tenant="a", weight=1.0))
    blocked = [CallId("blocked")]
    for _ in range(150):
        for tenant in "ab":
            if sum(item.call.tenant == tenant for item in tenants.engine.queue) < 4:
                tenants.arrive(tenant, 1.0, SMALL)
        for _ in range(5):
            tenants.engine.step(blocked=blocked)
    work_s = tenants.engine.work_s
    assert work_s["a"] / sum(work_s.values()) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("name", FAIR)
def test_invented_tenants_leave_no_accounts_behind_and_take_a_bounded_number_of_lanes(name: str) -> None:
    policy = create(name)
    engine = small_engine.SmallEngine(policy, places=64)
    for number in range(6000):
        engine.arrive(small_engine.call(f"c{number}", tenant=f"tenant{number}", output_predicted=1, prompt_tokens=1))
        if number % 2000 == 1999:
            lanes = {policy.lane(item) for item in engine.queue}
            assert len(lanes) <= tenant_accounts.MAX_TENANTS + 1
            engine.run(3.0)
            assert not len(engine.queue)
    assert isinstance(policy, tenant_accounts.TenantPolicy)
    assert len(policy.accounts) <= tenant_accounts.MAX_TENANTS + tenant_accounts.MAX_IDLE + 1


def test_a_tenant_name_that_is_no_valid_text_has_a_lane() -> None:
    assert tenant_accounts.own_lane("\ud800") != tenant_accounts.own_lane("")


class Unfair(policies.StaticPolicy):
    """It claims shares and serves in the order of arrival."""

    name = "unfair"

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return ()


class Generous(tenant_accounts.TenantPolicy):
    """A fair policy that lets idle tenants keep their credit."""

    name = "generous"

    def __init__(self) -> None:
        super().__init__(small_engine.context())
        self.turns = tenant_accounts.TagTurns(self)

    def price(self, lane: int) -> float:
        self.virtual_s = 0.0
        return 0.01


def test_a_policy_without_shares_is_found() -> None:
    tenants = Tenants(Unfair())
    tenants.busy(60.0, {"a": (1.0, SMALL), "b": (2.0, LARGE), "c": (1.0, LARGE)})
    work_s = tenants.engine.work_s
    shares = [work_s[tenant] / sum(work_s.values()) for tenant in "abc"]
    assert shares != pytest.approx([0.25, 0.5, 0.25], abs=0.06)


def test_a_policy_that_gives_credit_for_idle_time_is_found() -> None:
    tenants = Tenants(Generous())
    tenants.busy(5.0, {"a": (1.0, SMALL), "b": (1.0, SMALL)})
    tenants.busy(60.0, {"a": (1.0, SMALL)})
    before = dict(tenants.engine.work_s)
    tenants.busy(20.0, {"a": (1.0, SMALL), "b": (1.0, SMALL)})
    gained = {tenant: tenants.engine.work_s[tenant] - before[tenant] for tenant in "ab"}
    assert gained["b"] / (gained["a"] + gained["b"]) > 0.9
