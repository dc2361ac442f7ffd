"""The rows that other suites compare with: routers as others have them, in front of vLLM's first come, first served."""

from tidegate_policy import gateway_core
from tidegate_policy.dispatch import waiting_limits
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_sim import cell

NO_ADMISSION = waiting_limits.Limits(bound_workflows=False, share_among_tenants=False)
"""No bound on the active workflows, and no shares of tenants."""


def router(rule: str, policy: str = "fcfs") -> cell.Row:
    """A router with this dispatch rule. It bounds no workflows and learns no costs. It knows the speeds of the engines."""
    settings = gateway_core.CoreSettings(
        policy=policy, dispatch=DispatchSettings(rule=rule), learn_costs=False, limits=NO_ADMISSION
    )
    return cell.Row(gateway=settings)
