"""`load-band`: two loops around the load of an engine."""

import random

from regulated_engine import FULL, LIMITS, World

from tidegate_policy.engine.regulators.load_band import LoadBand
from tidegate_policy.engine.step import StepFacts, StepPlan


class Loaded:
    """A band around one call with a target of 50 ms."""

    def __init__(self, plan: StepPlan = FULL) -> None:
        self.band, self.world, self.outer = LoadBand(), World(), plan
        self.world.runs("decoding", done=3, tpot_s=0.05)

    def plan(self) -> StepPlan:
        return self.band.shape(self.world.engine(), self.outer)

    def step(self, load: float) -> None:
        self.band.observe(StepFacts(now=0.0, step_s=load * 0.05, computed={}, preempted=(), ended=()))


def band_after(loads: list[float], *, plan: StepPlan = FULL) -> StepPlan:
    """The plan after steps with these loads."""
    loaded = Loaded(plan)
    made = loaded.plan()
    for load in loads:
        loaded.step(load)
        made = loaded.plan()
    return made


def test_an_overload_lowers_tokens_at_once_and_places_only_when_it_lasts() -> None:
    assert band_after([0.75] * 10) == FULL, "inside the band nothing moves"
    once = band_after([1.9])
    assert once.max_step_tokens < 900
    assert once.max_running == 8
    assert band_after([1.9] * 60).max_running < 6


def test_the_loops_recover_and_do_not_wind_up() -> None:
    """However long an overload lasted, the way back takes the same time."""
    for length in (60, 600):
        after = band_after([1.9] * length + [0.1] * 120)
        assert (after.max_step_tokens, after.max_running) == (1000, 8)


def test_the_loops_stay_within_the_bounds_of_the_operator() -> None:
    rng = random.Random(3)
    outer = StepPlan(max_running=4, max_step_tokens=300)
    for _ in range(50):
        plan = band_after([rng.uniform(0, 30) for _ in range(rng.randrange(60))], plan=outer)
        assert 1 <= plan.max_running <= 4
        assert LIMITS.max_step_tokens // 16 <= plan.max_step_tokens <= 300


def test_steps_that_the_band_did_not_plan_leave_no_bounds_behind() -> None:
    """In a bypass steps end that the band has not planned."""
    loaded = Loaded()
    for _ in range(60):
        loaded.plan()
        loaded.step(1.9)
    assert loaded.plan().max_running < 6
    for _ in range(60):
        loaded.step(1.9)
    assert loaded.plan() == FULL
    loaded.step(0.75)
    assert loaded.plan() == FULL


def test_a_step_that_is_planned_before_the_one_before_it_has_ended_counts() -> None:
    """An engine with asynchronous scheduling plans a step while another one runs."""
    loaded = Loaded()
    loaded.plan()
    for _ in range(60):
        loaded.plan()
        loaded.step(1.9)
    assert loaded.plan().max_running < 6
