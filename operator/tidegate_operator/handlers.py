"""What kopf watches: pools, their children and their engine pods. Every event goes to the `controller`.

kopf watches (`watches` runs it); the rest is level-based work. So there are plain event handlers only: kopf's timers,
daemons and change handlers would put finalizers and annotations on the pools, and then a pool could not be deleted while
the operator is down.
"""

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import kopf

from tidegate_operator import objects, watch_session
from tidegate_operator.cluster import object_parts
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

registry = kopf.OperatorRegistry()


class Receiver(Protocol):
    """Takes the events. `event_type` None is an object of a listing."""

    def on_pool(self, event_type: str | None, body: Json) -> None: ...

    def on_child(self, event_type: str | None, body: Json) -> None: ...

    def on_pod(self, event_type: str | None, body: Json) -> None: ...


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf would copy each object of each event deeply, to tell change handlers what has changed. There are none."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        return None


@kopf.on.startup(registry=registry)
def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.peering.standalone = True  # the Lease decides which operator acts
    settings.posting.enabled = False  # the operator posts its few events itself
    settings.scanning.disabled = True  # the chart's role does not include listing namespaces and CRDs
    settings.networking.request_timeout = 30.0
    settings.watching.chunk_size = object_parts.PAGE  # kopf would list all objects of a kind in one answer
    settings.queueing.idle_timeout = 0.1  # until then kopf keeps the last event of each object
    settings.watching.server_timeout = 600  # then a watch is authorised again, and a lost right is noticed
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.process.ultimate_exiting_timeout = None  # kopf would kill the process when the watches of a namespace end
    for kind in objects.child_kinds(gateway_api=True):
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = child_metadata.POOL
    settings.watching.label_selectors["", "v1", "pods"] = child_metadata.POOL


@kopf.on.login(registry=registry, retries=10)
async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
    info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
    return None if info is None else watch_session.of(info)


@kopf.on.event(child_metadata.GROUP, child_metadata.VERSION, child_metadata.PLURAL, registry=registry)
async def pool_event(memo: Receiver, event: kopf.RawEvent, **_: Any) -> None:
    body = event["object"]
    if "spec" in body or event["type"] == "DELETED":
        memo.on_pool(event["type"], objects.without_managed_fields(body))
    else:
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        log.warning("pool %s/%s has too many parts, or nests too deeply, to be read", namespace, name)


async def child_event(memo: Receiver, event: kopf.RawEvent, **_: Any) -> None:
    if event["object"]["metadata"]["labels"][child_metadata.POOL]:  # a label may be empty, and names no pool then
        memo.on_child(event["type"], objects.without_managed_fields(event["object"]))


def watch(kinds: Iterable[objects.Kind]) -> None:
    """Watches these kinds of children too."""
    for kind in kinds:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)(child_event)


watch(objects.CHILD_KINDS)


@kopf.on.event("", "v1", "pods", registry=registry)
async def pod_event(memo: Receiver, event: kopf.RawEvent, **_: Any) -> None:
    if event["object"]["metadata"]["labels"][child_metadata.POOL]:
        memo.on_pod(event["type"], objects.without_managed_fields(event["object"]))
