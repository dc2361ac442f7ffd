"""A network namespace that holds a whole one-node cluster, so that the machine's own network and firewall stay
untouched.

Inside it a bridge stands for the node's network card: pods hang on it, and the node's own address is on it. Nothing
leads out. `enter` is the command prefix with which processes and tests go in; `ip netns exec` would not do, because
it remounts /sys, where kubelet then finds no cgroups.
"""

import pathlib
import subprocess

NODE_IP = "10.77.0.1"
POD_SUBNET = "10.77.0.0/24"
FIRST_POD_IP = "10.77.0.10"
SERVICE_SUBNET = "10.78.0.0/24"
FIRST_SERVICE_IP = "10.78.0.1"
DNS_SERVICE_IP = "10.78.0.10"
BRIDGE = "tidegate0"


def enter(name: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{name}", "--"]


def create(name: str) -> None:
    _run("ip", "netns", "add", name)
    for command in (
        "ip link set lo up",
        f"ip link add {BRIDGE} type bridge",
        f"ip addr add {NODE_IP}/24 dev {BRIDGE}",
        f"ip link set {BRIDGE} up",
        # A bridge without a port is down, and its address unreachable.
        "ip link add tidegate1 type veth peer name tidegate2",
        f"ip link set tidegate1 master {BRIDGE} up",
        "ip link set tidegate2 up",
        f"ip route add default via {NODE_IP}",
        "sysctl -qw net.ipv4.ip_forward=1",
    ):
        _run(*enter(name), *command.split())
    # Where the kernel has br_netfilter, Services must also see traffic between two pods of the bridge.
    if pathlib.Path("/proc/sys/net/bridge").exists():
        _run(*enter(name), "sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=1")


def remove(name: str) -> None:
    """No error when it is gone."""
    if pathlib.Path("/run/netns", name).exists():
        _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
