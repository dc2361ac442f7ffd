"""Which engines may change now? An edit reaches one engine of one node pool at a time, and stops at the first that fails.

Pure: desired manifests, observed objects and pods in; the manifests to apply now, and what there is to say about them, out.
Memory between two calls is in annotations of the workloads, so an operator may die between any two writes.

- A node pool changes only while the engines of all others serve. A node pool that lost an engine waits for those alone
  that are changing, and one that does not serve, or whose revision never did, for none. A change first starts a new engine
  beside the old ones. Only if the cluster has no room for it for a while (`engine_room`), and the new engine can take the
  place of an old one (`engine_place`), an old engine stops first. For an engine that no node can hold none stops: its
  deadline ends the change.
- A revision that does not serve by the deadline, or whose pods crash, is replaced by the last revision that served. The
  other node pools then keep what they have until the spec changes, even if they lose an engine.
- With `rollout.canary` a node pool first tests one engine of a new revision (`canary_hold`, `pool_canary`). While
  `rollout.paused` is set, a revision that never served reaches no further engine.
- Gateways change at once, unless the spec renames a node pool: those that run know the old name, so they and their settings
  stay until the engines of the new name have served, while engines of the old one serve.
- A new operator version renders other pods from the same spec. Workloads keep theirs until the spec changes, or until the
  annotation `tidegate.dev/restart` (engines) or `tidegate.dev/restart-all` of the pool does.
- The store changes after the gateways, which thus know a new password before the store requires it. A store without a
  volume would lose its data, so no annotation restarts it.
"""

import datetime
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate_operator import canary_hold, engine_place, engine_room, objects, pod_trouble, pool_status, quantity
from tidegate_operator.render import child_metadata, gateway_deployment, store_statefulset
from tidegate_operator.spec import Json

REVISION, SERVED, ADOPTED = canary_hold.REVISION, canary_hold.SERVED, canary_hold.ADOPTED
INPUTS = f"{child_metadata.GROUP}/inputs"
"""Annotation: the digest of the parts of the spec from which the template was built, and of the profiles in it that are
not shipped."""
FAILED = f"{child_metadata.GROUP}/failed"
"""Annotation: the revision that did not serve, as JSON with the keys `revision`, `inputs` and `why`, and `canary` if its
test failed."""
RESTART = f"{child_metadata.GROUP}/restart"
"""Annotation of a pool. A new value restarts its engines, one after the other."""
RESTART_ALL = f"{child_metadata.GROUP}/restart-all"
"""Annotation of a pool. A new value restarts its engines, its gateways and a store with a volume."""
TAKEN_OVER = gateway_deployment.RELOADED
"""Fields of the spec and of `gateway` that running gateways take over (`gateway_deployment.settings`)."""
DEFAULT_TTL = "60s"
"""Of `gateway.queue`, as stored pools have it."""
OLD_NAMES = (
    "it changes once all node pools of the spec have served, or once no engine of a removed node pool serves; until then "
    "it sends calls to those"
)
"""Told of gateways that know a removed node pool."""
PROGRESS_S = 600
"""The progress deadline that Kubernetes gives a Deployment without one."""
PAUSED = "waits, because spec.rollout.paused is set"
BEHIND_FAILED = "waits, because {} did not serve with the new spec; correct the spec of that node pool first"
"""Told of engines while the spec asks for a revision that failed in another node pool."""
STORE = pool_status.EMBEDDED_STORE

_NO_PLACE = (
    "finds no room for an engine of the new revision, and no old one stops for it, because {}; without room until its "
    "deadline the last revision that served comes back"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What to apply now."""

    desired: tuple[Json, ...]
    held: tuple[str, ...] = ()
    """Names of the workloads that do not follow the spec yet, because others go first."""
    problems: tuple[tuple[str, str], ...] = ()
    """(reason, message) of each revision that did not serve."""
    told: Mapping[str, str] = field(default_factory=dict)
    """By the name of a workload: what is being done to it, if it is not replaced as usual."""


def staged(
    body: Json, desired: Iterable[Json], observed: Iterable[Json], pods: Iterable[Json], *, now: datetime.datetime
) -> Rollout:
    """The part of `desired` that may be applied now. `body` is the ServingPool; `observed` are its children."""
    uid = body["metadata"]["uid"]
    ours = {objects.Reference.of(item): item for item in observed if objects.controller_uid(item) == uid}
    targets = [_Target(manifest, ours.get(objects.Reference.of(manifest)), body) for manifest in desired]
    engines = [target for target in targets if target.is_engine]
    every_pod = list(pods)
    unsettled = [target for target in engines if target.body is not None and not target.settled]
    changing = [target for target in unsettled if target.is_changing]
    gateways_change = any(target.is_gateway and (target.is_pending or not target.settled) for target in targets)
    gateways_wait = _needs_old_names(ours, targets)
    paused = bool(body["spec"].get("rollout", {}).get("paused"))
    manifests: list[Json] = []
    held: list[str] = []
    told: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    for target in targets:
        if gateways_wait and target.body is not None and (target.is_gateway or target.is_gateway_settings):
            manifests.append(target.held())
            if target.is_gateway:
                held.append(target.name)
                told[target.name] = OLD_NAMES
        elif not target.is_pending:
            manifests.append(target.kept(every_pod, now))
        elif paused and target.goes_forward:
            manifests.append(target.held())
            held.append(target.name)
            told[target.name] = PAUSED
        elif target.is_engine and _may_change(target, engines, unsettled, changing):
            manifests.append(target.changed())
            unsettled.append(target)
            if target.goes_forward:
                changing.append(target)
        elif not target.is_engine and not (target.is_store and gateways_change):
            manifests.append(target.changed())
        else:
            manifests.append(target.held())
            held.append(target.name)
            if target.is_engine and (failed := next((each for each in engines if each.has_failed), None)):
                told[target.name] = BEHIND_FAILED.format(failed.name)
        if target.is_engine and (problem := _problem(target, manifests[-1])):
            problems.append(problem)
        if target.is_engine and (sentence := target.obstacle(every_pod) or target.sentence(manifests[-1])):
            told.setdefault(target.name, sentence)
    return Rollout(desired=tuple(manifests), held=tuple(held), problems=tuple(problems), told=told)


def _needs_old_names(ours: Mapping[objects.Reference, Json], targets: Collection["_Target"]) -> bool:
    """Whether gateways that are about to change would forget engines that serve, before those of a new node pool do."""
    if not any(target.is_gateway and target.is_pending for target in targets):
        return False
    engines = [target for target in targets if target.is_engine and target.manifest["spec"]["replicas"]]
    if all(target.ever_served for target in engines):
        return False
    desired = {target.reference for target in targets}
    return any(
        reference not in desired
        and body["kind"] == "Deployment"
        and child_metadata.NODE_POOL in body["metadata"]["labels"]
        and pool_status.Workload.of(body).ready
        for reference, body in ours.items()
    )


def _may_change(
    target: "_Target",
    engines: Sequence["_Target"],
    unsettled: Collection["_Target"],
    changing: Collection["_Target"],
) -> bool:
    """Whether the engines of a node pool may change now. `unsettled` are the node pools of which not all engines serve, and
    `changing` those that replace a revision that served."""
    if any(each.has_failed for each in engines):
        # Another node pool takes the failed revision only where that costs nothing.
        return target.short and not target.ready and (not target.has_served or not any(each.ready for each in engines))
    if not unsettled:
        return True
    if not target.short:
        return False
    # A lost engine is no reason to change beside another node pool, but a pod without room must not block its own mend.
    return not target.has_served or not target.ready or all(each is target for each in changing)


def _problem(target: "_Target", manifest: Json) -> tuple[str, str] | None:
    failure = target.failure(manifest["metadata"]["annotations"])
    if not failure:
        return None
    what = "failed the test of the new spec" if failure.get("canary") else "did not serve with the new spec"
    why = failure.get("why", "its annotation does not say why")
    return "RolledBack", f"{target.name} {what} and runs the last one that served: {why}"


class _Target:
    """One desired object beside what exists of it."""

    def __init__(self, manifest: Json, body: Json | None, pool: Json) -> None:
        self.body = body
        self._pool = pool
        self.name: str = manifest["metadata"]["name"]
        self.reference = objects.Reference.of(manifest)
        labels = manifest["metadata"]["labels"]
        component = labels[child_metadata.COMPONENT]
        self.is_workload = manifest["kind"] in ("Deployment", "StatefulSet")
        self.is_engine = self.is_workload and child_metadata.NODE_POOL in labels
        self.is_store = self.is_workload and component == STORE
        self.is_gateway = self.is_workload and component == gateway_deployment.COMPONENT
        self.is_gateway_settings = manifest["kind"] == "ConfigMap" and component == gateway_deployment.COMPONENT
        self.manifest = _restarted(manifest, _restarts(pool, component)) if self.is_workload else manifest
        if self.is_store and body is not None:
            self.manifest = store_statefulset.beside(self.manifest, body)
        self._notes: Mapping[str, str] = {} if body is None else body["metadata"].get("annotations", {})
        self.wanted = self.inputs = self._known = ""
        self.settled, self.short, self.ready = False, False, 0
        self._rejected: str | None = None
        self._overdue: str | None = None
        if self.is_workload:
            self.wanted = child_metadata.digest(quantity.normalised(self.manifest["spec"]["template"]))
            inputs = _inputs(pool, component, labels.get(child_metadata.NODE_POOL))
            profiles = (
                self.manifest["spec"]["template"]["metadata"].get("annotations", {}).get(child_metadata.PROFILE_DIGEST)
            )
            self.inputs = self._known = _digest(inputs, profiles)
            if self.is_gateway:
                self.inputs = _digest(_read_at_start(inputs), profiles)
            elif self.is_engine:
                self.inputs = _digest(_read_by_engines(inputs), profiles)
            if body is not None:
                seen = pool_status.Workload.of(body)
                self.settled, self.short, self.ready = seen.settled, seen.short, seen.ready
                self._rejected, self._overdue = seen.rejected, seen.overdue
                if self.is_engine and self.settled and body["spec"].get("replicas") and not self.has_served:
                    self._notes = {**self._notes, SERVED: self._as_served(body)}

    @property
    def _revision(self) -> str:
        """The revision that the workload has."""
        return self._notes.get(REVISION, ADOPTED)

    @property
    def has_failed(self) -> bool:
        """Whether the spec still asks for a revision that did not serve."""
        return bool(self.failure(self._notes))

    def failure(self, notes: Mapping[str, str]) -> dict[str, Any]:
        """What the annotations of the workload say of a revision that did not serve, if the spec still asks for it; empty
        otherwise. Another operator version renders another revision from the same inputs."""
        found = canary_hold.noted(notes, FAILED)
        inputs = found.get("inputs", notes.get(INPUTS))  # earlier versions noted the inputs of the workload alone
        return found if found and (found.get("revision") == self.wanted or inputs in (self.inputs, self._known)) else {}

    @property
    def goes_forward(self) -> bool:
        """Whether the spec asks for engines of a revision that has not served here, while another one has."""
        return self.is_engine and canary_hold.replaces(self.wanted, self._notes)

    @property
    def is_changing(self) -> bool:
        """Whether the engines that exist get a revision that has not served here, while another one has."""
        return canary_hold.replaces(self._revision, self._notes)

    @property
    def has_served(self) -> bool:
        """Whether all engines have ever served with the present revision."""
        return bool(canary_hold.noted(self._notes, SERVED).get("revision") == self._revision)

    @property
    def ever_served(self) -> bool:
        """Whether all engines have ever served with any revision."""
        return SERVED in self._notes

    @property
    def is_pending(self) -> bool:
        """Whether the spec asks for other pods than the workload has."""
        if not self.is_workload or self.body is None:
            return False
        if REVISION not in self._notes:
            return self.short
        is_new = self._notes.get(INPUTS) not in (self.inputs, self._known)
        return is_new and self._notes[REVISION] != self.wanted and not self.has_failed

    def _present_template(self, body: Json) -> Json:
        """The pods of the present revision."""
        is_wanted = self._revision == self.wanted
        template: Json = self.manifest["spec"]["template"] if is_wanted else body["spec"]["template"]
        return template

    def _as_served(self, body: Json) -> str:
        """The annotation of a workload of whose present revision all engines serve, also if an edit changes them now."""
        return json.dumps({"revision": self._revision, "template": self._present_template(body)}, sort_keys=True)

    def changed(self) -> Json:
        """The manifest with the pods that the spec asks for."""
        return self._with(self.manifest["spec"]["template"], self.wanted, self.inputs, self._memory(SERVED))

    def held(self) -> Json:
        """The manifest with the pods that exist. The inputs stay too, so the change remains pending. Settings stay too."""
        assert self.body is not None
        if not self.is_workload:
            return {**self.manifest, "data": self.body.get("data") or self.manifest["data"]}
        inputs, memory = self._notes.get(INPUTS, ""), self._memory(SERVED, FAILED)
        return self._with(self.body["spec"]["template"], self._revision, inputs, memory)

    def kept(self, pods: Sequence[Json], now: datetime.datetime) -> Json:
        """The manifest of a workload that does not change its pods, unless they do not serve."""
        if not self.is_workload:
            return self.manifest
        if self.body is None:
            return self.changed()
        revision, template = self._revision, self._present_template(self.body)
        if not self.is_engine:
            return self._with(template, revision, self.inputs, {})
        served, memory = canary_hold.noted(self._notes, SERVED), self._memory(SERVED)
        if self.has_failed:
            memory |= self._memory(FAILED)
        misfit = canary_hold.failure(self._pool, revision)
        troubles = list(_troubles(self.body, pods, revision))
        is_complete = self.settled and self.body["spec"].get("replicas")
        why = misfit or self._why_not(troubles, now)
        has_other = "template" in served and served.get("revision") not in (None, revision)
        if not is_complete and has_other and why:
            told = {"revision": revision, "inputs": self.inputs, "why": why, **({"canary": True} if misfit else {})}
            memory[FAILED] = json.dumps(told)
            return self._with(served["template"], served["revision"], self.inputs, memory)
        manifest = self._with(template, revision, self.inputs, memory)
        if self.settled or not self._has_no_room(self.body, troubles) or self.obstacle(pods):
            return manifest
        if not self._is_in_place(self.body):
            if engine_room.is_freed_soon(self._without_room(self.body, pods), pods, now):
                return manifest
            since = self._notes.get(engine_room.SINCE) or engine_room.timestamp(now)
            # The room in a quota comes with no new node.
            if not self._is_over_quota and pool_status.age_s(since, now) < self._patience_s:
                return child_metadata.annotated(manifest, {engine_room.SINCE: since})
        manifest["spec"]["strategy"] = {**manifest["spec"]["strategy"], "rollingUpdate": engine_place.IN_PLACE}
        return manifest

    def obstacle(self, pods: Sequence[Json]) -> str | None:
        """Why no old engine stops for a new one that finds no room; None if one stops, or if the new one finds room."""
        if self.body is None or self.settled or self.is_pending:
            return None
        if not self._has_no_room(self.body, list(_troubles(self.body, pods, self._revision))):
            return None
        why = engine_place.obstacle(
            _pods_of(self.body, pods),
            revision=self._revision,
            served=canary_hold.noted(self._notes, SERVED).get("revision"),
            rejected=self._rejected_pod(self.body),
        )
        return _NO_PLACE.format(why) if why else None

    def _without_room(self, body: Json, pods: Sequence[Json]) -> list[engine_place.Asks]:
        """The new engines that find no room."""
        rejected = self._rejected_pod(body)
        return engine_place.without_room(_pods_of(body, pods), revision=self._revision, rejected=rejected)

    def _rejected_pod(self, body: Json) -> Json | None:
        """The spec of the pods that a quota rejects, if one does."""
        return body["spec"]["template"]["spec"] if self._is_over_quota else None

    def sentence(self, manifest: Json) -> str | None:
        """What is told of engines whose revision, in the manifest that is applied now, replaces another one."""
        notes = manifest["metadata"]["annotations"]
        if not manifest["spec"]["replicas"] or not canary_hold.replaces(notes[REVISION], notes):
            return None
        if engine_room.SINCE in notes:
            return engine_room.WAITS.format(self._patience_s)
        return canary_hold.sentence(self._pool, notes[REVISION])

    def _why_not(self, troubles: Sequence[pod_trouble.PodTrouble], now: datetime.datetime) -> str | None:
        """Why the pods of the revision will not serve; None while they may."""
        final = [each for each in troubles if pool_status.age_s(each.since, now) >= each.final_after_s]
        if final:
            return final[0].sentence
        # Where a quota has no room for one more engine, an old one stops first (`kept`), so that is no failure yet.
        stuck = None if self._is_over_quota and not self._overdue else self._rejected or self._overdue
        return troubles[0].sentence if stuck and troubles else stuck

    def _has_no_room(self, body: Json, troubles: Iterable[pod_trouble.PodTrouble]) -> bool:
        """Whether a new engine beside the old ones finds no room now. Stays true once an old engine stops for it."""
        return self._is_in_place(body) or self._is_over_quota or any(bool(trouble.lacks) for trouble in troubles)

    @staticmethod
    def _is_in_place(body: Json) -> bool:
        """Whether an old engine stops before a new one starts, which holds until the change has ended."""
        return bool(body["spec"].get("strategy", {}).get("rollingUpdate") == engine_place.IN_PLACE)

    @property
    def _patience_s(self) -> float:
        return engine_room.patience_s(self._pool, self.manifest["spec"].get("progressDeadlineSeconds", PROGRESS_S))

    @property
    def _is_over_quota(self) -> bool:
        return "exceeded quota" in (self._rejected or "")

    def _memory(self, *keys: str) -> dict[str, str]:
        return {key: self._notes[key] for key in keys if key in self._notes}

    def _with(self, template: Json, revision: str, inputs: str, memory: Mapping[str, str]) -> dict[str, Any]:
        if self.is_engine and revision != ADOPTED:
            template = child_metadata.annotated(template, {REVISION: revision})
        noted = child_metadata.annotated(self.manifest, {REVISION: revision, INPUTS: inputs, **memory})
        spec = {**self.manifest["spec"], "template": template}
        if self.is_engine and spec["replicas"] and self.body and canary_hold.replaces(revision, memory):
            spec |= canary_hold.fields(self._pool, revision, spec.get("progressDeadlineSeconds", PROGRESS_S), self.body)
        return {**noted, "spec": spec}


def _restarts(pool: Json, component: str) -> dict[str, str]:
    """The annotations of the pool that restart this component."""
    given = pool["metadata"].get("annotations", {})
    loses_data = component == STORE and "storage" not in pool["spec"]["state"]["valkey"]
    wanted = () if loses_data else (RESTART, RESTART_ALL) if component == "engine" else (RESTART_ALL,)
    return {name: given[name] for name in wanted if name in given}


def _restarted(manifest: Json, restarts: Mapping[str, str]) -> Json:
    if not restarts:
        return manifest
    template = child_metadata.annotated(manifest["spec"]["template"], restarts)
    return {**manifest, "spec": {**manifest["spec"], "template": template}}


def _digest(inputs: Any, profiles: str | None) -> str:
    """Only profiles that are not shipped count, so that an upgrade of those that are restarts nothing."""
    return child_metadata.digest([inputs, profiles] if profiles else inputs)


def _inputs(pool: Json, component: str, node_pool: str | None) -> Any:
    """The parts of the spec that shape the pods of a component. The number of engines is not among them. Parts that an
    earlier version did not have change the inputs only where they are given, so an upgrade restarts nothing."""
    spec, restarts = pool["spec"], _restarts(pool, component)
    if component == "gateway":
        pools = [_uncounted(item) for item in spec["nodePools"]]
        rest = {
            key: value for key, value in spec.items() if key not in ("replicas", "classes", "autoscaling", "rollout")
        }
        if any(item.get("scaledBy") == "autoscaler" for item in spec["nodePools"]):
            rest["autoscaling"] = {"holdCalls": spec.get("autoscaling", {}).get("holdCalls")}
        classes = [_without_new_default(item) for item in spec.get("classes", ())]
        whole = {**rest, **({"classes": classes} if classes else {}), "nodePools": pools}
        return [whole, restarts] if restarts else whole
    parts = ("credentials",) if component == STORE else ("credentials", "caBundle")
    given = {name: spec[name] for name in parts if name in spec}
    added = given | {name: value for name, value in restarts.items() if name == RESTART_ALL}
    if component == STORE:
        return [spec["state"], added] if added else spec["state"]
    (own,) = (_uncounted(item) for item in spec["nodePools"] if item["name"] == node_pool)
    inputs = [spec["model"], spec["engine"], own, spec["gateway"].get("queue"), restarts.get(RESTART)]
    return [*inputs, added] if added else inputs


def _read_at_start(inputs: Any) -> Any:
    """The inputs of a gateway without what it takes over while it runs, so that such an edit does not touch its
    Deployment. Earlier versions noted all inputs."""
    if isinstance(inputs, list):
        whole, restarts = inputs
        return [_read_at_start(whole), restarts]
    gateway = {key: value for key, value in inputs["gateway"].items() if key not in TAKEN_OVER}
    return {**{key: value for key, value in inputs.items() if key not in TAKEN_OVER}, "gateway": gateway}


def _read_by_engines(inputs: Any) -> Any:
    """The inputs of engines without the time that calls may wait in gateways. Its default stands there, so that most pools
    have the inputs that earlier versions noted."""
    model, engine, own, queue, *rest = inputs
    if queue and "ttl" in queue:
        queue = {**queue, "ttl": DEFAULT_TTL}
    return [model, engine, own, queue, *rest]


def _uncounted(node_pool: Json) -> Json:
    counts = ("replicas", "minReplicas", "maxReplicas", "costWeight", "scaledBy")
    return {key: value for key, value in node_pool.items() if key not in counts}


def _without_new_default(item: Json) -> Json:
    """A class without the default of `objective`, which stored pools get when the resource is upgraded."""
    return {key: value for key, value in item.items() if (key, value) != ("objective", 95)}


def _troubles(body: Json, pods: Iterable[Json], revision: str) -> Iterator[pod_trouble.PodTrouble]:
    """Of the workload's pods of this revision."""
    for pod in _pods_of(body, pods):
        if canary_hold.revision_of(pod) == revision and (trouble := pod_trouble.of(pod)):
            yield trouble


def _pods_of(body: Json, pods: Iterable[Json]) -> Iterator[Json]:
    labels = body["spec"]["selector"]["matchLabels"]
    return (pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items())
