"""How well does the gateway predict the tool after a call, its time, and the tokens that it returns? Prints three tables.

    .venv/bin/python tools/predictor/measure_tools.py DATA

DATA is a folder with the public files that `prompt_data` reads. Each source is replayed session by session through
`predict.tool_use`, and through rivals, so that a predictor sees a call only after it has predicted it. The first half of
each source is not counted. Errors of times and returns are mean absolute errors over the same calls.
"""

import collections
import statistics
import sys
from collections.abc import Callable, Hashable
from pathlib import Path

import prompt_data
from prompt_data import ToolSession

from tidegate_policy.predict import tool_use

TENANT, MODEL = "t", "m"
GLOBAL, SHIPPED = "mean of all tools", "shipped: mean of the tool"


class Names:
    """The majority of the calls with the same key; no name before the first of them."""

    def __init__(self, key: Callable[[str, str], Hashable]) -> None:
        self._key = key
        self._seen: dict[Hashable, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def predict(self, kind: str, before: str) -> str | None:
        seen = self._seen[self._key(kind, before)]
        return seen.most_common(1)[0][0] if seen else None

    def observe(self, kind: str, before: str, tool: str) -> None:
        self._seen[self._key(kind, before)][tool] += 1


class Means:
    """The running mean of the calls with the same key, else of all calls."""

    def __init__(self, key: Callable[[str, str], Hashable]) -> None:
        self._key = key
        self._seen: dict[Hashable, list[float]] = collections.defaultdict(list)

    def predict(self, tool: str, session: str) -> float:
        seen = self._seen[self._key(tool, session)]
        seen = seen if len(seen) >= tool_use.LEAST_SEEN else self._seen[GLOBAL]
        return statistics.fmean(seen) if seen else 0.0

    def observe(self, tool: str, session: str, value: float) -> None:
        for key in {self._key(tool, session), GLOBAL}:
            self._seen[key].append(value)


NAMES: dict[str, Callable[[str, str], Hashable]] = {
    "majority of all": lambda kind, before: 0,
    "majority of the kind": lambda kind, before: kind,
    "majority after the last tool": lambda kind, before: before,
}
MEANS: dict[str, Callable[[str, str], Hashable]] = {
    GLOBAL: lambda tool, session: GLOBAL,
    "mean of the session": lambda tool, session: session,
    "mean of tool and session": lambda tool, session: (tool, session),
}


class Replay:
    """One source, session by session."""

    def __init__(self, sessions: list[ToolSession]) -> None:
        self.right: collections.Counter[str] = collections.Counter()
        self.calls = self.said = self.said_right = 0
        self.errors: dict[str, dict[str, list[float]]] = {"time": {}, "return": {}}
        self._tools = tool_use.ToolUse()
        self._names = {name: Names(key) for name, key in NAMES.items()}
        self._means = {what: {name: Means(key) for name, key in MEANS.items()} for what in self.errors}
        half = sum(len(session.turns) for session in sessions) // 2
        done = 0
        for session in sessions:
            before = tool_use.NO_TOOL
            for turn in session.turns:
                self._name(session, before, turn.tool, counted=done >= half)
                if turn.tool and turn.seconds is not None:
                    self._time(session, turn, counted=done >= half)
                before = turn.tool
                done += 1

    def _name(self, session: ToolSession, before: str, tool: str, *, counted: bool) -> None:
        kind = (TENANT, "", session.kind, MODEL)
        shipped = self._tools.predict(kind, TENANT, before).tool
        if counted:
            self.calls += 1
            for name, rival in self._names.items():
                self.right[name] += rival.predict(session.kind, before) == tool
            self.right["shipped"] += (shipped or tool_use.NO_TOOL) == tool
            self.said += shipped is not None
            self.said_right += shipped == tool
        for rival in self._names.values():
            rival.observe(session.kind, before, tool)
        self._tools.on_answer(kind, before, tool)

    def _time(self, session: ToolSession, turn: prompt_data.ToolTurn, *, counted: bool) -> None:
        """What is known of the tool's time and return once its name is known."""
        kind = (TENANT, "", f"only {turn.tool}", MODEL)
        self._tools.on_answer(kind, tool_use.NO_TOOL, turn.tool)
        shipped = self._tools.predict(kind, TENANT, tool_use.NO_TOOL)
        known = shipped.tool_s is not None and counted
        truths = {"time": turn.seconds or 0.0, "return": float(turn.returned)}
        told = {"time": shipped.tool_s or 0.0, "return": float(shipped.return_tokens)}
        for what, truth in truths.items():
            for name, rival in self._means[what].items():
                if known:
                    error = abs(rival.predict(turn.tool, session.id) - truth)
                    self.errors[what].setdefault(name, []).append(error)
                rival.observe(turn.tool, session.id, truth)
            if known:
                self.errors[what].setdefault(SHIPPED, []).append(abs(told[what] - truth))
        self._tools.on_arrival(0.0, TENANT, session.id)
        self._tools.on_leave(TENANT, session.id)
        self._tools.on_away(0.0, TENANT, session.id, turn.tool, 0)
        gap = self._tools.on_arrival(truths["time"], TENANT, session.id)
        self._tools.on_leave(TENANT, session.id)
        if gap is not None:
            self._tools.observe(TENANT, gap, turn.returned)


def main(data: Path) -> None:
    replays = {source: Replay(sessions) for source, sessions in prompt_data.tool_sessions(data).items()}
    header = (*NAMES, "shipped", "a tool is named", "right where named")
    print(f"| source | calls | {' | '.join(header)} |\n|---|---|{'---|' * len(header)}")
    for source, found in replays.items():
        shares = [f"{found.right[name] / found.calls:.1%}" for name in (*NAMES, "shipped")]
        named = f"{found.said / found.calls:.1%} | " + (f"{found.said_right / found.said:.1%}" if found.said else "-")
        print(f"| {source} | {found.calls} | {' | '.join(shares)} | {named} |")
    for what, unit, digits in (("time", "s", 2), ("return", "tokens", 1)):
        print(f"\n| source | returns | {' | '.join(f'{name}, {unit}' for name in (*MEANS, SHIPPED))} |")
        print(f"|---|---|{'---|' * (len(MEANS) + 1)}")
        for source, found in replays.items():
            errors = found.errors[what]
            if errors:
                cells = [f"{statistics.fmean(errors[name]):.{digits}f}" for name in (*MEANS, SHIPPED)]
                print(f"| {source} | {len(errors[SHIPPED])} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
