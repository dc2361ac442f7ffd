"""Which objects must exist for a pool? A list of complete manifests, in the order in which they are applied.

Pure: the same pool gives the same manifests, byte for byte and under the same names, so applying them again after a
crash changes nothing. `child_metadata` gives names, labels and owners, and `pods` gives secure pod specs.
`engine_deployments`, `gateway_deployment` and `store_statefulset` render the three components, and `gateway_api` what a
Gateway of the cluster needs. `plan` compares the result with what exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate_operator import node_pool_spec, spec
from tidegate_operator.render import (
    engine_deployments,
    gateway_api,
    gateway_deployment,
    pods,
    scraping,
    store_statefulset,
)
from tidegate_operator.render.child_metadata import Manifest

NO_PROMETHEUS = scraping.Scraping()


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a pool whose spec names none."""

    tidegate: str
    """Gateway, embedded Valkey and simulated engines."""
    engine: str
    """vLLM with Tidegate's scheduler."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    """Names of Secrets that exist in the namespace of each pool."""

    def image(self, name: str, pull_policy: str | None = None) -> pods.Image:
        """The image `name` with the common pull policy, unless `pull_policy` is given."""
        return pods.Image(name=name, pull_policy=pull_policy or self.pull_policy, pull_secrets=self.pull_secrets)


def manifests(
    pool: spec.Pool,
    counts: Mapping[str, int],
    *,
    images: Images,
    operator_namespace: str,
    prometheus: scraping.Scraping = NO_PROMETHEUS,
    ipv6: bool = False,
) -> tuple[Manifest, ...]:
    """All objects of `pool`. `counts` is the number of engines of each node pool (`replica_allocation.desired`).
    With `ipv6` the ports listen on every address, of IPv6 too; else on those of IPv4."""
    gateway_image = images.image(pool.gateway.image or images.tidegate)

    def engine_image(engine: node_pool_spec.Engine) -> pods.Image:
        default = images.tidegate if engine.simulated else images.engine
        return images.image(engine.image or default, engine.pull_policy)

    return (
        *store_statefulset.manifests(pool, image=images.image(images.tidegate), ipv6=ipv6),
        *engine_deployments.manifests(
            pool,
            counts,
            image_of=engine_image,
            download_image=gateway_image,
            operator_namespace=operator_namespace,
            prometheus=prometheus,
            host="::" if ipv6 else "0.0.0.0",
        ),
        *gateway_deployment.manifests(
            pool,
            image=gateway_image,
            operator_namespace=operator_namespace,
            prometheus=prometheus,
            host="::" if ipv6 else "0.0.0.0",
        ),
        *gateway_api.manifests(pool),
    )
