"""Calls reach the engines of a renamed node pool until those of its new name serve."""

import pytest

from tidegate_operator import rollout

from .simulated_deployments import Simulated, manifests, pool


def with_settings(body):
    """The manifests of a pool whose gateways read the names of the node pools at their start."""
    names = " ".join(item["name"] for item in body["spec"]["nodePools"])
    *engines, gateway = manifests(body)
    gateway["spec"]["template"]["metadata"] = {"annotations": {"tidegate.dev/config-digest": names}}
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"gateway.yaml": names}}
    return [*engines, gateway, settings | {"metadata": gateway["metadata"]}]


class Pool:
    """A pool on a simulated cluster, which does not carry out its ConfigMap."""

    def __init__(self):
        self.body, self.cluster, self.settings = pool(image="v1"), Simulated(broken={"bad"}), []
        for _ in range(3):
            self.reconcile()
            self.cluster.step()

    def reconcile(self):
        """Returns the names of the workloads that wait."""
        observed = [*self.cluster.observed(), *self.settings]
        found = rollout.staged(self.body, self.manifests(), observed, self.cluster.listed(), now=self.cluster.now)
        *workloads, settings = found.desired
        self.cluster.apply(workloads)
        self.settings = [settings]
        return found.held

    def manifests(self):
        return with_settings(self.body)

    def known(self):
        """The node pools that the gateways know, and those that they know after a restart."""
        template = self.cluster.stated["chat-gateway"]["spec"]["template"]
        (settings,) = self.settings
        return template["metadata"]["annotations"]["tidegate.dev/config-digest"], settings["data"]["gateway.yaml"]


@pytest.fixture
def served():
    return Pool()


def test_gateways_know_the_engines_of_a_renamed_node_pool_until_their_successors_have_served(served):
    served.body["spec"]["nodePools"][2]["name"] = "d"
    for _ in range(2):
        assert served.reconcile() == ("chat-gateway",)
        assert served.known() == ("a b c", "a b c")
    served.cluster.step()
    assert served.reconcile() == ()
    assert served.known() == ("a b d", "a b d")
    served.cluster.lose("chat-engine-d", 2)
    assert served.reconcile() == ()
    assert served.known() == ("a b d", "a b d"), "it does not go back"


def test_where_the_new_name_never_serves_gateways_know_the_old_engines_as_long_as_these_serve(served, monkeypatch):
    served.body["spec"]["nodePools"][2]["name"] = "d"
    bad = with_settings(served.body)
    bad[2]["spec"]["template"]["spec"]["image"] = "bad"
    monkeypatch.setattr(served, "manifests", lambda: bad)
    for _ in range(20):
        assert served.reconcile() == ("chat-gateway",)
        served.cluster.step()
    assert served.known() == ("a b c", "a b c")
    served.cluster.lose("chat-engine-c", 2)
    assert served.reconcile() == ()
    assert served.known() == ("a b d", "a b d")


def test_gateways_forget_a_node_pool_that_the_spec_removes_at_once(served):
    served.body["spec"]["nodePools"][1:] = [{"name": "d", "replicas": 0}]  # without engines it replaces no other
    assert served.reconcile() == ()
    assert served.known() == ("a d", "a d")


def test_gateways_know_a_node_pool_that_the_spec_adds_at_once(served):
    served.body["spec"]["nodePools"].append({"name": "d", "replicas": 1})
    assert served.reconcile() == ()
    assert served.known() == ("a b c d", "a b c d")
