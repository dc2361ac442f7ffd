"""The Helm chart, rendered by Helm and taken by the real API server."""

import json
import subprocess

import pytest


def template(helm, *values):
    return helm.rendered("tidegate-system", *values)


def of_kind(manifests, kind):
    return [item for item in manifests if item["kind"] == kind]


def test_it_passes_the_strict_lint(helm):
    assert "0 chart(s) failed" in helm.run("lint", "--strict", helm.chart)


def test_the_api_server_takes_all_of_it_in_a_restricted_namespace(helm, kubectl, namespace):
    manifests = helm.rendered(namespace)
    text = "\n---\n".join(map(json.dumps, manifests))
    said = helm.plane.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", stdin=text)
    assert "Warning" not in said
    assert "deployment.apps/tidegate" in said


def test_its_rights_end_at_the_namespaces_that_it_serves(helm):
    manifests = template(helm, "namespaces.names={a,b}")
    assert sorted(item["metadata"]["namespace"] for item in of_kind(manifests, "Role")) == ["a", "b", "tidegate-system"]
    (deployment,) = of_kind(manifests, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [word for word in arguments if word.startswith("--namespace")] == ["--namespace=a", "--namespace=b"]
    assert not of_kind(manifests, "ClusterRoleBinding")


def test_it_may_serve_every_namespace(helm):
    manifests = template(helm, "namespaces.all=true")
    assert [item["metadata"]["namespace"] for item in of_kind(manifests, "Role")] == ["tidegate-system"]
    assert of_kind(manifests, "ClusterRoleBinding")
    (deployment,) = of_kind(manifests, "Deployment")
    assert "--all-namespaces" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(("value", "kept"), [("crds.keep=true", True), ("crds.keep=false", False)])
def test_an_uninstall_takes_the_pools_along_only_when_told(helm, value, kept):
    (crd,) = of_kind(template(helm, value), "CustomResourceDefinition")
    assert ("helm.sh/resource-policy" in crd["metadata"].get("annotations", {})) == kept


def test_no_two_releases_fight_over_the_resource_when_one_leaves_it_out(helm):
    assert not of_kind(template(helm, "crds.install=false"), "CustomResourceDefinition")


@pytest.mark.parametrize("value", ["replicas=-1", "logLevel=loud", "imaje.tag=1", "namespaces.names={UPPER}"])
def test_values_that_make_no_sense_are_refused(helm, value):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        template(helm, value)
    assert "values don't meet the specifications of the schema" in caught.value.stderr


def test_pull_secrets_are_for_the_operator_and_for_what_it_starts(helm):
    (deployment,) = of_kind(template(helm, "imagePullSecrets[0].name=registry"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "--image-pull-secret=registry" in pod["containers"][0]["args"]
