"""The autoscaler on recorded and generated loads, without engines: it follows the load, and never goes back and forth.

The recorded load is Azure's published trace, which is not part of this repository. Its tests are skipped without the file;
`TIDEGATE_DATA=FOLDER pytest tests/sim/test_recorded_loads.py` names the folder with `azure_llm_2023/`.
"""

import functools
import random

import pytest
import scaled_pool
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tidegate_profiles
from tidegate_policy import cost
from tidegate_policy.model import Call, CallId
from tidegate_policy.scale import autoscaler, call_load
from tidegate_sim import scale_traces, trace_format

COST = cost.from_mapping(tidegate_profiles.load("a100-40-llama2-70b-tp4")["cost"])
PERIOD_S = 10.0
AZURE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz"


@functools.cache
def azure_calls(path):
    return tuple(trace_format.from_azure(path))


def arrivals(calls, length_s):
    """The load that arrives in each period of `length_s` seconds."""
    tallies = [call_load.Tally() for _ in range(round(length_s / PERIOD_S))]
    for call in calls:
        sized = Call(
            id=CallId(call.id),
            arrived_at_s=call.arrival_s,
            prompt_tokens=call.prompt_tokens,
            output_predicted=call.output_tokens,
        )
        tallies[min(int(call.arrival_s / PERIOD_S), len(tallies) - 1)].add(sized)
    return [tally.load for tally in tallies]


def changes_on(calls, length_s, *, stabilisation_s=300.0):
    """The changes of an autoscaler that starts with what the first minute needs: (instant, engines)."""
    settings = autoscaler.ScaleSettings(stabilisation_s=stabilisation_s)
    state = autoscaler.begin(0.0, {"a100": 1})
    found = []
    for index, arrived in enumerate(arrivals(calls, length_s), 1):
        pool = autoscaler.NodePool(
            name="a100", cost=COST, price=4.0, low=0, high=40, ready=state.wanted["a100"], start_s=120.0
        )
        seen = autoscaler.Observation(
            seconds=PERIOD_S,
            arrived=arrived,
            waiting=call_load.NOTHING,
            queued=0,
            running=round(arrived.calls),
            node_pools=[pool],
        )
        state, decision = autoscaler.step(index * PERIOD_S, state, seen, settings)
        if decision.changed:
            found.append((index * PERIOD_S, decision.wanted["a100"]))
    return found, settings


def assert_calm(found, settings, length_s):
    """Few changes, and no decrease before the window after an increase is over."""
    instants = [at_s for at_s, _ in found]
    for at_s in instants:
        assert sum(at_s - 3600 < other <= at_s for other in instants) <= settings.changes_an_hour
    turns, raised_s, before = 0, None, 1
    for at_s, count in found:
        if count < before and raised_s is not None:
            assert at_s - raised_s >= settings.stabilisation_s
            turns += 1
        raised_s = at_s if count > before else None
        before = count
    assert turns <= 4 * length_s / 3600 + 1, "an hour has no more than four waves"


@pytest.mark.parametrize("rate", [0.5, 6.0])
@pytest.mark.parametrize("name", scale_traces.SHAPES)
def test_generated_loads_move_the_engines_few_times(name, rate):
    length_s = scale_traces.length_s(name)
    for seed in range(2):
        found, settings = changes_on(scale_traces.trace(name, seed, rate), length_s)
        assert_calm(found, settings, length_s)


@pytest.mark.parametrize("rate", [2.0, 5.0])
@pytest.mark.parametrize("name", scale_traces.FROM_AZURE)
def test_the_recorded_loads_of_azure_move_the_engines_few_times(published, name, rate):
    azure = azure_calls(published(AZURE))
    for seed in range(2):
        found, settings = changes_on(scale_traces.trace(name, seed, rate, azure), scale_traces.length_s(name))
        assert found, "the engines follow the load"
        assert_calm(found, settings, scale_traces.length_s(name))
        assert len(found) <= 14


@pytest.mark.parametrize("name", scale_traces.NAMES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], phases=[Phase.generate])
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(0.5, 3.0),
    scale=st.floats(0.2, 8.0),
    budget=st.integers(6, 20),
    bounds=st.tuples(st.integers(0, 3), st.integers(3, 12)),
)
def test_under_any_recorded_load_the_bounds_hold_and_changes_are_few(
    published, name, seed, rate, scale, budget, bounds
):
    """As `test_under_any_load_the_bounds_hold_and_changes_are_few`, on a random part of Azure's trace, or on a load with
    its published lengths. `scale` is the work of a call as a multiple of the trace's. An example takes half a second, so
    no smaller one is searched for after a failure."""
    azure = azure_calls(published(AZURE)) if name in scale_traces.FROM_AZURE else ()
    length_s = scale_traces.length_s(name)
    low, high = bounds
    rng = random.Random(seed)
    kinds = (
        scaled_pool.node_pool("a", cost=COST, price=4.0, low=low, high=high),
        scaled_pool.node_pool("b", cost=scaled_pool.SLOW, price=0.4, high=5),
    )
    pool = scaled_pool.Pool(*kinds, settings=autoscaler.ScaleSettings(changes_an_hour=budget))
    for arrived in arrivals(scale_traces.trace(name, seed, rate, azure), length_s):
        waiting = arrived.times(rng.choice((0, 0, 0, 1, 20)))
        wanted = pool.observe(
            0.0, arrived=arrived.times(scale), waiting=waiting, queued=rng.choice((0, 3)), running=round(arrived.calls)
        )
        assert low <= wanted["a"] <= high
        assert 0 <= wanted["b"] <= 5
    scaled_pool.assert_few(pool, budget)
