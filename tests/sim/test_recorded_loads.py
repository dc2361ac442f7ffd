"""The autoscaler on recorded and generated loads, without engines: it follows the load, and never goes back and forth."""

import pytest

import tidegate_profiles
from tidegate_policy import cost
from tidegate_policy.model import Call, CallId
from tidegate_policy.scale import autoscaler, call_load
from tidegate_sim import scale_traces, trace_format

COST = cost.from_mapping(tidegate_profiles.load("a100-40-llama2-70b-tp4")["cost"])
PERIOD_S = 10.0
AZURE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz"


def changes_on(calls, length_s, *, stabilisation_s=300.0):
    """The changes of an autoscaler that starts with what the first minute needs: (instant, engines)."""
    tallies = [call_load.Tally() for _ in range(round(length_s / PERIOD_S))]
    for call in calls:
        sized = Call(
            id=CallId(call.id),
            arrived_at_s=call.arrival_s,
            prompt_tokens=call.prompt_tokens,
            output_predicted=call.output_tokens,
        )
        tallies[min(int(call.arrival_s / PERIOD_S), len(tallies) - 1)].add(sized)
    settings = autoscaler.ScaleSettings(stabilisation_s=stabilisation_s)
    state = autoscaler.begin(0.0, {"a100": 1})
    found = []
    for index, tally in enumerate(tallies, 1):
        pool = autoscaler.NodePool(
            name="a100", cost=COST, price=4.0, low=0, high=40, ready=state.wanted["a100"], start_s=120.0
        )
        seen = autoscaler.Observation(
            seconds=PERIOD_S,
            arrived=tally.load,
            waiting=call_load.NOTHING,
            queued=0,
            running=round(tally.load.calls),
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
    azure = tuple(trace_format.from_azure(published(AZURE)))
    for seed in range(2):
        found, settings = changes_on(scale_traces.trace(name, seed, rate, azure), scale_traces.length_s(name))
        assert found, "the engines follow the load"
        assert_calm(found, settings, scale_traces.length_s(name))
        assert len(found) <= 14
