"""Has a person overridden the pool's policy for a while? Asked of a gateway's admin port, which reads it in the store.

One truth: `tidegate policy set` writes it to the store with its expiry; the operator only reads and shows it. When no
gateway answers, the answer is "as last seen": an override neither starts nor ends because a gateway restarts.
"""

import logging

import aiohttp

from tidegate_operator import spec
from tidegate_operator.render import labels

log = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=3.0)


class GatewayAdmin:
    """Reads overrides by `GET /admin/policy`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._seen: dict[str, str | None] = {}

    async def override(self, pool: spec.Pool) -> str | None:
        """The policy that a person has set for `pool`, None when nobody has."""
        host = f"{labels.component_name(pool, 'gateway')}-internal.{pool.namespace}.svc"
        try:
            async with self._session.get(f"http://{host}:{labels.ADMIN_PORT}/admin/policy", timeout=TIMEOUT) as answer:
                answer.raise_for_status()
                override = (await answer.json()).get("override")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("%s/%s: no gateway told the override: %s", pool.namespace, pool.name, error)
            return self._seen.get(pool.uid)
        self._seen[pool.uid] = override["policy"] if override else None
        return self._seen[pool.uid]
