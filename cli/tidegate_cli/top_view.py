"""The state of a gateway as lines of a terminal. `top_command` asks for the state and writes the lines."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidegate_cli import terminal_text
from tidegate_cli.terminal_text import Painter, number, percent, plain

State = Mapping[str, Any]

NAME = 28
"""Columns of a name."""
SHOWN_SWITCHES, SHOWN_WORKFLOWS, SHOWN_TENANTS = 3, 8, 6
TONES = {"met": "good", "running": "fair", "cancelled": "dim"}
TIMELINE = 30


def lines(state: State, paint: Painter, *, width: int, height: int | None = None) -> list[str]:
    """The whole view. With a `height` the list of engines takes the room that is left."""
    policy, whole = state["policy"], state["scope"]["tenant"] is None
    tone = {"ready": "good", "degraded": "fair"}.get(state["status"], "bad")
    status = ": ".join([state["status"], *state["reasons"]])
    scope = "" if whole else f"  tenant {plain(state['scope']['tenant'])}"
    head = [f"{paint('bold', 'Tidegate')}  {paint(tone, plain(status))}  {plain(state['model'])}{scope}  {state['at']}"]
    if not whole:
        shown = [*head, f"policy {policy['name']}", "", *_tenants(state), "", *_workflows(state, paint)]
        return [terminal_text.cut(line, width) for line in shown]
    above = [
        *head,
        *_totals(state, paint),
        "",
        *_classes(state, paint),
        "",
        *_policy(policy, paint),
        "",
    ]
    below = ["", *_queue(state), *_tenants(state), "", *_workflows(state, paint)]
    room = None if height is None else max(height - len(above) - len(below) - 3, 3)
    return [terminal_text.cut(line, width) for line in [*above, *_engines(state, paint, room), *below]]


def _totals(state: State, paint: Painter) -> Iterator[str]:
    seen, calls, engines = state["throughput"], state["calls"], state["engines"]
    rate = {name: sum(seen[name][-7:-1]) / (6 * seen["step_s"]) for name in ("answered", "tokens")}
    serving = sum(engine["accepting"] for engine in engines)
    counts = f"{calls['waiting']:,} wait here, {calls['out']:,} at engines, {serving} of {len(engines)} engines serve"
    yield f"{number(rate['answered'])} answers/s, {number(rate['tokens'])} tokens/s (30 s), {counts}"
    yield f"answers, 5 min  {paint('main', terminal_text.sparkline(seen['answered']))}"


def _classes(state: State, paint: Painter) -> list[str]:
    rows = []
    for each in state["classes"]:
        lately, met, left, goal = each["lately"], each["lately"]["met_ratio"], each["budget_left"], each["objective"]
        tone = "" if met is None else "good" if met >= goal else "bad"
        budget = "" if left is None else "good" if left > 0.25 else "fair" if left > 0 else "bad"
        counts = [number(lately[name]) for name in ("met", "late", "shed", "failed")]
        waits = [number(lately["answer_s"]), number(each["waiting"])]
        rows.append(
            [
                _name(each["name"]),
                paint(tone, percent(met)),
                percent(goal),
                *counts,
                *waits,
                paint(budget, percent(left)),
            ]
        )
    heads = ["CLASS (met: 5 min)", "#MET", "#WANTED", "#met", "#late", "#shed", "#failed", "#answer s"]
    return terminal_text.table([*heads, "#waiting", "#error budget left"], rows)


def _policy(policy: State, paint: Painter) -> Iterator[str]:
    left = "" if policy["left_s"] is None else f", {policy['left_s']:.0f} s left"
    since = f"for {policy['since_s']:.0f} s{left}"
    yield f"POLICY {paint('bold', policy['name'])} ({policy['source']}, {since}): {plain(policy['reason'])}"
    for each in policy["switches"][:SHOWN_SWITCHES]:
        yield f"  {each['at'][11:19]}  {each['from']} -> {each['to']}  {plain(each['reason'])}"
        yield paint("dim", f"            before: {each['evidence']}; after: {each['effect']}")


def _engines(state: State, paint: Painter, room: int | None) -> list[str]:
    engines = state["engines"]
    # The engines that serve nothing come first, then those with the most work.
    by_need = sorted(engines, key=lambda each: (each["accepting"], -each["backlog_s"], each["name"]))
    shown = by_need if room is None else by_need[:room]
    rows = []
    for each in shown:
        sent, most = each["calls"] + each["calls_of_others"], each["cap"]
        condition = (
            paint("good", "serves") if each["accepting"] else paint("bad", plain(each["reason"] or "takes no calls"))
        )
        rows.append(
            [
                _name(each["name"]),
                _name(each["node_pool"]),
                condition,
                terminal_text.bar(sent / (most or max(sent, 1)), 10),
                f"{sent}/{most or 'any'}",
                number(each["running"]),
                number(each["waiting"]),
                terminal_text.cut(_lanes(each["lanes"]) or "-", NAME),
                percent(each["kv_usage"]),
                number(each["backlog_s"]),
                _name(each["policy"] or "-"),
            ]
        )
    heads = [
        "ENGINE",
        "pool",
        "state",
        "load",
        "#sent/most",
        "#running",
        "#waiting",
        "lanes",
        "#KV",
        "#backlog s",
        "policy",
    ]
    more = Counter(plain(each["node_pool"] or "no pool") for each in by_need[len(shown) :])
    hidden = ", ".join(f"{count} in {name}" for name, count in more.most_common(8))
    return [
        *terminal_text.table(heads, rows),
        *([f"and {more.total()} engines with less work: {hidden}"] if more else []),
    ]


def _queue(state: State) -> list[str]:
    lanes = [_lanes(state["queue"]["lanes"])] if state["queue"]["lanes"] else []
    held = state["queue"]["held"]
    lanes += [f"held back {held:,}"] if held else []
    return [f"QUEUE {', '.join(lanes) or 'empty'}"]


def _tenants(state: State) -> list[str]:
    rows = [
        [
            _name(each["name"]),
            percent(each["share"]),
            number(each["lately"]["answered"]),
            number(each["lately"]["tokens"]),
            percent(each["lately"]["met_ratio"]),
            number(each["waiting"]),
        ]
        for each in state["tenants"][:SHOWN_TENANTS]
    ]
    return terminal_text.table(["TENANT (5 min)", "#share", "#answered", "#tokens", "#met", "#waiting"], rows)


def _workflows(state: State, paint: Painter) -> list[str]:
    newest: Sequence[State] | None = state["workflows"]["newest"]
    if newest is None:
        return ["WORKFLOWS none: no store answers"]
    rows = []
    for each in newest[:SHOWN_WORKFLOWS]:
        outcome, left = each["outcome"] or each["state"], each["left_ms"] / 1000
        end = f"{number(left)} s left" if left >= 0 else f"{number(-left)} s over"
        stages = " ".join(f"{plain(stage['name'])}:{stage['state']}" for stage in each["stages"])
        rows.append([_name(each["id"]), paint(TONES.get(outcome, "bad"), outcome), end, _timeline(each), stages])
    return terminal_text.table(["WORKFLOW", "outcome", "deadline", "time (| = deadline)", "stages"], rows)


def _timeline(flow: State) -> str:
    """Digits stand for the stages in their order, `|` for the deadline."""
    whole = max(flow["deadline_ms"], flow["elapsed_ms"], 1)
    columns = ["·"] * TIMELINE
    for index, stage in enumerate(flow["stages"]):
        if stage["start_ms"] is not None:
            begin = int(stage["start_ms"] / whole * (TIMELINE - 1))
            end = int((stage["start_ms"] + (stage["time_ms"] or 0)) / whole * (TIMELINE - 1))
            columns[begin : end + 1] = [str((index + 1) % 10)] * (min(end, TIMELINE - 1) - begin + 1)
    columns[int(flow["deadline_ms"] / whole * (TIMELINE - 1))] = "|"
    return "".join(columns)


def _lanes(lanes: Mapping[str, int]) -> str:
    return ", ".join(f"{plain(name)}: {calls:,}" for name, calls in lanes.items())


def _name(value: object) -> str:
    return terminal_text.cut(plain(value or "-"), NAME)
