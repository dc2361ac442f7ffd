"""Which engines are the pods of an InferencePool? The API server tells the pool and its pods, the pool tells the ports.

Each ready pod is one engine at each port of `targetPorts`, because each rank of a data-parallel server has a port of its
own. `discovery` asks again and again; a watch would save requests that one gateway makes every two seconds.
"""

import asyncio
import logging
import pathlib
import ssl
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import orjson

from tidegate_gateway import picker_settings
from tidegate_gateway.settings_decoder import BadSettings

logger = logging.getLogger("tidegate.gateway")

GROUP = "inference.networking.k8s.io/v1"
ACTIVE_PORTS = "inference.networking.k8s.io/active-ports"
"""Annotation of a pod: those of the pool's ports that it serves, with commas between them. Without it, all."""
ANSWER_S = 10.0
MOST_SHOWN = 200
"""Characters of an answer that are logged."""
Json = Mapping[str, Any]


def endpoints(pool: Json, pods: Sequence[Json]) -> list[str]:
    """The host:port of each engine of the pool, in order. Raises `LookupError`, `TypeError` or `ValueError` for objects of
    another form."""
    ports = [int(port["number"]) for port in pool["spec"]["targetPorts"]]
    return sorted(
        f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        for pod in pods
        if (address := _address(pod))
        for port in _active(pod, ports)
    )


def selector(pool: Json) -> str:
    """The labels of the pool's pods, as the API server takes them."""
    return ",".join(f"{key}={value}" for key, value in pool["spec"]["selector"]["matchLabels"].items())


def _address(pod: Json) -> str:
    """The address of a pod that takes calls; "" for any other."""
    status = pod.get("status", {})
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    return str(status.get("podIP", "")) if is_ready and "deletionTimestamp" not in pod["metadata"] else ""


def _active(pod: Json, ports: Sequence[int]) -> Iterator[int]:
    named = pod["metadata"].get("annotations", {}).get(ACTIVE_PORTS)
    active = None if named is None else {part.strip() for part in named.split(",")}
    return (port for port in ports if active is None or str(port) in active)


class PoolReader:
    """Reads one InferencePool and its pods."""

    def __init__(self, settings: picker_settings.InferencePool) -> None:
        """Raises `BadSettings` without the address or the certificate authority of an API server."""
        if settings.api_url is None:
            raise BadSettings("inferencePool.apiUrl is required outside a cluster")
        self.is_known = False
        """The pool exists, as far as the last answer tells."""
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._url = settings.api_url.rstrip("/")
        self._encryption: ssl.SSLContext | bool = True
        self._told = ""
        if self._url.startswith("https://"):
            try:
                self._encryption = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:
                raise BadSettings(f"inferencePool.caFile cannot be used: {settings.ca_file}: {error}") from error

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def read(self) -> list[str] | None:
        """The host:port of each engine now; None if the API server does not tell, and the last answer stands."""
        namespace, name = self._settings.namespace, self._settings.name
        try:
            pool = await self._ask(f"/apis/{GROUP}/namespaces/{namespace}/inferencepools/{name}")
            if pool is None:
                self.is_known = False
                self._tell("the cluster does not have it, so there are no engines")
                return []
            # Version 0 is what the API server has in its cache.
            query = {"labelSelector": selector(pool), "resourceVersion": "0"}
            pods = await self._ask(f"/api/v1/namespaces/{namespace}/pods", query)
            found = endpoints(pool, [] if pods is None else pods["items"])
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            self._tell(f"the API server does not tell its engines ({error!r})"[:MOST_SHOWN])
            return None
        self.is_known = True
        self._tell("")
        return found

    async def _ask(self, path: str, query: Mapping[str, str] | None = None) -> Json | None:
        """The object at a path; None if there is none."""
        if self._session is None:
            raise RuntimeError("the reader is not entered")
        token = (await asyncio.to_thread(pathlib.Path(self._settings.token_file).read_text)).strip()
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        async with (
            asyncio.timeout(ANSWER_S),
            self._session.get(
                self._url + path, params=query, headers=headers, ssl=self._encryption, allow_redirects=False
            ) as response,
        ):
            page = await response.read()
        if response.status == HTTPStatus.NOT_FOUND:
            return None
        if response.status != HTTPStatus.OK:
            raise ValueError(f"{response.status}: {page[:MOST_SHOWN].decode(errors='replace')}")
        found: Json = await asyncio.to_thread(orjson.loads, page)
        return found

    def _tell(self, trouble: str) -> None:
        """Logs a trouble when it begins, and its end."""
        if trouble != self._told:
            self._told = trouble
            level, text = (logging.WARNING, trouble) if trouble else (logging.INFO, "the API server tells its engines")
            logger.log(level, "InferencePool %s: %s", self._settings.shown, text)
