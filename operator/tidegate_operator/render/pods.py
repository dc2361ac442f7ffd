"""Pods that the `restricted` Pod Security Standard accepts.

No root, no capabilities, the default seccomp profile, a read-only root file system with /tmp beside it, and no token
of the API server. The user has no entry in the image's passwd file, so HOME and USER are set for libraries that ask.
Where a spec says something else for one of these names or paths, the spec's word is the one that counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

USER = 65532
ENVIRONMENT = ({"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "tidegate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a container runs, and how the node gets it."""

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
    """A pod's spec around `containers` of `image`, with a writable /tmp."""
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
        "volumes": _last_by("name", {"name": "tmp", "emptyDir": {}}, *volumes),
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
        "env": _last_by("name", *ENVIRONMENT, *env),
        "volumeMounts": _last_by("mountPath", {"name": "tmp", "mountPath": "/tmp"}, *mounts),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **more,
    }


def _last_by(key: str, *items: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The items in their order; of those with the same `key` only the last, since the API server takes no two."""
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
