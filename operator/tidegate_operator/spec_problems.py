"""The mistakes in a ServingPool that the API server cannot detect, each with its field and its reason.

The names of dispatch rules and profiles are not in the CRD, so that a new one needs no change there. Cycles of stages, the
ranges of policy parameters, and the ranges of decimal numbers that are strings are beyond the CEL rules of `crds/`.
"""

import graphlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate_operator import node_pool_spec, own_profile, quantity
from tidegate_operator.weights import weight_source
from tidegate_policy import policies
from tidegate_policy.admit import entitlements

_Json = Mapping[str, Any]


COST = (0, 1e6)
WEIGHT = (0.001, 1e6)
SIM_SPEED = (0.01, 1000)
RHO = (1, 100)
"""Smallest and largest values of numbers that may be decimal strings."""


SET_BY_OTHER_FIELDS = {
    "--model": "model.uri",
    "--served-model-name": "model.name",
    "--tensor-parallel-size": "nodePools[].tensorParallel",
    "-tp": "nodePools[].tensorParallel",
    "--host": "",
    "--port": "",
    "--control": "",
}
"""Arguments of engines that the operator sets, and the field with the value that a user chooses, if any."""
FOR_SEVERAL_NODES = {"--nnodes", "-n", "--node-rank", "-r", "--headless", "--data-parallel-address", "-dpa"}
"""Arguments of one of the processes of an engine on several nodes (decision 55)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    field: str
    """For example spec.workflows[text2sql].stages."""
    why: str

    def __str__(self) -> str:
        return f"{self.field}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The names that this version implements and a spec may use."""

    policies: frozenset[str]
    rules: frozenset[str]
    profiles: frozenset[str]
    selectors: frozenset[str]
    gateway_api: bool = False
    """The operator may write objects of the Gateway API."""


def outdated_resource(field: str) -> Problem:
    """The problem of a pool without a field that has a default: the ServingPool resource does not have the field."""
    return Problem(
        field="spec",
        why=f"the field {field} has no value, so the ServingPool resource of this cluster is older than this operator; "
        "upgrade it: kubectl apply --server-side --force-conflicts -f crds/servingpools.tidegate.dev.yaml",
    )


def find(spec: _Json, known: Known, profiles: own_profile.OwnProfiles) -> Iterator[Problem]:
    """Every problem of a `spec` that the API server has accepted."""
    yield from _number_problems(spec)
    yield from _argument_problems("spec.engine.args", spec["engine"])
    for item in spec["nodePools"]:
        yield from _argument_problems(f"spec.nodePools[{item['name']}].args", item)
    yield from _device_problems(spec)
    yield from _policy_problems(spec["policy"], known.policies)
    yield from _selector_problems(spec["policy"], known.selectors)
    yield from _parameter_problems(spec["policy"], known.policies)
    yield from _rule_problems(spec["gateway"]["dispatch"], known.rules)
    yield from _profile_problems(spec["nodePools"], known.profiles, profiles)
    yield from _weight_problems(spec)
    yield from _adapter_problems(spec)
    yield from _workflow_problems(spec.get("workflows", ()))
    if "api" in spec["gateway"] and not known.gateway_api:
        yield Problem(
            field="spec.gateway.api",
            why="this operator has no rights to the Gateway API; install the chart with gatewayApi.enabled=true",
        )


def _weight_problems(spec: _Json) -> Iterator[Problem]:
    """URIs that an earlier version of the CRD accepted."""
    named = [
        ("spec.model.uri", spec["model"]),
        *((f"spec.nodePools[{item['name']}].uri", item) for item in spec["nodePools"]),
        *((f"spec.model.adapters[{item['name']}].uri", item) for item in spec["model"].get("adapters", ())),
    ]
    for field, item in named:
        try:
            if "uri" in item:
                weight_source.parse(item["uri"])
        except ValueError as error:
            yield Problem(field=field, why=f"{error}: write a URI such as hf://OWNER/NAME or hostpath:///FOLDER")


def _adapter_problems(spec: _Json) -> Iterator[Problem]:
    """A CEL rule over the adapters of every node pool would cost more than the API server permits."""
    declared = [item["name"] for item in spec["model"].get("adapters", ())]
    for item in spec["nodePools"]:
        for name in item.get("adapters", ()):
            if name not in declared:
                field = f"spec.nodePools[{item['name']}].adapters"
                yield Problem(field=field, why=f"spec.model.adapters has no {name!r}; add it there")
    if declared:
        named = [("spec.engine.args", spec["engine"])]
        named += [(f"spec.nodePools[{item['name']}].args", item) for item in spec["nodePools"]]
        for field, item in named:
            if any(_flag(argument) == "--lora-modules" for argument in item.get("args", ())):
                yield Problem(field=field, why="spec.model.adapters sets --lora-modules: declare all adapters there")


def _number_problems(spec: _Json) -> Iterator[Problem]:
    """The schema checks the range of integers, and the form of the decimal numbers that are strings."""
    named = [
        *((f"spec.nodePools[{item['name']}].costWeight", item["costWeight"], COST) for item in spec["nodePools"]),
        *(
            (f"spec.{group}[{item['name']}].weight", item["weight"], WEIGHT)
            for group in ("classes", "tenants")
            for item in spec.get(group, ())
        ),
        *(
            (f"spec.classes[{item['name']}].objective", item["objective"], entitlements.OBJECTIVES)
            for item in spec.get("classes", ())
        ),
        ("spec.engine.simSpeed", spec["engine"].get("simSpeed", 1), SIM_SPEED),
        ("spec.gateway.dispatch.beta", spec["gateway"]["dispatch"]["beta"], WEIGHT),
        ("spec.policy.rollback.rho", spec["policy"]["rollback"]["rho"], RHO),
    ]
    for field, value, (low, high) in named:
        found = None if isinstance(value, bool) else quantity.number(value)
        if found is None or not low <= found <= high:
            yield Problem(field=field, why=f"{value!r} is no number from {low:g} to {high:g}")


def _flag(argument: str) -> str:
    """The name of an argument of vLLM, which takes both spellings."""
    return argument.partition("=")[0].replace("_", "-")


def _argument_problems(field: str, item: _Json) -> Iterator[Problem]:
    """A CEL rule over every argument of every node pool would cost more than the API server permits."""
    for argument in item.get("args", ()):
        flag = _flag(argument)
        if flag in SET_BY_OTHER_FIELDS:
            chosen = SET_BY_OTHER_FIELDS[flag]
            instead = f", and write the value into spec.{chosen}" if chosen else ""
            yield Problem(field=field, why=f"the operator sets {flag}: remove it{instead}")
        elif flag in FOR_SEVERAL_NODES:
            yield Problem(
                field=field, why=f"{flag} is for an engine on several nodes, and an engine is one pod: remove it"
            )


def _device_problems(spec: _Json) -> Iterator[Problem]:
    """The operator sets the number of devices among the limits of an engine, so another number there has no effect."""
    for item in spec["nodePools"]:
        devices = node_pool_spec.devices(item, simulated=spec["engine"]["kind"] == "sim")
        count = 0 if devices.claim_template else devices.count
        common, own = (settings.get("resources", {}).get("limits", {}) for settings in (spec["engine"], item))
        limit = own.get(devices.resource, common.get(devices.resource, count))
        if count and quantity.number(limit) != count:
            yield Problem(
                field=f"spec.nodePools[{item['name']}].gpus",
                why=f"an engine of this node pool requests {count} of {devices.resource}, but the limit of its resources "
                f"is {limit}: write the number here, and remove the limit",
            )


def _policy_problems(item: _Json, known: Collection[str]) -> Iterator[Problem]:
    named = [("spec.policy.name", item["name"])] if "name" in item else []
    for field, name in [*named, *(("spec.policy.allow", name) for name in item["allow"])]:
        if name not in known:
            yield _unknown(field, "policy", name, known)


def _parameter_problems(item: _Json, known: Collection[str]) -> Iterator[Problem]:
    for given in item.get("parameters", ()):
        policy, name = given["policy"], given["name"]
        field = f"spec.policy.parameters[{policy}.{name}]"
        if policy not in known:
            yield _unknown(field, "policy", policy, known)
            continue
        try:
            policies.create(policy, {name: float(given["value"])})
        except ValueError as error:
            yield Problem(field=field, why=str(error))


def _rule_problems(item: _Json, known: Collection[str]) -> Iterator[Problem]:
    if item["rule"] not in known:
        yield _unknown("spec.gateway.dispatch.rule", "dispatch rule", item["rule"], known)


def _selector_problems(item: _Json, known: Collection[str]) -> Iterator[Problem]:
    """The resource of a newer version permits selectors that this version does not have."""
    if item["selector"] not in known:
        yield _unknown("spec.policy.selector", "selector", item["selector"], known)


def _unknown(field: str, kind: str, name: str, known: Collection[str]) -> Problem:
    return Problem(field=field, why=f"there is no {kind} {name!r}; this version has {', '.join(sorted(known))}")


def _profile_problems(
    node_pools: Sequence[_Json], known: Collection[str], profiles: own_profile.OwnProfiles
) -> Iterator[Problem]:
    for item in node_pools:
        name, where = item["name"], f"spec.nodePools[{item['name']}].profile"
        if name in profiles.unusable:
            yield Problem(field=where, why=f"{profiles.unusable[name]}; shipped are {', '.join(sorted(known))}")
        elif "profile" in item and item["profile"] not in known and name not in profiles.usable:
            yield _unknown(where, "profile", item["profile"], known)


def _workflow_problems(workflows: Sequence[_Json]) -> Iterator[Problem]:
    for workflow in workflows:
        order = graphlib.TopologicalSorter({stage["name"]: stage["after"] for stage in workflow["stages"]})
        try:
            order.prepare()
        except graphlib.CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            yield Problem(
                field=f"spec.workflows[{workflow['name']}].stages",
                why=f"stages wait for each other in a cycle: {circle}",
            )
