"""A simulated cluster that carries out what the plan of a roll-out says, so that whole roll-outs run without a clock."""

import copy
import datetime

import operator_doubles
from tidegate_operator import engine_place, pool_status, rollout

UID = "pool-uid"
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
STEP_S = 30.0
"""Time that a step of the simulated cluster takes."""


def pool(**engine):
    body = operator_doubles.pool(nodePools=[{"name": name, "replicas": 2} for name in ("a", "b", "c")], gateway={})
    body["metadata"] |= {"uid": UID, "annotations": {}}
    body["spec"]["state"] = {"valkey": {"embedded": True}}
    body["spec"]["engine"] |= engine
    return body


def manifests(body, *, version="1"):
    """What rendering makes of the spec: an operator of another `version` renders other pods."""
    owner = {"uid": UID, "controller": True}

    def workload(name, component, template, *, replicas=2, **labels):
        metadata = {"name": name, "namespace": "n", "ownerReferences": [owner]}
        metadata["labels"] = {"app.kubernetes.io/component": component, **labels}
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "strategy": {}, "template": template}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}

    found = []
    for item in body["spec"]["nodePools"]:
        labels = {"tidegate.dev/node-pool": item["name"]}
        engine = body["spec"]["engine"]
        image = {"image": engine.get("image"), "by": version}
        if "resources" in engine:
            image["containers"] = [{"resources": engine["resources"]}]
        image |= {name: engine[name] for name in ("nodeSelector",) if name in engine}
        template = {"metadata": {"labels": labels}, "spec": image}
        found.append(workload(f"chat-engine-{item['name']}", "engine", template, replicas=item["replicas"], **labels))
    found.append(workload("chat-gateway", "gateway", {"metadata": {}, "spec": {"by": version}}))
    return found


NO_IMAGE = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]}
NO_WEIGHTS = {
    "initContainerStatuses": [
        {
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "WeightsNotFound: no such model: correct the URI"}},
            "restartCount": 1,
        }
    ]
}
"""Status of the pods of images in `broken`."""


OVER_QUOTA = 'pods "chat-engine-a-1" is forbidden: exceeded quota: gpus, requested: 1, used: 2, limited: 2'


class Simulated:
    """A cluster with controllers, which replace one pod in each step as the strategy allows. `spare` is the number of pods
    for which each workload has room beside its replicas; images in `broken` never become ready. No node has more memory
    than `NODE`, or a label. With `late` the deadlines of all changes are over. A `quota` is the most pods of a workload,
    placed or not. An engine that stops leaves its place after `drain_s`."""

    NODE = 2**40

    def __init__(self, *, spare=1, broken=(), quota=100, drain_s=0.0):
        self.spare, self.broken, self.failure, self.late = spare, set(broken), NO_IMAGE, False
        self.quota, self.rejected = quota, set()
        self.now, self.drain_s, self.leaving = NOW, drain_s, {}
        self.stated, self.generations, self.seen, self.pods, self.writes = {}, {}, {}, {}, 0

    def apply(self, desired):
        for manifest in desired:
            name = manifest["metadata"]["name"]
            if self.stated.get(name) != manifest:
                self.writes += 1
                self.stated[name] = copy.deepcopy(manifest)
                self.generations[name] = self.generations.get(name, 0) + 1
                self.pods.setdefault(name, [])
                self.leaving.setdefault(name, [])

    def step(self):
        self.seen = dict(self.generations)
        self.now += datetime.timedelta(seconds=STEP_S)
        for name, manifest in self.stated.items():
            spec, pods = manifest["spec"], self.pods[name]
            self.leaving[name] = [pod for pod in self.leaving[name] if pod["until"] > self.now]
            wanted, template = spec["replicas"], spec["template"]
            old = [pod for pod in pods if pod["template"] != template]
            rules = spec["strategy"].get("rollingUpdate", {"maxSurge": 1, "maxUnavailable": 0})
            idle = [pod for pod in old if not self.available(pod)]
            if spec.get("paused"):
                continue
            if not pods:
                pods += [self.made(template, placed=True) for _ in range(wanted)]
            elif idle:
                self.stop(name, idle[0])
            elif old and sum(map(self.available, pods)) > wanted - rules["maxUnavailable"]:
                self.stop(name, old[0])
            elif len(pods) - len(old) < wanted and len(pods) < wanted + rules["maxSurge"]:
                if len(pods) < self.quota:
                    pods.append(self.made(template, placed=False))
                    self.rejected.discard(name)
                else:
                    self.rejected.add(name)
            for pod in pods:
                if pod["template"] == template:
                    pod["held"] = bool(spec.get("minReadySeconds"))
                has_room = sum(other["placed"] for other in [*pods, *self.leaving[name]]) < wanted + self.spare
                pod["placed"] = pod["placed"] or (has_room and self.holds(pod["template"]["spec"]))

    def made(self, template, *, placed):
        created = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"template": template, "placed": placed, "held": False, "created": created}

    def holds(self, spec):
        """Whether an empty node takes the pod."""
        return engine_place.amounts(spec, "requests").get("memory", 0) <= self.NODE and "nodeSelector" not in spec

    def stop(self, name, pod):
        self.pods[name].remove(pod)
        if pod["placed"] and self.drain_s:
            self.leaving[name].append({**pod, "until": self.now + datetime.timedelta(seconds=self.drain_s)})

    def lose(self, name, count=1):
        """Engines of a node pool end, and do not come back."""
        for pod in self.pods[name][:count]:
            pod["lost"] = True

    def ready(self, pod):
        return pod["placed"] and not pod.get("lost") and pod["template"]["spec"].get("image") not in self.broken

    def available(self, pod):
        """A pod of a Deployment with minReadySeconds is ready long before it is available."""
        return self.ready(pod) and not pod["held"]

    def observed(self):
        found = []
        for name, manifest in self.stated.items():
            pods = self.pods[name]
            body = copy.deepcopy(manifest)
            body["metadata"]["generation"] = self.generations[name]
            body["status"] = {
                "observedGeneration": self.seen.get(name, 0),
                "replicas": len(pods),
                "updatedReplicas": sum(pod["template"] == manifest["spec"]["template"] for pod in pods),
                "readyReplicas": sum(map(self.ready, pods)),
                "availableReplicas": sum(map(self.available, pods)),
            }
            conditions = body["status"]["conditions"] = []
            if name in self.rejected:
                conditions.append({"type": "ReplicaFailure", "status": "True", "message": OVER_QUOTA})
            if self.late:
                conditions.append({"type": "Progressing", "status": "False", "message": "the deadline is over"})
            found.append(body)
        return found

    def listed(self):
        """The pods with their troubles."""
        found = []
        for name, pods in self.pods.items():
            for pod in [*pods, *self.leaving[name]]:
                status = {}
                if not pod["placed"]:
                    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                    status = {
                        "conditions": [
                            {**condition, "message": "0/3 nodes: 3 Insufficient memory, 3 Insufficient nvidia.com/gpu."}
                        ]
                    }
                elif not self.ready(pod):
                    status = self.failure
                else:
                    status = {"conditions": [{"type": "Ready", "status": "True"}]}
                notes = pod["template"]["metadata"].get("annotations", {})
                labels = self.stated[name]["metadata"]["labels"]
                spec = pod["template"]["spec"] | ({"nodeName": "node"} if pod["placed"] else {})
                metadata = {"name": name, "annotations": notes, "labels": labels, "creationTimestamp": pod["created"]}
                if "until" in pod:
                    metadata["deletionTimestamp"] = pod["until"].strftime("%Y-%m-%dT%H:%M:%SZ")
                found.append({"metadata": metadata, "spec": spec, "status": status})
        return found

    def serving(self):
        """Ready engines of each node pool."""
        return {name: sum(map(self.ready, pods)) for name, pods in self.pods.items() if "engine" in name}

    def images(self):
        return {
            pod["template"]["spec"].get("image") for name, pods in self.pods.items() if "engine" in name for pod in pods
        }


def staged(cluster, body, *, version="1"):
    return rollout.staged(body, manifests(body, version=version), cluster.observed(), cluster.listed(), now=cluster.now)


def run(cluster, body, *, rounds=80, version="1"):
    """Reconciles and moves. Returns the last roll-out, the least that served meanwhile, and whether all has settled."""
    least = cluster.serving() or None
    for _ in range(rounds):
        found = staged(cluster, body, version=version)
        cluster.apply(found.desired)
        cluster.step()
        serving = cluster.serving()
        least = serving if least is None else {name: min(least[name], serving[name]) for name in least}
    settled = all(pool_status.Workload.of(item).settled for item in cluster.observed())
    return found, least, settled


def started(**more):
    cluster = Simulated(**more)
    found, _, settled = run(cluster, pool(image="v1"), rounds=5)
    assert settled
    assert not found.problems
    return cluster
