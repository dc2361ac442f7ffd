"""The ends of calls that wait, by tenant and workflow.

Tenants take turns, and so do the workflows of a tenant, so no tenant's ends wait behind all ends of another one. The ends
of one workflow are taken one after the other in their order. Of a tenant's ends those that clients have seen come first.
"""

import collections
from collections.abc import Iterator
from dataclasses import dataclass

from tidegate_policy import tenant_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """The end of one call."""

    tenant: str
    """Whose turn it takes."""
    workflow: str
    call: str
    ok: bool
    """The call ended well, and its client has seen that."""


class _TenantEnds:
    """The ends of one tenant."""

    def __init__(self) -> None:
        self.counts = {True: 0, False: 0}
        """By whether they ended well."""
        self.workflows: dict[bool, dict[str, collections.deque[CallEnd]]] = {True: {}, False: {}}
        """By whether they ended well. The workflow whose turn it is next comes first."""


class WaitingEnds:
    """All ends that wait."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantEnds] = {}
        """The tenant whose turn it is next comes first."""
        self._sizes = {True: tenant_sizes.TenantSizes(), False: tenant_sizes.TenantSizes()}
        """By whether the ends ended well."""
        self._taken: set[str] = set()
        """Workflows of which an end is being recorded."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[CallEnd]:
        for ok in (True, False):
            for tenant in self._tenants.values():
                for ends in tenant.workflows[ok].values():
                    yield from ends

    def add(self, end: CallEnd) -> None:
        tenant = self._tenants.setdefault(end.tenant, _TenantEnds())
        tenant.workflows[end.ok].setdefault(end.workflow, collections.deque()).append(end)
        self._resized(tenant, end, 1)

    def take(self) -> CallEnd | None:
        """The next end, which stays here until `give_back`; None if there is none of a workflow that is not taken."""
        for name, tenant in self._tenants.items():
            for workflows in tenant.workflows.values():
                for workflow, ends in workflows.items():  # at most as many are passed over as are taken
                    if workflow not in self._taken:
                        self._taken.add(workflow)
                        workflows[workflow] = workflows.pop(workflow)
                        self._tenants[name] = self._tenants.pop(name)
                        return ends[0]
        return None

    def give_back(self, end: CallEnd, *, recorded: bool) -> None:
        """The end was taken, and is recorded or waits on."""
        self._taken.discard(end.workflow)
        tenant = self._tenants.get(end.tenant)
        ends = None if tenant is None else tenant.workflows[end.ok].get(end.workflow)
        if recorded and ends and ends[0] is end:  # else it was dropped meanwhile
            ends.popleft()
            self._left(end)

    def drop(self) -> CallEnd:
        """Takes out an end that no client has seen while there are any, else another one, of the tenant that has most of
        them. Some end must wait."""
        ok, name = next((ok, name) for ok in (False, True) if (name := self._sizes[ok].largest()) is not None)
        workflows = self._tenants[name].workflows[ok]
        end = workflows[next(reversed(workflows))].pop()
        self._left(end)
        return end

    def _left(self, end: CallEnd) -> None:
        tenant = self._tenants[end.tenant]
        self._resized(tenant, end, -1)
        if not tenant.workflows[end.ok][end.workflow]:
            del tenant.workflows[end.ok][end.workflow]
        if not any(tenant.counts.values()):
            del self._tenants[end.tenant]

    def _resized(self, tenant: _TenantEnds, end: CallEnd, by: int) -> None:
        """The tenant has one such end more (1) or less (-1)."""
        before = tenant.counts[end.ok]
        tenant.counts[end.ok] = before + by
        self._count += by
        self._sizes[end.ok].resized(end.tenant, before, before + by)
