"""The rows of the suites about one engine: Tidegate's scheduler class or vLLM's, behind a gateway that holds no call."""

from collections.abc import Mapping

from tidegate_policy import gateway_core, policies
from tidegate_policy.engine import regulators
from tidegate_sim import cell, gateway_rows, policy_option


def row(policy: str, **more: object) -> cell.Row:
    """A row with Tidegate's class under one policy, which may have parameters (`policy_option`). The gateway holds no call
    back, so the engine's queue decides."""
    chosen = policy_option.parse(policy)
    settings = gateway_core.CoreSettings(policy="fcfs", max_inflight=None, limits=gateway_rows.NO_ADMISSION)
    more.setdefault("engine_parameters", chosen.parameters)
    return cell.Row(gateway=settings, engine_policy=chosen.name, **more)  # type: ignore[arg-type]  # fields of Row


def stock(policy: str, **more: object) -> cell.Row:
    """A row with vLLM's own class."""
    return row(policy, stock_scheduler=True, **more)


def registered(rows: Mapping[str, cell.Row]) -> dict[str, cell.Row]:
    """The rows whose policies and regulators exist."""
    return {
        name: found
        for name, found in rows.items()
        if found.engine_policy in policies.POLICIES and all(each in regulators.REGULATORS for each in found.regulators)
    }
