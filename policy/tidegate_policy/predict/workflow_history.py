"""What do the workflows of a template look like? Learned from the calls of workflows that finished.

Clients declare few stages, and calls do not say what they wait for. A call that arrived after another had ended may have
waited for it, so the longest path behind a call is the longest chain of later calls. The history records the calls of
each running workflow, and shows a finished one to `remaining_work` and to the template: the order of its stages, how many
calls run at the same time, and how many there are.

A workflow ends by its own event. A workflow of which no call has run for `IDLE_S` counts as finished, and teaches what its
calls were. What a workflow lacked is told by its own event only: another gateway may have had the calls that were not seen
here, or they may still come.
"""

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tidegate_policy.model import CallId, WorkflowId
from tidegate_policy.predict.remaining_work import RemainingWork
from tidegate_policy.tenant_memory import TenantMemory

IDLE_S = 120.0
"""Longer pauses between the calls of a workflow are taken for its end."""
MAX_WORKFLOWS, MAX_CALLS = 10_000, 1000
"""Running workflows of all tenants, and calls of each, that are remembered."""
MAX_TEMPLATES, MAX_STAGES = 256, 256
"""Templates of all tenants, and stages of each, that are remembered. The stage that was seen least recently is forgotten
first."""
NEWEST_WEIGHT = 0.05
"""Weight of the newest workflow in a template, once the template is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedStage:
    """A stage of a template, as means over finished workflows that had it."""

    seen: int = 0
    place: float = 0.0
    """Where the stage begins: 0 = with the first call of the workflow, 1 = with the last one."""
    calls: float = 0.0
    """Calls of the stage in a workflow."""
    parallel: float = 0.0
    """Most calls of the stage at the same time."""


@dataclass(slots=True)
class _Span:
    stage: str
    arrived_at_s: float
    ended_at_s: float = 0.0
    own_s: float | None = None
    """Seconds of the call alone; None = it has not ended well."""
    demand_s: float = 0.0
    """Seconds of the whole pool that the call takes."""


@dataclass(slots=True)
class _Running:
    tenant: str
    template: str
    touched_at_s: float
    spans: dict[CallId, _Span] = field(default_factory=dict)
    open: int = 0
    over: bool = False
    whole: bool = True
    """The gateway has seen every call end well."""


class WorkflowHistory:
    """The running workflows of a gateway, and the templates that finished ones have shown."""

    def __init__(self, remaining_work: RemainingWork, finished: Callable[[str, float, float], None]) -> None:
        """`finished` takes the tenant, the latency alone and the demand of each workflow that has finished."""
        self._remaining_work = remaining_work
        self._finished = finished
        self._running: OrderedDict[WorkflowId, _Running] = OrderedDict()
        """Least recently touched first."""
        self._remembered: TenantMemory[WorkflowId, None] = TenantMemory(MAX_WORKFLOWS)
        """The same workflows, by tenant."""
        self._templates: TenantMemory[str, dict[str, LearnedStage]] = TenantMemory(MAX_TEMPLATES)
        self._uncalled: TenantMemory[str, frozenset[str]] = TenantMemory(MAX_TEMPLATES)
        """By template: the stages of its last workflow that had no call."""

    def stages(self, tenant: str, template: str = "") -> dict[str, LearnedStage]:
        """The stages of a template of the tenant, or of its workflows without one, in the order of their places."""
        known = self._templates.get(tenant, template) or {}
        return dict(sorted(known.items(), key=lambda item: item[1].place))

    def has_no_calls(self, tenant: str, template: str, stage: str) -> bool:
        """Whether the last workflow of the template had no call of the stage, and none had one that was seen here: its
        client completes it, for example after a tool has run."""
        if stage not in (self._uncalled.get(tenant, template) or ()):
            return False
        return stage not in (self._templates.get(tenant, template) or ())

    @property
    def templates(self) -> Sequence[tuple[str, str]]:
        """The tenants and their templates; "" = workflows without one."""
        return self._templates.keys()

    def on_call(
        self, now: float, workflow: WorkflowId, call: CallId, stage: str, *, tenant: str, template: str = ""
    ) -> None:
        """A call of a workflow of the tenant came in."""
        self.expire(now)
        running = self._running.get(workflow)
        if running is None:
            running = self._running[workflow] = _Running(tenant, template, now)
        self._touch(now, workflow, running)
        running.over = False
        running.open += 1
        if len(running.spans) < MAX_CALLS:
            running.spans[call] = _Span(stage, now)
        else:
            running.whole = False

    def on_end(
        self, now: float, workflow: WorkflowId, call: CallId, own_s: float | None, demand_s: float = 0.0
    ) -> None:
        """The call left. Alone it takes `own_s` seconds, and `demand_s` of the whole pool; None = it has no whole
        answer."""
        running = self._running.get(workflow)
        if running is None:
            return
        self._touch(now, workflow, running)
        running.open -= 1
        span = running.spans.get(call)
        if own_s is None and span is not None:
            del running.spans[call]  # the client will repeat it, or the workflow fails
        elif span is not None:
            span.ended_at_s, span.own_s, span.demand_s = now, own_s, demand_s
        if running.over and running.open <= 0:
            self._finish(workflow)

    def on_workflow_end(self, now: float, workflow: WorkflowId, *, ok: bool, uncalled: Iterable[str] = ()) -> None:
        """The workflow is finished, or cancelled or expired. Its last call may still be leaving. `uncalled` are its stages
        that had no call at any gateway. Workflows without a template have no stages in common, so
        nothing is learned from what one of them lacks."""
        running = self._running.get(workflow)
        if running is None:
            return
        if ok and running.template:
            lacked = frozenset(itertools.islice(uncalled, MAX_STAGES))
            self._uncalled.put(running.tenant, running.template, lacked)
        if not ok:
            self._forget(workflow)
        elif running.open > 0:
            running.over = True
        else:
            self._finish(workflow)

    def expire(self, now: float) -> None:
        """Finishes the workflows that have been idle for long."""
        while self._running:
            workflow, running = next(iter(self._running.items()))
            if now - running.touched_at_s < IDLE_S:
                return
            if running.open > 0:
                self._touch(now, workflow, running)
                return
            self._finish(workflow)

    def _touch(self, now: float, workflow: WorkflowId, running: _Running) -> None:
        running.touched_at_s = now
        self._running.move_to_end(workflow)
        gone = self._remembered.put(running.tenant, workflow, None)
        if gone is not None:
            del self._running[gone[1]]

    def _forget(self, workflow: WorkflowId) -> _Running:
        running = self._running.pop(workflow)
        self._remembered.pop(running.tenant, workflow)
        return running

    def _finish(self, workflow: WorkflowId) -> None:
        running = self._forget(workflow)
        spans = [span for span in running.spans.values() if span.own_s is not None]
        if not spans or not running.whole:
            return
        path_s = 0.0
        for span, rest_s in zip(spans, _rests_s(spans), strict=True):
            self._remaining_work.observe((running.tenant, running.template, span.stage), rest_s)
            path_s = max(path_s, rest_s + (span.own_s or 0.0))
        self._finished(running.tenant, path_s, sum(span.demand_s for span in spans))
        template = self._templates.get(running.tenant, running.template) or {}
        self._templates.put(running.tenant, running.template, template)
        for stage, seen in _shown(spans).items():
            before = template.pop(stage, LearnedStage())
            weight = max(NEWEST_WEIGHT, 1 / (before.seen + 1))
            template[stage] = LearnedStage(
                seen=before.seen + 1,
                place=before.place + weight * (seen.place - before.place),
                calls=before.calls + weight * (seen.calls - before.calls),
                parallel=before.parallel + weight * (seen.parallel - before.parallel),
            )
            if len(template) > MAX_STAGES:
                del template[next(iter(template))]


def _rests_s(spans: Sequence[_Span]) -> list[float]:
    """Seconds of the longest chain of calls that arrived after each call had ended."""
    order = sorted(range(len(spans)), key=lambda index: -spans[index].arrived_at_s)
    rests = [0.0] * len(spans)
    arrivals: list[float] = []
    longest: list[float] = []
    for index in order:  # The latest first, so what follows a call is known.
        span = spans[index]
        followers = bisect.bisect_right(arrivals, -span.ended_at_s)
        rests[index] = longest[followers - 1] if followers else 0.0
        arrivals.append(-span.arrived_at_s)
        longest.append(max(rests[index] + (span.own_s or 0.0), longest[-1] if longest else 0.0))
    return rests


def _shown(spans: Sequence[_Span]) -> dict[str, LearnedStage]:
    """What one workflow shows of its stages."""
    ordered = sorted(spans, key=lambda span: span.arrived_at_s)
    by_stage: dict[str, list[tuple[int, _Span]]] = {}
    for index, span in enumerate(ordered):
        by_stage.setdefault(span.stage, []).append((index, span))
    return {
        stage: LearnedStage(
            seen=1,
            place=members[0][0] / max(len(ordered) - 1, 1),
            calls=float(len(members)),
            parallel=float(_most_at_once([span for _, span in members])),
        )
        for stage, members in by_stage.items()
    }


def _most_at_once(spans: Sequence[_Span]) -> int:
    events = sorted([(span.arrived_at_s, 1) for span in spans] + [(span.ended_at_s, -1) for span in spans])
    most = running = 0
    for _, change in events:  # At one instant the ends come first.
        running += change
        most = max(most, running)
    return most
