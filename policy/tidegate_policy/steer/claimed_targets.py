"""Which missed targets are evidence of anything but the claims of one tenant?

Clients claim targets, also some that no engine can meet, so misses alone do not show that a pool has too much to do. What
engines measure cannot be claimed: where calls wait long for their first token, all misses count. Where they do not, the
misses of the tenant that misses most do not count, and neither do those of classes, which are not known by tenant. So no
single tenant changes the policy of a pool that serves at once.
"""

from dataclasses import replace

from tidegate_policy.qos import Qos

LONG_WAIT_S = 0.25
"""Time to the first token that one of ten calls exceeds where calls wait."""


def believed(qos: Qos) -> Qos:
    """The window with the targets that count as evidence. A window without tenants stays as it is."""
    if not qos.missed or not qos.tenants or qos.ttft.quantile_s(0.9) >= LONG_WAIT_S:
        return qos
    name, most = max(qos.tenants.items(), key=lambda item: item[1].missed)
    return replace(
        qos,
        with_target=max(qos.with_target - most.with_target, 0),
        missed=max(qos.missed - most.missed, 0),
        classes={},
        tenants={**qos.tenants, name: most._replace(with_target=0, missed=0)},
    )
