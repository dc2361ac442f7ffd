"""What kopf watches, and whom a change wakes.

kopf keeps the watches alive; everything else is level-based work of `control`. So there are plain event handlers
only: no kopf timers, daemons or change handlers, which would put finalizers and annotations on the pools and make
them impossible to delete while the operator is down.
"""

from typing import Any

import kopf

from tidegate_operator import controller
from tidegate_operator.render import child_metadata

registry = kopf.OperatorRegistry()


@kopf.on.startup(registry=registry)
def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.peering.standalone = True  # the Lease decides who acts
    settings.posting.enabled = False  # the operator posts its few events itself
    settings.scanning.disabled = True  # the chart's role does not include listing namespaces and CRDs
    settings.networking.request_timeout = 30.0
    for kind in ("deployments", "statefulsets"):
        settings.watching.label_selectors["apps", kind] = child_metadata.POOL


@kopf.on.login(registry=registry, retries=10)
def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


@kopf.on.event(child_metadata.GROUP, child_metadata.VERSION, child_metadata.PLURAL, registry=registry)
async def pool_changed(memo: controller.Controller, namespace: str | None, name: str, **_: Any) -> None:
    memo.wake(str(namespace), name)


@kopf.on.event("apps", "v1", "deployments", registry=registry)
@kopf.on.event("apps", "v1", "statefulsets", registry=registry)
async def child_changed(memo: controller.Controller, namespace: str | None, meta: kopf.Meta, **_: Any) -> None:
    memo.wake(str(namespace), meta.labels[child_metadata.POOL])
