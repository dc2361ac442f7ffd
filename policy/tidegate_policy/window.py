"""Records the events of each call in one engine and cuts them into windows, which `qos` summarises.

Events come with their instants; a call's events may fall into different windows and count in the window in which they
happen. A call that leaves without a token (cancelled) counts only as an arrival. The engine counts the tokens of each call,
so a step without a first token or an end costs a recorder nothing.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tidegate_policy.model import Call, CallId
from tidegate_policy.qos import Qos, Tally, Targets, TenantService

MAX_TENANTS = 100
MAX_CLASSES = 100
OTHER = "other"
"""Tenants beyond the first `MAX_TENANTS` of a window, and classes beyond the first `MAX_CLASSES`, are summed under this
name, because clients choose the names."""


NO_TARGETS = Targets()


@dataclass(slots=True)
class _Open:
    call: Call
    service_s: float
    first_s: float | None = None
    served: int = 0
    """Tokens that were counted as service of its tenant."""


@dataclass(slots=True)
class _Counts:
    since_s: float
    arrived: int = 0
    finished: int = 0
    preemptions: int = 0
    with_target: int = 0
    missed: int = 0
    blocked: int = 0
    ttft: Tally = field(default_factory=Tally)
    tpot: Tally = field(default_factory=Tally)
    service: Tally = field(default_factory=Tally)
    served: Counter[str] = field(default_factory=Counter)
    weights: dict[str, float] = field(default_factory=dict)
    tenant_targets: dict[str, Targets] = field(default_factory=dict)
    class_targets: dict[str, Targets] = field(default_factory=dict)


class Recorder:
    """Counts the events of one engine."""

    def __init__(self, now: float) -> None:
        self._open: dict[CallId, _Open] = {}
        self._started: dict[CallId, _Open] = {}
        """Those of them that have produced a token."""
        self._queued: Counter[tuple[str, float]] = Counter()
        """The number of the others, by tenant and weight, so that a cut looks at few calls."""
        self._window = _Counts(now)

    def on_arrival(self, call: Call, service_s: float) -> None:
        """A call entered the engine at `call.arrived_at_s`."""
        self._open[call.id] = _Open(call, service_s)
        self._queued[call.tenant, call.weight] += 1
        self._window.arrived += 1
        self._window.service.add(service_s)

    def on_first_token(self, now: float, call_id: CallId) -> None:
        """The call produced its first token."""
        record = self._open.get(call_id)
        if record is not None:
            if record.first_s is None:
                self._leaves_queue(record.call)
                self._started[call_id] = record
            record.first_s = now
            waited_s = now - record.call.arrived_at_s
            self._window.ttft.add(waited_s)
            self._window.blocked += waited_s > 2 * record.service_s

    def on_preemption(self) -> None:
        self._window.preemptions += 1

    def on_end(self, now: float, call_id: CallId, *, tokens: int, finished: bool) -> None:
        """The call left the engine: finished with its last token, or aborted. It produced `tokens` tokens in all."""
        record = self._open.pop(call_id, None)
        if record is not None:
            if self._started.pop(call_id, None) is None:
                self._leaves_queue(record.call)
            self._serve(record, tokens)
        if record is None or not finished or record.first_s is None:
            return
        window = self._window
        window.finished += 1
        tpot_s = tpot(now, first_at_s=record.first_s, tokens=tokens)
        if tpot_s is not None:
            window.tpot.add(tpot_s)
        missed = missed_target(now, record.call, first_at_s=record.first_s, tpot_s=tpot_s, tokens=tokens)
        if missed is not None:
            window.with_target += 1
            window.missed += missed
            one = Targets(with_target=1, missed=int(missed))
            tenant = self._tenant(record.call)
            window.tenant_targets[tenant] = window.tenant_targets.get(tenant, NO_TARGETS) + one
            slo_class = bounded(record.call.slo_class, window.class_targets, MAX_CLASSES)
            window.class_targets[slo_class] = window.class_targets.get(slo_class, NO_TARGETS) + one

    def cut(self, now: float, *, waiting: int, tokens: Callable[[CallId], int]) -> Qos:
        """The window since the last cut; a new one begins. `tokens` gives the tokens that a call has produced in all."""
        for call_id, record in self._started.items():
            self._serve(record, tokens(call_id))
        queued: Counter[str] = Counter()
        for (tenant, weight), count in self._queued.items():
            queued[self._name(tenant, weight)] += count
        window, self._window = self._window, _Counts(now)
        tenants = {
            name: TenantService(
                weight=window.weights.get(name, 1.0),
                served_tokens=window.served[name],
                waiting=queued[name],
                with_target=window.tenant_targets.get(name, NO_TARGETS).with_target,
                missed=window.tenant_targets.get(name, NO_TARGETS).missed,
            )
            for name in sorted({*window.served, *queued, *window.tenant_targets})
        }
        return Qos(
            window_s=now - window.since_s,
            arrived=window.arrived,
            finished=window.finished,
            waiting=waiting,
            preemptions=window.preemptions,
            ttft=window.ttft.freeze(),
            tpot=window.tpot.freeze(),
            service=window.service.freeze(),
            with_target=window.with_target,
            missed=window.missed,
            blocked=window.blocked,
            tenants=tenants,
            classes=window.class_targets,
        )

    def _serve(self, record: _Open, tokens: int) -> None:
        """Counts the tokens that a call produced since the last count as service of its tenant."""
        if tokens > record.served:
            self._window.served[self._tenant(record.call)] += tokens - record.served
            record.served = tokens

    def _leaves_queue(self, call: Call) -> None:
        """A call produced its first token, or left without one."""
        queued, kind = self._queued, (call.tenant, call.weight)
        queued[kind] -= 1
        if not queued[kind]:
            del queued[kind]

    def _tenant(self, call: Call) -> str:
        return self._name(call.tenant, call.weight)

    def _name(self, tenant: str, weight: float) -> str:
        """The name under which the window counts a tenant."""
        weights = self._window.weights
        name = bounded(tenant, weights, MAX_TENANTS)
        if name == tenant:
            weights[name] = weight
        return name


def bounded(name: str, known: Collection[str], limit: int) -> str:
    """`name`, or `OTHER` if it is new and `limit` names are known."""
    return name if name in known or len(known) < limit else OTHER


def tpot(now: float, *, first_at_s: float, tokens: int) -> float | None:
    """The mean time between the tokens of a call that ends now; None for a call of one token."""
    return (now - first_at_s) / (tokens - 1) if tokens > 1 else None


def further_s(call: Call, tokens: float) -> float:
    """Seconds by which a call with an output of `tokens` may finish after its due instant.

    Targets for the first token and for each further token imply a due instant for the *predicted* length. A call whose
    output is longer is due later by the time that its further tokens may take."""
    if call.ttft_s is None or call.tpot_s is None:
        return 0.0
    return max(tokens - call.output_predicted, 0) * call.tpot_s


def missed_target(now: float, call: Call, *, first_at_s: float, tpot_s: float | None, tokens: int) -> bool | None:
    """Whether a call that finishes now missed any of its targets; None when it had no target."""
    verdicts = []
    if call.ttft_s is not None:
        verdicts.append(first_at_s - call.arrived_at_s > call.ttft_s)
    if call.tpot_s is not None and tpot_s is not None:
        verdicts.append(tpot_s > call.tpot_s)
    if call.due_at_s is not None:
        verdicts.append(now > call.due_at_s + further_s(call, tokens))
    if call.deadline_at_s is not None:
        verdicts.append(now > call.deadline_at_s)
    return any(verdicts) if verdicts else None
