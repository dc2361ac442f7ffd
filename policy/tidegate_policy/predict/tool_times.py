"""How long a session's tool runs, whether the session returns, and how long the tool's answer is.

It learns from the sessions themselves: the gap between the end of a call and the next call of its session, by the name of
the tool that the call invokes. A prediction that travels with a call wins over what was learned. The number of remembered
tools and sessions is bounded, so a hostile client cannot make it grow.
"""

from dataclasses import dataclass, field

from tidegate_policy.model import Call

UNKNOWN_TOOL = ""
MAX_TOOLS, MAX_SESSIONS = 256, 10_000
FORGETTING = 0.05
"""Weight of the newest gap in a tool's averages, once it has seen `1 / FORGETTING` gaps."""
ABSENT_S = 600.0
"""A session that is away for longer does not return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """What is expected of a session after a call."""

    tool_s: float
    """Seconds until the session returns, if it returns."""
    share: float
    """Probability that it returns."""
    return_tokens: int
    """Tokens that the tool's answer adds to the next prompt."""


DEFAULT_RETURN = Return(tool_s=5.0, share=0.5, return_tokens=0)
"""What is expected of a tool before the first observation."""


@dataclass(slots=True)
class _Tool:
    ended: float = 1.0
    """Weighted count of calls that invoked the tool. The prior counts as one call."""
    returned: float = DEFAULT_RETURN.share
    tool_s: float = DEFAULT_RETURN.tool_s
    return_tokens: float = 0.0
    seen: int = 0


@dataclass(frozen=True, slots=True)
class _Away:
    tool: str
    since_s: float
    context_tokens: int


@dataclass(slots=True)
class ToolTimes:
    """Running averages by tool name."""

    _tools: dict[str, _Tool] = field(default_factory=dict)
    _away: dict[str, _Away] = field(default_factory=dict)
    """Sessions whose last call ended, oldest first."""

    def on_call_end(self, now: float, call: Call, output_tokens: int) -> None:
        """A call of a session finished; its client may run a tool now."""
        if call.session is None:
            return
        while self._away and (len(self._away) >= MAX_SESSIONS or self._oldest().since_s < now - ABSENT_S):
            self._gone(next(iter(self._away)))
        if call.session in self._away:
            self._gone(call.session)
        name = call.tool or UNKNOWN_TOOL
        self._away[call.session] = _Away(self._known(name), now, call.prompt_tokens + output_tokens)

    def on_arrival(self, now: float, call: Call) -> None:
        """A call arrived; if its session was away, the gap is the time of its tool."""
        away = None if call.session is None else self._away.pop(call.session, None)
        if away is None:
            return
        tool = self._tools[away.tool]
        tool.seen += 1
        weight = max(1.0 / tool.seen, FORGETTING)
        tool.tool_s += weight * (now - away.since_s - tool.tool_s)
        tool.return_tokens += weight * (max(call.prompt_tokens - away.context_tokens, 0) - tool.return_tokens)
        tool.ended = tool.ended * (1 - FORGETTING) + 1
        tool.returned = tool.returned * (1 - FORGETTING) + 1

    def expect(self, call: Call) -> Return:
        """What is expected after `call`, by what travels with it and by what was learned of its tool."""
        tool = self._tools.get(call.tool or UNKNOWN_TOOL) or self._tools.get(UNKNOWN_TOOL) or _Tool()
        return Return(
            tool_s=tool.tool_s if call.tool_s is None else call.tool_s,
            share=tool.returned / tool.ended,
            return_tokens=call.tool_return_tokens or round(tool.return_tokens),
        )

    def _oldest(self) -> _Away:
        return next(iter(self._away.values()))

    def _gone(self, session: str) -> None:
        tool = self._tools[self._away.pop(session).tool]
        tool.ended = tool.ended * (1 - FORGETTING) + 1
        tool.returned *= 1 - FORGETTING

    def _known(self, name: str) -> str:
        """The name under which a tool is remembered; tools beyond `MAX_TOOLS` share one."""
        if name not in self._tools:
            if len(self._tools) >= MAX_TOOLS:
                name = UNKNOWN_TOOL
            self._tools.setdefault(name, _Tool())
        return name
