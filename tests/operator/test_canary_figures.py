"""The counts of gateways, added up from the beginning of a step."""

import pytest

from tidegate_operator import canary_figures
from tidegate_policy.rollout.side_by_side import Service, Targets, Times


def state(calls, **more):
    times = {"count": calls, "log_sum": -1.5 * calls}
    service = {"calls": calls, "errors": 1, "ttft": times, "tpot": times, **more}
    return {"engines": [{"name": "e:8000", "service": {"targets": {}, **service}}]}


def seen(**calls):
    return {gateway: canary_figures.parse(state(count)) for gateway, count in calls.items()}


def add(figures, services, gateways):
    figures.add(services, gateways=gateways, engines={"e:8000", "new:8000"}, classes={"chat"})


def test_the_state_of_a_gateway_is_read():
    found = canary_figures.parse(state(4, targets={"chat": {"with_target": 3, "missed": 1}}))
    times = Times(count=4, log_sum=-6.0)
    targets = {"chat": Targets(with_target=3, missed=1)}
    assert found == {"e:8000": Service(calls=4, errors=1, ttft=times, tpot=times, targets=targets)}
    for broken in ({}, {"engines": [{"name": "e"}]}, state(4, ttft={"count": "many"})):
        with pytest.raises((KeyError, TypeError, ValueError)):
            canary_figures.parse(broken)


def test_calls_count_from_the_first_look_at_a_gateway_and_from_the_beginning_of_a_step():
    figures = canary_figures.CanaryFigures()
    add(figures, seen(one=10, two=20), gateways=["one", "two"])
    assert figures.of(["e:8000"]).calls == 0
    add(figures, seen(one=13, two=20), gateways=["one", "two"])
    add(figures, seen(one=14, two=25), gateways=["one", "two"])
    assert figures.of(["e:8000"]).calls == 9
    assert figures.of(["other:8000"]) == Service()
    figures.begin()
    add(figures, seen(one=15, two=25), gateways=["one", "two"])
    assert figures.of(["e:8000"]).calls == 1


def test_a_gateway_that_started_anew_counts_from_zero_and_an_engine_that_appears_counts_in_full():
    figures = canary_figures.CanaryFigures()
    add(figures, seen(one=10) | {"two": {}}, gateways=["one", "two"])
    add(figures, seen(one=3, two=5), gateways=["one", "two"])
    assert figures.of(["e:8000"]).calls == 8


def test_engines_and_classes_that_a_gateway_invents_are_not_kept():
    figures = canary_figures.CanaryFigures()
    for number in range(1, 20):
        targets = {name: {"with_target": number, "missed": 0} for name in ("chat", f"class-{number}")}
        services = canary_figures.parse(state(number, targets=targets))
        add(figures, {"one": services | {f"engine-{number}": services["e:8000"]}}, gateways=["one"])
    assert figures.of(["e:8000"]).targets == {"chat": Targets(with_target=18, missed=0)}
    assert figures._sums.keys() == {"e:8000"}


def test_a_gateway_that_is_gone_is_forgotten_and_one_that_is_silent_is_not():
    figures = canary_figures.CanaryFigures()
    add(figures, seen(one=10, two=10), gateways=["one", "two"])
    add(figures, {}, gateways=["one"])
    add(figures, seen(one=12, two=17), gateways=["one", "two"])
    assert figures.of(["e:8000"]).calls == 2
