"""What each tenant's tools are like (`predict.tool_times`), and what is expected of a tool that a tenant has not used yet.

A tenant is judged by its own sessions. Until it has enough of them for a tool, the median over the other tenants stands in,
in which each tenant counts once. So a tenant whose sessions return at false times changes what is expected of itself, and
of others only while more than half of the tenants that know the tool are false. The gateway (`predict.tool_use`) and the
engine (`engine.session_hold`) keep one such table each. Tenants, their tools and their sessions are bounded.
"""

import statistics
from collections import OrderedDict

from tidegate_policy.predict import tool_times
from tidegate_policy.predict.tool_times import Gap, Return, ToolTimes

LEAST_SEEN = 3
"""Returns of a tool before its averages are believed."""
MAX_TENANTS = 256
"""Tenants whose tools are remembered; the tenant whose call ended least recently is forgotten first."""
MAX_TENANT_TOOLS = 64
MAX_SESSIONS = tool_times.MAX_SESSIONS
"""Sessions of all tenants that are remembered between two calls; a tenant has an equal part of them, and at least
`LEAST_SESSIONS`."""
LEAST_SESSIONS = 64


class TenantTools:
    """The tools of all tenants. All methods take constant time, `expect` of an unknown tool a step for each tenant."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, ToolTimes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def on_call_end(self, now: float, tenant: str, session: str, tool: str, context_tokens: int) -> None:
        """No call of the session runs from now on, until its client has run `tool`."""
        times = self._times.get(tenant)
        if times is None:
            times = self._times[tenant] = ToolTimes(MAX_TENANT_TOOLS)
            if len(self._times) > MAX_TENANTS:
                self._times.popitem(last=False)
        self._times.move_to_end(tenant)
        most = max(MAX_SESSIONS // len(self._times), LEAST_SESSIONS)
        times.on_call_end(now, session, tool, context_tokens, most_sessions=most)

    def on_arrival(self, now: float, tenant: str, session: str) -> Gap | None:
        """A call of the session arrived; the gap since its last call, None if it was not away."""
        times = self._times.get(tenant)
        return None if times is None else times.on_arrival(now, session)

    def observe(self, tenant: str, gap: Gap, prompt_tokens: int) -> None:
        """The session returned after this gap with a prompt of so many tokens."""
        times = self._times.get(tenant)
        if times is not None:
            times.observe(gap, prompt_tokens)

    def own(self, tenant: str, name: str) -> Return | None:
        """What the tenant's own sessions showed of the tool; None if they were too few."""
        times = self._times.get(tenant)
        return None if times is None or times.seen(name) < LEAST_SEEN else times.expect(name)

    def expect(self, tenant: str, name: str) -> Return:
        """What is expected after a call of the tenant that invokes this tool: by the tenant's own sessions, by the median
        over the tenants that know the tool, or by the few sessions that the tenant has."""
        found = self.own(tenant, name)
        if found is not None:
            return found
        others = [times.expect(name) for times in self._times.values() if times.seen(name) >= LEAST_SEEN]
        if others:
            return Return(
                tool_s=statistics.median([each.tool_s for each in others]),
                share=statistics.median([each.share for each in others]),
                return_tokens=round(statistics.median([each.return_tokens for each in others])),
            )
        times = self._times.get(tenant)
        return tool_times.DEFAULT_RETURN if times is None else times.expect(name)
