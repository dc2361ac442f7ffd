"""What follows when one engine rejects a call that another one answers: either of the two may be wrong."""

from tidegate_policy.admit import outliers
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.engine_table import EngineFacts, EngineTable, Health
from tidegate_policy.model import NO_BACKLOG, EngineId

SETTINGS = outliers.OutlierSettings()
COST = CostModel(step_s=0.02, prefill_s=1e-4, max_batch=4)
HONEST, LIAR, THIRD, FOURTH = (EngineId(name) for name in ("honest", "liar", "third", "fourth"))


def table(*engines: EngineId) -> EngineTable:
    made = EngineTable("auto", SETTINGS)
    for engine in engines:
        update(made, engine)
    return made


def update(made: EngineTable, engine: EngineId, health: Health = Health.UP) -> None:
    made.update(EngineFacts(id=engine, cost=COST, health=health), lambda: NO_BACKLOG)


def accepting(made: EngineTable, now: float) -> list[EngineId]:
    return [item.facts.id for item in made.accepting(now)]


def contradict(
    made: EngineTable, now: float, engine: EngineId, *others: EngineId, calls: int = 1
) -> list[float | None]:
    """What follows when each of the others in turn answers calls of several tenants that the engine rejected."""
    turns = [(number, by) for number in range(calls) for by in others]
    return [made.on_second_opinion(now, engine, f"t{number % 3}", by, answers=True) for number, by in turns]


def test_an_engine_that_serves_calls_is_not_ejected_for_its_rejections() -> None:
    made = table(HONEST, LIAR, THIRD, FOURTH)
    for second in range(100):
        made.on_attempt(second, HONEST, "honest", ok=True)
        assert contradict(made, second + 0.9, HONEST, LIAR, THIRD, calls=10) == [None] * 20
    assert len(accepting(made, 100.0)) == 4
    assert made.on_attempt(100.0, HONEST, "t", ok=False).ejected_s is None, (
        "contradictions are no failures of its calls"
    )


def test_an_idle_engine_is_not_ejected_by_the_word_of_one_engine_out_of_two() -> None:
    made = table(HONEST, LIAR, THIRD)
    assert contradict(made, 0.0, HONEST, LIAR, calls=100) == [None] * 100
    assert contradict(made, 0.0, HONEST, THIRD) == [SETTINGS.base_ejection_s]
    assert accepting(made, 0.5) == [LIAR, THIRD]


def test_where_there_are_two_engines_the_one_that_serves_is_believed() -> None:
    made = table(HONEST, LIAR)
    assert contradict(made, 0.0, HONEST, LIAR, calls=3) == [None, None, 1.0]
    assert accepting(made, 0.5) == [LIAR]


def test_an_engine_that_was_found_right_or_that_serves_again_starts_anew() -> None:
    for meanwhile in ("confirmed", "serves"):
        made = table(HONEST, LIAR)
        contradict(made, 0.0, HONEST, LIAR, calls=2)
        if meanwhile == "serves":
            made.on_attempt(0.0, HONEST, "t", ok=True)
        else:
            made.on_second_opinion(0.0, HONEST, "t", LIAR, answers=False)
        assert contradict(made, outliers.SERVED_S, HONEST, LIAR, calls=2) == [None, None]


def test_the_word_of_an_engine_that_then_fails_calls_itself_counts_no_more() -> None:
    made = table(HONEST, LIAR)
    made.on_attempt(0.0, HONEST, "t", ok=False)
    for now in (10.0, 20.0, 30.0):  # each ejection is longer
        contradict(made, now, HONEST, LIAR, calls=3)
    assert accepting(made, 31.5) == [LIAR]
    assert [made.on_attempt(31.5, LIAR, "t", ok=False).ejected_s for _ in range(3)] == [None, None, 1.0]
    assert accepting(made, 31.5) == [HONEST]


def test_ejected_engines_serve_when_no_other_one_is_left() -> None:
    made = table(HONEST, LIAR)
    assert [made.on_attempt(0.0, HONEST, "t", ok=False).ejected_s for _ in range(3)][-1] == 1.0
    assert accepting(made, 0.1) == [LIAR]
    update(made, LIAR, Health.DOUBTFUL)
    assert accepting(made, 0.2) == [LIAR]
    update(made, LIAR, Health.DOWN)
    assert accepting(made, 0.3) == [HONEST]
    update(made, HONEST, Health.DOUBTFUL)
    assert accepting(made, 0.4) == [], "it is ejected, and in doubt too"
    update(made, LIAR)
    assert accepting(made, 0.5) == [LIAR]


def test_the_wrong_calls_of_one_tenant_do_not_make_the_rejections_of_another_one_stand() -> None:
    made = table(LIAR, HONEST)
    asked = []
    for number in range(60):
        if made.on_rejection(0.0, LIAR, "hostile"):
            asked.append(number)
            made.on_second_opinion(0.0, LIAR, "hostile", HONEST, answers=False)
        if number > 2:
            assert made.on_rejection(0.0, LIAR, "honest"), "another engine is asked"
    assert len(asked) == 20, "every third wrong call is tried twice"


def test_an_engine_forgets_the_tenants_whose_wrong_calls_are_the_oldest() -> None:
    record = outliers.FailureRecord()
    for number in range(1000):
        record.confirmed(f"t{number}")
    assert len(record._at_fault) == outliers.MOST_AT_FAULT
    assert not record.rejected("t999")
