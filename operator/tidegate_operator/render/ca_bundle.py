"""The certificates that the pods of a pool trust in the TLS connections that they open (`spec.caBundle`).

The libraries of gateways, engines and downloads each read another variable. All of them read their file once, so pods see a
changed ConfigMap after their next start.
"""

from typing import Any

from tidegate_operator import spec

FOLDER, FILE, VOLUME = "/etc/tidegate-ca", "ca.crt", "ca-bundle"
VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH")
"""Read by OpenSSL and Rust's clients, by Requests, and by gRPC."""


def env(pool: spec.Pool) -> list[dict[str, Any]]:
    return [{"name": name, "value": f"{FOLDER}/{FILE}"} for name in VARIABLES if pool.ca_bundle]


def mounts(pool: spec.Pool) -> list[dict[str, Any]]:
    return [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}] if pool.ca_bundle else []


def volumes(pool: spec.Pool) -> list[dict[str, Any]]:
    if pool.ca_bundle is None:
        return []
    name, key = pool.ca_bundle
    return [{"name": VOLUME, "configMap": {"name": name, "items": [{"key": key, "path": FILE}]}}]
