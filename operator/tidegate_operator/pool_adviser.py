"""The language model that a pool's selector `llm` asks, with the API key from a Secret of the pool's namespace."""

import base64
from collections.abc import Collection, Mapping, Sequence

from tidegate_control import bounded_http, llm_adviser, steering_driver
from tidegate_operator import cluster, spec
from tidegate_operator.render import child_metadata
from tidegate_policy.steer import llm_choice, steering_loop

SELECTOR = "llm"


def adviser(api: cluster.Cluster, client: bounded_http.Client, pool: spec.Pool) -> steering_driver.Ask | None:
    """How the pool's model is asked; None when the pool has another selector. The model has at most the time between the
    question and the decision, also where the spec states a longer one."""
    if pool.steering.selector != SELECTOR:
        return None
    llm = pool.steering.llm
    timeout_s = min(
        llm.timeout_s,
        steering_loop.observation_period_s(
            interval_s=pool.steering.interval_s, window_s=pool.steering.rollback_window_s
        ),
    )
    url = llm.url or child_metadata.api_url(pool.name, pool.namespace, tls=pool.gateway.tls_secret is not None)

    async def ask(messages: Sequence[Mapping[str, str]], allow: Collection[str]) -> llm_choice.Answer:
        try:
            key = None if llm.secret is None else await _key(api, pool.namespace, *llm.secret)
        except (cluster.ClusterError, LookupError, ValueError):
            name, entry = llm.secret or ("", "")
            return llm_choice.Answer(policy=None, trouble=f"Secret {name} with the key {entry} cannot be read")
        model = llm_adviser.Model(url=url, name=llm.name or pool.model.name, timeout_s=timeout_s, key=key)
        return await llm_adviser.ask(client, model, messages, allow)

    return ask


async def _key(api: cluster.Cluster, namespace: str, name: str, entry: str) -> str:
    """The API key. Raises ClusterError, LookupError, ValueError."""
    body = await api.secret(namespace, name)
    if body is None:
        raise LookupError(name)
    return base64.b64decode(body["data"][entry]).decode().strip()
