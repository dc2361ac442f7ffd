"""A call that is owed a place came: what of the older calls of its tenant that wait in the engine?

A gateway marks a call when it sends it, so a call that it sent before the engines were full has no mark. The engine would
start marked calls of the same tenant, and no older one until an answer ends: after a minute, beside long answers. So the
older ones count as owed, too. The gateway owes the tenant all of them, because it has little with all of them.
"""

from collections.abc import Mapping, Sequence

from tidegate_policy.engine.call_census import CallCensus
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.model import CallId
from tidegate_policy.waiting_queue import WaitingQueue


def promote(tenant: str, calls: Mapping[CallId, KnownCall], queues: Sequence[WaitingQueue], census: CallCensus) -> None:
    """The calls of the tenant that wait are owed a place from here on. Takes time in proportion to all calls."""
    for call_id, known in calls.items():
        if known.item.call.tenant != tenant or known.item.call.owed:
            continue
        for queue in queues:
            if call_id in queue:
                census.remove(known.item.call)
                known.item = queue.promote(call_id)
                census.add(known.item.call)
