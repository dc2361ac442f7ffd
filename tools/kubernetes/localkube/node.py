"""A real one-node cluster: kubelet, containerd, runc, a pod network, Services and cluster DNS, with no Docker and no
virtual machine, inside a network namespace of its own. Ready in about ten seconds. Needs root and Debian's packages
(`tools/kubernetes/packages.txt`).

One node for each state folder at a time; a node that is left over from a crash is cleared away first. Not real even
here: GPUs, NetworkPolicy enforcement, more than one machine.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localkube import background_processes, control_plane, leftovers, network, pki

PAUSE_IMAGE = "localhost/pause:1"
NODE = "node-0"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    folder: pathlib.Path
    programs: pathlib.Path
    name: str
    """Of its network namespace."""
    kubeconfig: pathlib.Path
    """Good inside the namespace."""
    _processes: background_processes.Processes

    @property
    def enter(self) -> list[str]:
        """Prefix of a command that is to see the node's network."""
        return network.enter(self.name)

    def load(self, archive: pathlib.Path) -> None:
        """Makes the images of a docker archive available to pods (imagePullPolicy: Never or IfNotPresent)."""
        _ctr(self.folder, "images", "import", "--no-unpack", str(archive))

    def name_image(self, image: str, name: str) -> None:
        """Gives an image of the node a further name."""
        _ctr(self.folder, "images", "tag", "--force", image, name)

    def run(self, name: str, command: Sequence[str | pathlib.Path], ready: Callable[[], bool]) -> None:
        """Starts a program of this machine in the node's network, and waits until it is ready. It ends with the node."""
        self._processes.start(name, command)
        self._processes.wait(name, ready, timeout_s=60)

    @contextlib.contextmanager
    def without_api_server(self) -> Iterator[None]:
        """The API server hangs meanwhile: its connections stay open, and nothing answers."""
        self._processes.pause("kube-apiserver")
        try:
            yield
        finally:
            self._processes.resume("kube-apiserver")

    def process_of(self, container: str) -> int:
        """The process id, on this machine, of the first process of a container. Raises LookupError if it does not run."""
        for line in _ctr(self.folder, "tasks", "list").splitlines():
            if line.split()[0] == container:
                return int(line.split()[1])
        raise LookupError(f"container {container} does not run")

    def stop(self) -> None:
        """Ends everything and removes all traces."""
        self._processes.stop("kubelet", "kube-proxy", "kube-scheduler", "kube-controller-manager", "coredns")
        self._processes.stop()
        leftovers.clear(self.folder, self.name)


def name_of(folder: pathlib.Path) -> str:
    return f"tidegate-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def start(programs: pathlib.Path, folder: pathlib.Path, archives: Sequence[pathlib.Path]) -> Node:
    """Starts a node whose state is in `folder`; `archives` must hold PAUSE_IMAGE. On an error nothing is left."""
    name = name_of(folder)
    leftovers.clear(folder, name)
    folder.mkdir(parents=True)
    running = background_processes.Processes(folder, enter=network.enter(name))
    node = Node(
        folder=folder, programs=programs, name=name, kubeconfig=folder / "admin.kubeconfig", _processes=running
    )  # fmt: skip
    try:
        network.create(name)
        _start_control_plane(node)
        _start_containers(node)
        for archive in archives:
            node.load(archive)
        _start_kubelet(node)
        _start_services(node)
    except BaseException:
        node.stop()
        raise
    return node


def kubectl(node: Node, *arguments: str, stdin: str | None = None) -> str:
    """What kubectl prints; raises KubectlError when it fails."""
    command = [*node.enter, str(node.programs / "kubectl"), "--kubeconfig", str(node.kubeconfig), *arguments]
    done = subprocess.run(
        command, input=stdin, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise control_plane.KubectlError(f"kubectl {' '.join(arguments)}: {done.stdout}")
    return done.stdout


def _start_control_plane(node: Node) -> None:
    folder, programs, running = node.folder, node.programs, node._processes
    store = "http://127.0.0.1:2379"
    running.start("etcd", [
        programs / "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--log-level", "warn",
        "--listen-client-urls", store, "--advertise-client-urls", store, "--listen-peer-urls", "http://127.0.0.1:2380",
    ])  # fmt: skip
    authority, accounts = pki.authority(folder), pki.service_account_key(folder)
    served = [f"IP:{ip}" for ip in ("127.0.0.1", network.NODE_IP, network.FIRST_SERVICE_IP)]
    served += [f"DNS:{host}" for host in ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")]
    crt, key = pki.certificate(folder, "api", subject="/CN=kube-apiserver", names=served)
    to_kubelet = pki.certificate(folder, "to-kubelet", subject="/O=system:masters/CN=kube-apiserver-kubelet-client")
    (folder / "tokens.csv").write_text(f'{control_plane.ADMIN_TOKEN},admin,admin,"system:masters"\n')
    running.start("kube-apiserver", [
        programs / "kube-apiserver", "--etcd-servers", store, "--secure-port", "6443", "--bind-address", "0.0.0.0",
        "--advertise-address", network.NODE_IP, "--tls-cert-file", crt, "--tls-private-key-file", key,
        "--client-ca-file", authority, "--token-auth-file", folder / "tokens.csv", "--authorization-mode", "RBAC",
        "--service-account-issuer", "https://kubernetes.default.svc",
        "--service-account-key-file", accounts, "--service-account-signing-key-file", accounts,
        "--service-cluster-ip-range", network.SERVICE_SUBNET, "--allow-privileged",
        "--kubelet-client-certificate", to_kubelet[0], "--kubelet-client-key", to_kubelet[1],
        "--kubelet-preferred-address-types", "InternalIP",
    ])  # fmt: skip
    control_plane.write_kubeconfig(node.kubeconfig, "https://127.0.0.1:6443", authority, control_plane.ADMIN_TOKEN)
    running.wait("kube-apiserver", lambda: _succeeds(node, "get", "--raw", "/readyz"), timeout_s=90)
    running.start("kube-controller-manager", [
        programs / "kube-controller-manager", "--kubeconfig", node.kubeconfig, "--leader-elect=false",
        "--cert-dir", folder / "manager-certs", "--service-account-private-key-file", accounts,
        "--root-ca-file", authority, "--use-service-account-credentials",
    ])  # fmt: skip
    running.start("kube-scheduler", [
        programs / "kube-scheduler", "--kubeconfig", node.kubeconfig, "--leader-elect=false",
        "--cert-dir", folder / "scheduler-certs",
    ])  # fmt: skip


def _start_containers(node: Node) -> None:
    folder = node.folder
    (folder / "cni").mkdir()
    addresses = {"subnet": network.POD_SUBNET, "rangeStart": network.FIRST_POD_IP}
    bridge = {
        "type": "bridge", "bridge": network.BRIDGE, "isGateway": True, "isDefaultGateway": True, "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[addresses]]},
    }  # fmt: skip
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    pods = {"cniVersion": "0.4.0", "name": node.name, "plugins": [bridge, ports]}
    (folder / "cni" / "10-pods.conflist").write_text(json.dumps(pods))
    (folder / "containerd.toml").write_text(f"""
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-run"
[grpc]
  address = "{_socket(folder)}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
""")
    node._processes.start("containerd", ["containerd", "--config", folder / "containerd.toml"])
    node._processes.wait("containerd", lambda: _ctr_answers(folder), timeout_s=30)


def _start_kubelet(node: Node) -> None:
    folder = node.folder
    (folder / "kubelet.json").write_text(json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{_socket(folder)}",
        "clusterDNS": [network.DNS_SERVICE_IP], "clusterDomain": "cluster.local", "resolvConf": "",
        "authentication": {
            "anonymous": {"enabled": False}, "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(folder / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        # What a machine that was not set up for Kubernetes, or is a container itself, does not offer.
        "failCgroupV1": False, "cgroupDriver": "cgroupfs", "cgroupsPerQOS": False, "enforceNodeAllocatable": [],
        "failSwapOn": False, "oomScoreAdj": 0, "localStorageCapacityIsolation": False,
        "evictionHard": {}, "imageGCHighThresholdPercent": 100,
        "shutdownGracePeriod": "0s",
    }))  # fmt: skip
    node._processes.start("kubelet", [
        node.programs / "kubelet", "--config", folder / "kubelet.json", "--kubeconfig", node.kubeconfig,
        "--root-dir", folder / "kubelet", "--hostname-override", NODE, "--node-ip", network.NODE_IP,
    ])  # fmt: skip
    node._processes.wait("kubelet", lambda: _is_ready(node), timeout_s=90)


def _start_services(node: Node) -> None:
    folder = node.folder
    node._processes.start("kube-proxy", [
        node.programs / "kube-proxy", "--kubeconfig", node.kubeconfig, "--hostname-override", NODE,
        "--proxy-mode", "nftables", "--cluster-cidr", network.POD_SUBNET, "--conntrack-max-per-core", "0",
    ])  # fmt: skip
    (folder / "Corefile").write_text(
        f"cluster.local:53 {{\n  bind {network.NODE_IP}\n  errors\n  kubernetes cluster.local {{\n"
        f"    kubeconfig {node.kubeconfig}\n    ttl 1\n  }}\n}}\n"
    )
    node._processes.start("coredns", [node.programs / "coredns", "-conf", folder / "Corefile"])
    kubectl(node, "apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, _dns_service())))


def _dns_service() -> list[dict[str, Any]]:
    """The Service kube-dns in front of the CoreDNS process, which is no pod and so needs its endpoint written by
    hand."""
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    return [
        {
            "apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"clusterIP": network.DNS_SERVICE_IP, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4", "ports": ports, "endpoints": [{"addresses": [network.NODE_IP]}],
        },
    ]  # fmt: skip


def _socket(folder: pathlib.Path) -> pathlib.Path:
    return folder / "containerd.sock"


def _ctr(folder: pathlib.Path, *arguments: str) -> str:
    command = ["ctr", "--address", str(_socket(folder)), "--namespace", "k8s.io", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _ctr_answers(folder: pathlib.Path) -> bool:
    try:
        _ctr(folder, "version")
    except RuntimeError:
        return False
    return True


def _succeeds(node: Node, *arguments: str) -> bool:
    try:
        kubectl(node, *arguments)
    except control_plane.KubectlError:
        time.sleep(0.2)
        return False
    return True


def _is_ready(node: Node) -> bool:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    try:
        return kubectl(node, "get", "node", NODE, "-o", f"jsonpath={path}") == "True"
    except control_plane.KubectlError:
        return False
