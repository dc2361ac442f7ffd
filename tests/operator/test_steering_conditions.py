"""The condition `ReportsCredible`: an engine whose numbers cannot be believed is named in the status of its pool."""

import dataclasses

from tidegate_operator import steering_status
from tidegate_policy import qos
from tidegate_policy.steer import guards, steering_loop

HONEST = qos.Qos(window_s=10.0, arrived=30, finished=30, with_target=30)
SETTINGS = steering_loop.Settings(allow=("urgency", "sjf"), interval_s=30.0, guards=guards.GuardSettings())


def test_an_engine_that_lies_is_named_with_what_it_claims_and_an_honest_pool_is_believed() -> None:
    loop = steering_loop.SteeringLoop(None, SETTINGS, now=0.0)
    honest = {"10.0.0.1:9001": [HONEST], "10.0.0.2:9001": [HONEST]}
    told = steering_status.credibility(loop.observe(10.0, honest, silent=()).outliers)
    assert (told.type, told.status, told.reason) == ("ReportsCredible", True, "Believed")
    lie = dataclasses.replace(HONEST, preemptions=10_000)
    told = steering_status.credibility(loop.observe(20.0, {**honest, "10.0.0.3:9001": [lie]}, silent=()).outliers)
    assert (told.status, told.reason) == (False, "Outliers")
    assert told.message == (
        "The steering loop counts less than these engines claim: 10.0.0.3:9001: it reports 10000 preemptions for 30 "
        "finished calls."
    )


def test_the_condition_names_five_engines_and_counts_the_others() -> None:
    told = steering_status.credibility({f"10.0.0.{number}:9001": "it reports nonsense" for number in range(9)})
    assert told.message.count("it reports nonsense") == 5
    assert told.message.endswith("; and 4 more.")
