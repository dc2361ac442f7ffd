"""The Helm chart, rendered by Helm and taken by the real API server."""

import json
import subprocess

import pytest

NODE_RULE = (
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]"
)

FIELD_RULE = NODE_RULE.replace("matchExpressions", "matchFields")
POD_RULE = "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0]"
TOLERATED = "tolerations[0].key=a,tolerations[0]"
LONG = "n" * 64


def template(helm, *values):
    return helm.rendered("tidegate-system", *values)


def of_kind(manifests, kind):
    return [item for item in manifests if item["kind"] == kind]


def test_the_chart_passes_the_strict_lint(helm):
    assert "0 chart(s) failed" in helm.run("lint", "--strict", helm.chart)


def test_the_api_server_accepts_the_whole_chart_in_a_restricted_namespace(helm, kubectl, namespace):
    kubectl("create", "serviceaccount", "tidegate")  # a dry run makes none, and pods need theirs
    manifests = helm.rendered(namespace)
    text = "\n---\n".join(map(json.dumps, manifests))
    said = helm.plane.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", stdin=text)
    assert "Warning" not in said
    assert "deployment.apps/tidegate" in said


def test_the_api_server_accepts_each_form_of_affinity_that_lint_passes(helm, kubectl, namespace):
    node, pods = "affinity.nodeAffinity", "affinity.podAntiAffinity"
    required, preferred = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
    expressions = f"{node}.{required}.nodeSelectorTerms[0].matchExpressions"
    term = f"{pods}.{preferred}[0].podAffinityTerm"
    values = [
        *(f"{expressions}[0].{each}" for each in ("key=zone", "operator=In", "values={a,b}")),
        *(f"{expressions}[1].{each}" for each in ("key=disk", "operator=Exists")),
        *(f"{expressions}[2].{each}" for each in ("key=cores", "operator=Gt")),
        f"{node}.{preferred}[0].weight=10",
        f"{node}.{preferred}[0].preference.matchExpressions[0].key=example.org/kind",
        f"{node}.{preferred}[0].preference.matchExpressions[0].operator=DoesNotExist",
        f"{pods}.{preferred}[0].weight=100",
        *(
            f"{term}.{each}"
            for each in ("topologyKey=kubernetes.io/hostname", "labelSelector.matchLabels.app=tidegate")
        ),
    ]
    manifests = helm.rendered(namespace, *values, strings=[f"{expressions}[2].values[0]=4"])
    (deployment,) = of_kind(manifests, "Deployment")
    assert len(deployment["spec"]["template"]["spec"]["affinity"]) == 2
    said = helm.plane.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=json.dumps(deployment))
    assert "deployment.apps/tidegate" in said


def test_the_api_server_accepts_the_forms_at_the_edge_of_what_lint_passes(helm, kubectl, namespace):
    values = [
        *(
            f"tolerations[0].{each}"
            for each in ("key=a.b/c", "operator=Exists", "effect=NoExecute", "tolerationSeconds=5")
        ),
        *(f"tolerations[1].{each}" for each in ("key=b", "value=c_d")),
        *(f"{FIELD_RULE}.{each}" for each in ("key=metadata.name", "operator=NotIn", "values={a.b}")),
        f"{POD_RULE}.topologyKey=kubernetes.io/hostname",
        f"{POD_RULE}.labelSelector.matchLabels.app=a",
        f"{POD_RULE}.namespaces={{{'n' * 63}}}",
        "resources.requests.memory=0.5Gi",
        "resources.requests.cpu=2000m",
    ]
    (deployment,) = of_kind(helm.rendered(namespace, *values), "Deployment")
    said = helm.plane.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=json.dumps(deployment))
    assert "deployment.apps/tidegate" in said


@pytest.mark.parametrize(
    "values",
    [
        "resources.requests.memory=1Gi",
        "resources.requests.cpu=2001m",
        "resources.limits.memory=100M",
        "resources.requests.cpu=1e3",
    ],
)
def test_a_request_above_its_limit_is_rejected_with_a_sentence_and_lint_fails(helm, values):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        template(helm, values)
    assert "raise the limit" in caught.value.stderr
    with pytest.raises(subprocess.CalledProcessError):
        helm.run("lint", "--strict", helm.chart, "--set", values)


def test_its_pods_start_in_a_namespace_with_quotas(helm):
    pods = [
        *of_kind(template(helm), "Pod"),
        *(item["spec"]["template"] for item in of_kind(template(helm), "Deployment")),
    ]
    containers = [container for pod in pods for container in pod["spec"]["containers"]]
    assert len(containers) == 2, "the operator and the test of `helm test`"
    for container in containers:
        assert {*container["resources"]["requests"]} == {*container["resources"]["limits"]} == {"cpu", "memory"}


def test_the_operators_rights_end_at_the_namespaces_that_it_serves(helm):
    manifests = template(helm, "namespaces.names={a,b}")
    assert sorted(item["metadata"]["namespace"] for item in of_kind(manifests, "Role")) == ["a", "b", "tidegate-system"]
    (deployment,) = of_kind(manifests, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [word for word in arguments if word.startswith("--namespace")] == ["--namespace=a", "--namespace=b"]
    assert not of_kind(manifests, "ClusterRoleBinding")


def test_the_operator_may_serve_every_namespace(helm):
    manifests = template(helm, "namespaces.all=true")
    assert [item["metadata"]["namespace"] for item in of_kind(manifests, "Role")] == ["tidegate-system"]
    assert of_kind(manifests, "ClusterRoleBinding")
    (deployment,) = of_kind(manifests, "Deployment")
    assert "--all-namespaces" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(("value", "kept"), [("crds.keep=true", True), ("crds.keep=false", False)])
def test_an_uninstall_deletes_the_pools_only_when_crds_keep_is_false(helm, value, kept):
    (crd,) = of_kind(template(helm, value), "CustomResourceDefinition")
    assert ("helm.sh/resource-policy" in crd["metadata"].get("annotations", {})) == kept


def test_a_second_release_without_the_resource_does_not_conflict_with_the_first(helm):
    assert not of_kind(template(helm, "crds.install=false"), "CustomResourceDefinition")


@pytest.mark.parametrize(
    "value",
    [
        "replicas=-1", "logLevel=loud", "imaje.tag=1", "namespaces.names={UPPER}", "image.digest=latest",
        "image.repository=registry.example/a b", "image.tag=a b", "resources.requests.cpu=much", "resources.request.cpu=1",
        "nodeSelector.zone=a b", "tolerations[0].effect=NoSchedul", "tolerations[0].operater=Exists",
        "affinity.nodeAffinty.a=b", "priorityClassName=High", "serviceAccount.name=Name", "podAnnotations.a.b=c",
        "imagePullSecrets[0].nam=registry", "nodeSelector.a b=c", "podAnnotations.a b=c", "resources.limits.a b=1",
        "tolerations[0].key=a b", "affinity.nodeAffinity.requiredDuringScheduling=a",
        f"{NODE_RULE}.operator=In", f"{NODE_RULE}.key=zone", f"{NODE_RULE}.key=zone,{NODE_RULE}.operator=In",
        f"{NODE_RULE}.key=zone,{NODE_RULE}.operator=Is,{NODE_RULE}.values={{a}}",
        f"{NODE_RULE}.key=zone,{NODE_RULE}.operator=Exists,{NODE_RULE}.values={{a}}",
        "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].namespaces={a}",
        "affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=10",
        f"{POD_RULE}.topologyKey=zone,{POD_RULE}.namespaces={{a.b}}",
        f"{FIELD_RULE}.key=metadata.namespace,{FIELD_RULE}.operator=In,{FIELD_RULE}.values={{a}}",
        f"{FIELD_RULE}.key=metadata.name,{FIELD_RULE}.operator=Exists",
        f"{FIELD_RULE}.key=metadata.name,{FIELD_RULE}.operator=In,{FIELD_RULE}.values={{a,b}}",
        f"{TOLERATED}.operator=Exists,{TOLERATED}.value=a", f"{TOLERATED}.value=a b",
        f"{TOLERATED}.tolerationSeconds=5", f"{TOLERATED}.effect=NoSchedule,{TOLERATED}.tolerationSeconds=5",
        "priorityClassName=a..b", "serviceAccount.name=a.-b", "imagePullSecrets[0].name=a-.b",
        r"podAnnotations.a\.\.b/c=d", r"nodeSelector.a\.\.b/c=d",
        f"namespaces.names={{{LONG}}}", f"monitoring.prometheus.namespace={LONG}",
    ],
)  # fmt: skip
def test_invalid_values_are_rejected(helm, value):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        template(helm, value)
    assert "values don't meet the specifications of the schema" in caught.value.stderr


def test_pull_secrets_reach_the_operator_and_the_pods_that_it_creates(helm):
    (deployment,) = of_kind(template(helm, "imagePullSecrets[0].name=registry"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "--image-pull-secret=registry" in pod["containers"][0]["args"]


DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ((), "tidegate-operator:0.1.0"),
        (("image.tag=v2",), "tidegate-operator:v2"),
        ((f"image.digest={DIGEST}",), f"tidegate-operator@{DIGEST}"),
        (("image.tag=v2", f"image.digest={DIGEST}"), f"tidegate-operator:v2@{DIGEST}"),
    ],
)
def test_an_image_is_named_by_tag_or_by_digest(helm, values, image):
    (deployment,) = of_kind(template(helm, *values), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == image


def test_digests_reach_the_images_of_pools(helm):
    (deployment,) = of_kind(template(helm, f"engineImage.digest={DIGEST}"), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--engine-image=tidegate-engine@{DIGEST}" in arguments


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False)])
def test_the_operator_is_told_of_ipv6(helm, value, expected):
    (deployment,) = of_kind(template(helm, f"ipv6={value}"), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert ("--ipv6" in arguments) is expected


def test_the_pod_of_helm_test_checks_the_operator_with_its_own_account(helm):
    manifests = template(helm, "namespaces.names={a,b}")
    (deployment,) = of_kind(manifests, "Deployment")
    (pod,) = of_kind(manifests, "Pod")
    operator, (test,) = deployment["spec"]["template"]["spec"], pod["spec"]["containers"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["serviceAccountName"] == operator["serviceAccountName"]
    assert test["command"] == ["tidegate", "operator", "--check"]
    assert set(test["args"]) <= set(operator["containers"][0]["args"])
    assert {"--namespace=a", "--namespace=b", "--lease=tidegate"} <= set(test["args"])


@pytest.mark.parametrize("name", ["1234", "on"])
def test_names_that_yaml_reads_as_numbers_or_booleans_are_rendered_as_texts(helm, name):
    fields = ("serviceAccount.name", "priorityClassName", "monitoring.prometheus.namespace", "namespaces.names[0]")
    values = ("monitoring.prometheus.podLabels.app=prometheus", "monitoring.scrape=podMonitors")
    manifests = helm.rendered(name, *values, strings=[f"{field}={name}" for field in fields])
    assert {item["metadata"].get("namespace", name) for item in manifests} == {name}
    assert [item["metadata"]["name"] for item in of_kind(manifests, "ServiceAccount")] == [name]
    subjects = [each for item in of_kind(manifests, "RoleBinding") for each in item["subjects"]]
    assert subjects == [{"kind": "ServiceAccount", "name": name, "namespace": name}] * 2
    pods = [item["spec"]["template"]["spec"] for item in of_kind(manifests, "Deployment")]
    pods += [item["spec"] for item in of_kind(manifests, "Pod")]
    assert [(pod["serviceAccountName"], pod["priorityClassName"]) for pod in pods] == [(name, name)] * 2
    (policy,) = of_kind(manifests, "NetworkPolicy")
    (source,) = policy["spec"]["ingress"][1]["from"]
    assert source["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": name}}
    monitors = [item["spec"]["namespaceSelector"] for item in of_kind(manifests, "PodMonitor")]
    assert monitors == [{"matchNames": [name]}] * 3
