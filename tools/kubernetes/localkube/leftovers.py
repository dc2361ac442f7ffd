"""What a node that ended badly leaves on the machine, and its removal. Every step is safe to repeat.

Whatever belongs to a node carries its state folder or its name: containers hang below shims whose command line names
the folder's socket, mounts lie below the folder, and the pod network keeps its leases under the node's name. Nothing
else on the machine is touched.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Iterator

from localkube import network

PROGRAMS = {
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns",
    "containerd", "containerd-shim-runc-v2", "setpriv", "nsenter",
}  # fmt: skip
CNI = pathlib.Path("/var/lib/cni")


def clear(folder: pathlib.Path, name: str) -> None:
    """Removes everything of the node `name` with the state in `folder`, running or not."""
    _kill_all(folder)
    _forget_containers(folder)
    unmount_below(folder)
    _forget_pod_network(name)
    network.remove(name)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_all(folder: pathlib.Path) -> None:
    """The node's own programs, which name the folder in their command line, and the containers below them."""
    for _ in range(50):
        if not (left := [*_below(_naming(folder))]):
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _naming(folder: pathlib.Path) -> set[int]:
    return {
        pid
        for pid, words in _processes()
        if pathlib.Path(words[0]).name in PROGRAMS and any(str(folder) in word for word in words)
    }


def _below(roots: set[int]) -> Iterator[int]:
    """The processes in `roots` and all their descendants."""
    parents = {pid: _parent(pid) for pid, _ in _processes()}
    for pid in parents:
        ancestor: int | None = pid
        while ancestor and ancestor not in roots:
            ancestor = parents.get(ancestor)
        if ancestor:
            yield pid


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(entry.name), (entry / "cmdline").read_text(errors="replace").split("\0")


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    return None


def unmount_below(folder: pathlib.Path) -> None:
    """Every mount inside `folder`, so that it can be removed."""
    lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    for point in sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True):
        _unmount(point)


def _forget_containers(folder: pathlib.Path) -> None:
    """What runc and containerd's shims keep of each container elsewhere: its state, its cgroups, its socket."""
    for container in (folder / "containerd-run" / "io.containerd.runtime.v2.task" / "k8s.io").glob("*"):
        with contextlib.suppress(OSError):
            pathlib.Path((container / "address").read_text().removeprefix("unix://")).unlink(missing_ok=True)
        shutil.rmtree(pathlib.Path("/run/containerd/runc/k8s.io", container.name), ignore_errors=True)
        for cgroup in pathlib.Path("/sys/fs/cgroup").glob(f"**/k8s.io/{container.name}"):
            for inner in sorted([cgroup, *cgroup.glob("**/")], reverse=True):
                with contextlib.suppress(OSError):
                    inner.rmdir()


def _forget_pod_network(name: str) -> None:
    """The pods' network namespaces and addresses, of which the CNI plugins keep records."""
    for record in (CNI / "results").glob(f"{name}-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            kept = json.loads(record.read_text())
            for sandbox in {link.get("sandbox") for link in kept["result"]["interfaces"]} - {None, ""}:
                _unmount(sandbox)
                pathlib.Path(sandbox).unlink(missing_ok=True)
            for other in (CNI / "results").glob(f"*-{kept['containerId']}-*"):
                other.unlink(missing_ok=True)
        record.unlink(missing_ok=True)
    shutil.rmtree(CNI / "networks" / name, ignore_errors=True)


def _unmount(point: str) -> None:
    detach = 2  # MNT_DETACH: now, whoever still looks at it
    ctypes.CDLL(None).umount2(point.encode(), detach)
