"""What a pool's gateways know of its policy, by their admin port: read there, and told there.

A manual override lives in the pool's store, where `tidegate policy set` puts it with its expiry; the gateways read it, and
the operator only shows it. The steering loop's choice goes the other way, so that calls which wait in a gateway follow the
same order as those in the engines. Any one gateway speaks for all, since they share the store.
"""

import logging
from dataclasses import dataclass

import aiohttp

from tidegate_operator import spec
from tidegate_operator.render import labels

log = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=3.0)
REASON_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A gateway's own account."""

    policy: str
    overridden: bool
    """Whether a person has set it."""
    reason: str
    alpha: float


class Gateways:
    """The gateways of any pool, found by the name of their internal Service."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def look(self, pool: spec.Pool) -> View | None:
        """None when no gateway answers."""
        try:
            async with self._session.get(f"{_admin(pool)}/admin/state", timeout=TIMEOUT) as answer:
                answer.raise_for_status()
                state = await answer.json()
            policy = state["policy"]
            return View(
                policy=policy["name"],
                overridden=policy["source"] == "override",
                reason=policy["reason"],
                alpha=state["dispatch"]["alpha"],
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            log.debug("%s/%s: no gateway answers: %r", pool.namespace, pool.name, error)
            return None

    async def tell(self, pool: spec.Pool, policy: str, reason: str) -> None:
        """Best effort: whoever does not hear is told again when it is next looked at."""
        body = {"policy": policy, "reason": reason[:REASON_CHARACTERS], "source": "steered"}
        try:
            async with self._session.put(f"{_admin(pool)}/admin/policy", json=body, timeout=TIMEOUT) as answer:
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s/%s: no gateway took the policy: %r", pool.namespace, pool.name, error)


def _admin(pool: spec.Pool) -> str:
    return f"http://{labels.component_name(pool, 'gateway')}-internal.{pool.namespace}.svc:{labels.ADMIN_PORT}"
