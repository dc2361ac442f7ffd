"""Which profile has each node pool? One of the ConfigMap that the spec names, or else a shipped one.

The operator reads the ConfigMap by its name when it reconciles the pool. It keeps each profile that it has accepted in a
ConfigMap of the pool's own (`render.engine_profile`), from which the engines of the node pool read it. So a profile that
turns wrong or disappears changes nothing in a pool that runs, and the next operator knows the last usable one too. What
steers and scales the pool computes with the profile that is in force.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate_operator import cluster, objects, own_profile, spec
from tidegate_operator.cluster import object_parts
from tidegate_operator.render import child_metadata, engine_profile
from tidegate_operator.spec import Json

REASON = "ProfileUnusable"
"""Of the condition of a pool that keeps a profile, because the present one cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The ConfigMap of profiles, as it was read."""

    name: str
    data: Mapping[str, str] = field(default_factory=dict)
    trouble: str | None = None
    """Why it could not be read."""

    def profile(self, name: str, *, is_shipped: bool) -> own_profile.OwnProfile | None:
        """The profile of this name; None if the shipped one counts. Raises `own_profile.Unusable`."""
        if self.trouble is not None:
            raise own_profile.Unusable(self.trouble)
        text = self.data.get(f"{name}.yaml")
        if text is None and not is_shipped:
            raise own_profile.Unusable(f"the ConfigMap {self.name} has no {name}.yaml; add it, or name another profile")
        try:
            return None if text is None else own_profile.parse(text, name)
        except own_profile.Unusable as error:
            raise own_profile.Unusable(f"correct {name}.yaml in the ConfigMap {self.name}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    profiles: own_profile.OwnProfiles
    kept: Sequence[str] = ()
    """A sentence for each node pool that keeps a profile, because the present one cannot be used."""


NONE = Resolved(profiles=spec.NO_PROFILES)


def named(body: Json) -> str | None:
    """The ConfigMap of profiles that a ServingPool names."""
    reference = body["spec"].get("profilesConfigMapRef")
    return None if reference is None else str(reference["name"])


async def read(api: cluster.Cluster, body: Json) -> Given | None:
    """The ConfigMap that the pool names; None if it names none. Raises ClusterError."""
    name = named(body)
    if name is None:
        return None
    reference = objects.Reference(kind=objects.CONFIG_MAPS, namespace=body["metadata"]["namespace"], name=name)
    try:
        found = await api.get(reference)
    except cluster.RejectedError as error:
        return Given(name=name, trouble=f"the ConfigMap {name} cannot be read: {error}")
    if found is None:
        why = f"there is no ConfigMap {name} in this namespace; create it, or correct spec.profilesConfigMapRef.name"
        return Given(name=name, trouble=why)
    if not object_parts.is_whole(found):
        why = f"the ConfigMap {name} has more than {object_parts.MOST_PARTS} braces, brackets and commas, so it is not read"
        return Given(name=name, trouble=f"{why}; shorten its profiles")
    return Given(name=name, data=found.get("data") or {})


def resolve(body: Json, given: Given | None, children: Iterable[Json], shipped: Collection[str]) -> Resolved:
    """The profiles of a pool. `given` is the ConfigMap that it names, and `children` has the profiles that are in force."""
    if given is None:
        return NONE
    before = in_force(body, children).usable
    usable: dict[str, own_profile.OwnProfile] = {}
    unusable: dict[str, str] = {}
    kept: list[str] = []
    for item in body["spec"]["nodePools"]:
        if "profile" not in item:
            continue
        node_pool, name = item["name"], item["profile"]
        last = before.get(node_pool)
        try:
            found = given.profile(name, is_shipped=name in shipped)
        except own_profile.Unusable as error:
            found = last if last is not None and last.name == name else None
            if found is None and name not in shipped:
                unusable[node_pool] = str(error)
                continue
            instead = "the shipped profile of this name" if found is None else "the last usable one"
            kept.append(f"spec.nodePools[{node_pool}].profile: {error}; until then {instead} counts")
        if found is not None:
            usable[node_pool] = found
    return Resolved(profiles=own_profile.OwnProfiles(usable=usable, unusable=unusable), kept=kept)


def in_force(body: Json, children: Iterable[Json]) -> own_profile.OwnProfiles:
    """The profiles with which the engines and gateways of a pool work, whatever the ConfigMap that it names says now."""
    if named(body) is None:
        return spec.NO_PROFILES
    return own_profile.OwnProfiles(usable=dict(_kept(body["metadata"]["uid"], children)))


def _kept(owner: str, children: Iterable[Json]) -> Iterator[tuple[str, own_profile.OwnProfile]]:
    """By node pool: the profiles in the ConfigMaps of the pool."""
    for child in children:
        node_pool = child["metadata"]["labels"].get(child_metadata.NODE_POOL)
        if child["kind"] == "ConfigMap" and node_pool is not None and objects.controller_uid(child) == owner:
            found = engine_profile.of_config_map(child)
            if found is not None:
                yield node_pool, found
