"""The alert rules, as Prometheus' own promtool judges them."""

import itertools
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import alert_cases
import pytest
import rule_model
import slo_rules
import symptom_alerts
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ROOT / "helm" / "tidegate" / "files" / "rules.yaml"
PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here; install Debian's package prometheus")
ALERTS = [
    rule
    for group in itertools.chain(slo_rules.groups(), symptom_alerts.groups())
    for rule in group.rules
    if isinstance(rule, rule_model.Alert)
]


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_files_of_the_chart_are_those_that_the_code_makes() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/monitoring/generate", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


@with_promtool
def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


def unit_tests(case: alert_cases.Case) -> list[dict[str, Any]]:
    (rule,) = (alert for alert in ALERTS if alert.name == case.alert)

    def one(series: dict[str, str], fires: bool) -> dict[str, Any]:
        labels = {"severity": rule.severity, **case.labels}
        expected = {"eval_time": f"{case.at_min}m", "alertname": case.alert, "exp_alerts": []}
        asked: dict[str, Any] = {
            "interval": f"{case.interval_min}m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
        }
        if not fires:
            return {**asked, "alert_rule_test": [expected]}
        query = f'count by ({", ".join(labels)}) (ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
        shown = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
        sample = {"labels": f"{{{shown}}}", "value": 1}
        return {
            **asked,
            "promql_expr_test": [{"expr": query, "eval_time": f"{case.at_min}m", "exp_samples": [sample]}],
        }

    return [one(case.fires, True), *(one(series, False) for series in case.silent)]


@with_promtool
@pytest.mark.parametrize("case", alert_cases.CASES, ids=lambda case: case.alert)
def test_an_alert_fires_when_it_should_and_else_stays_silent(case: alert_cases.Case, tmp_path: pathlib.Path) -> None:
    document = {"rule_files": [str(RULES)], "evaluation_interval": f"{case.interval_min}m", "tests": unit_tests(case)}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(file))


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in alert_cases.CASES} == {alert.name for alert in ALERTS}


def test_every_alert_has_a_page_that_it_links_to() -> None:
    page = (ROOT / rule_model.RUNBOOKS).read_text()
    assert sorted(re.findall(r"^## (Tidegate\w+)$", page, re.MULTILINE)) == sorted(alert.name for alert in ALERTS)
    links = {rule["annotations"]["runbook_url"] for group in yaml.safe_load(RULES.read_text())["groups"]
             for rule in group["rules"] if "alert" in rule}  # fmt: skip
    assert links == {f"{rule_model.RUNBOOKS}#{alert.name.lower()}" for alert in ALERTS}
