"""A real Kubernetes control plane with nodes that kwok pretends, on loopback ports of its own.

Real: schema, defaults, CEL, server-side apply, RBAC, status and scale, garbage collection, Deployments that become
pods, scheduling by GPU count and label, disruption budgets, service-account tokens. Not real: containers, probes, the
network; a pod turns Ready by itself. Needs no root. `start` returns in a few seconds; `ControlPlane.stop` leaves
nothing.
"""

import base64
import dataclasses
import json
import pathlib
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from localkube import background_processes, pki

ADMIN_TOKEN = "admin-token"


class KubectlError(RuntimeError):
    """kubectl failed; the message is its output."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    folder: pathlib.Path
    programs: pathlib.Path
    server: str
    kubeconfig: pathlib.Path
    audit_log: pathlib.Path
    """One JSON line for each request that the API server has answered: who, verb, resource."""
    store: str
    """URL of etcd."""
    processes: background_processes.Processes
    """For tests that end or pause one: `etcd`, `kube-apiserver`, `kube-controller-manager`, `kube-scheduler`, `kwok`."""

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """What `kubectl` prints, standard error included; raises KubectlError when it fails."""
        done = subprocess.run(
            [self.programs / "kubectl", "--kubeconfig", self.kubeconfig, "--cache-dir", self._kinds, *arguments],
            input=stdin, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stdout}")
        return done.stdout

    def add_kinds(self, crd: pathlib.Path, group_version: str) -> None:
        """Applies a CustomResourceDefinition; returns when kubectl knows its kinds."""
        self.kubectl("apply", "--server-side", "-f", str(crd))
        until = time.monotonic() + 30
        schema = f"/openapi/v3/apis/{group_version}"  # comes last
        while "/namespaces/{namespace}/" not in self.kubectl("get", "--raw", schema, check=False):
            if time.monotonic() > until:
                raise KubectlError(f"{crd} was applied, and its kinds are not served")
            time.sleep(0.05)
        shutil.rmtree(self._kinds, ignore_errors=True)

    @property
    def _kinds(self) -> pathlib.Path:
        """What kubectl remembers of the kinds that there are; it does not notice new ones."""
        return self.folder / "kubectl-cache"

    def kubeconfig_for(self, token: str, name: str) -> pathlib.Path:
        """A kubeconfig that acts as the token's owner."""
        return write_kubeconfig(self.folder / f"{name}.kubeconfig", self.server, self.folder / "ca.crt", token)

    def stop(self) -> None:
        self.processes.stop()

    def wait(self) -> None:
        """Returns when the API server answers, for example after a restart."""
        self.processes.wait("kube-apiserver", lambda: _answers(f"{self.server}/readyz"), timeout_s=90)


def start(programs: pathlib.Path, folder: pathlib.Path, *, without: Sequence[str] = ()) -> ControlPlane:
    """Starts everything in `folder` (empty, private), except the controllers `without`; on any error nothing is left
    running."""
    running = background_processes.Processes(folder)
    try:
        return _start(programs, folder, running, without)
    except BaseException:
        running.stop()
        raise


def _start(
    programs: pathlib.Path, folder: pathlib.Path, running: background_processes.Processes, without: Sequence[str]
) -> ControlPlane:
    store_port, peer_port, api_port, manager_port, scheduler_port, kwok_port = background_processes.free_ports(6)
    store, server = f"http://127.0.0.1:{store_port}", f"https://127.0.0.1:{api_port}"
    running.start("etcd", [
        programs / "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--log-level", "warn",
        "--listen-client-urls", store, "--advertise-client-urls", store,
        "--listen-peer-urls", f"http://127.0.0.1:{peer_port}",
    ])  # fmt: skip
    running.wait("etcd", lambda: _answers(f"{store}/readyz"), timeout_s=30)

    authority, accounts = pki.authority(folder), pki.service_account_key(folder)
    crt, key = pki.certificate(
        folder, "api", subject="/CN=kube-apiserver", names=["IP:127.0.0.1", "IP:10.96.0.1", "DNS:localhost"]
    )
    (folder / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
    (folder / "audit.yaml").write_text(json.dumps(AUDIT_POLICY))
    running.start("kube-apiserver", [
        programs / "kube-apiserver", "--etcd-servers", store, "--bind-address", "127.0.0.1", "--secure-port", str(api_port),
        "--tls-cert-file", crt, "--tls-private-key-file", key, "--client-ca-file", authority,
        "--token-auth-file", folder / "tokens.csv", "--authorization-mode", "RBAC",
        "--service-account-issuer", "https://kubernetes.default.svc",
        "--service-account-key-file", accounts, "--service-account-signing-key-file", accounts,
        "--service-cluster-ip-range", "10.96.0.0/16", "--allow-privileged",
        # OpenShift has it on: whoever sets blockOwnerDeletion needs the right to do so.
        "--enable-admission-plugins", "OwnerReferencesPermissionEnforcement",
        "--audit-policy-file", folder / "audit.yaml", "--audit-log-path", folder / "audit.log",
        "--audit-log-mode", "blocking-strict",
    ])  # fmt: skip
    running.wait("kube-apiserver", lambda: _answers(f"{server}/readyz"), timeout_s=90)

    kubeconfig = write_kubeconfig(folder / "admin.kubeconfig", server, authority, ADMIN_TOKEN)
    running.start("kube-controller-manager", [
        programs / "kube-controller-manager", "--kubeconfig", kubeconfig, "--leader-elect=false",
        "--bind-address", "127.0.0.1", "--secure-port", str(manager_port), "--cert-dir", folder / "manager-certs",
        "--service-account-private-key-file", accounts, "--root-ca-file", authority, "--use-service-account-credentials",
        "--concurrent-gc-syncs", "20", "--controllers", ",".join(["*", *(f"-{name}" for name in without)]),
        # kwok is late on a busy machine. A pod that was declared unready with its node never becomes ready again, because
        # no kubelet corrects it.
        "--node-monitor-grace-period", "24h",
    ])  # fmt: skip
    running.start("kube-scheduler", [
        programs / "kube-scheduler", "--kubeconfig", kubeconfig, "--leader-elect=false",
        "--bind-address", "127.0.0.1", "--secure-port", str(scheduler_port), "--cert-dir", folder / "scheduler-certs",
    ])  # fmt: skip
    running.start("kwok", [
        programs / "kwok", "--kubeconfig", kubeconfig, "--config", programs / "kwok-stages.yaml",
        "--manage-nodes-with-annotation-selector", "kwok.x-k8s.io/node=fake", "--server-address", f"127.0.0.1:{kwok_port}",
        "--cidr", "127.77.0.0/16",  # whoever connects to a pretended pod must not leave this machine
    ])  # fmt: skip
    return ControlPlane(
        folder=folder, programs=programs, server=server, kubeconfig=kubeconfig,
        audit_log=folder / "audit.log", store=store, processes=running,
    )  # fmt: skip


AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


def fake_gpu_node(name: str, *, product: str, gpus: int = 8) -> dict[str, Any]:
    """A node that kwok keeps Ready, labelled as NVIDIA's GPU feature discovery does."""
    capacity = {"cpu": "128", "memory": "1Ti", "pods": "1000", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": product},
        },
        "status": {"allocatable": capacity, "capacity": capacity},
    }


def write_kubeconfig(path: pathlib.Path, server: str, authority: pathlib.Path, token: str) -> pathlib.Path:
    cluster = {"server": server, "certificate-authority-data": base64.b64encode(authority.read_bytes()).decode()}
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "local",
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": "local", "user": {"token": token}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "local"}}],
    }))  # fmt: skip
    path.chmod(0o600)
    return path


def _answers(url: str) -> bool:
    """Whether a GET of our own loopback server says 200. Its certificate is minutes old, and nothing secret is
    sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=2, context=context if url.startswith("https") else None) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except OSError:
        return False
