"""Which workflow or relQuery does a client's id mean? With authentication each tenant has ids of its own.

A client chooses ids, and may guess those of others. The store and the gateway core know a workflow or a relQuery of an
authenticated tenant by a hash of the tenant and the client's id, so equal ids of two tenants never meet. Clients see their
own id only. Without authentication a tenant is a claim, which protects nobody: ids are then unique in the pool.
"""

import hashlib
from dataclasses import dataclass

_SEPARATOR = "/"
"""No id of a client has it."""
_DIGITS = 16
"""Of the hash, 4 bits each. Names of tenants are up to 256 characters long, as long as a label of an engine."""


@dataclass(frozen=True, slots=True)
class TenantIds:
    """The ids of one gateway's callers."""

    by_tenant: bool
    """Callers are authenticated."""

    def of(self, client_id: str, tenant: str | None) -> str:
        """The id in the pool of what `tenant` calls `client_id`; without a tenant it is the client's id."""
        if not self.by_tenant or not tenant:
            return client_id
        return hashlib.sha256(tenant.encode()).hexdigest()[:_DIGITS] + _SEPARATOR + client_id


OF_THE_POOL = TenantIds(by_tenant=False)
"""Ids are unique in the pool."""


def of_client(pool_id: str) -> str:
    """The id as its client chose it."""
    return pool_id.rpartition(_SEPARATOR)[2]


def tenant_part(pool_id: str) -> str:
    """What the ids of one authenticated tenant have in common; without authentication nothing."""
    return pool_id.rpartition(_SEPARATOR)[0]
