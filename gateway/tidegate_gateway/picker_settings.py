"""How does the gateway work as the endpoint picker of a proxy? The groups `picker` and `inferencePool` of the settings.

`listen.extProcPort` opens the port; these groups say what the port and the engines behind it are like (docs/envoy.md).
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts the credentials of a pod."""
API_URL = re.compile(r"https://[^/?#@\s]+/?|http://(localhost|\[::1\]|127(\.\d{1,3}){3})(:\d+)?/?")
MOST_FALLBACKS = 16
OBJECT_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picker:
    """The endpoint picker's port."""

    self_signed: bool = False
    """Without `tls`, the port takes TLS too, with a certificate that is made at the start and that nobody can verify:
    gateways of the Gateway API Inference Extension use TLS and verify nothing. Plain text stays possible."""
    health_port: int | None = None
    """gRPC health checks in plain text on a port of their own, for probes of Kubernetes, which cannot use TLS; null = only
    at the picker's port, 0 picks a free one."""
    fallbacks: int = 0
    """Further engines that the destination names, for a retry policy of the proxy, which goes down the list when an engine
    fails a request. 0 suits every proxy; some of them take one address only (agentgateway)."""
    conformance_tests: bool = False
    """For the conformance suite of the Gateway API Inference Extension only: each client chooses its engine by the header
    test-epp-endpoint-selection, and reaches every path of an engine; an engine is healthy if its port is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePool:
    """Engines that are the pods of an InferencePool: each ready pod at each port of `targetPorts`. The gateway asks the API
    server every `health.resolve`."""

    name: str | None = None
    """Name of the InferencePool (inference.networking.k8s.io/v1); null = engines come from `engines` and `services`."""
    namespace: str = "default"
    """Namespace of the InferencePool and of its pods."""
    api_url: str | None = None
    """Address of the API server, https or on loopback; null = that of the cluster in which the gateway runs."""
    token_file: str = f"{ACCOUNT}/token"
    """The gateway's token at the API server, which may read InferencePools and pods of the namespace."""
    ca_file: str = f"{ACCOUNT}/ca.crt"
    """The certificate authority of the API server in PEM."""

    @property
    def shown(self) -> str:
        """Namespace and name, "" without a pool."""
        return "" if self.name is None else f"{self.namespace}/{self.name}"


def placed(pool: InferencePool, environment: Mapping[str, str]) -> InferencePool:
    """The pool with the API server of the cluster in which this process runs, unless another one is set."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if pool.name is None or pool.api_url is not None or not host:
        return pool
    return dataclasses.replace(pool, api_url=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")


def problems(picker: Picker, pool: InferencePool, *, ext_proc_port: int | None) -> list[str]:
    """What is wrong with these groups, for a gateway whose picker's port is `ext_proc_port`."""
    found = []
    if ext_proc_port is None and picker != Picker():
        found.append("picker belongs to the port of an endpoint picker: set listen.extProcPort")
    if not 0 <= (picker.health_port or 0) <= 65535:
        found.append("picker.healthPort must be from 0 to 65535")
    if not 0 <= picker.fallbacks <= MOST_FALLBACKS:
        found.append(f"picker.fallbacks must be from 0 to {MOST_FALLBACKS}")
    found += [
        f"inferencePool.{key} {value!r} is no name of an object of Kubernetes"
        for key, value in (("name", pool.name), ("namespace", pool.namespace))
        if value is not None and not OBJECT_NAME.fullmatch(value)
    ]
    if pool.api_url is not None and not API_URL.fullmatch(pool.api_url):
        found.append("inferencePool.apiUrl must start with https:// and name a host (http:// on loopback only)")
    return found
