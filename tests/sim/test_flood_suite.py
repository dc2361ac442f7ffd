"""The suite about floods: its traces, and the attainment of the tenants that do not flood the pool."""

from dataclasses import replace

import pytest

from tidegate_sim import cell, suite
from tidegate_sim.suites import flood

KEY = suite.CellKey(suite="flood", pool="hetero-1", row="no shares", trace="801", rate=6.0, workflows=0)


def outcome(ttft_s: float, tpot_s: float, *, late_tenants: tuple[str, ...]) -> cell.Outcome:
    """Every call of the trace of `KEY`, with the given times for the calls of `late_tenants` and short ones for others."""
    calls = []
    for item in flood.SUITE.trace(KEY):
        is_late = item.tenant in late_tenants
        first_at_s = item.arrival_s + (ttft_s if is_late else 0.1)
        calls.append(
            cell.CallOutcome(
                id=item.id,
                workflow=None,
                stage=None,
                tenant=item.tenant,
                slo_class="",
                urgency=None,
                arrived_at_s=item.arrival_s,
                first_at_s=first_at_s,
                finished_at_s=first_at_s + (tpot_s if is_late else 0.01) * (item.output_tokens - 1),
                output_tokens=item.output_tokens,
            )
        )
    return cell.Outcome(
        calls=calls, latencies_s=(), finished_s=(), queued_share=0.0, preemptions=0, steps=0, busy_share={}, calls_on={}
    )


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "tenants", "attainment"),
    [
        (2.0, 0.01, flood.TENANTS, 0.0),
        (0.1, 0.1, flood.TENANTS, 0.0),
        (0.9, 0.07, flood.TENANTS, 1.0),
        (2.0, 0.1, (flood.FLOODER,), 1.0),
    ],
    ids=["first token late", "later tokens late", "in time", "only the flooding tenant is late"],
)
def test_the_attainment_is_the_share_of_the_calls_of_the_others_that_meet_both_targets(
    ttft_s: float, tpot_s: float, tenants: tuple[str, ...], attainment: float
) -> None:
    found = flood.SUITE.numbers(outcome(ttft_s, tpot_s, late_tenants=tenants), KEY)
    assert found["attainment"] == attainment


def test_a_call_that_was_shed_or_has_not_ended_missed_its_targets() -> None:
    served = outcome(0.1, 0.01, late_tenants=())
    counted = [call for call in served.calls if call.tenant == "ant" and call.arrived_at_s >= flood.FLOOD_FROM_S]
    lost = {call.id for call in counted}
    calls = [replace(call, finished_at_s=None) if call.id in lost else call for call in served.calls]
    found = flood.SUITE.numbers(replace(served, calls=calls), KEY)
    assert found["attainment"] == pytest.approx(1 - len(lost) / found["counted"])


def test_the_calls_of_the_other_tenants_are_the_same_with_and_without_the_flood_and_every_call_has_targets() -> None:
    quiet, flooded = flood.trace("801", 6.0), flood.trace("801-flood", 6.0)
    assert [call for call in quiet if call.tenant in flood.TENANTS] == [
        call for call in flooded if call.tenant in flood.TENANTS
    ]
    assert len(flooded) > 3 * len(quiet)
    assert {(call.ttft_slo_ms, call.tpot_slo_ms) for call in flooded} == {(1000.0, 75.0)}


def test_the_table_tells_the_part_of_their_attainment_that_the_others_lose() -> None:
    runs = {}
    for row in flood.ROWS:
        for seed, kept in ((801, 0.5), (802, 0.7)):
            quiet = {"p95_s": 10.0, "p50_s": 5.0, "attainment": 0.8, "shed_of_others": 0}
            runs[replace(KEY, row=row, trace=f"{seed}")] = quiet
            runs[replace(KEY, row=row, trace=f"{seed}-flood")] = {**quiet, "attainment": 0.8 * (1 - kept)}
    found = {"pool": KEY.pool, "rate": KEY.rate, "row": "no shares", **flood.compared(runs, KEY.pool, 6.0, "no shares")}
    assert found["lost"]["mean"] == pytest.approx(0.6)
    text = flood.SUITE.table({"cells": [found], "scheduler": {"sentence": "None ran."}})
    assert "80.0% 32.0% +60.0%" in text
    assert "less than 10%" in text
