"""The steps of `e2e` with a pool of simulated engines: calls, a workflow, switches of the policy, `kubectl scale`."""

import json

import e2e_cluster

LOADS = ("overload", "blocking", "misses")
"""The beginnings of reasons that name a load."""


def tell(story: e2e_cluster.Story, cluster: e2e_cluster.Cluster) -> None:
    story.check("kubectl apply of a pool with two node pools: ready", lambda: apply_pool(cluster))
    story.check("a chat completion through the gateway's Service, whole and streamed", lambda: chat(cluster))
    story.check("a workflow of three stages through the gateway's Service", lambda: workflow(cluster))
    story.check("a load shift switches the policy on every engine", lambda: switch(cluster))
    story.check("chat, long jobs, then deadlines: the policy follows, with reasons", lambda: steer(cluster))
    story.check("kubectl scale", lambda: scale(cluster))


def apply_pool(cluster: e2e_cluster.Cluster) -> str:
    cluster.kubectl("apply", "-n", e2e_cluster.WORK, "-f", str(e2e_cluster.E2E / "pool.yaml"))
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/chat", "--for=condition=Ready", "--timeout=180s")
    return cluster.kubectl("get", "-n", e2e_cluster.WORK, "spool,pods")


def chat(cluster: e2e_cluster.Cluster) -> str:
    answer = e2e_cluster.ask(cluster, "chat", e2e_cluster.GATEWAY, "demo", "What is the capital of France?")
    e2e_cluster.expect(
        answer["status"] == 200 and "simulated" in answer["text"] and answer["streamed"] == answer["text"], answer
    )
    return json.dumps(answer)


def workflow(cluster: e2e_cluster.Cluster) -> str:
    answer = e2e_cluster.ask(cluster, "workflow", e2e_cluster.GATEWAY, "demo")
    e2e_cluster.expect(answer["status"] == 200 and answer.get("state") == "done", answer)
    return f"{answer['id']}: {answer['state']}, stages {[stage['state'] for stage in answer['stages']]}"


def switch(cluster: e2e_cluster.Cluster) -> str:
    e2e_cluster.wait_for(
        lambda: e2e_cluster.policies(cluster, "chat") == {e2e_cluster.active_policy(cluster, "chat")}, timeout_s=30
    )
    calm = e2e_cluster.policies(cluster, "chat")
    e2e_cluster.expect(calm == {e2e_cluster.active_policy(cluster, "chat")}, calm)
    load = cluster.start(
        "exec",
        "-i",
        "-n",
        e2e_cluster.WORK,
        "client",
        "--",
        *e2e_cluster.program("load", e2e_cluster.GATEWAY, "demo", "40"),
    )
    switched = e2e_cluster.wait_for(
        lambda: e2e_cluster.policies(cluster, "chat") == {e2e_cluster.active_policy(cluster, "chat")} != calm,
        timeout_s=60,
    )
    found = e2e_cluster.engine_states(cluster, "chat")
    output, _ = load.communicate()
    counts = json.loads(output.splitlines()[-1])
    e2e_cluster.expect(
        switched, f"after {counts}: {e2e_cluster.active_policy(cluster, 'chat')}, on the engines {found}"
    )
    e2e_cluster.expect(len(found) == 3, found)
    events = cluster.kubectl("events", "-n", e2e_cluster.WORK, "--for", "servingpool/chat")
    e2e_cluster.expect("PolicySwitched" in events, events)
    line = next(line for line in events.splitlines() if "PolicySwitched" in line)
    return f"{counts}\n{line}\n{json.dumps(found)}"


def steer(cluster: e2e_cluster.Cluster) -> str:
    """The demonstration of `tools/steering/demonstrate` on this cluster: three kinds of load, and the switches. A pool that
    still serves by the policy for an overload has no need to switch to it, so the loads come once more; a policy that was
    chosen for misses may then serve an overload too."""
    policy = {"allow": ["urgency", "edf", "sjf", "two-lane"], "rollback": {"window": "8s", "rho": "1.2"}}
    cluster.kubectl(
        "patch", "-n", e2e_cluster.WORK, "spool/chat", "--type=merge", "-p", json.dumps({"spec": {"policy": policy}})
    )
    get = ("exec", "-n", e2e_cluster.WORK, "deploy/chat-gateway", "--", "tidegate", "policy", "get")
    earlier = {each["at"] for each in json.loads(cluster.kubectl(*get, "--json"))["switches"]}
    watch = cluster.start(*get, "--watch")
    counts, reasons = [], list[str]()
    while len(counts) < 3 and not any(reason.startswith(LOADS) for reason in reasons):
        counts.append(e2e_cluster.ask(cluster, "phases", e2e_cluster.GATEWAY, "demo", "30"))
        switches = json.loads(cluster.kubectl(*get, "--json"))["switches"]
        reasons = [each["reason"] for each in switches if each["source"] == "steered" and each["at"] not in earlier]
    watch.terminate()
    told, _ = watch.communicate(timeout=60)
    e2e_cluster.expect(any(reason.startswith(LOADS) for reason in reasons), told)
    e2e_cluster.wait_for(
        lambda: e2e_cluster.policies(cluster, "chat") == {e2e_cluster.active_policy(cluster, "chat")}, timeout_s=30
    )
    e2e_cluster.expect(
        e2e_cluster.policies(cluster, "chat") == {e2e_cluster.active_policy(cluster, "chat")},
        e2e_cluster.engine_states(cluster, "chat"),
    )
    return f"{json.dumps(counts)}\n{told}"


def scale(cluster: e2e_cluster.Cluster) -> str:
    cluster.kubectl("scale", "-n", e2e_cluster.WORK, "spool/chat", "--replicas=4")
    cluster.kubectl(
        "wait", "-n", e2e_cluster.WORK, "spool/chat", "--for=jsonpath={.status.engines}=4/4", "--timeout=120s"
    )
    return cluster.kubectl("get", "-n", e2e_cluster.WORK, "spool")
