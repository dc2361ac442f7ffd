"""What containers request, and their limits, where the spec states nothing.

A quota of a namespace on `requests.cpu`, `limits.memory` and the like rejects each pod of which a container does not state
this value, so every container of a default pool states all four. A limit of CPU time delays calls as soon as it is reached,
so it is several times the request: a part of the pool that works as usual never reaches it. Memory limits are above what
the bounds of the part permit. An engine of vLLM without devices computes on the CPU and keeps the model in the node's
memory: nobody knows how much it needs, so it gets no limits (decision 48).
"""

from decimal import Decimal
from typing import Any

from tidegate_operator import node_pool_spec, quantity
from tidegate_operator.spec import Json

GATEWAY: Json = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"cpu": "4", "memory": "4Gi"}}
"""One core runs the event loop, and others parse large bodies. `limits` of its settings bound bodies and streams."""
STORE: Json = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "4", "memory": "4Gi"}}
"""Gateways keep at most 1 GiB of workflows in it; the rewrite of its file may take as much again."""
DOWNLOAD: Json = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "8", "memory": "8Gi"}}
SIMULATED: Json = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
REQUEST_GIB, LIMIT_GIB, LIMIT_CPU = 4, 16, 8
"""Of each process of vLLM: one for each device, and one that serves and schedules. A process requests one CPU."""
_GIB = 2**30


def of_engine(node_pool: node_pool_spec.NodePool) -> Json:
    """The default of the container of an engine, beside its devices."""
    engine, devices = node_pool.engine, node_pool.devices
    if engine.simulated:
        return SIMULATED
    offload = quantity.number(engine.offload) or Decimal(0)
    if not devices.count:
        return {"requests": {"cpu": "1", "memory": quantity.text(REQUEST_GIB * _GIB + offload)}}
    processes = 1 + devices.count
    shared = quantity.number(engine.shared_memory) or Decimal(0)
    return {
        "requests": {"cpu": str(processes), "memory": quantity.text(processes * REQUEST_GIB * _GIB + offload)},
        "limits": {
            "cpu": str(processes * LIMIT_CPU),
            "memory": quantity.text(processes * LIMIT_GIB * _GIB + shared + offload),
        },
    }


def completed(given: Json, default: Json) -> dict[str, Any]:
    """`given` with the defaults for what it does not state.

    A limit without a request is the request too, as in every Pod. A default limit is at least twice the request that is
    given. A limit of 0 stands for none.
    """
    stated: Json = given.get("limits", {})
    limits = {
        name: value for name, value in stated.items() if name not in default["requests"] or quantity.number(value)
    }
    unrequested = {name: value for name, value in default["requests"].items() if name not in limits}
    requests = {**unrequested, **given.get("requests", {})}
    for name, value in default.get("limits", {}).items():
        if name not in stated:
            twice = 2 * (quantity.number(requests[name]) or Decimal(0))
            limits[name] = value if twice <= (quantity.number(value) or 0) else quantity.text(twice)
    both = {"requests": requests, "limits": limits}
    rest = {name: value for name, value in given.items() if name not in both}
    return {**rest, **{name: values for name, values in both.items() if values}}
