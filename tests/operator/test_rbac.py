"""The rights that the chart gives the operator: all that it needs, and not one more.

The audit log of the API server tells what an operator that lives through everything really asks for.
"""

import datetime
import json

import pytest

import operator_doubles
from tidegate_operator import objects, reconcile, render, replica_allocation, spec

UNSEEN = {
    # Server-side apply creates what is not there: the API server checks "create", and the audit log says "patch".
    *(
        (group, resource, "create")
        for group, resource in (
            ("apps", "deployments"), ("apps", "statefulsets"), ("", "serviceaccounts"), ("", "configmaps"),
            ("", "services"), ("policy", "poddisruptionbudgets"), ("networking.k8s.io", "networkpolicies"),
        )
    ),
    # Checked where the cluster protects owner references, without a request of its own.
    ("tidegate.dev", "servingpools/finalizers", "update"),
}  # fmt: skip


_RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
DOWNLOAD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "download", "labels": {"tidegate.dev/pool": "chat", "tidegate.dev/node-pool": "fast"}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [{"name": "weights", "image": "x", "securityContext": _RESTRICTED}],
        "containers": [{"name": "engine", "image": "x", "securityContext": _RESTRICTED}],
        "nodeSelector": {"kubernetes.io/hostname": "none"},
    },
}


def granted(roles):
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def roles_of(plane, *namespaces):
    """The operator's own roles: those that its ServiceAccount is bound to."""
    found = [json.loads(plane.kubectl("get", "roles", "-n", name, "-o", "json"))["items"] for name in namespaces]
    return [role for items in found for role in items]


def asked(plane, user):
    """(group, resource, verb) of every request of `user`, and those that were forbidden."""
    seen, forbidden = set(), []
    for line in plane.audit_log.read_text().splitlines():
        record = json.loads(line)
        if record["user"]["username"] != user or "objectRef" not in record:
            continue
        about = record["objectRef"]
        resource = about["resource"] + (f"/{about['subresource']}" if "subresource" in about else "")
        seen.add((about.get("apiGroup", ""), resource, record["verb"]))
        if record["responseStatus"]["code"] == 403:
            forbidden.append(record["responseStatus"]["message"])
    return seen, forbidden


async def test_the_operator_needs_all_its_rights_and_no_others(
    plane, kubectl, operator, namespace, cluster, rules, eventually
):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    # Children of every kind that an older version has left must go.
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    # Another owner has names that a pool needs, and the operator looks which owner.
    for manifest in one_of_each(pool, rules):
        name = manifest["metadata"]["name"].replace("chat", "rival")
        await cluster.apply({**manifest, "metadata": {"name": name, "namespace": namespace}})
    kubectl("create", "-f", "-", body=operator_doubles.pool("rival"))
    kubectl("wait", "spool/rival", "--for=condition=Degraded", "--timeout=120s")
    kubectl("delete", "spool/rival")
    # A download of weights, whose progress is in its log.
    kubectl("create", "-f", "-", body=DOWNLOAD)
    running = {"name": "weights", "image": "x", "imageID": "x", "ready": False, "restartCount": 0}
    status = {"status": {"initContainerStatuses": [{**running, "state": {"running": {}}}]}}
    kubectl("patch", "pod/download", "--subresource=status", "--type=merge", "-p", json.dumps(status))
    eventually(lambda: ("", "pods/log", "get") in asked(plane, operator.user)[0])
    kubectl("delete", "pod/download", "--now")
    old = [
        {**manifest, "metadata": {**manifest["metadata"], "name": "chat-old"}} for manifest in one_of_each(pool, rules)
    ]
    for manifest in old:
        await cluster.apply(manifest)
    kubectl("scale", "spool/chat", "--replicas=4")
    kinds = ",".join(kind.plural for kind in objects.CHILD_KINDS)
    eventually(lambda: "chat-old" not in kubectl("get", kinds, "-o", "name"))
    kubectl("wait", "spool/chat", "--for=jsonpath={.status.engines}=4/4", "--timeout=120s")
    # An autoscaled pool, whose rivals are looked for.
    own = {"name": "own", "scaledBy": "autoscaler", "maxReplicas": 2}
    kubectl("create", "-f", "-", body=operator_doubles.pool("auto", nodePools=[own]))
    eventually(lambda: ("autoscaling", "horizontalpodautoscalers", "list") in asked(plane, operator.user)[0])
    operator.stop()
    seen, forbidden = asked(plane, operator.user)
    assert forbidden == []
    allowed = granted(roles_of(plane, namespace, operator.system))
    assert seen <= allowed
    assert allowed - seen - UNSEEN == set()


def one_of_each(pool, rules):
    manifests = render.manifests(pool, replica_allocation.desired(pool), images=rules.images, operator_namespace="x")
    return {manifest["kind"]: manifest for manifest in manifests}.values()


@pytest.mark.parametrize("right", sorted(UNSEEN), ids=":".join)
async def test_each_right_that_the_audit_log_does_not_show_is_needed(
    plane, kubectl, installed, as_operator, namespace, rules, right
):
    group, resource, verb = right
    (role,) = roles_of(plane, namespace)
    for rule in [rule for rule in role["rules"] if group in rule["apiGroups"] and resource in rule["resources"]]:
        rule["resources"].remove(resource)
        fewer = [item for item in rule["verbs"] if item != verb]
        role["rules"].append({"apiGroups": [group], "resources": [resource], "verbs": fewer})
    role["rules"] = [rule for rule in role["rules"] if rule["resources"] and rule["verbs"]]
    kubectl("replace", "-f", "-", body=role)
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    now = datetime.datetime.now(datetime.UTC)
    result = await reconcile.reconcile(as_operator, namespace, "chat", rules=rules, now=now)
    assert result is reconcile.Result.REJECTED
