"""How many calls may wait in the gateway, how long, and for what?"""

from dataclasses import dataclass

from tidegate_policy.model import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many calls the gateway may hold, and for how long."""

    max_waiting: int = 5000
    """Calls that may wait in the gateway; the next one that would have to wait is shed as saturated."""
    ttl_s: float = 60.0
    """Seconds that a call without a deadline may wait in the gateway."""
    hold_s: float = 0.0
    """Seconds that a call may wait while no engine accepts calls, because an autoscaler starts one for it; 0 = such calls
    are shed at once. A call with a deadline waits until its deadline."""
    bound_workflows: bool = True
    """Workflows beyond the number that saturates the pool wait before their first call; tenants share that number
    (`admit.workflow_gate`)."""
    share_among_tenants: bool = True
    """While several tenants compete, calls beyond the share of their tenant wait (`admit.tenant_shares`)."""

    def expires_at_s(self, now: float, call: Call, *, holds: bool) -> float:
        """The instant at which the wait of a call ends; `holds` = it waits for an engine that does not exist yet."""
        if call.deadline_at_s is not None:
            return call.deadline_at_s
        return now + (max(self.ttl_s, self.hold_s) if holds else self.ttl_s)
