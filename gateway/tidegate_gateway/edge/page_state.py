"""What the status page and `tidegate top` show: one JSON object, `GET /v1/state`.

It has no addresses, no prompts and no keys. A caller whose API key belongs to one tenant, or whose request names one, gets
the policy and what concerns this tenant; all others get the whole pool. The whole state is made at most once in `FRESH_S`,
however many pages ask.
"""

import collections
import datetime
from typing import Any

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import state_snapshot
from tidegate_gateway.observe import recent_service
from tidegate_gateway.openai import error_table
from tidegate_gateway.store import store_contract
from tidegate_gateway.workflows import workflow_service, workflow_view
from tidegate_policy.admit import entitlements

FRESH_S = 0.5
SHARED_LABELS = ("none", "other")
"""Labels of calls without a tenant, and of the tenants beyond the first ones."""
SHOWN_WORKFLOWS, SHOWN_TENANTS, SHOWN_RECENT = 16, 50, 12
OBJECTIVE = entitlements.OBJECTIVE / 100
"""The share of targets to meet of calls without a class of the settings."""


class PageState:
    """The state of one gateway for its pages."""

    def __init__(self, gateway: running_gateway.Gateway, *, takes_calls: bool) -> None:
        """`takes_calls`: the port of the page takes calls too."""
        self._gateway = gateway
        self._takes_calls = takes_calls
        self._whole: tuple[float, dict[str, Any]] | None = None

    async def of_pool(self) -> dict[str, Any]:
        """The state of the whole pool."""
        now = self._gateway.clock()
        if self._whole is None or now - self._whole[0] >= FRESH_S:
            newest = None if self._whole is None else self._whole[1]["workflows"]["newest"]
            state = {"takes_calls": self._takes_calls, **whole(self._gateway, newest)}
            self._whole = now, state  # further pages take it while this one asks the store
            state["workflows"]["newest"] = await self._workflows(None)
        return self._whole[1]

    async def of_tenant(self, tenant: str) -> dict[str, Any]:
        """The part that a tenant may see: nothing of it comes from the calls of others."""
        gateway, now = self._gateway, self._gateway.clock()
        return {
            "takes_calls": self._takes_calls,
            "scope": {"tenant": tenant},
            **_head(gateway),
            "policy": {"name": gateway.policy.active.name},
            "tenants": [_tenant(tenant, self._lately(tenant, now), None, None)],
            "workflows": {"newest": await self._workflows(tenant)},
            "recent": _recent(gateway, now, tenant),
        }

    def _lately(self, tenant: str, now: float) -> recent_service.Tally | None:
        """The service of a tenant. Names that are labels of several tenants, and tenants without a label, have none."""
        if tenant in SHARED_LABELS:
            return None
        return self._gateway.metrics.service.by_tenant(now).get(tenant)

    async def _workflows(self, tenant: str | None) -> list[dict[str, Any]] | None:
        """The newest workflows as timelines; None without a store, or while it does not answer."""
        by = workflow_service.Requester(tenant=tenant)
        try:
            shown, _ = await self._gateway.workflows.listed(None, SHOWN_WORKFLOWS, by, timeline)
        except error_table.GatewayError:
            return None
        return shown


def whole(gateway: running_gateway.Gateway, newest: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The state of the whole pool with these timelines of workflows."""
    now, service = gateway.clock(), gateway.metrics.service
    waiting = _Waiting(gateway)
    lately, since_start = service.by_class(now), service.since_start()
    objectives = {item.name: item.objective / 100 for item in gateway.settings.classes}
    names = dict.fromkeys([*objectives, *since_start, *waiting.classes])
    summary, steps = state_snapshot.summary(gateway), service.series(now)
    return {
        "scope": {"tenant": None},
        **_head(gateway),
        "policy": summary["policy"],
        "calls": summary["calls"],
        "dispatch": summary["dispatch"],
        "queue": {"lanes": waiting.lanes, "held": waiting.held},
        "objective": OBJECTIVE,
        "classes": [
            {
                "name": name,
                "waiting": waiting.classes[name],
                "lately": state_snapshot.tally(lately.get(name, recent_service.Tally())),
                "since_start": state_snapshot.tally(
                    since_start[name] if name in since_start else recent_service.Tally()
                ),
                "objective": objectives.get(name, OBJECTIVE),
                "budget_left": budget_left(since_start.get(name), objectives.get(name, OBJECTIVE)),
            }
            for name in names
        ],
        "throughput": {
            "step_s": recent_service.SLICE_S,
            "answered": [step.calls for step in steps],
            "tokens": [step.tokens for step in steps],
            "missed": [step.with_target - step.met for step in steps],
        },
        "tenants": _tenants(gateway, now, waiting),
        "engines": state_snapshot.engines(gateway),
        "workflows": {**state_snapshot.workflow_counts(gateway), "newest": newest},
        "recent": _recent(gateway, now, None),
    }


def budget_left(seen: recent_service.Tally | None, objective: float) -> float | None:
    """The part of the error budget that is left: 1 = no target was missed, 0 = as many as the objective allows, negative =
    more. None without a call that had a target."""
    if seen is None or seen.met_ratio is None:
        return None
    return round(1 - (1 - seen.met_ratio) / (1 - objective), 4)


def timeline(record: store_contract.Record) -> dict[str, Any]:
    """A workflow on a time axis that begins with it, in milliseconds."""
    end_ms = record.now_ms if record.ended_ms is None else record.ended_ms
    return {
        "id": record.client_id,
        "tenant": record.tenant or None,
        "template": record.template or None,
        "state": record.state,
        "outcome": record.outcome,
        "deadline_ms": record.deadline_ms - record.created_ms,
        "elapsed_ms": end_ms - record.created_ms,
        "left_ms": workflow_view.left_ms(record),
        "stages": [
            {
                "name": stage.name,
                "state": workflow_view.stage_state(record, stage),
                "start_ms": None if stage.started_ms is None else stage.started_ms - record.created_ms,
                "time_ms": workflow_view.time_ms(record, stage),
                "share_ms": stage.share_ms,
                "slack_ms": workflow_view.slack_ms(record, stage),
                "calls_running": stage.running,
                "calls_done": stage.done,
            }
            for stage in record.stages
        ],
    }


class _Waiting:
    """The waiting calls, counted."""

    def __init__(self, gateway: running_gateway.Gateway) -> None:
        dispatcher, metrics = gateway.core.dispatcher, gateway.metrics
        self.classes: collections.Counter[str] = collections.Counter()
        self.tenants: collections.Counter[str] = collections.Counter()
        for (slo_class, tenant), calls in dispatcher.waiting_by_class_and_tenant.items():
            self.classes[metrics.class_label(slo_class)] += calls
            self.tenants[metrics.known_label("tenant", tenant or "none")] += calls
        self.lanes = dispatcher.waiting_by_lane()
        self.held = dispatcher.waiting - sum(self.lanes.values())
        """Calls beyond their tenant's share, or of workflows that may not start yet."""


def _head(gateway: running_gateway.Gateway) -> dict[str, Any]:
    status, reasons = gateway.problems()
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "status": status,
        "reasons": reasons,
        "model": gateway.directory.served,
        "window_s": recent_service.KEPT_S,
    }


def _tenants(gateway: running_gateway.Gateway, now: float, waiting: _Waiting) -> list[dict[str, Any]]:
    """The tenants that were served most lately; calls without a tenant count as `none`."""
    lately, shares = gateway.metrics.service.by_tenant(now), gateway.core.tenant_service.shares(now)
    by_use = sorted({*lately, *waiting.tenants}, key=lambda name: (-lately[name].tokens if name in lately else 0, name))
    return [
        _tenant(name, lately.get(name), waiting.tenants[name], shares.get("" if name == "none" else name))
        for name in by_use[:SHOWN_TENANTS]
    ]


def _tenant(name: str, lately: recent_service.Tally | None, waiting: int | None, share: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "waiting": waiting,
        "share": None if share is None else round(share, 4),
        "lately": state_snapshot.tally(lately or recent_service.Tally()),
    }


def _recent(gateway: running_gateway.Gateway, now: float, tenant: str | None) -> list[dict[str, Any]]:
    found = [item for item in reversed(gateway.recent) if tenant is None or item.tenant == tenant]
    return [state_snapshot.decision(item, now) for item in found[:SHOWN_RECENT]]
