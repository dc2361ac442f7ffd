"""What do the settings of a gateway mean? Sentences for `tidegate config check`, and warnings about unusual values."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tidegate_profiles
from tidegate_cli import settings_reference
from tidegate_gateway import access_settings, gateway_settings, settings_decoder
from tidegate_gateway.callers import api_keys, authentication
from tidegate_gateway.edge import port_encryption
from tidegate_policy import duration
from tidegate_policy.admit import entitlements

SLOWEST_TPOT_S = 5.0
"""A target above is probably a mistake of the unit: people read four tokens a second."""


def problems(settings: gateway_settings.Settings) -> Iterator[str]:
    """Problems that a gateway would find only while it starts; each begins with the path of its setting."""
    for group in ("engines", "services"):
        for i, item in enumerate(getattr(settings, group)):
            if item.profile is not None and item.cost is None:
                try:
                    tidegate_profiles.load(item.profile)
                except tidegate_profiles.UnknownProfile as error:
                    yield f"{group}[{i}].profile: {error}"
    for unusable in _unusable_files(settings):
        if not _is_elsewhere(unusable):
            yield str(unusable)


def sentences(settings: gateway_settings.Settings) -> Iterator[str]:
    """What a gateway with these settings does."""
    listen = settings.listen
    named = (("HTTP", listen.port), ("gRPC", listen.grpc_port), ("an Envoy's endpoint picker", listen.ext_proc_port))
    ports = [f"{name} {port}" for name, port in named if port is not None]
    secured = "" if settings.tls.cert_file is None else f", with TLS and the certificate {settings.tls.cert_file}"
    yield f"Clients connect to {listen.host}: {', '.join(ports)}{secured}."
    if settings.auth.keys_file is not None:
        yield f"Callers need an API key of {settings.auth.keys_file}, and the key decides their tenant."
    if (jwt := settings.auth.jwt).issuer is not None:
        yield f"Callers with a token of {jwt.issuer} may call; its claim {jwt.tenant_claim} decides their tenant."
    pool = settings.inference_pool.shown
    if settings.engines or settings.services or pool:
        names = [item.name or item.url for item in settings.engines] + [
            f"{item.name} (DNS)" for item in settings.services
        ]
        names += [f"{pool} (the pods of an InferencePool)"] if pool else []
        yield f"Calls go to the engines {', '.join(names)} by the dispatch rule {settings.dispatch.rule}."
    else:
        yield "The file names no engines: `tidegate up` starts its own, `tidegate gateway` answers 503."
    named_profiles = {item.profile for item in settings.engines if item.cost is None}
    named_profiles |= {item.profile for item in settings.services if item.cost is None}
    for name in filter(named_profiles.__contains__, tidegate_profiles.names()):
        yield f"Profile {name}: {tidegate_profiles.accuracy(tidegate_profiles.load(name))}."
    yield (
        f"At most {settings.queue.max_requests:,} calls wait, at first by the policy {settings.policy.name}. "
        f"A call without a deadline waits for {duration.text(settings.queue.ttl_s)} at most."
    )
    for slo_class in settings.classes:
        yield f"Class {slo_class.name}: {_class(slo_class)}."
    if settings.default_class is not None:
        yield f"A call that names no class belongs to {settings.default_class}."
    elif settings.classes:
        yield "A call that names no class has no targets of a class (defaultClass)."
    for tenant in settings.tenants:
        limit = (
            "no token limit" if tenant.tokens_per_minute is None else f"{tenant.tokens_per_minute:,} tokens a minute"
        )
        urgency = f"its most urgent level is {tenant.max_urgency} of 0 to 4"
        whose = f"Tenant {tenant.name}" if tenant.name else "Calls that name no tenant"
        yield f"{whose}: weight {tenant.weight:g}, {limit}; {urgency}."
    for template in settings.workflows:
        within = "" if template.deadline_s is None else f" within {duration.text(template.deadline_s)}"
        stages = _stages(template)
        told = (
            f"its stages end{within}: {stages}"
            if stages
            else f"its calls name its stages{within and f', which end{within}'}"
        )
        yield f"Workflow {template.name}: {told}."


def warnings(settings: gateway_settings.Settings) -> Iterator[str]:
    """What is allowed and probably not meant. The gateway may run on another machine, so files may be absent here."""
    for error in _unusable_files(settings):
        if _is_elsewhere(error):
            yield f"{error}; a gateway does not start without it"
    if settings.auth.keys_file is not None:
        with contextlib.suppress(settings_decoder.BadSettings):
            if not api_keys.ApiKeys(settings.auth.keys_file).count:
                yield f"auth.keysFile: {settings.auth.keys_file} has no keys, so no caller has an API key"
    if settings.picker.conformance_tests:
        yield "picker.conformanceTests: clients choose engines and reach all their paths; it is for tests only"
    for slo_class in settings.classes:
        if slo_class.tpot_s is not None and slo_class.tpot_s >= SLOWEST_TPOT_S:
            target = duration.text(slo_class.tpot_s)
            yield f"classes[{slo_class.name}].tpot is {target} for each token, which is slow for any reader"
        if slo_class.ttft_s is slo_class.tpot_s is slo_class.deadline_s is None:
            yield f"classes[{slo_class.name}] has no target (ttft, tpot or deadline), so no call of it is ever late"
    is_open = not access_settings.LOOPBACK.fullmatch(settings.listen.admin_host) and settings.auth.pool_token is None
    if settings.listen.admin_port is not None and is_open:
        yield f"listen.adminHost is {settings.listen.admin_host}: its clients may switch the policy"
    if not access_settings.LOOPBACK.fullmatch(settings.listen.host) and settings.listen.status_page:
        yield f"listen.host is {settings.listen.host}: its clients see the status page (listen.statusPage)"


def _unusable_files(settings: gateway_settings.Settings) -> Iterator[settings_decoder.BadSettings]:
    """Errors of the files of keys and certificates."""
    for load in (
        lambda: authentication.Authentication(settings.auth),
        lambda: port_encryption.PortEncryption(settings.tls),
    ):
        try:
            load()
        except settings_decoder.BadSettings as error:
            yield error


def _is_elsewhere(error: settings_decoder.BadSettings) -> bool:
    """Whether the file cannot be read here, and may be fine where the gateway runs."""
    return isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | PermissionError)


def in_force(file: gateway_settings.Settings, placed: gateway_settings.Settings) -> str:
    """All settings as YAML, with a mark at the defaults and at those that the environment sets in place of the file."""
    lines: list[str] = []
    _write(lines, placed, file, "", 0)
    return "\n".join(lines) + "\n"


def _class(slo_class: entitlements.SloClass) -> str:
    targets = [
        text.format(duration.text(target_s))
        for text, target_s in (
            ("the first token within {}", slo_class.ttft_s),
            ("{} for each further token", slo_class.tpot_s),
            ("the answer within {}", slo_class.deadline_s),
        )
        if target_s is not None
    ]
    shed = "; shed first when the queue is half full" if slo_class.sheddable else ""
    return (
        f"{', '.join(targets) or 'no targets'}; weight {slo_class.weight:g}; objective {slo_class.objective:g}%{shed}"
    )


def _stages(template: gateway_settings.Template) -> str:
    texts = []
    for stage in template.stages:
        details = [f"after {', '.join(stage.after)}"] if stage.after else []
        details += [f"{stage.parallel} calls at a time"] if stage.parallel is not None else []
        details += [f"up to {stage.repeat} times"] if stage.repeat > 1 else []
        texts.append(f"{stage.name} ({'; '.join(details)})" if details else stage.name)
    return ", ".join(texts)


def _write(lines: list[str], item: object, file: object, path: str, depth: int) -> None:
    kind: Any = type(item)
    for key, (name, _) in settings_decoder.fields(kind).items():
        value, given = getattr(item, name), getattr(file, name, None)
        start = f"{'  ' * depth}{key}:"
        if dataclasses.is_dataclass(value):
            lines.append(start)
            _write(lines, value, given, f"{path}{key}.", depth + 1)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            lines.append(start)
            for entry in value:
                inside: list[str] = []
                _write(inside, entry, entry, f"{path}{key}.", depth + 1)
                lines += [f"{'  ' * depth}- {inside[0].lstrip()}", *inside[1:]]
        else:
            mark = "  # from the environment" if value != given else ""
            if not mark and not settings_decoder.required(kind, name) and value == settings_decoder.default(kind, name):
                mark = "  # default"
            if f"{path}{key}" in ("store.password", "auth.poolToken") and value is not None:
                value, mark = "...", f"{mark or '  #'} (hidden)"
            lines.append(f"{start} {settings_reference.shown(name, value)}{mark}")
