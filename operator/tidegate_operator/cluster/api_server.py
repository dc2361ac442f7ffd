"""The cluster over HTTP: requests to the API server.

Reads are lists and gets. Writes are server-side apply: each states the full intent under the operator's own field
manager, so the fields of other owners stay, and a stale read overwrites nothing. `plan` decides what is written.

The requests use the client's transport (`ApiClient`) with paths and plain JSON. The typed models would drop unknown
fields of a pod spec that a ServingPool passes through, and the dynamic client would ask the API server for its
resources first, for which the chart grants no right.
"""

import asyncio
import functools
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio import client, config
from kubernetes.aio.client import exceptions

from tidegate_operator import pool_status, replica_allocation
from tidegate_operator.cluster import ClusterError, RejectedError, UnknownKindError, object_parts
from tidegate_operator.objects import GATEWAY_API_KINDS, Kind, Reference, child_kinds, without_managed_fields
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

FIELD_MANAGER = "tidegate-operator"
APPLY = "application/apply-patch+yaml"
"""Content type of server-side apply."""
MERGE = "application/merge-patch+json"
TIMEOUT_S = 20.0
PAUSE = re.compile(r"[0-9]{1,9}")
"""Seconds in the header Retry-After; the other form, a date, is not used by API servers."""
LONGEST_PAUSE_S = 600
"""That the API server may ask for."""
LISTS_AT_ONCE = 12
"""Answers with several objects, of all pools: as many as one pool has kinds of objects."""
LOG_BYTES = 512
"""Most of a log that is read."""
UNTYPED = ("failed to create typed patch object", "failed to convert new object")
"""How the message of status 500 begins when the applied object has a field that is unknown, duplicated or of a wrong
type."""
UNREADABLE = "failed to create typed live object"
"""How the message begins where the object in the cluster has such a field. The API server takes a list for an instant from
those who may write the status, and then no server-side apply."""
STATUS_FIELD = re.compile(r"\.status\.(\w+)")
UNDECLARED = re.compile(r"\.status\.(\w+(?:\.\w+)*)[^:]*: field not declared in schema")
"""In the message about a status that an older ServingPool resource does not know."""
POOLS = Kind(
    api_version=f"{child_metadata.GROUP}/{child_metadata.VERSION}",
    kind=child_metadata.KIND,
    plural=child_metadata.PLURAL,
)
PODS = Kind(api_version="v1", kind="Pod", plural="pods")
SECRETS = Kind(api_version="v1", kind="Secret", plural="secrets")
LEASES = Kind(api_version="coordination.k8s.io/v1", kind="Lease", plural="leases")
AUTOSCALERS = Kind(api_version="autoscaling/v2", kind="HorizontalPodAutoscaler", plural="horizontalpodautoscalers")
EVENTS = Kind(api_version="events.k8s.io/v1", kind="Event", plural="events")


class ApiServer:
    """A `Cluster` over HTTP."""

    def __init__(self, api: client.ApiClient, *, instance: str, gateway_api: bool = False) -> None:
        """`instance` is the name of this process in its events. With `gateway_api` pools may own `GATEWAY_API_KINDS`."""
        self._child_kinds = child_kinds(gateway_api=gateway_api)
        self._api = api
        self._instance = instance
        self._unknown: set[str] = set()
        """Fields of the status that the cluster's ServingPool resource did not have; each is logged once."""
        self._listing = asyncio.Semaphore(LISTS_AT_ONCE)
        self._unlisted: set[str] = set()
        """Namespaces whose autoscalers could not be listed; each is logged once, and again after they could be."""

    async def pool(self, namespace: str, name: str) -> Json | None:
        body = await self.read(POOLS.path(namespace, name))
        return body if body is None or "spec" in body else None  # one that has too many parts is not served

    async def check_pools(self, namespace: str | None) -> None:
        try:
            await self.ask("GET", POOLS.path(namespace), query=[("limit", "1")])
        except exceptions.ApiException as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise RejectedError("the cluster has no ServingPool resource; install it with the chart") from error
            raise _translate(error) from error

    async def pool_keys(self, namespace: str | None) -> set[tuple[str, str]]:
        pages = self._pages(POOLS, namespace)
        return {(body["metadata"]["namespace"], body["metadata"]["name"]) async for page in pages for body in page}

    async def children(self, namespace: str, pool: str) -> Sequence[Json]:
        """The kinds are listed at the same time: when the API server is slow, one list after the other takes seconds."""
        lists = (self._children_of(kind, namespace, pool) for kind in self._child_kinds)
        found: list[Json] = []
        for listed in await asyncio.gather(*lists, return_exceptions=True):  # so none goes on after an error
            if isinstance(listed, BaseException):
                raise listed
            found += listed
        return found

    async def _children_of(self, kind: Kind, namespace: str, pool: str) -> list[Json]:
        listing = object_parts.Listing(pool)
        try:
            return [body async for page in self._pages(kind, namespace, pool) for body in listing.children(page)]
        except UnknownKindError:
            if kind in GATEWAY_API_KINDS:  # only pools with `gateway.api` need these; their writes are rejected
                return []
            raise

    async def get(self, reference: Reference) -> Json | None:
        return await self.read(reference.path)

    async def pods(self, namespace: str, pool: str) -> Sequence[Json]:
        listing = object_parts.Listing(pool)
        return [body async for page in self._pages(PODS, namespace, pool) for body in listing.pods(page)]

    async def last_line(self, namespace: str, pod: str, container: str) -> str | None:
        query = [("container", container), ("tailLines", "1"), ("limitBytes", str(LOG_BYTES))]
        try:
            text = await self._bytes("GET", f"{PODS.path(namespace, pod)}/log", query=query, accept="*/*")
        except (exceptions.ApiException, ClusterError) as error:
            log.debug("the log of pod %s/%s cannot be read: %s", namespace, pod, error)
            return None
        return text.decode(errors="replace").strip() or None

    async def autoscalers(self, namespace: str) -> Sequence[Json]:
        try:
            pages = self._pages(AUTOSCALERS, namespace)
            found = [_target(body) async for page in pages for body in page if "spec" in body]  # else of too many parts
        except RejectedError as error:  # the rights of an older chart
            if namespace not in self._unlisted:
                self._unlisted.add(namespace)
                log.warning("the autoscalers of %s cannot be listed: %s", namespace, error)
            return []
        self._unlisted.discard(namespace)
        return found

    async def secret(self, namespace: str, name: str) -> Json | None:
        return await self.read(SECRETS.path(namespace, name))

    async def create_secret(self, manifest: Json) -> None:
        try:
            await self.ask("POST", SECRETS.path(manifest["metadata"]["namespace"]), manifest)
        except exceptions.ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise _translate(error) from error

    async def apply(self, manifest: Json) -> Json:
        reference = Reference.of(manifest)
        try:
            return await self._apply(reference.path, manifest, FIELD_MANAGER)
        except ClusterError as error:
            if error.status == HTTPStatus.NOT_FOUND and reference.kind in GATEWAY_API_KINDS:
                raise _unknown(reference.kind) from error
            raise

    async def claim(self, namespace: str, name: str, owner: str) -> bool:
        manifest = child_metadata.annotated(_pool(name), {child_metadata.OWNER: owner})
        digest = hashlib.sha256(owner.encode()).hexdigest()[:16]  # a field manager has at most 128 characters
        path, query = POOLS.path(namespace, name), [("fieldManager", f"{FIELD_MANAGER}-of-{digest}")]
        try:
            _object(await self.ask("PATCH", path, manifest, query=query, content_type=APPLY), f"PATCH {path}")
        except exceptions.ApiException as error:
            if error.status == HTTPStatus.CONFLICT:
                return False
            raise _translate(error) from error
        return True

    async def state_replicas(self, namespace: str, name: str, total: int) -> None:
        stated = child_metadata.annotated(_pool(name), {replica_allocation.STATED: str(total)})
        manifest = {**stated, "spec": {"replicas": total}}
        await self._apply(POOLS.path(namespace, name), manifest, f"{FIELD_MANAGER}-replicas")

    async def delete(self, reference: Reference, uid: str) -> None:
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self.ask("DELETE", reference.path, options)
        except exceptions.ApiException as error:
            is_gone_or_replaced = error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
            if not is_gone_or_replaced:
                raise _translate(error) from error

    async def apply_status(self, namespace: str, name: str, body: Json, *, writer: str) -> Json:
        path = f"{POOLS.path(namespace, name)}/status"
        try:
            return await self._apply_status(path, {**_pool(name), "status": body}, writer)
        except RejectedError as error:
            unknown = set(UNDECLARED.findall(str(error)))
            if not unknown:
                raise
            if not unknown <= self._unknown:
                self._unknown |= unknown
                log.warning(
                    "the ServingPool resource of this cluster is older than this operator: its status has no %s",
                    ", ".join(sorted(unknown)),
                )
            known = functools.reduce(_without, (field.split(".") for field in unknown), body)
            return await self._apply_status(path, {**_pool(name), "status": known}, writer)

    async def _apply_status(self, path: str, manifest: Json, writer: str) -> Json:
        """Fields in the cluster that no apply can read are removed first."""
        try:
            return await self._apply(path, manifest, writer)
        except ClusterError as error:
            if not str(error).startswith(UNREADABLE):
                raise
            unreadable = sorted(set(STATUS_FIELD.findall(str(error))))
            log.warning("%s: a status with fields of a wrong type is replaced: %s", path, error)
        removed: Json = {"status": dict.fromkeys(unreadable) or None}
        try:
            await self.ask("PATCH", path, removed, content_type=MERGE)
        except exceptions.ApiException as error:
            raise _translate(error) from error
        return await self._apply(path, manifest, writer)

    async def record(self, event: pool_status.Event) -> None:
        body = event.manifest(controller=child_metadata.MANAGED_BY, instance=self._instance)
        try:
            await self.ask("POST", EVENTS.path(event.namespace), body)
        except exceptions.ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                log.warning(
                    "event %s on %s/%s was not posted: %s", event.reason, event.namespace, event.pool, _message(error)
                )

    def lease(self, namespace: str, name: str) -> "Lease":
        return Lease(self, namespace, name)

    async def _pages(self, kind: Kind, namespace: str | None, pool: str | None = None) -> AsyncIterator[list[Json]]:
        """The objects of a kind, or those with the label of a pool, a few at a time: each may be large."""
        query, path, further = [("limit", str(object_parts.PAGE))], kind.path(namespace), ""
        if pool is not None:
            query.append(("labelSelector", f"{child_metadata.POOL}={pool}"))
        # The items of a list carry no apiVersion and kind.
        given = {"apiVersion": kind.api_version, "kind": kind.kind}
        while True:
            asked = [*query, ("continue", further)] if further else query
            try:
                async with self._listing:
                    items, listed = object_parts.page(await self._bytes("GET", path, query=asked))
            except msgspec.ValidationError as error:
                raise ClusterError(f"the answer to GET {path} has no list of items") from error
            except ValueError as error:
                raise ClusterError(f"the answer to GET {path} is no JSON: {error}") from error
            except exceptions.ApiException as error:
                if error.status == HTTPStatus.NOT_FOUND:
                    raise _unknown(kind) from error
                raise _translate(error) from error
            yield [{**given, **_object(item, f"GET {path}")} for item in items]
            further = str((listed.metadata or {}).get("continue") or "")
            if not further:
                return

    async def read(self, path: str) -> Json | None:
        try:
            return _object(await self.ask("GET", path), f"GET {path}")
        except exceptions.ApiException as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise _translate(error) from error

    async def _apply(self, path: str, manifest: Json, manager: str) -> Json:
        query = [("fieldManager", manager), ("force", "true")]
        try:
            return _object(await self.ask("PATCH", path, manifest, query=query, content_type=APPLY), f"PATCH {path}")
        except exceptions.ApiException as error:
            raise _translate(error) from error

    async def ask(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        content_type: str = "application/json",
    ) -> Mapping[str, Any]:
        """One request. Raises ApiException for an answer with an error status, and ClusterError without an answer or with
        one that is no JSON object, for example the page of a proxy."""
        answer = await self._bytes(method, path, body, query=query, content_type=content_type)
        try:
            parsed = object_parts.parsed(answer)
        except ValueError as error:
            raise ClusterError(f"the answer to {method} {path} is no JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ClusterError(f"the answer to {method} {path} is no JSON object")
        return parsed

    async def _bytes(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> bytes:
        headers = {"Accept": accept, "Content-Type": content_type}
        try:
            request = await self._api.param_serialize(
                method, path, query_params=list(query), header_params=headers, body=body, auth_settings=["BearerToken"]
            )
        except (
            OSError,
            ValueError,
            config.ConfigException,
        ) as error:  # the file of the token is read again now and then
            raise ClusterError(f"the request {method} {path} cannot be made: {error!r}") from error
        try:
            answer = await self._api.call_api(*request, _request_timeout=TIMEOUT_S)
            body_bytes: bytes = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterError(f"the API server did not answer {method} {path}: {error!r}") from error
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            text = body_bytes.decode(errors="replace")
            refused = exceptions.ApiException(status=answer.status, reason=answer.reason, body=text)
            refused.headers = answer.headers
            raise refused
        return body_bytes


class Lease:
    """A `lease.LeaseStore` over HTTP."""

    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self._server = server
        self._namespace = namespace
        self._name = name

    async def read(self) -> Json | None:
        return await self._server.read(LEASES.path(self._namespace, self._name))

    async def write(self, body: Json) -> Json | None:
        metadata = {"name": self._name, "namespace": self._namespace, **body.get("metadata", {})}
        whole = {**body, "apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata}
        exists = "resourceVersion" in metadata
        path, method = LEASES.path(self._namespace, self._name if exists else None), "PUT" if exists else "POST"
        try:
            return _object(await self._server.ask(method, path, whole), f"{method} {path}")
        except exceptions.ApiException as error:
            if error.status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                return None
            raise _translate(error) from error


def _object(found: Any, asked: str) -> Json:
    """An object of an answer, without its record of field owners. Raises ClusterError for anything else, for example the
    page of a proxy that is JSON too."""
    if not isinstance(found, dict) or not isinstance(found.get("metadata"), dict):
        raise ClusterError(f"the answer to {asked} has an object without metadata")
    return without_managed_fields(found)


def _target(autoscaler: Json) -> Json:
    """The name of an autoscaler and what it scales."""
    return {
        "metadata": {"name": autoscaler["metadata"]["name"]},
        "spec": {"scaleTargetRef": autoscaler["spec"]["scaleTargetRef"]},
    }


def _without(body: Json, path: Sequence[str]) -> Json:
    """The object without the field at this path."""
    name, *further = path
    if further and isinstance(body.get(name), dict):
        return {**body, name: _without(body[name], further)}
    return {key: value for key, value in body.items() if key != name}


def _pool(name: str) -> Json:
    """The beginning of what is applied to a ServingPool."""
    return {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": {"name": name}}


def _unknown(kind: Kind) -> UnknownKindError:
    return UnknownKindError(f"the cluster has no {kind.kind} in {kind.api_version}; install the resource that has it")


def _translate(error: exceptions.ApiException) -> ClusterError:
    message = _message(error)
    is_rejected = error.status in (400, 403, 405, 413, 415, 422) or message.startswith(UNTYPED)
    if is_rejected:
        return RejectedError(message, status=error.status)
    return ClusterError(message, retry_after_s=_retry_after_s(error), status=error.status)


def _retry_after_s(error: exceptions.ApiException) -> float:
    """For how long the API server asks for no further attempt, for example because it has too many requests (429)."""
    stated = (error.headers or {}).get("Retry-After", "")
    return float(min(int(stated), LONGEST_PAUSE_S)) if PAUSE.fullmatch(stated) else 0.0


def _message(error: exceptions.ApiException) -> str:
    """The API server's message, truncated so that no long secret reaches a log."""
    try:
        return str(json.loads(error.body)["message"])[:400]
    except (ValueError, TypeError, KeyError):
        return f"HTTP {error.status} {error.reason}"
