"""What settings does a gateway have? The reference page `docs/settings.md`, made from the settings dataclasses.

Name, type, unit, default and reason come from the code. The examples come from `every_setting.yaml`. Two tables name the
units of plain numbers and the places of settings in a ServingPool; tests check that both are complete.
"""

import ast
import dataclasses
import functools
import importlib.resources
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tidegate_gateway import gateway_settings, settings_decoder
from tidegate_policy import duration

REQUIRED = "required"
OPERATOR = "the operator sets it"
ABSENT = "the default counts"
UNITS = {
    "port": "port number",
    "bytes": "bytes",
    "weight": "ratio",
    "classes[].objective": "percent",
    "policy.parameters[].value": "its own",
    "dispatch.alpha": "ratio",
    "dispatch.beta": "seconds squared",
    "dispatch.cap": "calls",
    "dispatch.prefixEntries": "entries",
    "picker.fallbacks": "engines",
    "health.unhealthyAfter": "health checks",
    "health.consecutiveFailures": "calls",
    "tenants[].maxUrgency": "urgency level",
    "tenants[].tokensPerMinute": "tokens a minute",
    "workflows[].stages[].parallel": "calls",
    "workflows[].stages[].repeat": "times",
    "queue.maxRequests": "calls",
    "store.connections": "connections",
    "relqueries.rows": "rows",
    "relqueries.perTenant": "relQueries",
    "relqueries.window": "rows",
    "relqueries.inFlight": "rows",
    "relqueries.floor": "rows",
    "relqueries.waiting": "calls",
    "relqueries.running": "relQueries",
    "relqueries.attempts": "failures",
    "limits.connections": "connections",
    "limits.connectionsPerAddress": "connections",
    "limits.choices": "sequences",
}
"""The unit of a number: by its path, else by the last word of its name."""
SERVING_POOL = {
    "skipUnknown": OPERATOR,
    "model": "model.name",
    "services[].nodePool": "nodePools[].name",
    "services[].profile": "nodePools[].profile",
    "classes": "classes",
    "defaultClass": "gateway.defaultClass",
    "tenants": "tenants",
    "workflows": "workflows",
    "dispatch.rule": "gateway.dispatch.rule",
    "dispatch.alpha": "gateway.dispatch.alpha",
    "dispatch.beta": "gateway.dispatch.beta",
    "queue.maxRequests": "gateway.queue.maxRequests",
    "queue.ttl": "gateway.queue.ttl",
    "queue.hold": "autoscaling.holdCalls",
    "store.url": "state.valkey.url",
    "store.password": "state.valkey.secretRef",
    "tracing.endpoint": "gateway.tracing.endpoint",
    "listen": OPERATOR,
    "picker.selfSigned": OPERATOR,
    "auth.keysFile": "gateway.auth.keysSecretRef",
    "auth.allowUnauthenticated": OPERATOR,
    "auth.poolToken": "credentials.secretName",
    "auth.jwt.issuer": "gateway.auth.jwt.issuer",
    "auth.jwt.audience": "gateway.auth.jwt.audience",
    "auth.jwt.jwksUrl": "gateway.auth.jwt.jwksUrl",
    "auth.jwt.tenantClaim": "gateway.auth.jwt.tenantClaim",
    "auth.jwt.classesClaim": "gateway.auth.jwt.classesClaim",
    "tls.certFile": "gateway.tls.secretName",
    "tls.keyFile": "gateway.tls.secretName",
    "services": OPERATOR,
    "store.pool": OPERATOR,
    "store.journal": OPERATOR,
    "timeouts.drain": "gateway.drainTimeout",
    "timeouts.announce": OPERATOR,
    "timeouts.firstToken": "gateway.timeouts.firstToken",
    "timeouts.nextToken": "gateway.timeouts.nextToken",
    "timeouts.answer": "gateway.timeouts.answer",
    "limits.bodyBytes": "gateway.limits.body",
    "limits.connections": "gateway.limits.connections",
    "limits.connectionsPerAddress": "gateway.limits.connectionsPerAddress",
    "allow": "gateway.allow",
    "dispatch.learnCosts": "gateway.dispatch.learnCosts",
    "dispatch.isolateTenants": "gateway.dispatch.isolateTenants",
    "relqueries.rows": "gateway.relQueries.rows",
    "relqueries.perTenant": "gateway.relQueries.perTenant",
    "relqueries.inFlight": "gateway.relQueries.inFlight",
    "relqueries.lasts": "gateway.relQueries.lasts",
    "relqueries.rowsUrls": "gateway.relQueries.rowsUrls",
    "policy.name": "policy.name",
    "policy.parameters": "policy.parameters",
}
"""Where a setting stands in the `spec` of a ServingPool. An entry for a group covers the settings in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting; all fields are text for a reader."""

    path: str
    """Such as `queue.ttl` or `classes[].tpot`."""
    type: str
    unit: str
    default: str
    reason: str
    example: str
    serving_pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Settings that stand together; the path of the top level is empty."""

    path: str
    summary: str
    settings: tuple[Setting, ...]


def groups(kind: Any = gateway_settings.Settings, path: str = "") -> Iterator[Group]:
    """The groups of settings in `kind`, which stands at `path`: its own settings first."""
    known, why = settings_decoder.fields(kind), reasons(kind)
    inner: list[tuple[str, Any]] = []
    own: list[Setting] = []
    for key, (name, hint) in known.items():
        place = f"{path}.{key}" if path else key
        if group := _group(hint):
            inner.append((place + ("[]" if typing.get_origin(hint) is tuple else ""), group))
        else:
            own.append(_setting(kind, name, hint, place, why.get(name, "")))
    if own:
        yield Group(path=path, summary=inspect.getdoc(kind) or "", settings=tuple(own))
    for place, group in inner:
        yield from groups(group, place)


def reasons(kind: Any) -> dict[str, str]:
    """The docstring under each field of the dataclass `kind`, which Python does not keep at run time."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, follower in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match follower:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[statement.target.id] = " ".join(text.split())
    return found


@functools.cache
def examples() -> dict[str, Any]:
    """A document that holds every setting."""
    text = importlib.resources.files("tidegate_cli").joinpath("every_setting.yaml").read_text()
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def page() -> str:
    """The reference page in Markdown."""
    lines = [_OPENING]
    for group in groups():
        lines += [
            f"## {f'`{group.path}`' if group.path else 'Top level'}",
            "",
            group.summary,
            "",
            "| name | type | unit | default | meaning | example | in `spec` of a ServingPool |",
            "|---|---|---|---|---|---|---|",
        ]
        for item in group.settings:
            pool = f"`{item.serving_pool}`" if item.serving_pool not in (OPERATOR, ABSENT) else item.serving_pool
            default = item.default if item.default == REQUIRED else f"`{item.default}`"
            meaning = item.reason.replace("|", "\\|")
            lines.append(
                f"| `{item.path}` | {item.type} | {item.unit} | {default} | {meaning} | `{item.example}` | {pool} |"
            )
        lines.append("")
    return "\n".join(lines)


def shown(name: str, value: object) -> str:
    """The value of the field `name` as a settings file has it, on one line."""
    if name.endswith("_s") and isinstance(value, float | int):
        return duration.text(value)
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else _text(value)


def _text(value: str) -> str:
    try:
        plain = bool(value) and yaml.safe_load(value) == value
    except yaml.YAMLError:
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)


def _setting(kind: Any, name: str, hint: Any, path: str, reason: str) -> Setting:
    default = REQUIRED if settings_decoder.required(kind, name) else shown(name, settings_decoder.default(kind, name))
    words = _words(hint, timed=name.endswith("_s"))
    number = "number" in words
    return Setting(
        path=path,
        type=words,
        unit=_unit(path) if number else "ms, s, m or h" if name.endswith("_s") else "",
        default=default,
        reason=reason,
        example=shown("", _example(path)),
        serving_pool=_serving_pool(path),
    )


def _group(hint: Any) -> Any:
    """The dataclass of a group, or of the items of a list of groups; None for a plain setting."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return inner if dataclasses.is_dataclass(inner) else None


def _words(hint: Any, *, timed: bool) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(item, timed=timed) for item in arguments)
    if origin is typing.Literal:
        return " or ".join(f"`{item}`" for item in arguments)
    if origin is tuple:
        return "list of " + _words(arguments[0], timed=False)
    if origin is not None:
        return "mapping"
    if hint is float and timed:
        return "duration"
    return {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}[hint]


def _unit(path: str) -> str:
    if path in UNITS:
        return UNITS[path]
    matching = [unit for word, unit in UNITS.items() if path.lower().endswith(word) and "." not in word]
    return matching[0] if matching else ""


def _example(path: str) -> Any:
    found: Any = examples()
    for step in path.split("."):
        found = found[step.removesuffix("[]")]
        if step.endswith("[]"):
            found = found[0]
    return found


def _serving_pool(path: str) -> str:
    best = max(
        (own for own in SERVING_POOL if path == own or path.startswith((f"{own}.", f"{own}["))), default="", key=len
    )
    if not best:
        return ABSENT
    place = SERVING_POOL[best]
    return place if place == OPERATOR else f"{place}{path[len(best) :]}"


_OPENING = """\
# Settings of the gateway

`tidegate config reference` makes this page from the code. A settings file is YAML or JSON. `tidegate gateway --config FILE`
and `tidegate up --config FILE` read the same file. A file names only the settings that differ from the defaults.

- `tidegate config check FILE` names the problems of a file with their lines, and says in words what the file means. It
  compares values with each other once all names and types are right. A file of keys or a certificate that is malformed
  is a problem. One that cannot be read here brings a warning, because the gateway may run elsewhere.
- `tidegate config show --config FILE` prints all settings that are in force and marks the defaults. `tidegate up` writes
  the file that its gateway reads to `gateway.yaml` in its state folder.
- [examples/pool.yaml](examples/pool.yaml) is a worked example: two tenants, two classes, token limits, a workflow template.
- A duration has a unit: `60ms`, `1.5s`, `10m`, `1h30m`. A number without a unit is an error, and so is an unknown name.
- The environment overrides the file: `TIDEGATE_STORE_URL` (`store.url`), `TIDEGATE_STORE_PASSWORD` (`store.password`),
  `TIDEGATE_POOL_TOKEN` (`auth.poolToken`), `TIDEGATE_HOST` (`listen.host`), `OTEL_EXPORTER_OTLP_ENDPOINT`
  (`tracing.endpoint`).
- The options of `tidegate up` override both. `tidegate up` starts a store where `store.url` is null, and the engines of
  `--engines` where the file names none. Its steering loop begins with `urgency`, whatever `policy.name` is.
- A running `tidegate gateway` takes over changes of `classes`, `defaultClass`, `tenants`, `workflows` and `policy` from its
  file in seconds. Changes of the other settings take effect at its next start. A file that cannot be used changes nothing.
  `tidegate up` reads `--config FILE` at its start only, and writes what is in force to `gateway.yaml` in its state
  folder: edit that file for a change while it runs, and FILE for the next start.
- The last column names the field of a ServingPool from which the operator takes the setting.
"""
