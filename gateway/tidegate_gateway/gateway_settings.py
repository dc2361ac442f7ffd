"""The settings of a gateway, in one file so that all names, defaults and units can be read together. Those of the
authentication and encryption of clients are in `access_settings`, those of an endpoint picker in `picker_settings`, the
engines are in `engine_entries`, and the scheduling policy is in `policy_settings`.

They come from one YAML or JSON file and the few environment variables of `from_environment`.

Each group is one concern; each field has its default, its unit and the reason for it. The operator renders this file into
a ConfigMap, so key names follow the `ServingPool` where both have the same thing. `settings_decoder` reads it; `app`
hands the groups to the parts that need them.
"""

import dataclasses
import itertools
import pathlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tidegate_control import pool_token
from tidegate_gateway import (
    access_settings,
    engine_entries,
    picker_settings,
    policy_settings,
    settings_decoder,
    settings_file,
    stage_declaration,
)
from tidegate_gateway.settings_decoder import BadSettings
from tidegate_policy import gateway_core
from tidegate_policy.admit import entitlements, outliers
from tidegate_policy.dispatch import prefix_index, routing, rules, waiting_limits

AUTO_ALPHA = 0.2
"""The meaning of `alpha: auto`; HexGen's best values lie between 0.1 and 0.4."""
ROWS_URL = re.compile(r"https?://[^/?#@\\\s]+/[^?#@\\\s]*")
"""An address of rows, and a prefix of such addresses."""
STORE_URLS = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """The addresses and ports of the gateway."""

    host: str = "127.0.0.1"
    """Address of the client ports; loopback by default. "::" is every address, of IPv6 and of IPv4."""
    port: int = 8000
    """HTTP; 0 picks a free one."""
    status_page: bool = True
    """The page at / of the HTTP port, and its state. Without API keys it shows all tenants to every client of the port."""
    client_metrics: bool = True
    """/metrics at the HTTP port too."""
    grpc_port: int | None = 9000
    """gRPC; null = none, 0 picks a free one."""
    ext_proc_port: int | None = None
    """The endpoint picker of an Envoy (docs/envoy.md); null = none, 0 picks a free one. Every client of it may send
    calls to the engines' queue, and with `auth` each needs a key as at the HTTP port."""
    admin_host: str = "127.0.0.1"
    """Address of the admin port. Every client of it may switch the policy; beyond loopback it requires `auth.poolToken`, if
    there is one."""
    admin_port: int | None = 8001
    """/admin/state, /admin/policy; null = none, 0 picks a free one."""
    metrics_host: str = "127.0.0.1"
    """Address of the metrics port."""
    admin_names: tuple[str, ...] = ()
    """Further host names by which browsers and tools may call the admin port (docs/http.md, Admin port)."""
    metrics_port: int | None = None
    """/metrics, /health and /ready on a port without clients; null = the admin port (metrics) and the HTTP port (all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """When an engine may take calls (names as in Envoy's outlier detection)."""

    interval_s: float = 1.0
    """Between two health checks."""
    timeout_s: float = 3.0
    """For one health check; it finds an engine that only accepts connections."""
    unhealthy_after: int = 3
    """Failed health checks in a row before an engine is down; one refused connection is enough."""
    consecutive_failures: int = 3
    """Calls that fail by the engine's fault, beyond those that succeed, before it is ejected."""
    base_ejection_s: float = 1.0
    """First ejection; each further one doubles it, until successes have taken back all failures."""
    max_ejection_s: float = 60.0
    """Longest ejection."""
    resolve_s: float = 2.0
    """Between two DNS look-ups of a service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A workflow that clients create by its name."""

    name: str
    """The `template` of POST /v1/workflows."""
    deadline_s: float | None = None
    """From the creation of a workflow; null = the client gives one."""
    stages: tuple[stage_declaration.StageDeclaration, ...] = ()
    """The stages, each with the stages that come before it; empty = the calls tell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The choice of an engine for a call."""

    rule: str = routing.DEFAULT_RULE
    """The dispatch rule: least-delay, earliest-finish, score (HexGen eq 4), or a common rule: round-robin, least-requests,
    weighted-least-requests, power-of-two, bounded-affinity, cache-aware, prefix-score."""
    alpha: float | Literal["auto"] = "auto"
    """For `score`: 0 = load alone, 1 = speed alone; auto = 0.2 (decision 25)."""
    beta: float = 300.0
    """For `score`, in seconds squared; see `routing.DispatchSettings`. The benchmark uses the default."""
    cap: int | Literal["auto"] | None = "auto"
    """Sequences at one engine at most; further calls wait here. auto = enough to keep its batch full, and a quarter
    more for a tenant that comes while another one has all places; null = no bound."""
    prefix_entries: int = prefix_index.DEFAULT_MAX_ENTRIES
    """Entries of the index of prefixes, for all engines together; 0 = dispatch knows no prefixes."""
    isolate_tenants: bool = False
    """Prompts of different tenants share no KV cache: the gateway gives each call the `cache_salt` of its tenant."""
    learn_costs: bool = False
    """The step costs of an engine with a profile follow its answers too. It suits profiles that nobody measured; where
    prompts share prefixes it disturbs dispatch (decision 18). Engines without a profile always learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The queue of calls for which no engine has room."""

    max_requests: int = 5000
    """Calls that may wait here; the next one that would have to wait is shed as saturated. Each takes about 12 KiB of
    memory besides its body, which `limits.bodiesBytes` bounds."""
    ttl_s: float = 60.0
    """Longest wait here of a call without a deadline, anew after a failed attempt; one with a deadline waits until that."""
    hold_s: float = 0.0
    """Longest wait here of a call without a deadline while no engine exists, because an autoscaler starts one for it; 0 =
    calls are shed while there is no engine."""
    bound_workflows: bool = True
    """No more workflows are active than pay; others wait before their first call. Tenants share by weight, and of a tenant
    the workflow with the earliest deadline starts first."""
    share_among_tenants: bool = True
    """While several tenants compete, calls beyond a tenant's share of the pool wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Valkey or Redis, shared by all gateways of a pool."""

    url: str | None = None
    """Such as redis://127.0.0.1:6379/0; null = no store: single calls are served, workflows are shed."""
    password: str | None = None
    """Better set by TIDEGATE_STORE_PASSWORD than in the file."""
    pool: str = "default"
    """Name under which this pool's gateways share their state in the store."""
    timeout_s: float = 1.0
    """For one command: a silent store delays the beginning and the end of a workflow call by no more each."""
    connections: int = 64
    """Connections to the store at most; a command waits for a free one, and tenants take turns."""
    sync_s: float = 0.2
    """Between two exchanges of backlogs with the other gateways."""
    lease_s: float = 5.0
    """Silence after which a gateway counts as dead, and its backlogs are forgotten."""
    grace_s: float = 10.0
    """Time after its deadline in which a workflow may still be finished."""
    journal: str | None = None
    """A file that keeps the ends of calls which the store could not take; a gateway that was killed reads it when it
    starts again. One file for each gateway; null = such ends wait in memory only, and a gateway with a store warns of it
    at its start."""
    retention_s: float = 3600.0
    """How long the store keeps the record of an ended workflow and the answers to its Idempotency-Keys."""
    tenant_bytes: int = 128 * 1024 * 1024
    """Workflows of one tenant in the store, about 1.5 KiB for one with three stages. Above, those that ended first are
    removed before their retention is over; when that is not enough, new ones are shed."""
    total_bytes: int = 1024 * 1024 * 1024
    """Workflows of all tenants in the store. Of its own bound a tenant has the part that is free of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelQueries:
    """The bounds of relQueries (docs/relqueries.md); they need a store."""

    rows: int = 100_000
    """Rows of one relQuery."""
    row_bytes: int = 64 * 1024
    """Bytes of one row: the values that the template uses."""
    body_bytes: int = 32 * 1024 * 1024
    """A form with a file of rows, or the rows at a URL."""
    result_bytes: int = 256 * 1024 * 1024
    """Results of one relQuery; it fails above."""
    per_tenant: int = 16
    """Running relQueries of one tenant."""
    tenant_bytes: int = 512 * 1024 * 1024
    """Rows and results of one tenant in the store; above, its new relQueries are shed."""
    store_bytes: int = 2 * 1024 * 1024 * 1024
    """Rows and results of all tenants in the store. Of its own bound a tenant has the part that is free of this one."""
    lasts_s: float = 24 * 3600.0
    """The time of a relQuery without a deadline; then it is expired."""
    window: int = 256
    """Rows of one relQuery at engines of one gateway."""
    in_flight: int = 1024
    """Rows of all relQueries of one gateway at engines; tenants share them equally."""
    floor: int = 4
    """Rows of one tenant that may always be under way, whatever waits. Further rows let other calls pass."""
    waiting: int = 4
    """Calls in the queue, above which relQueries start no rows beyond `floor`."""
    running: int = 256
    """RelQueries that one gateway runs at the same time."""
    attempts: int = 3
    """Failures of engines, after which a row has an error. A row that is shed is sent again until the deadline."""
    rows_urls: tuple[str, ...] = ()
    """Prefixes of the addresses from which rows may be fetched, such as https://data.example/tables/; empty = none."""
    fetch_s: float = 60.0
    """For rows to arrive from an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of what clients can use of this process. All share `bodies_bytes`; those of a port share `connections`."""

    body_bytes: int = 8 * 1024 * 1024
    """A request's body; about two million tokens, or a few pictures."""
    bodies_bytes: int = 256 * 1024 * 1024
    """The bodies of all requests that arrive or are being answered; above, requests with a body are shed. The
    bodies of a tenant may have twice the bytes that are free, so one tenant alone has two thirds."""
    body_s: float = 30.0
    """For a request's body to arrive."""
    idle_s: float = 10.0
    """For a request's headers to arrive, and between two requests of a connection."""
    write_s: float = 60.0
    """For a client to take the next 64 KiB of its answer, or the next gRPC message; after that its call is cancelled."""
    connections: int = 10_000
    """Connections of clients to one port. For a further one, the HTTP port closes the one that has waited longest for its
    next request or its body, and the gRPC port one without calls. The picker's port takes as many requests at a time.
    Fewer open files than twice as many lower this bound at the start."""
    connections_per_address: int = 5_000
    """Connections from one address (of IPv6: one /64 network) to one port, which closes further ones. Addresses of this
    machine have no bound of their own, because a local proxy brings all clients from there."""
    choices: int = 16
    """`n` times the prompts of one call: each choice is a sequence in the engine."""
    answer_bytes: int = 64 * 1024 * 1024
    """An answer that is not streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the gateway waits for an engine, and for calls when it stops."""

    connect_s: float = 2.0
    """For a connection to an engine; then the call tries another engine."""
    first_token_s: float = 60.0
    """To the first token, in addition to the predicted wait and work of the call."""
    answer_s: float = 600.0
    """For an answer that is not streamed, while its engine is seen to generate."""
    next_token_s: float = 60.0
    """Between two tokens of a stream; a preempted call may have to compute its prompt again."""
    drain_s: float = 30.0
    """After SIGTERM, for the calls under way to finish."""
    announce_s: float = 0.0
    """After SIGTERM, how long /ready says no before new calls are shed, so that load balancers notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """OpenTelemetry spans of calls."""

    endpoint: str | None = None
    """OTLP collector over gRPC, such as http://127.0.0.1:4317; null = no spans."""
    required: bool = True
    """Without the exporter, true ends the start with an error. False (an endpoint from the environment) logs a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a gateway."""

    skip_unknown: bool = False
    """Skips keys that this version does not know, with a warning. The operator sets it: a gateway may be older than it."""
    model: str | None = None
    """The model that every engine serves; null = the model that most engines list."""
    listen: Listen = field(default_factory=Listen)
    auth: access_settings.Auth = field(default_factory=access_settings.Auth)
    tls: access_settings.Tls = field(default_factory=access_settings.Tls)
    engines: tuple[engine_entries.StaticEngine, ...] = ()
    services: tuple[engine_entries.EngineService, ...] = ()
    inference_pool: picker_settings.InferencePool = field(default_factory=picker_settings.InferencePool)
    picker: picker_settings.Picker = field(default_factory=picker_settings.Picker)
    health: Health = field(default_factory=Health)
    classes: tuple[entitlements.SloClass, ...] = ()
    default_class: str | None = None
    """The class of calls that name none."""
    allow: tuple[entitlements.Feature, ...] = ()
    """Fields of requests that engines get only where they are permitted, for all calls; classes have the same setting."""
    tenants: tuple[entitlements.Tenant, ...] = ()
    workflows: tuple[Template, ...] = ()
    dispatch: Dispatch = field(default_factory=Dispatch)
    queue: Queue = field(default_factory=Queue)
    store: Store = field(default_factory=Store)
    relqueries: RelQueries = field(default_factory=RelQueries)
    policy: policy_settings.Policy = field(default_factory=policy_settings.Policy)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    tracing: Tracing = field(default_factory=Tracing)


def load(path: pathlib.Path, environment: Mapping[str, str], *, store_url: str | None = None) -> Settings:
    """The settings in the file at `path` and the environment; each problem in `BadSettings` names its line. `store_url` is
    the store where neither of them names one."""
    file = settings_file.read(path)
    try:
        settings = from_environment(settings_decoder.decode_document(Settings, file.content), environment)
        if settings.store.url is None:
            settings = dataclasses.replace(settings, store=dataclasses.replace(settings.store, url=store_url))
        return _checked(settings)
    except BadSettings as error:
        raise BadSettings(*map(file.located, error.problems)) from None


def from_mapping(document: object) -> Settings:
    """The settings in a decoded document. Raises `BadSettings`."""
    return _checked(settings_decoder.decode_document(Settings, document))


def from_environment(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """Overrides the settings that depend on the place: TIDEGATE_STORE_URL, TIDEGATE_STORE_PASSWORD, TIDEGATE_POOL_TOKEN,
    TIDEGATE_HOST and OpenTelemetry's own OTEL_EXPORTER_OTLP_ENDPOINT. Raises `BadSettings`."""
    store: dict[str, Any] = {}
    if url := environment.get("TIDEGATE_STORE_URL"):
        store["url"] = url
    if password := environment.get("TIDEGATE_STORE_PASSWORD"):
        store["password"] = password
    host = environment.get("TIDEGATE_HOST") or settings.listen.host
    try:
        token = pool_token.from_environment(environment)
    except pool_token.BadToken as error:
        raise BadSettings(str(error)) from None
    collector = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return dataclasses.replace(
        settings,
        store=dataclasses.replace(settings.store, **store),
        listen=dataclasses.replace(settings.listen, host=host),
        auth=settings.auth if token is None else dataclasses.replace(settings.auth, pool_token=token),
        tracing=Tracing(endpoint=collector, required=False) if collector else settings.tracing,
        inference_pool=picker_settings.placed(settings.inference_pool, environment),
    )


def core_settings(settings: Settings) -> gateway_core.CoreSettings:
    """The part of the settings that the gateway core decides by."""
    dispatch, health = settings.dispatch, settings.health
    alpha = AUTO_ALPHA if isinstance(dispatch.alpha, str) else dispatch.alpha
    return gateway_core.CoreSettings(
        policy=settings.policy.name,
        dispatch=routing.DispatchSettings(
            rule=dispatch.rule, alpha=alpha, beta=dispatch.beta, prefix_entries=dispatch.prefix_entries
        ),
        max_inflight=dispatch.cap,
        learn_costs=dispatch.learn_costs,
        limits=waiting_limits.Limits(
            max_waiting=settings.queue.max_requests,
            ttl_s=settings.queue.ttl_s,
            hold_s=settings.queue.hold_s,
            bound_workflows=settings.queue.bound_workflows,
            share_among_tenants=settings.queue.share_among_tenants,
        ),
        ejection=outliers.OutlierSettings(
            consecutive_failures=health.consecutive_failures,
            base_ejection_s=health.base_ejection_s,
            max_ejection_s=health.max_ejection_s,
        ),
        classes=settings.classes,
        default_class=settings.default_class,
        tenants=settings.tenants,
    )


def objectives(settings: Settings) -> dict[str, float]:
    """The objectives of the classes, in percent."""
    return {item.name: item.objective for item in settings.classes}


def _checked(settings: Settings) -> Settings:
    if problems := _problems(settings):
        raise BadSettings(*problems)
    return settings


def _problems(settings: Settings) -> list[str]:
    problems = access_settings.problems(settings.auth, settings.tls, host=settings.listen.host)
    problems += policy_settings.problems(settings.policy)
    problems += picker_settings.problems(
        settings.picker, settings.inference_pool, ext_proc_port=settings.listen.ext_proc_port
    )
    if settings.dispatch.rule not in rules.RULES:
        near = settings_decoder.suggestion(settings.dispatch.rule, rules.RULES)
        problems.append(f"dispatch.rule {settings.dispatch.rule!r} is not a dispatch rule; {near}")
    if isinstance(settings.dispatch.alpha, float) and not 0 <= settings.dispatch.alpha <= 1:
        problems.append("dispatch.alpha must be from 0 to 1, or auto")
    if isinstance(settings.dispatch.cap, int) and settings.dispatch.cap < 1:
        problems.append("dispatch.cap must be at least 1, auto, or null for none")
    if settings.queue.max_requests < 0:
        problems.append("queue.maxRequests must be 0 (nothing waits) or more")
    if settings.dispatch.prefix_entries < 0:
        problems.append("dispatch.prefixEntries must not be negative")
    if settings.dispatch.beta <= 0:
        problems.append("dispatch.beta must be greater than 0")
    if settings.store.url is not None and not settings.store.url.startswith(STORE_URLS):
        problems.append(f"store.url must start with one of {', '.join(STORE_URLS)}")
    own = settings.relqueries
    problems += [
        f"relqueries.{name} must be at least 1"
        for name in ("rows", "window", "floor", "attempts", "running")
        if getattr(own, name) < 1
    ]
    problems += [
        f"relqueries.rowsUrls: {url!r} must start with https:// or http:// and name a host, without user and query"
        for url in own.rows_urls
        if not ROWS_URL.fullmatch(url)
    ]
    limited = [tenant.name for tenant in settings.tenants if tenant.tokens_per_minute is not None]
    if limited and settings.store.url is None:
        problems.append(f"tenants[{limited[0]}].tokensPerMinute needs a store, which counts the tokens: set store.url")
    names = {item.name for item in settings.classes}
    if settings.default_class is not None and settings.default_class not in names:
        near = settings_decoder.suggestion(settings.default_class, names)
        problems.append(f"defaultClass {settings.default_class!r} is not among classes; {near}")
    problems += [
        f"{group}[{name}].name occurs {count} times; each name must occur once"
        for group in ("classes", "tenants", "workflows")
        for name, count in Counter(item.name for item in getattr(settings, group)).items()
        if count > 1
    ]
    problems += [
        f"{group}[{item.name}].weight must be greater than 0"
        for group in ("classes", "tenants")
        for item in getattr(settings, group)
        if item.weight <= 0
    ]
    low, high = entitlements.OBJECTIVES
    problems += [
        f"classes[{item.name}].objective must be from {low:g} to {high:g} percent"
        for item in settings.classes
        if not low <= item.objective <= high
    ]
    problems += [
        f"listen.{key} must be from 0 to 65535"
        for key, (name, _) in settings_decoder.fields(Listen).items()
        if name.endswith("port") and not 0 <= (getattr(settings.listen, name) or 0) <= 65535
    ]
    problems += [
        f"tenants[{tenant.name}].maxUrgency must be from 0 to 4"
        for tenant in settings.tenants
        if not 0 <= tenant.max_urgency <= 4
    ]
    problems += [
        f"tenants[{tenant.name}].tokensPerMinute must be at least 1, or null for no limit"
        for tenant in settings.tenants
        if tenant.tokens_per_minute is not None and tenant.tokens_per_minute < 1
    ]
    durations = ("connect_s", "first_token_s", "answer_s", "next_token_s")
    for group, fields, least in (
        ("health", ("interval_s", "timeout_s", "resolve_s"), "more than 0s"),
        ("timeouts", durations, "more than 0s"),
        ("health", ("unhealthy_after", "consecutive_failures"), "at least 1"),
    ):
        wrong = [name for name in fields if getattr(getattr(settings, group), name) <= 0]
        problems += [f"{group}.{settings_decoder.key(name)} must be {least}" for name in wrong]
    problems += engine_entries.problems(settings.engines, settings.services)
    problems += _equal_ports(settings)
    for template in settings.workflows:
        try:
            stage_declaration.check(template.stages)
        except stage_declaration.BadStages as error:
            problems.append(f"workflows[{template.name}].stages{error.where} {error}")
    return problems


def _equal_ports(settings: Settings) -> list[str]:
    """Ports that cannot be open at the same time, because their numbers are equal and their addresses overlap."""
    listen = settings.listen
    ports = [
        ("listen.port", listen.host, listen.port),
        ("listen.grpcPort", listen.host, listen.grpc_port),
        ("listen.extProcPort", listen.host, listen.ext_proc_port),
        ("picker.healthPort", listen.host, settings.picker.health_port),
        ("listen.adminPort", listen.admin_host, listen.admin_port),
        ("listen.metricsPort", listen.metrics_host, listen.metrics_port),
    ]
    return [
        f"{name} and {other} are both {port}, and a port serves one protocol: choose two numbers"
        for (other, other_host, other_port), (name, host, port) in itertools.combinations(ports, 2)
        if port and port == other_port and (host == other_host or {host, other_host} & {"0.0.0.0", "::"})
    ]
