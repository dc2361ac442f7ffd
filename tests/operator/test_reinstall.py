"""The chart, installed, uninstalled and installed again while its resource and the pools stay."""

import json

import pytest

import operator_doubles

from .conftest import CRD, make_namespace

KEPT = "servingpools.tidegate.dev"


@pytest.fixture
def without_resource(plane):
    """The resource is the chart's own during the test."""
    plane.kubectl("delete", "crd", KEPT, "--timeout=120s")
    yield
    plane.kubectl("delete", "crd", KEPT, "--ignore-not-found", "--timeout=120s")
    plane.add_kinds(CRD, "tidegate.dev/v1alpha1")


def install(helm, release, namespace, *more):
    return helm.run("install", release, helm.chart, "-n", namespace, "--set", "replicas=0", *more)


def test_a_release_is_installed_again_over_the_resource_that_an_uninstall_kept(
    plane, helm, namespace, kubectl, without_resource
):
    install(helm, "tidegate", namespace)
    kubectl("wait", f"crd/{KEPT}", "--for=condition=Established", "--timeout=120s")
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    helm.run("uninstall", "tidegate", "-n", namespace)
    assert "chat" in kubectl("get", "spool", "-o", "name")
    install(helm, "tidegate", namespace)
    assert "chat" in kubectl("get", "spool", "-o", "name")
    helm.run("uninstall", "tidegate", "-n", namespace)
    other = make_namespace(plane, f"{namespace}-other")
    said = install(helm, "other", other)
    assert f"belongs to the release {namespace}/tidegate" in said
    assert f"kubectl annotate crd {KEPT} --overwrite" in said
    owner = json.loads(kubectl("get", "crd", KEPT, "-o", "json"))["metadata"]["annotations"]
    assert owner["meta.helm.sh/release-namespace"] == namespace
    command = said[said.index("annotate crd") : said.index("\n", said.index("annotate crd"))]
    plane.kubectl(*command.split())
    helm.run("upgrade", "other", helm.chart, "-n", other, "--set", "replicas=0")
    assert "chat" in kubectl("get", "spool", "-o", "name")
    assert (
        plane.kubectl("get", "crd", KEPT, "-o", "jsonpath={.metadata.labels.app\\.kubernetes\\.io/instance}") == "other"
    )
