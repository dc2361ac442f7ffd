"""What the documents say is what the code does."""

import pathlib
import re

from tidegate_gateway import gateway_settings, settings_decoder, settings_reload
from tidegate_gateway.openai import error_table
from tidegate_operator.render import gateway_deployment
from tidegate_policy import policies
from tidegate_policy.engine import regulators
from tidegate_policy.steer import emergency, guards, rules, switch_regret

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_every_refusal_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| `([a-z_-]+)` \| (\d{3}) \| ([A-Z_]+) \|$", (DOCS / "http.md").read_text(), re.MULTILINE)
    assert rows == [(str(code), str(row.status), row.grpc) for code, row in error_table.TABLE.items()]


def test_every_policy_has_its_page() -> None:
    pages = {page.stem for page in (DOCS / "policies").glob("*.md")} - {"README"}
    assert pages == set(policies.POLICIES)


def test_every_regulator_has_its_page() -> None:
    pages = {page.stem for page in (DOCS / "regulators").glob("*.md")} - {"README"}
    assert pages == set(regulators.REGULATORS)


def test_the_steering_rules_are_documented_with_their_thresholds_and_policies() -> None:
    row = re.compile(r"^\| `([a-z]+)` \| (.*) \| (?:emergency: )?`([a-z-]+)`(?:, else `([a-z-]+)`)? \|$", re.MULTILINE)
    page = {name: (evidence, *cures) for name, evidence, *cures in row.findall((DOCS / "steering.md").read_text())}
    default = rules.Rules()
    thresholds = {
        "silence": ["half"],
        "thrashing": [f"more than {emergency.THRASH:.0f} preemptions"],
        "blocking": [f"{default.block_ratio:.0%} of the calls", f"at least {default.dispersion}"],
        "overload": [
            f"{default.growth} calls",
            f"{default.overload_miss_ratio:.0%} of its targets",
            f"at least {default.overload_wait_s:.0f} s",
            f"at least {default.overload_first_misses:.0%} of the targets",
        ],
        "misses": [f"{default.miss_ratio:.0%} of its targets", f"{default.part_miss_ratio:.0%} of its own"],
        "unfairness": [f"below {default.fairness:.2f}"],
    }
    assert page.keys() == thresholds.keys()
    code = "".join(pathlib.Path(module.__file__).read_text() for module in (rules, emergency))
    for name, (evidence, *cures) in page.items():
        assert f'"{name}: ' in code
        assert all(said in evidence for said in thresholds[name])
        assert f'("{cures[0]}", "{cures[1]}")' in code or cures == ["fcfs", ""]
        assert f"`{name}`" in (DOCS / "policies" / f"{cures[0]}.md").read_text(), "the page of the policy agrees"
    assert f"at least {default.enough} calls" in (DOCS / "steering.md").read_text()


def test_the_guards_are_documented_with_their_defaults() -> None:
    page, default = (DOCS / "steering.md").read_text(), guards.GuardSettings()
    for said in (
        f"`policy.dwell` ({default.dwell_s:.0f} s",
        f"`policy.rollback.window` ({default.window_s:.0f} s)",
        f"`policy.rollback.rho` ({default.rho})",
        f"{switch_regret.FLOOR_TTFT_S} s, {switch_regret.FLOOR_TPOT_S} s and {switch_regret.FLOOR_MISS_RATIO:.0%}",
        f"again for {default.ban_s:.0f} s",
        f"at least {default.bypass_s:.0f} s",
        f"at most {default.per_hour} times in any hour",
    ):
        assert said in page


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(
        r"`((?:policy|gateway|engine-image|operator|sim|cli)/[a-z_/-]+(?:\.py|/))`",
        (DOCS / "architecture.md").read_text(),
    )
    assert named
    assert not [name for name in named if not (DOCS.parent / name).exists()]


def test_the_operator_restarts_no_gateway_for_settings_that_a_gateway_reloads() -> None:
    names = {name: key for key, (name, _) in settings_decoder.fields(gateway_settings.Settings).items()}
    assert {names[name] for name in settings_reload.RELOADED} == set(gateway_deployment.RELOADED)
