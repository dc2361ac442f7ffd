"""What `tools/kubernetes/e2e` leaves behind on a cluster that somebody gave it; the API server is real, no check runs."""

import importlib.machinery
import importlib.util
import json
import pathlib
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def e2e():
    loader = importlib.machinery.SourceFileLoader("e2e_program", str(ROOT / "tools/kubernetes/e2e"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def existing(plane, *kinds):
    """The objects of these kinds, without the namespaces of other tests, which may end meanwhile."""
    names = {name for kind in kinds for name in plane.kubectl("get", kind, "-o", "name").split()}
    return {name for name in names if not name.startswith("namespace/test-")}


def test_a_failed_run_removes_the_objects_that_it_created_and_no_others(plane, e2e):
    theirs = {"namespace/tidegate-e2e", "namespace/tidegate-e2e-system"}
    for name in theirs:
        plane.kubectl("create", *name.split("/"))
    kinds = ("namespaces", "clusterroles", "clusterrolebindings")
    before = existing(plane, *kinds)
    values = ("crds.install=false", "namespaces.all=true")
    sets = [word for value in values for word in ("--set", value)]

    def fail():
        with e2e.given_cluster(str(plane.kubeconfig)) as cluster:
            e2e.make_namespaces(cluster)
            cluster.helm("install", "tidegate", str(ROOT / "helm/tidegate"), "-n", e2e.e2e_cluster.SYSTEM, *sets)
            made = existing(plane, *kinds) - before
            assert {name.partition(".")[0].partition("/")[0] for name in made} == {
                "namespace", "clusterrole", "clusterrolebinding"
            }  # fmt: skip
            raise e2e.e2e_cluster.FailedError("a check failed")

    with pytest.raises(e2e.e2e_cluster.FailedError, match="a check failed"):
        fail()
    assert existing(plane, *kinds) == before
    assert theirs < before


@pytest.mark.parametrize(("phase", "passes"), [("Succeeded", True), ("Failed", False)])
def test_the_check_of_the_installation_passes_only_with_the_pod_of_helm_test(plane, e2e, phase, passes):
    """The pod has no node, and the test ends it as a kubelet would."""
    namespace = e2e.e2e_cluster.SYSTEM
    values = ("crds.install=false", "nodeSelector.no=where", f"namespaces.names={{{namespace}}}")
    sets = [word for value in values for word in ("--set", value)]
    patch = json.dumps({"status": {"phase": phase}})

    def end_the_pod(cluster):
        def ended():
            try:
                cluster.kubectl(
                    "patch",
                    "pod",
                    "tidegate-test",
                    "-n",
                    namespace,
                    "--subresource=status",
                    "--type=merge",
                    "-p",
                    patch,
                )
            except e2e.e2e_cluster.FailedError:
                return False
            return True

        e2e.e2e_cluster.wait_for(ended, timeout_s=60)

    with e2e.given_cluster(str(plane.kubeconfig)) as cluster:
        e2e.make_namespaces(cluster)
        cluster.helm("install", "tidegate", str(ROOT / "helm/tidegate"), "-n", namespace, *sets)
        kubelet = threading.Thread(target=end_the_pod, args=[cluster])
        kubelet.start()
        if passes:
            assert "Succeeded" in e2e.check_installation(cluster)
        else:
            with pytest.raises(e2e.e2e_cluster.FailedError, match="tidegate-test"):
                e2e.check_installation(cluster)
        kubelet.join()


def test_a_run_that_created_nothing_removes_nothing(plane, e2e):
    before = existing(plane, "namespaces")
    with e2e.given_cluster(str(plane.kubeconfig)):
        pass
    assert existing(plane, "namespaces") == before
