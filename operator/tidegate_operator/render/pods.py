"""Pod specs that the `restricted` Pod Security Standard accepts.

The pods have no root user, no capabilities, the default seccomp profile, a read-only root file system, a writable /tmp,
and no token of the API server. HOME and USER are set, because the user has no entry in the image's passwd file and some
libraries read it. A variable, volume or mount of the spec replaces the default of the same name or path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

USER = 65532
ENVIRONMENT = ({"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "tidegate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The image of a container, and how the node pulls it."""

    name: str
    pull_policy: str
    pull_secrets: tuple[str, ...]
    """Names of Secrets in the pool's namespace."""


def pod(
    containers: Sequence[Mapping[str, Any]],
    *,
    account: str,
    image: Image,
    volumes: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """The spec of a pod with `containers` of `image` and a writable /tmp."""
    secrets = [{"name": name} for name in image.pull_secrets]
    return {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"imagePullSecrets": secrets} if secrets else {}),
        "containers": list(containers),
        "volumes": last_by("name", {"name": "tmp", "emptyDir": {}}, *volumes),
        **more,
    }


def container(
    name: str, *, image: Image, ports: Mapping[str, int], env: Sequence[Mapping[str, Any]] = (),
    mounts: Sequence[Mapping[str, Any]] = (), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "name": name,
        "image": image.name,
        "imagePullPolicy": image.pull_policy,
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "env": last_by("name", *ENVIRONMENT, *env),
        "volumeMounts": last_by("mountPath", {"name": "tmp", "mountPath": "/tmp"}, *mounts),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **more,
    }


def last_by(key: str, *items: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The items in their order, but only the last of those with the same `key`: the API server rejects duplicates."""
    return list({item[key]: item for item in items}.values())


def http_probe(path: str, *, port: str = "http", period_s: int = 5, failures: int = 3) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def service_ports(ports: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "port": number, "targetPort": name} for name, number in ports.items()]
