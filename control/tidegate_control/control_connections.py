"""Connections to a changing set of engines: their reports, and the policy in force on them.

`EngineConnections` keeps a stream of reports open to each engine of the set, opens it again when it breaks, and sets a
policy and its parameters wherever an engine reports others. This module decides nothing.
"""

import asyncio
import collections
import contextlib
import logging
import random
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tidegate_control import control_client
from tidegate_policy import qos

log = logging.getLogger(__name__)

RECONNECT_S = 1.0
"""Pause before a broken stream of reports is opened again. It doubles while the engine cannot be reached."""
LONGEST_RECONNECT_S = 15.0
"""Longest of these pauses."""
SILENT_PERIODS = 3
"""An engine is silent when its next report is late by this many periods, less one, plus `RECONNECT_S`."""
MAX_REPORTS = 1000
"""Reports kept of one engine while the caller does not take them, for example while a pool's spec is invalid."""


class ReportPace(NamedTuple):
    """How often an engine reports."""

    period_s: float
    """Seconds between two reports."""
    idle_period_s: float
    """Seconds between two reports while nothing happens in the engine; not below `period_s`."""


class EngineConnections:
    """The connections of one pool."""

    def __init__(self, *, pace: ReportPace, token: str | None = None) -> None:
        self._token = token
        self.pace = pace
        """A change takes effect at the next `retarget`."""
        self._connections: dict[str, _Connection] = {}

    async def retarget(self, addresses: Collection[str]) -> None:
        """Connects to these engines (host:port of EngineControl) and disconnects from all others."""
        gone = [self._connections.pop(address) for address in [*self._connections] if address not in addresses]
        for connection in gone:
            await connection.close()
        for address in addresses:
            if address not in self._connections:
                self._connections[address] = _Connection(address, self.pace, self._token)
            elif self._connections[address].pace != self.pace:
                await self._connections[address].reopen(self.pace)

    def take_reports(self) -> dict[str, list[qos.Qos]]:
        """The reports of each engine since the last call, oldest first; an empty list for an engine without any."""
        return {address: connection.take_reports() for address, connection in self._connections.items()}

    def silent(self) -> set[str]:
        """Engines whose reports are overdue."""
        return {address for address, connection in self._connections.items() if connection.is_silent}

    def rejections(self) -> dict[str, str]:
        """The answers of the engines that do not accept the token, by address."""
        return {address: found.rejection for address, found in self._connections.items() if found.rejection}

    def not_following(self) -> dict[str, str]:
        """Why each engine may serve by another policy than the one that was put in force last, by address: the engine did
        not accept it, or does not report."""
        silent = dict.fromkeys(self.silent(), "it does not report")
        return silent | {address: found.failure for address, found in self._connections.items() if found.failure}

    def unfit(self, previous: str) -> dict[str, str]:
        """The answers of the engines that serve by the policy `previous` and do not know the one that was put in force
        last, by address."""
        return {
            address: found.failure
            for address, found in self._connections.items()
            if found.failure and found.is_unfit and found.policy == previous
        }

    def reported(self) -> set[str]:
        """Engines that have reported since the last `take_reports`."""
        return {address for address, connection in self._connections.items() if connection.reports}

    async def put_in_force(
        self,
        policy: str,
        reason: str,
        parameters: Mapping[str, float],
        defaults: Mapping[str, float],
        *,
        bypass: bool = False,
    ) -> dict[str, str]:
        """Sets `policy`, its `parameters` and `bypass` on each engine whose last report differs; returns the errors by
        address. An engine that could not be reached is left out until its stream of reports is open again.

        `defaults` are the values of the policy's other parameters. They count only where the engine reports the parameter,
        because an engine of another version may not have it.
        """
        outdated = [
            (connection, values)
            for connection in self._connections.values()
            if not connection.is_unreachable
            and (values := connection.values_to_set(policy, parameters, defaults, bypass=bypass)) is not None
        ]
        errors = await asyncio.gather(
            *(connection.set_policy(policy, reason, values, bypass=bypass) for connection, values in outdated)
        )
        return {connection.address: error for (connection, _), error in zip(outdated, errors, strict=True) if error}

    async def close(self) -> None:
        await self.retarget(())


class _Connection:
    """One engine's stream of reports, opened again whenever it breaks."""

    def __init__(self, address: str, pace: ReportPace, token: str | None) -> None:
        self.address = address
        self.pace = pace
        self.policy: str | None = None
        """The policy that the engine last named; None while it has named none."""
        self.parameters: Mapping[str, float] = {}
        """The values of the policy's parameters, as the engine last reported them."""
        self.bypass = False
        """Whether the engine last reported to be in bypass."""
        self.reports: collections.deque[qos.Qos] = collections.deque(maxlen=MAX_REPORTS)
        """Since the last `take_reports`."""
        self.is_unreachable = False
        """Whether the last attempt to open the stream did not reach the engine. True until it reports again."""
        self.rejection: str | None = None
        """Why the engine did not accept the token at the last attempt; None when it did, or could not be asked."""
        self.failure: str | None = None
        """Why the last attempt to set a policy failed; None when it did not fail."""
        self.is_unfit = False
        """Whether it failed because the engine does not know the policy or a parameter."""
        self._accepted: tuple[str, dict[str, float], bool] | None = None
        """The policy, its parameters and the bypass that the engine accepted last."""
        self._client = control_client.EngineClient(address, token=token)
        self._warned = False
        self._open()

    @property
    def is_silent(self) -> bool:
        due_s = self.pace.idle_period_s if self._is_idle else self.pace.period_s
        patience_s = due_s + (SILENT_PERIODS - 1) * self.pace.period_s + RECONNECT_S
        return asyncio.get_running_loop().time() - self._reported_at_s > patience_s

    async def reopen(self, pace: ReportPace) -> None:
        """Asks for reports at another pace; the reports that came are kept."""
        self.pace = pace
        await self._stop()
        self._open()

    def take_reports(self) -> list[qos.Qos]:
        taken = list(self.reports)
        self.reports.clear()
        return taken

    def values_to_set(
        self, policy: str, parameters: Mapping[str, float], defaults: Mapping[str, float], *, bypass: bool
    ) -> dict[str, float] | None:
        """The parameters that `SetPolicy` must carry; None when the engine reports the policy with these values and this
        `bypass`."""
        reported = self.parameters if self.policy == policy else {}
        wanted = {name: value for name, value in defaults.items() if name in reported} | dict(parameters)
        if (self.policy, self.bypass) != (policy, bypass) or not wanted.items() <= reported.items():
            return wanted
        self.failure = None  # of another policy that was to be set before
        return None

    async def set_policy(
        self, policy: str, reason: str, parameters: Mapping[str, float], *, bypass: bool
    ) -> str | None:
        """Returns the reason of a failure, and None when the policy is in force. An engine that accepts the same again, and
        has reported another policy in the meantime, does not follow."""
        asked = (policy, dict(parameters), bypass)
        self.failure, self.is_unfit = None, False
        disobeyed = self.policy if asked == self._accepted else None
        self._accepted = None
        try:
            switched = await self._client.set_policy(policy, reason, parameters, bypass=bypass)
        except control_client.CallFailed as error:
            self.failure, self.is_unfit = str(error), error.is_invalid
        else:
            if switched is None:
                self.failure = control_client.UNREADABLE
            else:
                self.policy, self.parameters, self.bypass = switched.policy, parameters, bypass
                self._accepted = asked
                if disobeyed is not None:
                    self.failure = f"it accepted {policy} and went on with {disobeyed}"
        return self.failure

    async def close(self) -> None:
        await self._stop()
        await self._client.close()

    def _open(self) -> None:
        self._reported_at_s = asyncio.get_running_loop().time()
        self._is_idle = False
        """Whether nothing happened in the engine, by its last report on this stream."""
        self._task = asyncio.create_task(self._follow())

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        failures = 0
        while True:
            opened_at_s = self._reported_at_s
            try:
                await self._read_stream()
            except control_client.CallFailed as error:
                self.is_unreachable = error.is_unreachable
                self.rejection = str(error) if error.is_unauthenticated else None
                self._log(logging.DEBUG if error.is_unreachable else logging.WARNING, str(error))
            except Exception as error:  # noqa: BLE001  # logged with its traceback
                self._log(logging.ERROR, "a defect", error)
            # Another process may answer at this address next time.
            self.policy = self.failure = self._accepted = None
            has_reported = self._reported_at_s > opened_at_s
            failures = failures + 1 if self.is_unreachable and not has_reported else 0
            pause_s = min(RECONNECT_S * 2 ** max(failures - 1, 0), LONGEST_RECONNECT_S)
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.0))

    async def _read_stream(self) -> None:
        """Reads one stream until it ends or carries a report that cannot be read."""
        watched = self._client.watch(self.pace.period_s, idle_period_s=self.pace.idle_period_s)
        async with contextlib.aclosing(watched) as reports:
            async for report in reports:
                if report is None:
                    self._log(logging.WARNING, control_client.UNREADABLE)
                    return
                self.reports.append(report.window)
                self.policy, self.parameters, self.bypass = report.policy, report.policy_parameters, report.bypass
                self._reported_at_s = asyncio.get_running_loop().time()
                self._is_idle = report.window.is_idle
                self._warned = self.is_unreachable = False
                self.rejection = None

    def _log(self, level: int, why: str, defect: Exception | None = None) -> None:
        """Logs the first failure at `level`, and further ones at DEBUG until the engine reports again."""
        shown = logging.DEBUG if self._warned else level
        log.log(shown, "engine %s does not report: %s", self.address, why, exc_info=defect)
        self._warned |= level > logging.DEBUG
