"""The manifests of a pool's gateway.

They are a ConfigMap with the settings, a Deployment that restarts when the settings change, a Service for clients, an
internal Service for the admin and metrics ports, a disruption budget, an account, and a NetworkPolicy that admits only
the operator to the admin port. The gateway never talks to the API server: its settings name the headless Service of
each node pool, and DNS resolves that name to the engines.
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tidegate_control import pool_token
from tidegate_operator import node_pool_cost, node_pool_spec, spec
from tidegate_operator.render import (
    ca_bundle,
    child_metadata,
    default_resources,
    engine_profile,
    engine_weights,
    gateway_api,
    pods,
    scraping,
    store_statefulset,
)
from tidegate_policy import duration

COMPONENT = "gateway"
PUBLIC_PORTS = {"http": child_metadata.HTTP_PORT, "grpc": child_metadata.GRPC_PORT}
INTERNAL_PORTS = {"admin": child_metadata.ADMIN_PORT, "metrics": child_metadata.METRICS_PORT}
SETTINGS, KEYS, TLS = "/etc/tidegate", "/etc/tidegate-keys", "/etc/tidegate-tls"
RELOADED = ("classes", "defaultClass", "tenants", "workflows", "policy")
"""Settings that a running gateway takes from its file."""
JOURNAL = "/tmp/ends.jsonl"
"""It outlives a container that was killed, and is lost with the pod."""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The same text in a tenth of the time, where PyYAML was built with libyaml."""
LEAVE_S = 5
"""Seconds in which a stopping gateway still accepts calls, while load balancers and clients with connections learn that
it stops."""


def settings(pool: spec.Pool, host: str = "0.0.0.0") -> dict[str, Any]:
    """The settings file of `tidegate gateway --config`; the gateway's `settings` module documents the keys."""
    further = dict(pool.gateway.further)
    return {
        "skipUnknown": True,  # gateways keep their image while the operator is upgraded
        "model": pool.model.name,
        "listen": {
            "host": host,
            "port": child_metadata.HTTP_PORT,
            "grpcPort": child_metadata.GRPC_PORT,
            **({"extProcPort": child_metadata.EXT_PROC_PORT} if pool.gateway.api else {}),
            "adminHost": host,
            "adminPort": child_metadata.ADMIN_PORT,
            "metricsHost": host,
            "metricsPort": child_metadata.METRICS_PORT,
            "statusPage": False,
            "clientMetrics": False,
        },
        # Proxies of the Inference Extension use TLS and verify nothing, others use plain text.
        **({"picker": {"selfSigned": True}} if pool.gateway.api else {}),
        "auth": _auth(pool.gateway),
        **({"tls": {"certFile": f"{TLS}/tls.crt", "keyFile": f"{TLS}/tls.key"}} if pool.gateway.tls_secret else {}),
        "services": [
            {
                "name": f"{child_metadata.engine_name(pool, node_pool.name)}.{pool.namespace}.svc",
                "port": child_metadata.HTTP_PORT,
                "controlPort": child_metadata.CONTROL_PORT,
                "nodePool": node_pool.name,
                "profile": node_pool.profile,
                **_cost(pool.engine, node_pool),
            }
            for node_pool in pool.node_pools
        ],
        "classes": [dict(item) for item in pool.classes],
        "defaultClass": pool.gateway.default_class,
        "tenants": [dict(item) for item in pool.tenants],
        "workflows": [dict(item) for item in pool.workflows],
        **_policy(pool.steering.parameters),
        "dispatch": {
            "rule": pool.gateway.rule,
            "alpha": "auto" if pool.gateway.alpha is None else pool.gateway.alpha,
            "beta": pool.gateway.beta,
            **further.pop("dispatch", {}),
        },
        "queue": {
            "maxRequests": pool.gateway.max_waiting,
            "ttl": duration.text(pool.gateway.ttl_s),
            **({"hold": duration.text(pool.autoscaling.hold_s)} if pool.is_autoscaled else {}),
        },
        "store": {
            "url": store_statefulset.url(pool),
            "pool": f"{pool.namespace}.{pool.name}",
            "journal": JOURNAL,
        },
        "timeouts": {
            "announce": duration.text(LEAVE_S),
            "drain": duration.text(pool.gateway.drain_s),
            **further.pop("timeouts", {}),
        },
        **({"tracing": {"endpoint": pool.gateway.traces_to}} if pool.gateway.traces_to else {}),
        **further,
    }


def _policy(parameters: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The parameters of policies; steering chooses the policy. Empty where the spec sets none."""
    given = [
        {"policy": policy, "name": name, "value": value}
        for policy, values in sorted(parameters.items())
        for name, value in sorted(values.items())
    ]
    return {"policy": {"parameters": given}} if given else {}


def _text(config: Mapping[str, Any]) -> str:
    return _TEXTS.of(json.dumps(config))


class Texts:
    """YAML of JSON texts, of which the last ones are kept within `most` characters. Every check of a pool renders its
    settings again, and YAML is the slowest part of that. A very large pool has 300 KB, so their number is no bound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        """By the digest of the JSON text, the one that was used last at the end."""
        self.kept_characters = 0

    def of(self, config: str) -> str:
        key = hashlib.sha256(config.encode()).digest()
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        made = self._kept[key] = str(yaml.dump(json.loads(config), Dumper=_DUMPER, sort_keys=False))
        self.kept_characters += len(made)
        while self.kept_characters > self._most:
            _, oldest = self._kept.popitem(last=False)
            self.kept_characters -= len(oldest)
        return made


_TEXTS = Texts(most=32 * 1024 * 1024)


def _public_ports(pool: spec.Pool) -> dict[str, int]:
    return PUBLIC_PORTS | (gateway_api.PORTS if pool.gateway.api else {})


def _auth(gateway: spec.Gateway) -> dict[str, Any]:
    keys = {"keysFile": f"{KEYS}/keys.yaml"} if gateway.keys_secret else {}
    tokens = {"jwt": dict(gateway.jwt)} if gateway.jwt else {}
    return {**keys, **tokens} or {"allowUnauthenticated": True}


def _read_at_start(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a gateway reads at its start only; it takes over changes of the others from the file."""
    return {key: value for key, value in config.items() if key not in RELOADED}


def _cost(engine: node_pool_spec.Engine, node_pool: node_pool_spec.NodePool) -> dict[str, Any]:
    """The cost model of engines whose profile is not shipped, or that are simulated at another speed than their profile's;
    empty for other engines."""
    if node_pool.own_profile is None and (not engine.simulated or engine.sim_speed == 1):
        return {}
    model = node_pool_cost.model(engine, node_pool)
    return {} if model is None else {"cost": dataclasses.asdict(model)}


def manifests(
    pool: spec.Pool, *, image: pods.Image, operator_namespace: str, prometheus: scraping.Scraping, host: str
) -> Iterator[child_metadata.Manifest]:
    """`host` is the address on which the ports listen."""
    name, selector = child_metadata.component_name(pool, COMPONENT), child_metadata.selector(pool.name, COMPONENT)
    config = settings(pool, host)
    yield child_metadata.service_account(pool, COMPONENT)
    yield child_metadata.manifest(pool, "v1", "ConfigMap", name, COMPONENT, data={"gateway.yaml": _text(config)})
    public = child_metadata.manifest(
        pool, "v1", "Service", name, COMPONENT,
        spec={"type": pool.gateway.service_type, "selector": selector, "ports": pods.service_ports(_public_ports(pool))},
    )  # fmt: skip
    notes = pool.gateway.service_annotations
    yield child_metadata.annotated(public, notes) if notes else public
    internal = child_metadata.manifest(
        pool, "v1", "Service", f"{name}-internal", COMPONENT,
        spec={"clusterIP": "None", "selector": selector, "ports": pods.service_ports(INTERNAL_PORTS)},
    )  # fmt: skip
    yield prometheus.announced(internal, child_metadata.METRICS_PORT)
    yield child_metadata.disruption_budget(pool, name, COMPONENT)
    yield _network_policy(pool, operator_namespace, prometheus)
    first_engine_s = max(engine_weights.longest_start_s(pool, each) for each in pool.node_pools)
    yield child_metadata.manifest(
        pool, "apps/v1", "Deployment", name, COMPONENT,
        spec={
            "replicas": pool.gateway.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            # A gateway is ready when it has an engine, and an engine may start slowly.
            "progressDeadlineSeconds": first_engine_s + spec.START_SLACK_S,
            "template": {
                "metadata": {
                    "labels": {"app.kubernetes.io/name": "tidegate-gateway", **selector},
                    "annotations": {
                        **pool.gateway.placement.annotations,
                        **engine_profile.gateway_annotations(pool),
                        child_metadata.CONFIG_DIGEST: child_metadata.digest(_read_at_start(config)),
                    },
                },
                "spec": _pod(pool, image),
            },
        },
    )  # fmt: skip


def _pod(pool: spec.Pool, image: pods.Image) -> dict[str, Any]:
    name = child_metadata.component_name(pool, COMPONENT)
    secrets = _secrets(pool.gateway)
    container = pods.container(
        "gateway",
        image=image,
        ports=_public_ports(pool) | INTERNAL_PORTS,
        command=["tidegate", "gateway"],
        args=[f"--config={SETTINGS}/gateway.yaml"],
        env=[
            child_metadata.secret_variable(pool, pool_token.VARIABLE, child_metadata.TOKEN_KEY),
            *_password(pool),
            *ca_bundle.env(pool),
        ],
        mounts=[
            *(
                {"name": volume, "mountPath": path, "readOnly": True}
                for volume, path in (("settings", SETTINGS), ("keys", KEYS), ("tls", TLS))
                if volume == "settings" or volume in secrets
            ),
            *ca_bundle.mounts(pool),
        ],
        resources=default_resources.completed(pool.gateway.resources, default_resources.GATEWAY),
        # Probes use the metrics port: many clients on the client port must not make the gateway look dead.
        startupProbe=pods.http_probe("/health", port="metrics", period_s=1, failures=60),
        readinessProbe=pods.http_probe("/ready", port="metrics"),
        livenessProbe=pods.http_probe("/health", port="metrics", period_s=10, failures=6),
    )
    return pods.pod(
        [container],
        account=name,
        image=image,
        volumes=[
            {"name": "settings", "configMap": {"name": name}},
            *ca_bundle.volumes(pool),
            *({"name": volume, "secret": secret} for volume, secret in secrets.items()),
        ],
        terminationGracePeriodSeconds=LEAVE_S + pool.gateway.drain_s + 10,
        **pool.gateway.placement.pod_fields(),
        topologySpreadConstraints=[
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": child_metadata.selector(pool.name, COMPONENT)},
            }
            for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
        ],
    )


def _secrets(gateway: spec.Gateway) -> dict[str, dict[str, Any]]:
    """The Secrets that the pod mounts, by volume. The kubelet updates the files when a Secret changes."""
    secrets: dict[str, dict[str, Any]] = {}
    if gateway.keys_secret is not None:
        name, key = gateway.keys_secret
        secrets["keys"] = {"secretName": name, "items": [{"key": key, "path": "keys.yaml"}]}
    if gateway.tls_secret is not None:
        secrets["tls"] = {"secretName": gateway.tls_secret}
    return secrets


def _password(pool: spec.Pool) -> list[dict[str, Any]]:
    """The password of the embedded store, or of the store that the spec names, if it has one."""
    variable, where = "TIDEGATE_STORE_PASSWORD", pool.store
    if where.url is None:
        return [child_metadata.secret_variable(pool, variable, child_metadata.PASSWORD_KEY)]
    if where.secret is None:
        return []
    name, key = where.secret
    return [{"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}]


def _network_policy(pool: spec.Pool, operator_namespace: str, prometheus: scraping.Scraping) -> child_metadata.Manifest:
    operator = {
        "podSelector": {"matchLabels": child_metadata.OPERATOR_SELECTOR},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}},
    }
    return child_metadata.manifest(
        pool, "networking.k8s.io/v1", "NetworkPolicy", child_metadata.component_name(pool, COMPONENT), COMPONENT,
        spec={
            "podSelector": {"matchLabels": child_metadata.selector(pool.name, COMPONENT)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": "http"}, {"port": "grpc"}]},
                *prometheus.admitted("metrics"),
                {"from": [operator], "ports": [{"port": "admin"}]},
                *gateway_api.admitted(pool, *gateway_api.PORTS),
            ],
        },
    )  # fmt: skip
