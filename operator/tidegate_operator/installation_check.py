"""What hinders the operator of this release? The check `tidegate operator --check`.

`helm test` runs it with the operator's account.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from tidegate_operator import cluster
from tidegate_operator.cluster import lease

PATIENCE_S = 2.0 * lease.DURATION_S
"""Time in which a holder of the Lease must renew it, or a new operator take it."""


async def obstacles(
    server: cluster.PoolLister, leases: lease.LeaseStore, namespaces: Sequence[str | None]
) -> AsyncIterator[str]:
    """One sentence for each obstacle."""
    for namespace in namespaces:
        where = f"of namespace {namespace}" if namespace else "of the cluster"
        try:
            await server.check_pools(namespace)
        except cluster.ClusterError as error:
            yield f"the ServingPools {where} cannot be listed: {error}"
    try:
        if not await _is_renewed(leases):
            yield f"no operator renewed its Lease within {PATIENCE_S:.0f} s: look at the operator's pods and their logs"
    except cluster.ClusterError as error:
        yield f"the Lease cannot be read: {error}"


async def _is_renewed(leases: lease.LeaseStore) -> bool:
    """Whether a holder renews the Lease. The clocks of the two processes need not agree."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + PATIENCE_S
    first = await leases.read()
    while loop.time() < until_s:
        await asyncio.sleep(lease.RETRY_S)
        found = await leases.read()
        if found and found["spec"].get("holderIdentity") and found["spec"] != (first or {}).get("spec"):
            return True
    return False
