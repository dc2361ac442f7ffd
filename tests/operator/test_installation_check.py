"""`tidegate operator --check`, which `helm test` runs."""

import os
import subprocess
import sys

import pytest

from tidegate_operator import cluster, installation_check


class Pools:
    """Lists pools, except in the namespaces of `forbidden`."""

    def __init__(self, *forbidden):
        self.forbidden = forbidden

    async def check_pools(self, namespace):
        if namespace in self.forbidden:
            raise cluster.RejectedError("servingpools is forbidden")

    async def pool_keys(self, namespace):
        return set()


class Leases:
    """Reads one version after the other, and the last one from then on."""

    def __init__(self, *versions):
        self.versions = list(versions)

    async def read(self):
        found = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        return found and {"spec": found}

    async def write(self, body):
        raise AssertionError(body)


def renewed():
    return Leases({"holderIdentity": "a", "renewTime": "1"}, {"holderIdentity": "a", "renewTime": "2"})


@pytest.mark.parametrize(
    ("pools", "leases", "expected"),
    [
        (Pools(), renewed(), []),
        (Pools("b"), renewed(), ["the ServingPools of namespace b cannot be listed: servingpools is forbidden"]),
        (Pools(), Leases(None, {"holderIdentity": "a", "renewTime": "1"}), []),
        (Pools(), Leases(None), ["no operator renewed its Lease within 30 s: look at the operator's"]),
        (Pools(), Leases({"holderIdentity": "a", "renewTime": "1"}), ["no operator renewed its Lease within 30 s"]),
        (Pools(), Leases({"holderIdentity": "", "renewTime": "1"}), ["no operator renewed its Lease within 30 s"]),
    ],
)  # fmt: skip
def test_each_obstacle_is_a_sentence(in_virtual_time, pools, leases, expected):
    async def found():
        return [line async for line in installation_check.obstacles(pools, leases, ["a", "b"])]

    lines = in_virtual_time(found())
    assert [line[: len(text)] for line, text in zip(lines, expected, strict=True)] == expected


def test_the_check_passes_with_an_operator_and_its_rights(plane, operator, namespace):
    kubeconfig = plane.kubeconfig_for(operator.token, f"{operator.system}-check")
    command = [
        sys.executable, "-m", "tidegate_operator", "--check", "--operator-namespace", operator.system,
        "--lease", "tidegate", f"--namespace={namespace}",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "An operator acts" in done.stdout
    other = subprocess.run(
        [*command, "--namespace=elsewhere"], env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert other.returncode == 1
    assert "the ServingPools of namespace elsewhere cannot be listed" in other.stderr
