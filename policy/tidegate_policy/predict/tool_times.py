"""How long a session's tool runs, whether the session returns, and how long the tool's answer is.

It learns from the sessions themselves: the gap between the end of a call and the next call of its session, by the name of
the tool that the call invokes. The engine (`engine.session_hold`) and the gateway (`predict.tool_use`) learn from what each
of them sees. The number of remembered tools and sessions is bounded, so a hostile client cannot make it grow: the tool that
was used least recently is forgotten first, and so is the session that is away for the longest time.
"""

from collections import OrderedDict
from dataclasses import dataclass

from tidegate_policy import immutable

UNKNOWN_TOOL = ""
MAX_TOOLS, MAX_SESSIONS = 256, 10_000
FORGETTING = 0.05
"""Weight of the newest gap in a tool's averages, once it has seen `1 / FORGETTING` gaps."""
ABSENT_S = 600.0
"""A session that is away for longer does not return."""


@immutable.value(frozen=True, slots=True, kw_only=True)
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


@immutable.value(frozen=True, slots=True, kw_only=True)
class Gap:
    """The time between a call and the next call of its session."""

    tool: str
    """The tool that the earlier call invoked; `UNKNOWN_TOOL` = none that is known."""
    seconds: float
    context_tokens: int
    """Tokens of the prompt and of the answer of the earlier call."""


@dataclass(slots=True)
class _Tool:
    ended: float = 1.0
    """Weighted count of calls that invoked the tool. The prior counts as one call."""
    returned: float = 0.5
    tool_s: float = 5.0
    return_tokens: float = 0.0
    seen: int = 0


@dataclass(slots=True)
class _Away:
    tool: str
    since_s: float
    context_tokens: int


class ToolTimes:
    """Running averages by tool name. All methods take constant time."""

    def __init__(self, most_tools: int = MAX_TOOLS) -> None:
        self._most_tools = most_tools
        self._tools: OrderedDict[str, _Tool] = OrderedDict()
        self._away: dict[str, _Away] = {}
        """Sessions whose last call ended, oldest first."""

    @property
    def away(self) -> int:
        """Sessions that are remembered between two calls."""
        return len(self._away)

    def on_call_end(
        self, now: float, session: str, tool: str, context_tokens: int, *, most_sessions: int = MAX_SESSIONS
    ) -> None:
        """A call of the session finished with this context; its client may run the tool now."""
        away = self._away
        while away and (len(away) >= most_sessions or self._oldest().since_s < now - ABSENT_S):
            self._gone(next(iter(away)))
        if session in away:
            self._gone(session)
        if tool not in self._tools:
            self._tools[tool] = _Tool()
            if len(self._tools) > self._most_tools:
                self._tools.popitem(last=False)
        self._tools.move_to_end(tool)
        away[session] = _Away(tool, now, context_tokens)

    def on_arrival(self, now: float, session: str) -> Gap | None:
        """A call of the session arrived; the gap since its last call, None if it was not away."""
        away = self._away.pop(session, None)
        if away is None:
            return None
        return Gap(tool=away.tool, seconds=max(now - away.since_s, 0.0), context_tokens=away.context_tokens)

    def observe(self, gap: Gap, prompt_tokens: int) -> None:
        """The session returned after this gap with a prompt of so many tokens."""
        tool = self._tools.get(gap.tool)
        if tool is None:
            return
        tool.seen += 1
        weight = max(1.0 / tool.seen, FORGETTING)
        tool.tool_s += weight * (gap.seconds - tool.tool_s)
        tool.return_tokens += weight * (max(prompt_tokens - gap.context_tokens, 0) - tool.return_tokens)
        tool.ended = tool.ended * (1 - FORGETTING) + 1
        tool.returned = tool.returned * (1 - FORGETTING) + 1

    def expect(self, name: str) -> Return:
        """What is expected after a call that invokes this tool; of a tool that is not known, what is expected after calls
        whose tool was not known."""
        tool = self._tools.get(name) or self._tools.get(UNKNOWN_TOOL)
        if tool is None:
            return DEFAULT_RETURN
        return Return(
            tool_s=tool.tool_s,
            share=tool.returned / tool.ended,
            return_tokens=round(tool.return_tokens),
        )

    def seen(self, name: str) -> int:
        """Returns of sessions from this tool that were seen."""
        tool = self._tools.get(name)
        return 0 if tool is None else tool.seen

    def _oldest(self) -> _Away:
        return next(iter(self._away.values()))

    def _gone(self, session: str) -> None:
        tool = self._tools.get(self._away.pop(session).tool)
        if tool is not None:
            tool.ended = tool.ended * (1 - FORGETTING) + 1
            tool.returned *= 1 - FORGETTING
