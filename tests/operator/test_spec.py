import pathlib

import pytest
import yaml

from tidegate_operator import spec, spec_problems

KNOWN = spec_problems.Known(
    policies=frozenset({"fcfs", "edf", "sjf", "two-lane", "urgency", "priority"}),
    rules=frozenset({"least-delay", "score"}),
    profiles=frozenset({"a100-70b-tp8"}),
    selectors=frozenset({"rules", "classifier", "llm"}),
)


def stored(**changes):
    """The documented example as the API server stores it, with top-level fields of its spec replaced."""
    text = (pathlib.Path(__file__).parent / "golden" / "chat.stored.yaml").read_text()
    metadata = {"name": "chat", "namespace": "prod", "uid": "0123", "generation": 3}
    return {"metadata": metadata, "spec": {**yaml.safe_load(text)["spec"], **changes}}


def problems(**changes):
    with pytest.raises(spec.InvalidSpecError) as caught:
        spec.parse(stored(**changes), KNOWN)
    return [str(problem) for problem in caught.value.problems]


def test_the_documented_example_is_parsed():
    pool = spec.parse(stored(), KNOWN)
    assert (pool.model.name, pool.model.max_model_len, pool.model.cache) == ("Qwen/Qwen3-8B", 32768, None)
    assert {item.weights.uri for item in pool.node_pools} == {"hf://Qwen/Qwen3-8B"}
    assert [(item.name, item.devices.count, item.max_replicas) for item in pool.node_pools] == [
        ("a100", 8, 4),
        ("a6000", 8, None),
    ]
    assert pool.gateway.alpha is None
    assert pool.steering.allow == ("two-lane", "edf", "sjf", "urgency", "fcfs")
    assert pool.steering.interval_s == 30
    assert pool.steering.parameters == {"two-lane": {"threshold_s": 2.5}}


def test_the_safe_policy_is_always_allowed():
    policy = {**stored()["spec"]["policy"], "allow": ["edf"]}
    assert spec.parse(stored(policy=policy), KNOWN).steering.allow == ("edf", "fcfs")


def test_simulated_engines_request_no_gpu():
    engine = {**stored()["spec"]["engine"], "kind": "sim"}
    assert [item.devices.count for item in spec.parse(stored(engine=engine), KNOWN).node_pools] == [0, 0]


def test_an_unknown_policy_is_reported_with_the_known_ones():
    policy = {**stored()["spec"]["policy"], "allow": ["edf", "fifo"]}
    assert problems(policy=policy) == [
        "spec.policy.allow: there is no policy 'fifo'; this version has edf, fcfs, priority, sjf, two-lane, urgency"
    ]


def with_parameters(*items):
    named = [dict(zip(("policy", "name", "value"), item, strict=True)) for item in items]
    return {**stored()["spec"]["policy"], "parameters": named}


def test_the_parameters_of_policies_are_numbers_by_policy_and_name():
    policy = with_parameters(("two-lane", "threshold_s", "10"), ("two-lane", "fast_share", "0.5"))
    assert spec.parse(stored(policy=policy), KNOWN).steering.parameters == {
        "two-lane": {"threshold_s": 10.0, "fast_share": 0.5}
    }


def test_a_spec_without_parameters_sets_none():
    policy = {key: value for key, value in stored()["spec"]["policy"].items() if key != "parameters"}
    assert spec.parse(stored(policy=policy), KNOWN).steering.parameters == {}


@pytest.mark.parametrize(
    ("parameter", "problem"),
    [
        pytest.param(
            ("fifo", "speed", "1"),
            "spec.policy.parameters[fifo.speed]: there is no policy 'fifo'; this version has edf, fcfs, priority, sjf, "
            "two-lane, urgency",
            id="unknown policy",
        ),
        pytest.param(
            ("two-lane", "slow_share", "0.5"),
            "spec.policy.parameters[two-lane.slow_share]: policy 'two-lane' has no parameter 'slow_share'; known are "
            "fast_share, threshold_s",
            id="unknown parameter",
        ),
        pytest.param(
            ("edf", "threshold_s", "1"),
            "spec.policy.parameters[edf.threshold_s]: policy 'edf' has no parameter 'threshold_s'; it has none",
            id="policy without parameters",
        ),
        pytest.param(
            ("two-lane", "fast_share", "1.5"),
            "spec.policy.parameters[two-lane.fast_share]: parameter 'fast_share' of policy 'two-lane' must be between "
            "0.01 and 0.99 (share of the starts), not 1.5",
            id="out of range",
        ),
    ],
)
def test_a_bad_policy_parameter_is_reported_with_its_reason(parameter, problem):
    assert problems(policy=with_parameters(("two-lane", "threshold_s", "2"), parameter)) == [problem]


def test_an_unknown_dispatch_rule_is_reported_with_the_known_ones():
    gateway = stored()["spec"]["gateway"]
    gateway["dispatch"]["rule"] = "magic"
    assert problems(gateway=gateway) == [
        "spec.gateway.dispatch.rule: there is no dispatch rule 'magic'; this version has least-delay, score"
    ]


def test_an_unknown_profile_is_reported_with_its_node_pool():
    node_pools = [{**stored()["spec"]["nodePools"][0], "profile": "abacus"}]
    assert problems(nodePools=node_pools) == [
        "spec.nodePools[a100].profile: there is no profile 'abacus'; this version has a100-70b-tp8"
    ]


def test_a_cycle_of_stages_is_reported_with_the_names_of_its_stages():
    def stage(name, *after):
        return {"name": name, "after": list(after)}

    workflows = [{"name": "loop", "stages": [stage("a", "c"), stage("b", "a"), stage("c", "b"), stage("d")]}]
    (problem,) = problems(workflows=workflows)
    assert problem.startswith("spec.workflows[loop].stages: stages wait for each other in a cycle: ")
    circle = problem.rpartition(": ")[2].split(" -> ")
    assert set(circle) == {"a", "b", "c"}
    assert circle[0] == circle[-1]


def test_all_problems_are_reported_at_once():
    policy = {**stored()["spec"]["policy"], "allow": ["fifo"]}
    node_pools = [{**stored()["spec"]["nodePools"][0], "profile": "abacus"}]
    assert len(problems(policy=policy, nodePools=node_pools)) == 2


@pytest.mark.parametrize("value", ["0", "0.0001", "1000001"])
def test_a_decimal_string_outside_its_range_is_a_problem(value):
    assert problems(tenants=[{"name": "t", "weight": value}]) == [
        f"spec.tenants[t].weight: '{value}' is no number from 0.001 to 1e+06"
    ]


def test_a_rollback_that_is_no_number_is_a_problem():
    policy = {**stored()["spec"]["policy"], "rollback": {"rho": True, "window": "20s"}}
    assert problems(policy=policy) == ["spec.policy.rollback.rho: True is no number from 1 to 100"]


def test_a_selector_that_only_the_resource_of_a_newer_version_knows_is_a_problem():
    policy = {**stored()["spec"]["policy"], "selector": "oracle"}
    assert problems(policy=policy) == [
        f"spec.policy.selector: there is no selector 'oracle'; this version has {', '.join(sorted(KNOWN.selectors))}"
    ]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--tensor-parallel-size=4", "remove it, and write the value into spec.nodePools[].tensorParallel"),
        ("--served_model_name", "remove it, and write the value into spec.model.name"),
        ("--port=80", "the operator sets --port: remove it"),
    ],
)
def test_an_argument_that_another_field_sets_is_reported(argument, sentence):
    engine = {**stored()["spec"]["engine"], "args": [argument]}
    (problem,) = problems(engine=engine)
    assert problem.startswith("spec.engine.args: the operator sets --")
    assert problem.endswith(sentence)
    node_pools = [{**stored()["spec"]["nodePools"][0], "args": [argument]}]
    (problem,) = problems(nodePools=node_pools)
    assert problem.startswith("spec.nodePools[a100].args: ")


@pytest.mark.parametrize("flag", ["--nnodes", "--node-rank", "--headless", "--data-parallel-address"])
def test_an_argument_of_an_engine_on_several_nodes_is_reported(flag):
    sentence = f"{flag} is for an engine on several nodes, and an engine is one pod: remove it"
    argument = flag if flag == "--headless" else f"{flag.replace('-', '_').replace('__', '--')}=2"
    engine = {**stored()["spec"]["engine"], "args": [argument, "--pipeline-parallel-size=2"]}
    assert problems(engine=engine) == [f"spec.engine.args: {sentence}"]
    node_pools = [{**stored()["spec"]["nodePools"][0], "args": [argument]}]
    assert problems(nodePools=node_pools) == [f"spec.nodePools[a100].args: {sentence}"]


@pytest.mark.parametrize(
    ("common", "own", "limit"),
    [({"nvidia.com/gpu": 2}, {}, "2"), ({"nvidia.com/gpu": "1"}, {"nvidia.com/gpu": "4"}, "4")],
)
def test_a_limit_of_gpus_that_the_number_of_gpus_contradicts_is_a_problem(common, own, limit):
    engine = {**stored()["spec"]["engine"], "resources": {"limits": common}}
    node_pool = {**stored()["spec"]["nodePools"][0], "resources": {"limits": own}}
    assert problems(engine=engine, nodePools=[{**node_pool, "gpus": 1, "tensorParallel": 1}]) == [
        "spec.nodePools[a100].gpus: an engine of this node pool requests 1 of nvidia.com/gpu, but the limit of its "
        f"resources is {limit}: write the number here, and remove the limit"
    ]
    for fits in ({"gpus": int(limit)}, {"gpus": 0}, {"resourceClaimTemplateName": "one"}):
        changed = {key: value for key, value in node_pool.items() if key != "gpus"}
        spec.parse(stored(engine=engine, nodePools=[{**changed, "tensorParallel": 1, **fits}]), KNOWN)


def test_an_adapter_that_is_not_declared_is_reported_with_its_node_pool():
    node_pools = [{**stored()["spec"]["nodePools"][0], "adapters": ["sql"]}]
    assert problems(nodePools=node_pools) == [
        "spec.nodePools[a100].adapters: spec.model.adapters has no 'sql'; add it there"
    ]


def test_declared_adapters_and_those_of_arguments_exclude_each_other():
    engine = {**stored()["spec"]["engine"], "args": ["--enable-lora", "--lora-modules", "a=/a"]}
    declared = {"name": "demo", "adapters": [{"name": "sql", "uri": "file:///sql"}]}
    (problem,) = problems(engine=engine, model=declared)
    assert problem.startswith("spec.engine.args: spec.model.adapters sets --lora-modules")


@pytest.mark.parametrize("uri", ["file:///", "file:////", "hostpath:////", "ftp://host/model"])
def test_a_stored_uri_that_names_no_weights_is_a_problem_of_its_field(uri):
    (problem,) = problems(model={"name": "demo", "uri": uri})
    assert problem.startswith(f"spec.model.uri: '{uri}' ")
    node_pools = [{**item, "uri": uri} for item in stored()["spec"]["nodePools"]]
    expected = [f"spec.nodePools[{item['name']}].uri" for item in node_pools]
    assert [problem.partition(":")[0] for problem in problems(nodePools=node_pools)] == expected
