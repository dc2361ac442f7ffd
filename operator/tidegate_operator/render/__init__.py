"""What must exist for a pool? A list of complete manifests, in the order in which they are applied.

Pure: the same pool gives the same manifests, byte for byte, under the same names, so that applying them again after a
crash changes nothing. `labels` names things and says whose they are, `pods` makes them safe, `engines`, `gateway` and
`store` are the three parts. `plan` compares the result with what exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate_operator import spec
from tidegate_operator.render import engine_deployments, gateway_deployment, pods, store_statefulset
from tidegate_operator.render.child_metadata import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What a pool runs when it names no image itself."""

    tidegate: str
    """Gateway, embedded Valkey and simulated engines."""
    engine: str
    """vLLM with Tidegate's scheduler."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    """Names of Secrets that each pool's namespace has."""

    def image(self, name: str, pull_policy: str | None = None) -> pods.Image:
        """The image `name`, pulled as all of them are unless `pull_policy` says otherwise."""
        return pods.Image(name=name, pull_policy=pull_policy or self.pull_policy, pull_secrets=self.pull_secrets)


def manifests(
    pool: spec.Pool, counts: Mapping[str, int], *, images: Images, operator_namespace: str
) -> tuple[Manifest, ...]:
    """Everything that `pool` owns. `counts` is the engines of each node pool (`replica_allocation.desired`)."""
    engine_image = pool.engine.image or (images.tidegate if pool.engine.simulated else images.engine)
    return (
        *store_statefulset.manifests(pool, image=images.image(images.tidegate)),
        *engine_deployments.manifests(
            pool,
            counts,
            image=images.image(engine_image, pool.engine.pull_policy),
            operator_namespace=operator_namespace,
        ),
        *gateway_deployment.manifests(
            pool,
            image=images.image(pool.gateway.image or images.tidegate),
            operator_namespace=operator_namespace,
        ),
    )
