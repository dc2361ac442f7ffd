"""The page at `/`: the state of the gateway for a person with a browser. Rendered from `state_snapshot`, without
scripts.
"""

import html
from collections.abc import Iterable, Mapping
from typing import Any

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:.5em 0 1.5em}"
    "td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left}h1{font-size:1.3em}h2{font-size:1.05em}"
    ".bad{color:#b00}.dim{color:#777}"
)


def render(state: Mapping[str, Any]) -> str:
    """The whole page."""
    policy, dispatch, calls = state["policy"], state["dispatch"], state["calls"]
    status = " - ".join([state["status"], *state["reasons"]])
    until = "" if policy["left_s"] is None else f" for another {policy['left_s']:.0f} s"
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=2>",
            f"<title>Tidegate</title><style>{_STYLE}</style><h1>Tidegate</h1>",
            f"<p class={'dim' if state['status'] == 'ready' else 'bad'}>{_text(status)}</p>",
            f"<p>model <b>{_text(state['model'] or 'unknown yet')}</b>, policy <b>{_text(policy['name'])}</b>",
            f" <span class=dim>({_text(policy['source'])}: {_text(policy['reason'])}{until})</span>,",
            f" dispatch {_text(dispatch['rule'])}, alpha {_text(dispatch['alpha'])}, cap {_text(dispatch['cap'])}</p>",
            f"<p><b>{calls['waiting']}</b> calls wait here, <b>{calls['out']}</b> are at engines</p>",
            "<h2>Engines</h2>",
            _table(
                ("engine", "pool", "state", "calls", "others'", "backlog s", "running", "waiting", "KV", "policy"),
                map(_engine, state["engines"]),
            ),
            "<h2>Recent decisions</h2>",
            _table(
                ("s ago", "call", "tenant", "class", "engine", "queue s", "service s", "slack s"),
                (
                    [
                        item[key]
                        for key in ("ago_s", "call", "tenant", "class", "engine", "queue_s", "service_s", "slack_s")
                    ]
                    for item in state["recent"][:20]
                ),
            ),
        ]
    )


def _engine(item: Mapping[str, Any]) -> list[object]:
    serves = "serves" if item["accepting"] else item["reason"] or "does not take calls"
    keys = ("calls", "calls_of_others", "backlog_s", "running", "waiting", "kv_usage", "policy")
    name = f"{item['name']} (simulated {item['simulated']})" if item["simulated"] else item["name"]
    return [name, item["node_pool"], serves, *(item[key] for key in keys)]


def _table(head: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    titles = "".join(f"<th>{title}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _text(value: object) -> str:
    if isinstance(value, float):
        value = f"{round(value, 3) + 0.0:.3f}".rstrip("0").rstrip(".")  # + 0.0: no minus before a zero
    return html.escape("-" if value is None or value == "" else str(value))
