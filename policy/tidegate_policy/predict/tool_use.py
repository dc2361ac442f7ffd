"""Which tool will the client run after a call, for how long, and how much will its answer add to the next prompt?

AugServe (section 4.2) predicts a tool's time from its name, and knows the name because its requests carry it. Here a
gateway learns both. The name follows the earlier answers of calls of the same kind (`output_length.Kind`) after the same
tool of the session. The time and the return are the means of that tool of the tenant, from the gaps between an answer and
the next call of its session, or of its workflow where a call names no session. docs/prediction.md has the measurements.

Names come from engines, and sessions from clients, so both are bounded: in their length, for each tenant, and in all. What
is not known well enough stays unknown.
"""

from dataclasses import dataclass, field

from tidegate_policy import immutable
from tidegate_policy.predict import tenant_tools, tool_times
from tidegate_policy.predict.output_length import Kind
from tidegate_policy.tenant_memory import TenantMemory

NO_TOOL = tool_times.UNKNOWN_TOOL
MOST_NAME = 64
"""Characters of a name; the API of OpenAI allows no longer one. A longer name is cut."""
LEAST_SHARE = 0.5
"""A tool is predicted where at least this share of the earlier calls invoked it."""
LEAST_SEEN = tenant_tools.LEAST_SEEN
"""Calls of a kind before their tool is predicted, and returns of a tool before its time is."""
FORGETTING = 0.05
"""Weight of the newest call of a kind, once `1 / FORGETTING` were seen."""
MAX_KINDS = 4096
"""Kinds of all tenants, each after one tool, that are remembered."""
MAX_NAMES = 8
"""Tools remembered for each kind; the least likely one gives way."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class NextTool:
    """What is predicted of the tool after a call."""

    tool: str | None = None
    """None = no tool, or not known."""
    tool_s: float | None = None
    """None = not known."""
    return_tokens: int = 0
    """0 = not known."""


NOT_KNOWN = NextTool()


@dataclass(slots=True)
class _Names:
    """The tools that calls of one kind invoked."""

    seen: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    """Shares of the calls; what is missing to 1 are tools that were forgotten."""

    def add(self, name: str) -> None:
        self.seen += 1
        weight = max(1.0 / self.seen, FORGETTING)
        weights = self.weights
        for each in weights:
            weights[each] *= 1.0 - weight
        if name not in weights and len(weights) >= MAX_NAMES:
            del weights[min(weights, key=weights.__getitem__)]
        weights[name] = weights.get(name, 0.0) + weight

    def likely(self) -> str:
        """The tool that most of the calls invoked; `NO_TOOL` if there is none."""
        if self.seen < LEAST_SEEN:
            return NO_TOOL
        name = max(self.weights, key=self.weights.__getitem__)
        return name if self.weights[name] >= LEAST_SHARE else NO_TOOL


class ToolUse:
    """Predicts and learns the tools of all tenants. All methods take constant time."""

    def __init__(self) -> None:
        self._names: TenantMemory[tuple[Kind, str], _Names] = TenantMemory(MAX_KINDS)
        """By kind, and by the tool that the session ran before the call."""
        self._times = tenant_tools.TenantTools()
        self._running: dict[tuple[str, str], int] = {}
        """Calls that have not ended, by tenant and session."""

    def predict(self, kind: Kind, tenant: str, before: str) -> NextTool:
        """The tool after a call of `kind` whose session ran the tool `before`."""
        names = self._names.get(kind[0], (kind, before))
        name = NO_TOOL if names is None else names.likely()
        if name == NO_TOOL:
            return NOT_KNOWN
        expected = self._times.own(tenant, name)
        if expected is None:
            return NextTool(tool=name)
        return NextTool(tool=name, tool_s=expected.tool_s, return_tokens=expected.return_tokens)

    def on_arrival(self, now: float, tenant: str, session: str) -> tool_times.Gap | None:
        """A call of the session arrived. The gap since the last call if the session was away; None if it is new, or if
        another call of it runs: gaps between calls side by side say nothing of tools."""
        key = (tenant, session)
        running = self._running.get(key, 0)
        self._running[key] = running + 1
        gap = self._times.on_arrival(now, tenant, session)
        return None if running else gap

    def on_leave(self, tenant: str, session: str) -> bool:
        """A call of the session ended in any way. Returns whether it was the last one that ran."""
        key = (tenant, session)
        left = self._running[key] - 1
        if left:
            self._running[key] = left
            return False
        del self._running[key]
        return True

    def on_answer(self, kind: Kind, before: str, tool: str) -> None:
        """A call of `kind`, whose session ran the tool `before`, invoked `tool`, or none (`NO_TOOL`)."""
        key = (kind, before)
        names = self._names.get(kind[0], key) or _Names()
        names.add(bounded(tool))
        self._names.put(kind[0], key, names)

    def on_away(self, now: float, tenant: str, session: str, tool: str, context_tokens: int) -> None:
        """No call of the session runs from now on, until its client has run `tool`."""
        self._times.on_call_end(now, tenant, session, bounded(tool), context_tokens)

    def observe(self, tenant: str, gap: tool_times.Gap, prompt_tokens: int) -> None:
        """A session returned after `gap` with a prompt of so many tokens. A gap without a tool is the time of a person or
        of a program, which no prediction reads."""
        if gap.tool != NO_TOOL:
            self._times.observe(tenant, gap, prompt_tokens)


def bounded(name: str) -> str:
    """A tool's name of bounded length."""
    return name[:MOST_NAME]
