"""Pods that the `restricted` Pod Security Standard accepts.

No root, no capabilities, the default seccomp profile, a read-only root file system with /tmp beside it, and no token
of the API server. The user has no entry in the image's passwd file, so HOME and USER are set for libraries that ask.
"""

from collections.abc import Mapping, Sequence
from typing import Any

USER = 65532
ENVIRONMENT = ({"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "tidegate"})


def pod(
    containers: Sequence[Mapping[str, Any]], *, account: str, volumes: Sequence[Mapping[str, Any]] = (), **more: Any
) -> dict[str, Any]:
    """A pod's spec around `containers`, with a writable /tmp."""
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
        "containers": list(containers),
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
        **more,
    }


def container(
    name: str, *, image: str, pull_policy: str, ports: Mapping[str, int], env: Sequence[Mapping[str, Any]] = (),
    mounts: Sequence[Mapping[str, Any]] = (), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": pull_policy,
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "env": [*ENVIRONMENT, *env],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **more,
    }


def http_probe(path: str, *, port: str = "http", period_s: int = 5, failures: int = 3) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def service_ports(ports: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "port": number, "targetPort": name} for name, number in ports.items()]
