"""The Secret of a pool: the token that its parts show each other, and the password of its embedded store.

The operator creates it once, owned by the pool, and never changes it. A spec may name an existing Secret in its place
(`credentials.secretName`). Nothing watches or lists Secrets: the operator reads one by its name, and pods refer to it.
"""

import base64
import secrets
from typing import Any

from tidegate_control import pool_token
from tidegate_operator import cluster, objects, spec
from tidegate_operator.render import child_metadata

RANDOM_BYTES = 32


async def ensure(api: cluster.Cluster, pool: spec.Pool) -> tuple[str, str] | None:
    """Creates the pool's Secret if the pool needs one of its own. Returns (reason, message) of an obstacle. Raises
    ClusterError."""
    if pool.credentials is not None:
        return None  # the kubelet tells when the Secret or a key in it does not exist
    name = child_metadata.secret_name(pool)
    try:
        found = await api.secret(pool.namespace, name)
        if found is None:
            await api.create_secret(_manifest(pool, name))
            return None
    except cluster.RejectedError as error:
        return "Refused", f"Secret {name}: {error}"
    if objects.controller_uid(found) != pool.uid:
        return "NameTaken", f"Secret {name} exists and belongs to another owner"
    return None


async def token(api: cluster.Cluster, pool: spec.Pool) -> str | None:
    """The token that the pool's parts require; None when there is none that could be used. Raises ClusterError."""
    try:
        body = await api.secret(pool.namespace, child_metadata.secret_name(pool))
    except cluster.RejectedError:
        return None  # `ensure` reports it
    encoded = {} if body is None else body.get("data") or {}
    try:
        return pool_token.checked(base64.b64decode(encoded[child_metadata.TOKEN_KEY]).decode(), "the token")
    except (KeyError, ValueError):
        return None


def _manifest(pool: spec.Pool, name: str) -> dict[str, Any]:
    values = {
        key: secrets.token_urlsafe(RANDOM_BYTES) for key in (child_metadata.TOKEN_KEY, child_metadata.PASSWORD_KEY)
    }
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return child_metadata.manifest(pool, "v1", "Secret", name, "credentials", type="Opaque", immutable=True, data=data)
