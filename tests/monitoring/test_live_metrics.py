"""`promtool check metrics` on what gateways, engines and the operator serve."""

import json
import pathlib
import re
import shutil
import subprocess
import urllib.request
from typing import Any

import prometheus_client
import pytest

from tidegate_engine import meters
from tidegate_operator import operator_metrics, workqueue
from tidegate_policy.steer import guards

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here; install Debian's package prometheus")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def complaints(text: str) -> list[str]:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines()


def read(url: str, body: dict[str, Any] | None = None) -> str:
    headers = {"content-type": "application/json", "x-tidegate-class": "interactive"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return str(answer.read().decode())


def of_operator() -> operator_metrics.OperatorMetrics:
    """Metrics of an operator with one pool of each kind of trouble."""
    metrics = operator_metrics.OperatorMetrics()
    attempted = metrics.add_queue("reconcile", lambda: workqueue.Reading(depth=2, age_s=1.5))
    attempted(0.2, True)
    body = {
        "metadata": {"namespace": "serving", "name": "chat"},
        "status": {
            "nodePools": [{"name": "a100", "desired": 2, "ready": 1}, {"name": "gone", "sloAttainment": "1"}],
            "conditions": [{"type": "Ready", "status": "False"}, {"type": "Degraded", "status": "True"}],
        },
    }
    metrics.add_pools(lambda: [body], lambda: {("serving", "chat"): 1})
    verdict = guards.Verdict(kind=guards.Kind.SWITCH, policy="sjf", reason="overload: 3 s of work wait")
    metrics.decided(("serving", "chat"), "urgency", verdict)
    return metrics


def test_the_gateway_and_its_simulated_engines_serve_clean_metrics(running_up: Any) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    read(f"{running_up.url}/v1/chat/completions", body)
    text = read(f"{running_up.url}/metrics")
    assert 'tidegate_slo_calls_total{class="interactive"' in text
    assert complaints(text) == []
    (engine, *_) = json.loads(read(f"{running_up.admin_url}/admin/state"))["engines"]
    text = read(f"{engine['url']}/metrics")
    assert "vllm:num_requests_running" in text
    assert [line for line in complaints(text) if "':'" not in line] == []  # vLLM's own names have a colon


def test_a_real_engine_serves_clean_metrics() -> None:
    meter = meters.prometheus()
    meter.scheduled(0.001, 1)
    meter.stepped(0.01, (1, 1))
    meter.bad_label("tg.urgency")
    meter.holds(1024)
    meter.cost_error(mean=0.1, p95=0.2)
    meter.policy_failed("urgency.key", 1)
    text = prometheus_client.generate_latest().decode()
    own = "\n".join(line for line in text.splitlines() if "tidegate_engine" in line) + "\n"
    assert 'tidegate_engine_policy_failures_total{hook="urgency.key"} 1.0' in own
    assert complaints(own) == []


def test_the_operator_serves_clean_metrics_of_its_queues_and_pools() -> None:
    metrics = of_operator()
    text = metrics.exposition()[0].decode()
    assert complaints(text) == []
    of_pool = 'namespace="serving"'
    for line in (
        'tidegate_operator_queue_depth{queue="reconcile"} 2.0',
        'tidegate_operator_queue_age_seconds{queue="reconcile"} 1.5',
        'tidegate_operator_work_errors_total{queue="reconcile"} 1.0',
        f'tidegate_operator_engines_desired{{{of_pool},node_pool="a100",pool="chat"}} 2.0',
        f'tidegate_operator_engines_ready{{{of_pool},node_pool="a100",pool="chat"}} 1.0',
        f'tidegate_operator_engines_silent{{{of_pool},pool="chat"}} 1.0',
        f'tidegate_operator_pool_condition{{condition="Degraded",{of_pool},pool="chat"}} 1.0',
        f'tidegate_operator_pool_condition{{condition="Ready",{of_pool},pool="chat"}} 0.0',
        f'tidegate_operator_decisions_total{{decision="switch",{of_pool},pool="chat"}} 1.0',
        f'tidegate_operator_decisions_total{{decision="rollback",{of_pool},pool="chat"}} 0.0',
        f'tidegate_operator_policy_switches_total{{from="urgency",{of_pool},pool="chat",reason="overload",to="sjf"}} 1.0',
    ):
        assert line in text.splitlines()
    metrics.forget(("serving", "chat"))
    assert "tidegate_operator_decisions_total{" not in metrics.exposition()[0].decode()


def test_every_metric_that_the_rules_and_dashboards_name_exists() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    known = {
        name + suffix
        for name, kind in re.findall(r"^\| `(\w+)(?:\{[^}]*\})?` \| (\w+) ", page, re.MULTILINE)
        for suffix in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))
    }
    files = [file for file in ROOT.glob("helm/tidegate/files/*") if file.name != "servingpools.tidegate.dev.yaml"]
    assert len(files) >= 3
    for file in files:
        named = set(re.findall(r"\b(tidegate_\w+)\b", file.read_text()))
        assert named
        assert named <= known, (file.name, named - known)
