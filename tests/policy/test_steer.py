"""Which policy is proposed, and when it takes effect."""

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.qos import Histogram, Qos, Tally, Targets, TenantService
from tidegate_policy.steer import emergency, guards, proposal, rules

ALLOW = frozenset(policies.POLICIES)
RULES = rules.Rules()
CAREFUL = guards.GuardSettings()
UNCOUNTED = guards.GuardSettings(per_hour=1_000_000)


def histogram(*seconds: float) -> Histogram:
    tally = Tally()
    for each in seconds:
        tally.add(each)
    return tally.freeze()


def window(*, ttft_s: float = 0.1, calls: int = 100, missed: int = 0, blocked: int = 0, **rest: object) -> Qos:
    defaults: dict[str, object] = {
        "arrived": calls,
        "finished": calls,
        "waiting": 10,
        "ttft": histogram(*[ttft_s] * calls),
        "service": histogram(*[1.0] * calls),
        "with_target": calls,
    }
    return Qos(missed=missed, blocked=blocked, **{**defaults, **rest})  # type: ignore[arg-type]


def proposed(qos: Qos, active: str = "fcfs", allow: frozenset[str] = ALLOW) -> str | None:
    proposal = RULES.propose(qos, active, allow)
    return None if proposal is None else proposal.policy


def test_a_pool_without_symptoms_keeps_its_policy() -> None:
    assert proposed(window()) is None


def test_misses_while_the_load_is_feasible_ask_for_deadlines_first() -> None:
    assert proposed(window(missed=20)) == "edf"
    assert proposed(window(missed=20), allow=frozenset({"urgency", "fcfs"})) == "urgency"


def test_misses_under_overload_ask_for_short_calls_first() -> None:
    assert proposed(window(missed=20, arrived=200, finished=100)) == "sjf"


def test_deadlines_that_cannot_be_met_ask_for_short_calls_also_once_the_arrivals_have_calmed_down() -> None:
    calm = {"arrived": 30, "finished": 100}
    assert proposed(window(missed=100, **calm), active="urgency") == "sjf"
    assert proposed(window(missed=50, **calm), active="edf") == "sjf"
    assert proposed(window(missed=49, **calm), active="urgency") == "edf"
    found = RULES.propose(window(missed=100, window_s=30.0, **calm), "urgency", ALLOW)
    assert found is not None
    assert found.reason == "overload: 100% of targets missed in 30 s, 10 calls wait, 3 s at the rate of completions"


def test_a_part_of_the_pool_that_misses_all_its_targets_is_no_overload() -> None:
    parts = {"chat": Targets(with_target=20, missed=20), "batch": Targets(with_target=180)}
    assert proposed(window(calls=200, missed=20, classes=parts)) == "edf"


def test_misses_of_one_class_or_tenant_count_when_the_pool_meets_its_targets() -> None:
    for part in (
        {"classes": {"chat": Targets(with_target=40, missed=10), "batch": Targets(with_target=60)}},
        {"tenants": {"chat": TenantService(with_target=40, missed=10)}},
    ):
        found = RULES.propose(window(calls=1000, missed=10, window_s=30.0, **part), "fcfs", ALLOW)
        assert found is not None
        assert found.policy == "edf"
        assert found.reason.startswith("misses: 25% of the targets of")
        assert found.reason.endswith("chat missed in 30 s")


def test_few_calls_of_a_class_are_no_evidence() -> None:
    assert proposed(window(classes={"chat": Targets(with_target=10, missed=10)})) is None


def test_tenants_that_wait_while_others_are_served_ask_for_fair_sharing() -> None:
    unfair = {"a": TenantService(served_tokens=900, waiting=5), "b": TenantService(served_tokens=100, waiting=5)}
    assert proposed(window(tenants=unfair)) == "wfq"
    assert proposed(window(tenants=unfair), allow=frozenset({"stride", "fcfs"})) == "stride"
    assert proposed(window(tenants={**unfair, "a": TenantService(served_tokens=900)})) is None
    assert proposed(window(tenants={**unfair, "a": TenantService(weight=9.0, served_tokens=900, waiting=5)})) is None


def test_short_calls_behind_long_ones_ask_for_lanes() -> None:
    mixed = histogram(*[0.2] * 90, *[30.0] * 10)
    assert proposed(window(blocked=40, service=mixed)) == "two-lane"


def test_waiting_among_equal_calls_does_not_propose_lanes() -> None:
    assert proposed(window(blocked=40)) is None


def test_without_waiting_calls_no_policy_is_proposed() -> None:
    assert proposed(window(missed=50, waiting=0)) is None


def test_few_calls_are_no_evidence() -> None:
    assert proposed(window(calls=3, missed=3, waiting=2)) is None


MIXED = {"service": histogram(*[0.2] * 90, *[30.0] * 10)}
WAITS = {"window_s": 10.0, "waiting": 20}
"""The pool finishes 100 calls in 10 s, so 20 that wait are 2 s."""


@pytest.mark.parametrize(
    ("below", "policy", "reached", "cure"),
    [
        ({"missed": 4}, None, {"missed": 5}, "edf"),
        ({"missed": 49}, "edf", {"missed": 50}, "sjf"),
        ({"missed": 5, "arrived": 150}, "edf", {"missed": 5, "arrived": 151}, "sjf"),
        ({**WAITS, "missed": 2, "waiting": 19}, None, {**WAITS, "missed": 2}, "sjf"),
        ({**WAITS, "missed": 1}, None, {**WAITS, "missed": 2}, "sjf"),
        ({**MIXED, "blocked": 19}, None, {**MIXED, "blocked": 20}, "two-lane"),
        ({"calls": 9, "missed": 9}, None, {"calls": 20, "missed": 20}, "sjf"),
        (
            {"classes": {"chat": Targets(with_target=20, missed=3)}},
            None,
            {"classes": {"chat": Targets(with_target=20, missed=4)}},
            "edf",
        ),
        (
            {
                "tenants": {
                    "a": TenantService(served_tokens=3, waiting=1),
                    "b": TenantService(served_tokens=1, waiting=1),
                }
            },
            None,
            {
                "tenants": {
                    "a": TenantService(served_tokens=31, waiting=1),
                    "b": TenantService(served_tokens=10, waiting=1),
                }
            },
            "wfq",
        ),
    ],
    ids=["misses", "late", "growth", "wait", "first-misses", "blocking", "enough", "part", "fairness"],
)
def test_each_rule_begins_at_its_threshold(
    below: dict[str, object], policy: str | None, reached: dict[str, object], cure: str
) -> None:
    assert proposed(window(**below)) == policy  # type: ignore[arg-type]
    assert proposed(window(**reached)) == cure  # type: ignore[arg-type]


def test_thrashing_and_silence_are_emergencies() -> None:
    for qos in (window(preemptions=600), window(engines=1, silent=2)):
        bypass = emergency.found(qos, [qos])
        assert bypass is not None
        assert (bypass.policy, bypass.emergency) == ("fcfs", True)


def test_preemptions_of_an_engine_whose_memory_is_full_are_no_emergency() -> None:
    assert emergency.found(window(), [window(preemptions=300)]) is None


def test_a_policy_that_is_not_allowed_is_not_proposed() -> None:
    assert proposed(window(missed=20), allow=frozenset({"fcfs"})) is None


def state(active: str = "fcfs", since_at_s: float = 0.0) -> guards.SteerState:
    return guards.SteerState(active=active, since_at_s=since_at_s)


EDF = proposal.Proposal(policy="edf", reason="misses")
PANIC = proposal.Proposal(policy="fcfs", reason="thrash", emergency=True)


def test_a_proposal_waits_for_the_dwell() -> None:
    early, verdict = guards.step(59.0, state(), window(), EDF, CAREFUL)
    assert verdict.kind is guards.Kind.KEEP
    assert verdict.held == guards.Held(policy="edf", active="fcfs", until_at_s=60.0, guard=guards.Guard.DWELL)
    _, verdict = guards.step(60.0, early, window(), EDF, CAREFUL)
    assert (verdict.kind, verdict.policy, verdict.reason) == (guards.Kind.SWITCH, "edf", "misses")
    assert verdict.held is None


@pytest.mark.parametrize(
    ("kind", "returns", "dwell_s"),
    [(guards.Kind.KEEP, 0, 10), (guards.Kind.SWITCH, 2, 40), (guards.Kind.BYPASS, 0, 30)],
)
def test_a_proposal_takes_effect_once_the_minimum_dwell_is_over(kind: guards.Kind, returns: int, dwell_s: int) -> None:
    quick = guards.GuardSettings(dwell_s=10.0, bypass_s=30.0)
    active = guards.SteerState(active="fcfs", since_at_s=0.0, kind=kind, returns=returns)
    assert guards.minimum_dwell_s(active, quick) == dwell_s
    assert guards.step(dwell_s - 0.1, active, window(), EDF, quick)[1].kind is guards.Kind.KEEP
    assert guards.step(dwell_s, active, window(), EDF, quick)[1].kind is guards.Kind.SWITCH


def test_a_bypass_does_not_wait() -> None:
    _, verdict = guards.step(0.1, state("edf"), window(), PANIC, CAREFUL)
    assert (verdict.kind, verdict.policy) == (guards.Kind.BYPASS, "fcfs")


def test_an_emergency_lifts_the_bounds_also_while_the_safe_policy_is_active_and_until_it_is_over() -> None:
    bypassed, verdict = guards.step(10.0, state(), window(), PANIC, CAREFUL)
    assert (verdict.kind, verdict.policy, bypassed.switched_at_s) == (guards.Kind.BYPASS, "fcfs", ())
    over = proposal.Proposal(policy="fcfs", reason="the emergency is over")
    assert guards.step(20.0, bypassed, window(), PANIC, CAREFUL)[1].kind is guards.Kind.KEEP
    assert guards.step(69.0, bypassed, window(), over, CAREFUL)[1].kind is guards.Kind.KEEP
    after, verdict = guards.step(70.0, bypassed, window(), over, CAREFUL)
    assert (verdict.kind, after.kind, after.active) == (guards.Kind.SWITCH, guards.Kind.SWITCH, "fcfs")
    assert guards.step(80.0, after, window(), None, CAREFUL)[1].kind is guards.Kind.KEEP


def test_an_emergency_that_returns_soon_is_told_by_the_end_of_the_last_bypass_alone() -> None:
    """The safe policy may also be left because a selector proposes another one, or a person does."""
    left, _ = guards.step(60.0, state(), window(), EDF, CAREFUL)
    first, _ = guards.step(70.0, left, window(), PANIC, CAREFUL)
    assert first.bypasses == 0, "no bypass came before"
    chosen, _ = guards.step(130.0, first, window(), None, CAREFUL, override="sjf")
    back, _ = guards.step(140.0, chosen, window(), None, CAREFUL)
    assert (back.active, guards.step(150.0, back, window(), PANIC, CAREFUL)[0].bypasses) == ("edf", 1)
    again, _ = guards.step(140.0, first, window(), EDF, CAREFUL)
    assert policies.SAFE not in {name for name, at_s in again.left_at_s.items() if at_s == 140.0}
    assert guards.step(150.0, again, window(), PANIC, CAREFUL)[0].bypasses == 1


@pytest.mark.parametrize("by", ["a person", "an emergency"])
def test_a_trial_that_is_interrupted_begins_anew_when_its_policy_is_back(by: str) -> None:
    calm, late = window(ttft_s=0.1, with_target=0), window(ttft_s=5.0, with_target=0)
    over = proposal.Proposal(policy="edf", reason="the emergency is over")
    tried, _ = guards.step(60.0, state("urgency"), calm, EDF, CAREFUL)
    if by == "a person":
        held, _ = guards.step(65.0, tried, late, None, CAREFUL, override="sjf")
        back, _ = guards.step(140.0, held, late, None, CAREFUL)
    else:
        held, _ = guards.step(65.0, tried, late, PANIC, CAREFUL)
        back, _ = guards.step(140.0, held, late, over, CAREFUL)
    assert back.active == "edf"
    _, verdict = guards.step(150.0, back, late, None, CAREFUL)
    assert (verdict.kind, verdict.policy) == (guards.Kind.ROLLBACK, "urgency")
    stale, _ = guards.step(5000.0, held, late, over if by == "an emergency" else None, CAREFUL)
    assert guards.step(5010.0, stale, late, None, CAREFUL)[1].kind is guards.Kind.KEEP, "an hour has passed"


def test_an_override_during_a_bypass_returns_to_the_policy_from_before_the_bypass() -> None:
    bypassed, _ = guards.step(10.0, state("edf"), window(), PANIC, CAREFUL)
    taken, _ = guards.step(30.0, bypassed, window(), None, CAREFUL, override="sjf")
    assert taken.active == "sjf"
    back, verdict = guards.step(60.0, taken, window(), None, CAREFUL)
    assert (back.active, verdict.reason) == ("edf", "the override has ended")


def test_a_service_before_which_nothing_had_finished_is_no_reason_to_roll_back() -> None:
    idle = window(calls=0, waiting=20)
    after, _ = guards.step(60.0, state(), idle, EDF, CAREFUL)
    _, verdict = guards.step(70.0, after, window(ttft_s=0.5, with_target=0), None, CAREFUL)
    assert verdict.kind is guards.Kind.KEEP


def test_a_switch_that_worsened_the_service_is_rolled_back_and_banned() -> None:
    after, _ = guards.step(60.0, state(), window(ttft_s=0.1, with_target=0), EDF, CAREFUL)
    back, verdict = guards.step(70.0, after, window(ttft_s=0.5, with_target=0), None, CAREFUL)
    assert (verdict.kind, verdict.policy) == (guards.Kind.ROLLBACK, "fcfs")
    assert "TTFT p99" in verdict.reason
    _, verdict = guards.step(200.0, back, window(), EDF, CAREFUL)
    assert verdict.kind is guards.Kind.KEEP
    _, verdict = guards.step(371.0, back, window(), EDF, CAREFUL)
    assert verdict.kind is guards.Kind.SWITCH


def test_a_switch_that_slows_the_tokens_is_rolled_back() -> None:
    after, _ = guards.step(60.0, state(), window(tpot=histogram(*[0.1] * 50), with_target=0), EDF, CAREFUL)
    _, verdict = guards.step(70.0, after, window(tpot=histogram(*[0.4] * 50), with_target=0), None, CAREFUL)
    assert verdict.kind is guards.Kind.ROLLBACK
    assert "TPOT p99" in verdict.reason
    _, verdict = guards.step(70.0, after, window(tpot=histogram(*[0.4] * 5), with_target=0), None, CAREFUL)
    assert verdict.kind is guards.Kind.KEEP


def test_tokens_that_are_still_faster_than_people_read_are_no_reason_to_roll_back() -> None:
    after, _ = guards.step(60.0, state(), window(tpot=histogram(*[0.01] * 50)), EDF, CAREFUL)
    _, verdict = guards.step(70.0, after, window(tpot=histogram(*[0.05] * 50)), None, CAREFUL)
    assert verdict.kind is guards.Kind.KEEP


def test_a_switch_is_not_rolled_back_after_the_window_or_for_noise() -> None:
    after, _ = guards.step(60.0, state(), window(ttft_s=0.001), EDF, CAREFUL)
    assert guards.step(70.0, after, window(ttft_s=0.04), None, CAREFUL)[1].kind is guards.Kind.KEEP
    assert guards.step(90.0, after, window(ttft_s=9.0), None, CAREFUL)[1].kind is guards.Kind.KEEP


def test_no_misses_before_and_one_after_is_no_reason_to_roll_back() -> None:
    after, _ = guards.step(60.0, state(), window(ttft_s=0.5), EDF, CAREFUL)
    one, ten = window(ttft_s=0.5, missed=1), window(ttft_s=0.5, missed=10)
    assert guards.step(70.0, after, one, None, CAREFUL)[1].kind is guards.Kind.KEEP
    assert guards.step(70.0, after, ten, None, CAREFUL)[1].kind is guards.Kind.ROLLBACK


def test_an_override_takes_precedence_and_its_end_returns_to_the_rules() -> None:
    held, verdict = guards.step(1.0, state(), window(), PANIC, CAREFUL, override="edf")
    assert (verdict.kind, verdict.policy) == (guards.Kind.OVERRIDE, "edf")
    held, verdict = guards.step(2.0, held, window(), PANIC, CAREFUL, override="edf")
    assert verdict.kind is guards.Kind.KEEP
    handed_back, verdict = guards.step(3.0, held, window(), None, CAREFUL)
    assert (verdict.kind, verdict.policy) == (guards.Kind.SWITCH, "fcfs")
    assert guards.step(4.0, handed_back, window(), None, CAREFUL)[1].kind is guards.Kind.KEEP


def test_one_override_after_another_still_ends_where_it_began() -> None:
    held, _ = guards.step(1.0, state("sjf"), window(), None, CAREFUL, override="edf")
    held, _ = guards.step(2.0, held, window(), None, CAREFUL, override="urgency")
    assert guards.step(3.0, held, window(), None, CAREFUL)[1].policy == "sjf"


def test_the_end_of_an_override_keeps_the_memory() -> None:
    known = guards.SteerState(
        active="edf",
        since_at_s=0.0,
        strikes={"sjf": 2},
        banned_until_at_s={"sjf": 99.0},
        left_at_s={"sjf": 3.0},
        returns=2,
    )
    held, _ = guards.step(10.0, known, window(), None, CAREFUL, override="priority", allow=("edf", "sjf"))
    after, verdict = guards.step(20.0, held, window(), None, CAREFUL, allow=("edf", "sjf"))
    assert (verdict.kind, verdict.policy, verdict.reason) == (guards.Kind.SWITCH, "edf", "the override has ended")
    assert (after.strikes, after.banned_until_at_s) == (known.strikes, known.banned_until_at_s)
    assert (after.left_at_s, after.returns) == (known.left_at_s, known.returns)


@pytest.mark.parametrize(("allow", "policy"), [(("urgency", "fcfs"), "urgency"), (("two-lane",), "fcfs")])
def test_a_policy_that_is_not_allowed_is_left_at_once(allow: tuple[str, ...], policy: str) -> None:
    known = guards.SteerState(active="edf", since_at_s=0.0, strikes={"sjf": 1})
    after, verdict = guards.step(1.0, known, window(), None, CAREFUL, allow=allow)
    assert (verdict.kind, verdict.policy, verdict.reason) == (guards.Kind.SWITCH, policy, "edf is not allowed")
    assert after.strikes == {"sjf": 1}
    assert guards.step(2.0, after, window(), None, CAREFUL, allow=allow)[1].kind is guards.Kind.KEEP


def test_a_proposal_that_an_engine_does_not_know_is_taken_back_and_banned_and_an_override_is_not() -> None:
    calm = window(with_target=0)
    current, _ = guards.step(100.0, state(), calm, EDF, CAREFUL)
    current, verdict = guards.step(5000.0, current, calm, EDF, CAREFUL, unknown="e1 answers no")
    assert (verdict.kind, verdict.policy) == (guards.Kind.ROLLBACK, "fcfs")
    assert verdict.reason == "rollback: edf is not known everywhere: e1 answers no"
    assert guards.step(5100.0, current, calm, EDF, CAREFUL)[1].kind is guards.Kind.KEEP
    current, _ = guards.step(1.0, state(), calm, None, CAREFUL, override="edf")
    assert guards.step(2.0, current, calm, None, CAREFUL, override="edf", unknown="no")[1].kind is guards.Kind.KEEP


PROPOSALS = st.none() | st.builds(
    lambda policy, emergency: proposal.Proposal(
        policy="fcfs" if emergency else policy, reason="x", emergency=emergency
    ),
    st.sampled_from(sorted(ALLOW)),
    st.booleans(),
)
HISTORIES = st.lists(
    st.tuples(
        st.floats(0.1, 120),
        PROPOSALS,
        st.builds(
            lambda ttft_s, calls, share: window(ttft_s=ttft_s, calls=calls, missed=int(calls * share)),
            st.floats(0, 10),
            st.integers(0, 100),
            st.floats(0, 1),
        ),
    ),
    max_size=60,
)


@given(HISTORIES)
def test_over_any_history_no_two_chosen_switches_are_closer_than_the_dwell(
    history: list[tuple[float, proposal.Proposal | None, Qos]],
) -> None:
    current, now, last_change = state(), 0.0, 0.0
    for seconds, proposed, qos in history:
        now += seconds
        current, verdict = guards.step(now, current, qos, proposed, CAREFUL)
        if verdict.kind is guards.Kind.SWITCH:
            assert now - last_change >= CAREFUL.dwell_s
        if verdict.kind is not guards.Kind.KEEP:
            last_change = now
        assert current.active == verdict.policy


@given(HISTORIES)
def test_over_any_history_there_is_a_way_back_to_fcfs(
    history: list[tuple[float, proposal.Proposal | None, Qos]],
) -> None:
    current, now = state(), 0.0
    for seconds, proposed, qos in history:
        now += seconds
        current, _ = guards.step(now, current, qos, proposed, CAREFUL)
        _, verdict = guards.step(now, current, qos, PANIC, CAREFUL)
        assert verdict.policy == "fcfs"


def test_a_proposal_that_always_worsens_the_service_is_tried_less_and_less_often() -> None:
    current, now = state(), 0.0
    switches = []
    while now < 86_400:
        now += 10.0
        ttft_s = 5.0 if current.active == "edf" else 0.1
        current, verdict = guards.step(now, current, window(ttft_s=ttft_s, with_target=0), EDF, UNCOUNTED)
        if verdict.kind is guards.Kind.SWITCH:
            switches.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(switches)]
    assert gaps == sorted(gaps)
    assert len(switches) <= 10


def switches_of(period_s: float, until_s: float) -> list[float]:
    """When the order changes while the symptoms ask for edf and two-lane in turns of `period_s`."""
    current, now, switches = state("edf"), 0.0, []
    while now < until_s:
        now += 10.0
        wanted = "two-lane" if now // period_s % 2 else "edf"
        current, verdict = guards.step(now, current, window(), proposal.Proposal(policy=wanted, reason="x"), UNCOUNTED)
        if verdict.kind is guards.Kind.SWITCH:
            switches.append(now)
    return switches


def test_alternating_symptoms_cause_fewer_and_fewer_switches() -> None:
    switches = switches_of(period_s=20.0, until_s=86_400)
    gaps = [later - earlier for earlier, later in itertools.pairwise(switches)]
    assert gaps[0] < 2 * CAREFUL.dwell_s
    assert min(gaps[guards.MAX_RETURNS + 1 :]) >= CAREFUL.dwell_s * 2**guards.MAX_RETURNS
    assert len(switches) < 100


@given(
    symptoms=st.lists(
        st.tuples(
            st.sampled_from(["edf", "two-lane", "sjf", "wfq", "", "emergency"]),
            st.sampled_from([0.1, 5.0]),
            st.sampled_from([None, None, "e1 answers no"]),
            st.floats(1.0, 400.0),
        ),
        min_size=200,
        max_size=400,
    )
)
@settings(max_examples=60, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_in_any_hour_there_are_fewer_than_six_switches_and_a_bypass_is_never_held_back(
    symptoms: list[tuple[str, float, str | None, float]],
) -> None:
    current, now, switches = state(), 0.0, []
    for wanted, ttft_s, unknown, pause_s in symptoms:
        now += pause_s
        emergency = wanted == "emergency"
        asked = proposal.Proposal(policy=policies.SAFE if emergency else wanted, reason="x", emergency=emergency)
        qos = window(ttft_s=ttft_s, missed=int(10 * ttft_s))
        careless = guards.GuardSettings(dwell_s=10, ban_s=10)
        before = current.active
        current, _ = guards.step(now, current, qos, asked if wanted else None, careless, unknown=unknown)
        if current.active != before:
            switches.append(now)
        if emergency:
            assert (current.active, current.kind) == (policies.SAFE, guards.Kind.BYPASS)
    for first, sixth in zip(switches, switches[5:], strict=False):
        assert sixth - first >= guards.HOUR_S


def test_every_slow_change_of_the_load_causes_a_switch() -> None:
    hours = 6
    assert len(switches_of(period_s=3600.0, until_s=hours * 3600)) == hours


@pytest.mark.parametrize("allow", [frozenset({policies.DEFAULT, "edf"}), frozenset({"edf"})])
def test_a_pool_starts_with_the_default_policy_where_it_is_allowed_else_with_the_safe_one(
    allow: frozenset[str],
) -> None:
    assert guards.start_policy(allow) == (policies.DEFAULT if policies.DEFAULT in allow else policies.SAFE)
