"""A revision that failed in one node pool keeps later edits from the others, and these say so."""

from tidegate_operator import rollout

from .simulated_deployments import manifests, pool, started


def test_a_later_edit_of_another_node_pool_is_told_which_node_pool_must_be_corrected_first():
    def edited(node_pool, **engine):
        body = pool(image="v1")
        for item in body["spec"]["nodePools"]:
            item |= {"engine": engine} if item["name"] == node_pool else {}
        return body

    def rendered(body):
        found = manifests(body)
        for item, manifest in zip(body["spec"]["nodePools"], found, strict=False):
            manifest["spec"]["template"]["spec"] |= item.get("engine", {})
        return found

    def rounds(body, count=40):
        for _ in range(count):
            found = rollout.staged(body, rendered(body), cluster.observed(), cluster.listed(), now=cluster.now)
            cluster.apply(found.desired)
            cluster.step()
        return found

    cluster = started()
    cluster.broken = {"bad"}
    both = edited("a", image="bad")
    assert rounds(both).told == {}
    both["spec"]["nodePools"][2]["engine"] = {"image": "v2"}
    found = rounds(both)
    assert found.held == ("chat-engine-c",)
    assert "chat-engine-a did not serve" in found.told["chat-engine-c"]
    assert cluster.images() == {"v1"}
    both["spec"]["nodePools"][0]["engine"] = {"image": "v3"}
    assert rounds(both).told == {}
    assert cluster.images() == {"v1", "v2", "v3"}
