"""How many requests the operator sends to the API server while nothing changes, from the API server's audit log.

`make test` measures five pools in windows of ten seconds, `make faults` 200 pools in windows of a minute. The operator
comes to rest when two windows in a row are quiet. The figure is the mean of the windows after them, five in `make faults`,
so a burst every few minutes counts.
"""

import collections
import json
import os
import statistics
import time

import pytest

import operator_doubles

IS_FULL = "TIDEGATE_FAULTS" in os.environ
POOLS, MEASURED_S, WINDOWS = (200, 60, 5) if IS_FULL else (5, 10, 2)
SETTLE_S = 1500 if IS_FULL else 120
MOST_A_SECOND = 1.0


def requests_of(plane, user):
    """Method and resource of each request of the user."""
    records = map(json.loads, plane.audit_log.read_text().splitlines())
    return [
        f"{record['verb']} {record.get('objectRef', {}).get('resource', record['requestURI'])}"
        for record in records
        if record["user"]["username"] == user
    ]


@pytest.mark.timeout(2 * SETTLE_S + WINDOWS * MEASURED_S + 600)
def test_idle_pools_cost_less_than_one_request_a_second(plane, kubectl, operator, eventually, capsys, figure):
    """The engines of these pools cannot be reached, because kwok's pods have no processes."""
    bodies = [
        operator_doubles.pool(f"idle-{number}", nodePools=[{"name": "a"}], gateway={"replicas": 1})
        for number in range(POOLS)
    ]
    kubectl("create", "-f", "-", body={"apiVersion": "v1", "kind": "List", "items": bodies})

    def are_settled():
        time.sleep(POOLS / 20)  # a list of many pools is work for the API server
        items = json.loads(kubectl("get", "spool", "-o", "json"))["items"]
        steered = [item for item in items if "activePolicy" in item.get("status", {})]
        ready = [item for item in steered if condition(item, "Ready") == "True"]
        return len(ready) == POOLS and all(condition(item, "PolicyStable") == "False" for item in ready)

    eventually(are_settled, timeout_s=SETTLE_S)

    rates = []

    def measure():
        """The requests a second of one window."""
        before, began_at_s = len(requests_of(plane, operator.user)), time.monotonic()
        time.sleep(MEASURED_S)
        seen, took_s = requests_of(plane, operator.user)[before:], time.monotonic() - began_at_s
        kinds = ", ".join(f"{count} {kind}" for kind, count in collections.Counter(seen).most_common(4))
        rates.append((len(seen) / took_s, kinds))
        return rates[-1][0]

    def are_quiet():
        """Changes of conditions, for example that the engines are silent, may still be written in the first windows."""
        measure()
        return max(rate for rate, _ in rates[-2:]) < MOST_A_SECOND and len(rates) > 1

    eventually(are_quiet, timeout_s=SETTLE_S)
    mean = statistics.fmean(measure() for _ in range(WINDOWS))
    with capsys.disabled():
        print(f"\n{POOLS} idle pools: the mean of the last {WINDOWS} of these windows of {MEASURED_S} s counts:")
        for rate, kinds in rates:
            print(f"  {rate:.2f} requests/s ({kinds})")
    figure(
        f"{POOLS} idle pools: requests/s to the API server",
        f"{mean:.2f}",
        goal=f"{MOST_A_SECOND:g}",
        met=mean < MOST_A_SECOND,
    )
    assert mean < MOST_A_SECOND


def condition(item, name):
    return next((found["status"] for found in item["status"].get("conditions", ()) if found["type"] == name), None)
