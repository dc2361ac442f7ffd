"""How the operator names Kubernetes objects: kinds, references and paths."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tidegate_operator.spec import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """The path at the API server; a namespace of None means all namespaces. A name may come from a spec, so no slash in
        it leads to another object."""
        root = "/apis" if "/" in self.api_version else "/api"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}/{self.api_version}{scope}/{self.plural}" + (f"/{quote(name, safe='')}" if name else "")


CONFIG_MAPS = Kind(api_version="v1", kind="ConfigMap", plural="configmaps")
CHILD_KINDS = (
    Kind(api_version="v1", kind="ServiceAccount", plural="serviceaccounts"),
    CONFIG_MAPS,
    Kind(api_version="v1", kind="Service", plural="services"),
    Kind(api_version="apps/v1", kind="Deployment", plural="deployments"),
    Kind(api_version="apps/v1", kind="StatefulSet", plural="statefulsets"),
    Kind(api_version="policy/v1", kind="PodDisruptionBudget", plural="poddisruptionbudgets"),
    Kind(api_version="networking.k8s.io/v1", kind="NetworkPolicy", plural="networkpolicies"),
)
"""The kinds of object that every pool owns. The chart's role grants access to these kinds and to no others, except to
`GATEWAY_API_KINDS` where the chart was installed for them."""
GATEWAY_API_KINDS = (
    Kind(api_version="gateway.networking.k8s.io/v1", kind="HTTPRoute", plural="httproutes"),
    Kind(api_version="inference.networking.k8s.io/v1", kind="InferencePool", plural="inferencepools"),
    Kind(api_version="llm-d.ai/v1alpha2", kind="InferenceObjective", plural="inferenceobjectives"),
)
"""The kinds that a pool with `gateway.api` owns too; a cluster may not have them."""

_KINDS = {(kind.api_version, kind.kind): kind for kind in (*CHILD_KINDS, *GATEWAY_API_KINDS)}


def child_kinds(*, gateway_api: bool) -> tuple[Kind, ...]:
    """The kinds that are watched and listed."""
    return CHILD_KINDS + (GATEWAY_API_KINDS if gateway_api else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A child by its kind and name."""

    kind: Kind
    namespace: str
    name: str

    @staticmethod
    def of(manifest: Json) -> "Reference":
        metadata = manifest["metadata"]
        kind = _KINDS[manifest["apiVersion"], manifest["kind"]]
        return Reference(kind=kind, namespace=metadata["namespace"], name=metadata["name"])

    @property
    def path(self) -> str:
        return self.kind.path(self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.kind.kind} {self.name}"


def without_managed_fields(body: Json) -> Json:
    """The object without its record of field owners, which is half of its size and which nothing reads."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    return {**body, "metadata": metadata}


def controller_uid(body: Json) -> str | None:
    """The uid of the object that owns `body`, if one does."""
    owners: list[Any] = body["metadata"].get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def owned(pool: Json | None, labelled: Iterable[Json]) -> list[Json]:
    """Those of the objects with the pool's label that the pool owns. A copy of a child has its label too. All of them if
    the pool does not exist."""
    return [body for body in labelled if pool is None or controller_uid(body) == pool["metadata"]["uid"]]
