"""The loop that keeps the right ordering policy in force on every engine of a pool.

It watches the quality of service that each engine reports, lets the pure rules and guards of `tidegate_policy.steer`
decide, and sets the verdict on all engines; an engine that reports another policy (it is new, it restarted, it did
not hear) is set again. It knows engines by address and nothing of Kubernetes: `steer_pool` carries its outcome into a
pool's status, and `tidegate up` runs it without a cluster.

Instants are seconds of the wall clock, because what the loop remembers outlives this process.
"""

import asyncio
import collections
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import grpc

from tidegate_policy import qos
from tidegate_policy.steer import guards, rules
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

CALL_S = 5.0
"""For an engine to put a policy in force."""
RECONNECT_S = 1.0
SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 0.1, 60.0
"""Between two reports of an engine, as EngineControl takes it."""
SAME_END_S = 2.0
"""An override's end that moved by less has not been moved by a person: it was told as a duration."""
SILENT_PERIODS = 3
"""An engine is silent after so many periods, and the time to open its stream again, without a report."""
MAX_REPORTS = 1000
"""Kept of one engine when nobody takes them, as while a pool's spec is invalid."""
UNREADABLE = "its answer cannot be read"
"""Said of bytes that are no message, for which grpc.aio gives None, and of numbers that nobody can have measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a pool's spec says about its policy."""

    allow: tuple[str, ...]
    interval_s: float
    guards: guards.GuardSettings
    thresholds: rules.Thresholds = field(default_factory=rules.Thresholds)

    @property
    def tick_s(self) -> float:
        """Time between two looks; the guards want one at least in their window."""
        return min(self.interval_s, self.guards.window_s / 2)

    @property
    def period_s(self) -> float:
        """Time between two reports of an engine: some for each look."""
        return min(max(self.tick_s / 4, SHORTEST_PERIOD_S), LONGEST_PERIOD_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A policy that a person has chosen, in the spec or for a while."""

    policy: str
    reason: str
    until_s: float | None = None
    """When it ends; None = when its giver says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one look has led to."""

    state: guards.SteerState
    verdict: guards.Verdict
    window: Mapping[str, qos.Qos] | None
    """What each engine delivered since the last decision, by address; None between two decisions."""


class Engines:
    """Connections to a changing set of engines: what they report, and what is told to them."""

    def __init__(self, *, period_s: float) -> None:
        self.period_s = period_s
        """Time between two reports; a change takes effect at the next `retarget`."""
        self._watches: dict[str, _Watch] = {}

    async def retarget(self, addresses: Collection[str]) -> None:
        """Watches these engines (host:port of EngineControl) and no others."""
        gone = [self._watches.pop(address) for address in [*self._watches] if address not in addresses]
        for watch in gone:
            await watch.close()
        for address in addresses:
            if address not in self._watches:
                self._watches[address] = _Watch(address, self.period_s)
            elif self._watches[address].period_s != self.period_s:
                await self._watches[address].reopen(self.period_s)

    def take(self) -> dict[str, list[qos.Qos]]:
        """What each engine has reported since the last call."""
        return {address: watch.take() for address, watch in self._watches.items()}

    def silent(self) -> set[str]:
        """Engines that should have reported for some time and have not."""
        return {address for address, watch in self._watches.items() if watch.is_silent}

    def heard(self) -> set[str]:
        """Engines that have reported since the last `take`."""
        return {address for address, watch in self._watches.items() if watch.reports}

    async def put_in_force(self, policy: str, reason: str) -> dict[str, str]:
        """Sets `policy` on each engine whose last report names another; returns the errors by address."""
        wrong = [watch for watch in self._watches.values() if watch.policy != policy]
        errors = await asyncio.gather(*(watch.set_policy(policy, reason) for watch in wrong))
        return {watch.address: error for watch, error in zip(wrong, errors, strict=True) if error}

    async def close(self) -> None:
        await self.retarget(())


class _Watch:
    """One engine's stream of reports, reopened whenever it breaks."""

    def __init__(self, address: str, period_s: float) -> None:
        self.address = address
        self.period_s = period_s
        self.policy: str | None = None
        """As the engine last said; None = it has not said."""
        self.reports: collections.deque[qos.Qos] = collections.deque(maxlen=MAX_REPORTS)
        """Since the last `take`."""
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = control_pb2_grpc.EngineControlStub(self._channel)  # type: ignore[no-untyped-call]
        self._warned = False
        self._open()

    @property
    def is_silent(self) -> bool:
        patience_s = SILENT_PERIODS * self.period_s + RECONNECT_S
        return asyncio.get_running_loop().time() - self._heard_s > patience_s

    async def reopen(self, period_s: float) -> None:
        """Asks for reports at another pace; those that came are kept."""
        self.period_s = period_s
        await self._stop()
        self._open()

    def take(self) -> list[qos.Qos]:
        taken = list(self.reports)
        self.reports.clear()
        return taken

    async def set_policy(self, policy: str, reason: str) -> str | None:
        """Returns why it failed, None when the policy is in force."""
        request = control_pb2.SetPolicyRequest(policy=policy, reason=reason)
        try:
            answer = await self._stub.SetPolicy(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        if answer is None:
            return UNREADABLE
        self.policy = answer.policy
        return None

    async def close(self) -> None:
        await self._stop()
        await self._channel.close()

    def _open(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._follow())

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                await self._hear()
            except grpc.aio.AioRpcError as error:
                away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                self._tell(logging.DEBUG if away else logging.WARNING, f"{error.code().name}: {error.details()}")
            except Exception as error:  # noqa: BLE001  # told with where it comes from
                self._tell(logging.ERROR, "a defect", error)
            self.policy = None  # it may be another process when it answers again
            await asyncio.sleep(RECONNECT_S)

    async def _hear(self) -> None:
        """Takes in one stream, until it ends or says what cannot be read."""
        stream = self._stub.WatchQos(control_pb2.WatchQosRequest(period_s=self.period_s))
        async for report in stream:
            if report is None or not _credible(report):
                stream.cancel()
                self._tell(logging.WARNING, UNREADABLE)
                return
            self.reports.append(read(report))
            self.policy = report.policy
            self._heard_s = asyncio.get_running_loop().time()
            self._warned = False

    def _tell(self, level: int, why: str, defect: Exception | None = None) -> None:
        """Once at `level`, then, until the engine reports again, to those who look for it."""
        shown = logging.DEBUG if self._warned else level
        log.log(shown, "engine %s does not report: %s", self.address, why, exc_info=defect)
        self._warned |= level > logging.DEBUG


def read(report: control_pb2.QosReport) -> qos.Qos:
    """An engine's report as the decision core knows it."""
    return qos.Qos(
        window_s=report.window_s,
        arrived=report.arrived,
        finished=report.finished,
        running=report.running,
        waiting=report.waiting,
        kv_usage=report.kv_usage,
        preemptions=report.preemptions,
        ttft=_histogram(report.ttft),
        tpot=_histogram(report.tpot),
        service=_histogram(report.service),
        with_target=report.with_target,
        missed=report.missed,
        blocked=report.blocked,
        tenants={
            item.tenant: qos.TenantService(weight=item.weight, served_tokens=item.served_tokens, waiting=item.waiting)
            for item in report.tenants
        },
    )


def _credible(report: control_pb2.QosReport) -> bool:
    histograms = (report.ttft, report.tpot, report.service)
    numbers = (report.window_s, report.kv_usage, *(each.sum_s for each in histograms))
    most = len(qos.BOUNDS_S) + 1
    return all(map(math.isfinite, numbers)) and all(len(each.counts) <= most for each in histograms)


def _histogram(message: control_pb2.Histogram) -> qos.Histogram:
    return qos.Histogram(counts=tuple(message.counts), sum_s=message.sum_s)


class Loop:
    """One pool's loop. At least every `settings.tick_s`: `decide`, write the outcome down, `enforce`."""

    def __init__(self, state: guards.SteerState | None, settings: Settings, *, now: float) -> None:
        """`state` is what was last written down; None for a pool that was never steered."""
        self._settings = settings
        self.engines = Engines(period_s=settings.period_s)
        self._state = state or guards.SteerState(active=rules.start(settings.allow), since_s=now)
        self._decided_s = now
        self._looks: list[dict[str, qos.Qos]] = []
        """What each engine delivered, look by look, since the last decision."""

    @property
    def settings(self) -> Settings:
        """Of today: they may be set anew between two looks, before the engines are retargeted."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self._settings = settings
        self.engines.period_s = settings.period_s

    def decide(self, now: float, override: Override | None) -> Outcome:
        """Looks at what the engines delivered and decides. Every `interval_s` anything may be proposed, about the
        whole interval; in between only an emergency, and the guards judge the last switch by the latest look."""
        reports = self.engines.take()
        latest = {address: qos.over_time(windows) for address, windows in reports.items() if windows}
        self._looks.append(latest)
        whole = now - self._decided_s >= self.settings.interval_s
        window = _over_looks(self._looks) if whole else latest
        if whole:
            self._looks, self._decided_s = [], now
        silent = len(self.engines.silent())
        together = replace(qos.across(window.values()), engines=len(reports) - silent, silent=silent)
        self._state, verdict = _decide(now, self._state, together, self.settings, override, whole=whole)
        return Outcome(state=self._state, verdict=verdict, window=window if whole else None)

    def held(self, now: float) -> Override | None:
        """The override in force, if its time is not over: what to go on with when nobody can say whether it still
        holds."""
        state = self._state
        if state.kind is not guards.Kind.OVERRIDE or (state.until_s is not None and now >= state.until_s):
            return None
        return Override(policy=state.active, reason=state.reason, until_s=state.until_s)

    async def enforce(self) -> dict[str, str]:
        """Puts the decided policy in force wherever it is not; returns the engines that did not take it, and why."""
        return await self.engines.put_in_force(self._state.active, self._state.reason)


def _over_looks(looks: list[dict[str, qos.Qos]]) -> dict[str, qos.Qos]:
    addresses = dict.fromkeys(address for look in looks for address in look)
    return {address: qos.over_time(look[address] for look in looks if address in look) for address in addresses}


def _decide(
    now: float,
    state: guards.SteerState,
    together: qos.Qos,
    settings: Settings,
    override: Override | None,
    *,
    whole: bool,
) -> tuple[guards.SteerState, guards.Verdict]:
    """One step of the pure core. Between two decisions (not `whole`) only an emergency is proposed."""
    proposal = rules.propose(together, state.active, settings.allow, settings.thresholds)
    if proposal is not None and not (whole or proposal.emergency):
        proposal = None
    policy = None if override is None else override.policy
    state, verdict = guards.step(now, state, together, proposal, settings.guards, override=policy, allow=settings.allow)
    if override is not None and verdict.kind is guards.Kind.OVERRIDE:
        state = replace(state, reason=override.reason)
        verdict = replace(verdict, reason=override.reason)
    if override is not None and not _same_end(state.until_s, override.until_s):
        state = replace(state, until_s=override.until_s)
    return state, verdict


def _same_end(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < SAME_END_S
