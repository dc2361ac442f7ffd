"""The monitoring of the chart: how Prometheus finds and reaches the metrics, and its alerts."""

import json
import pathlib
import shutil
import subprocess
import urllib.request

import pytest
import yaml

import operator_doubles
from tidegate_operator import render, replica_allocation, spec
from tidegate_operator.render import scraping

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here; install Debian's package prometheus")
PROMETHEUS = ("monitoring.prometheus.namespace=monitoring", "monitoring.prometheus.podLabels.app=prometheus")


def of_kind(manifests, kind):
    return [item for item in manifests if item["kind"] == kind]


def test_without_values_the_chart_needs_no_resource_of_the_prometheus_operator(helm):
    manifests = helm.rendered("tidegate-system")
    assert not [item for item in manifests if item["apiVersion"].startswith("monitoring.coreos.com")]
    (policy,) = of_kind(manifests, "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "health"}]}]


def test_pod_monitors_find_gateways_engines_and_operators(helm):
    values = ("monitoring.scrape=podMonitors", "monitoring.labels.release=stack", "namespaces.names={a,b}")
    monitors = {item["metadata"]["name"]: item for item in of_kind(helm.rendered("system", *values), "PodMonitor")}
    assert sorted(monitors) == ["tidegate-engines", "tidegate-gateways", "tidegate-operator"]
    for name, port in (("engines", "http"), ("gateways", "metrics")):
        monitor = monitors[f"tidegate-{name}"]
        assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
        assert monitor["metadata"]["labels"]["release"] == "stack"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == port
        assert {item["targetLabel"] for item in endpoint["relabelings"] if "action" not in item} == {
            "pool",
            "node_pool",
        }
    (endpoint,) = monitors["tidegate-operator"]["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == ("metrics", True)
    assert of_kind(helm.rendered("system", *values, "namespaces.all=true"), "PodMonitor")[0]["spec"][
        "namespaceSelector"
    ] == {"any": True}


def test_the_selectors_of_pod_monitors_match_the_pods_that_the_operator_makes(helm, rules):
    monitors = of_kind(helm.rendered("system", "monitoring.scrape=podMonitors"), "PodMonitor")
    for component, deployment in (("gateway", "chat-gateway"), ("engine", "chat-engine-a100")):
        (monitor,) = [item for item in monitors if item["metadata"]["name"] == f"tidegate-{component}s"]
        template = rendered(rules)["Deployment", deployment]["spec"]["template"]
        labels = template["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels["tidegate.dev/pool"] == "chat"
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports


PODS = (
    ("engine", "http", "true"),
    ("engine", "http", "false"),
    ("gateway", "metrics", "true"),
    ("gateway", "metrics", "false"),
)
"""Component, port and readiness of pods, as discovery in Kubernetes tells them."""


def kept(config, folder):
    """The labels of the pods that a scrape configuration keeps, as Prometheus' own promtool says."""
    prefix = "__meta_kubernetes_pod_"
    config["static_configs"] = [
        {
            "targets": ["127.0.0.1:1"],
            "labels": {
                "__meta_kubernetes_namespace": "serving",
                f"{prefix}name": f"{component}-{ready}",
                f"{prefix}ready": ready,
                f"{prefix}container_port_name": port,
                f"{prefix}label_app_kubernetes_io_component": component,
                f"{prefix}label_tidegate_dev_pool": "chat",
            },
        }
        for component, port, ready in PODS
    ]
    file = folder / "scrape.yaml"
    file.write_text(yaml.safe_dump({"scrape_configs": [config]}))
    command = [PROMTOOL, "check", "service-discovery", str(file), config["job_name"]]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {each["discoveredLabels"][f"{prefix}name"]: each["labels"] for each in shown if each["labels"]}


@with_promtool
def test_pod_monitors_leave_out_engines_that_are_not_ready(helm, tmp_path):
    seen = set()
    for monitor in of_kind(helm.rendered("system", "monitoring.scrape=podMonitors"), "PodMonitor"):
        component = monitor["spec"]["selector"]["matchLabels"].get("app.kubernetes.io/component")
        if component is None:
            continue
        seen.add(component)
        names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        relabelings = [
            {names.get(name, name): value for name, value in each.items()} for each in endpoint["relabelings"]
        ]
        found = kept({"job_name": component, "relabel_configs": relabelings}, tmp_path)
        assert {labels["pool"] for labels in found.values()} == {"chat"}
        assert (f"{component}-true" in found, f"{component}-false" in found) == (True, component == "gateway")
    assert seen == {"engine", "gateway"}


@with_promtool
def test_a_plain_prometheus_leaves_out_engines_that_are_not_ready(tmp_path):
    config, _ = yaml.safe_load((ROOT / "docs/examples/prometheus.yaml").read_text())["scrape_configs"]
    del config["kubernetes_sd_configs"]
    found = kept(config, tmp_path)
    assert sorted(found) == ["engine-true", "gateway-false", "gateway-true"]
    assert {(labels["namespace"], labels["pool"]) for labels in found.values()} == {("serving", "chat")}


def rendered(rules, prometheus=render.NO_PROMETHEUS):
    body = yaml.safe_load((pathlib.Path(__file__).parent / "golden" / "chat.stored.yaml").read_text())
    metadata = {"name": "chat", "namespace": "serving", "uid": "u", "generation": 1}
    pool = spec.parse({"metadata": metadata, **body}, rules.known)
    made = render.manifests(
        pool,
        replica_allocation.desired(pool),
        images=rules.images,
        operator_namespace="system",
        prometheus=prometheus,
    )
    return {(item["kind"], item["metadata"]["name"]): item for item in made}


def test_prometheus_reaches_the_metrics_of_engines_only_where_the_chart_names_it(rules):
    closed = rendered(rules)["NetworkPolicy", "chat-engine"]["spec"]["ingress"]
    where = scraping.Scraping(namespace="monitoring", pod_labels={"app": "prometheus"})
    opened = rendered(rules, where)["NetworkPolicy", "chat-engine"]["spec"]["ingress"]
    assert opened[: len(closed)] == closed
    (extra,) = opened[len(closed) :]
    assert extra == {
        "from": [
            {
                "podSelector": {"matchLabels": {"app": "prometheus"}},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
            }
        ],
        "ports": [{"port": "http"}],
    }


def test_annotations_are_on_services_so_that_no_pod_restarts(helm, rules):
    plain, noted = rendered(rules), rendered(rules, scraping.Scraping(annotate=True))
    for key in (("Service", "chat-gateway-internal"), ("Service", "chat-engine-a100")):
        port = "8002" if "gateway" in key[1] else "8000"
        assert noted[key]["metadata"]["annotations"]["prometheus.io/port"] == port
        assert "annotations" not in plain[key]["metadata"]
    assert {key: item for key, item in noted.items() if key[0] != "Service"} == {
        key: item for key, item in plain.items() if key[0] != "Service"
    }


def test_the_chart_tells_the_operator_where_prometheus_is(helm):
    manifests = helm.rendered("system", "monitoring.scrape=annotations", *PROMETHEUS, "podAnnotations.a=b")
    (deployment,) = of_kind(manifests, "Deployment")
    template = deployment["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "a": "b",
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "8081",
        "prometheus.io/path": "/metrics",
    }
    arguments = template["spec"]["containers"][0]["args"]
    assert {
        "--scrape-annotations",
        "--prometheus-namespace=monitoring",
        "--prometheus-pod-label=app=prometheus",
    } <= set(arguments)
    (policy,) = of_kind(manifests, "NetworkPolicy")
    assert policy["spec"]["ingress"][1]["ports"] == [{"port": "metrics"}]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@with_promtool
def test_the_prometheus_rule_has_the_alerts_with_links_to_the_given_page(helm, tmp_path):
    address = "https://docs.example.com/alerts"
    (rule,) = of_kind(
        helm.rendered("system", "monitoring.rules.enabled=true", f"monitoring.runbooks={address}"), "PrometheusRule"
    )
    shipped = yaml.safe_load((ROOT / "helm/tidegate/files/rules.yaml").read_text())
    assert [group["name"] for group in rule["spec"]["groups"]] == [group["name"] for group in shipped["groups"]]
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]
    assert {each["annotations"]["runbook_url"] for each in alerts} == {
        f"{address}#{each['alert'].lower()}" for each in alerts
    }
    assert "{{ $labels.class }}" in alerts[0]["annotations"]["summary"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    subprocess.run([PROMTOOL, "check", "rules", str(tmp_path / "rules.yaml")], check=True, capture_output=True)


def test_the_dashboards_are_config_maps_that_the_sidecar_of_grafana_finds(helm):
    values = ("monitoring.dashboards.enabled=true", "monitoring.dashboards.labels.team=serving")
    maps = of_kind(helm.rendered("system", *values), "ConfigMap")
    assert [list(item["data"]) for item in maps] == [["tidegate-pool.json"], ["tidegate-operator.json"]]
    for item in maps:
        labels = item["metadata"]["labels"]
        assert (labels["grafana_dashboard"], labels["team"]) == ("1", "serving")
        ((name, text),) = item["data"].items()
        assert text == (ROOT / "helm/tidegate/files" / name).read_text()


@with_promtool
def test_the_configuration_for_a_plain_prometheus_is_valid(tmp_path):
    text = (ROOT / "docs/examples/prometheus.yaml").read_text()
    assert text.count("kubernetes_sd_configs: [{role: pod}]") == 2
    # Debian builds Prometheus without the discovery of Kubernetes.
    text = text.replace("kubernetes_sd_configs: [{role: pod}]", "static_configs: [{targets: ['127.0.0.1:1']}]")
    (tmp_path / "prometheus.yaml").write_text(text)
    shutil.copy(ROOT / "helm/tidegate/files/rules.yaml", tmp_path)
    done = subprocess.run(
        [PROMTOOL, "check", "config", str(tmp_path / "prometheus.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["monitoring.scrape=all", "monitoring.interval=30", "monitoring.rules.on=true"])
def test_invalid_values_are_rejected(helm, value):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        helm.rendered("system", value)
    assert "values don't meet the specifications of the schema" in caught.value.stderr


def test_a_running_operator_reports_its_pools_and_its_work(kubectl, operator, namespace, eventually):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")

    def shown():
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics") as answer:
            return dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")

    of_pool = f'namespace="{namespace}"'
    key = f'tidegate_operator_pool_condition{{condition="Ready",{of_pool},pool="chat"}}'
    eventually(lambda: shown().get(key) == "1.0")
    seen = shown()
    assert seen[f'tidegate_operator_engines_desired{{{of_pool},node_pool="fast",pool="chat"}}'] == "2.0"
    assert seen["tidegate_operator_active"] == "1.0"
    assert float(seen['tidegate_operator_work_seconds_count{queue="reconcile"}']) > 0
    assert seen['tidegate_operator_queue_depth{queue="reconcile"}'] in ("0.0", "1.0")
    assert json.loads(kubectl("get", "spool/chat", "-o", "json"))["status"]["engines"] == "3/3"
