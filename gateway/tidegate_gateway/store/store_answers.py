"""What do the scripts of the store answer? Their JSON becomes the values of `store_contract`."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from tidegate_gateway.store import store_contract
from tidegate_policy.admit import tenant_load
from tidegate_policy.admit.tenant_load import PoolLoad, TenantLoad


def rows(value: object) -> Iterable[Any]:
    """A Lua list; an empty one arrives as an object."""
    return value if isinstance(value, list) else ()


def entries(value: object) -> Iterable[tuple[str, Any]]:
    """The entries of all objects in a Lua list. An empty object may arrive as a list."""
    return itertools.chain.from_iterable(item.items() for item in rows(value) if isinstance(item, dict))


def told(load: PoolLoad) -> dict[str, Any]:
    """What the other gateways are told of the tenants, as `pool_load` reads it."""
    return {
        "tenants": _lists(load.tenants),
        "places": load.places,
        "parts": {key: _lists(tenants) for key, tenants in load.parts.items()},
        "long_prompts": sorted(load.long_prompts),
    }


def _lists(loads: Mapping[str, TenantLoad]) -> dict[str, list[float]]:
    return {tenant: list(load) for tenant, load in loads.items()}


def pool_load(answer: object) -> PoolLoad:
    """What tenants have at all other gateways, and the places that these have learned on average."""
    return tenant_load.merged(
        PoolLoad(
            _loads(item.get("tenants")),
            item["places"] if isinstance(item.get("places"), int | float) else None,
            {key: _loads(tenants) for key, tenants in entries([item.get("parts")])},
            frozenset(map(str, rows(item.get("long_prompts")))),
        )
        for item in rows(answer)
        if isinstance(item, dict)
    )


def _loads(told: object) -> dict[str, TenantLoad]:
    return {tenant: TenantLoad(*load) for tenant, load in numbers([told], len(TenantLoad._fields))}


def numbers(value: object, count: int) -> Iterable[tuple[str, list[Any]]]:
    """The entries of all objects in a Lua list, of each the first `count` numbers. A gateway of another version may tell
    more, which are left out, or fewer, whose entry is left out."""
    for name, row in entries(value):
        found = row[:count] if isinstance(row, list) else []
        if len(found) == count and all(isinstance(each, int | float) for each in found):
            yield name, found


def chosen(answer: object) -> dict[str, Any]:
    found = answer if isinstance(answer, dict) else {}
    return {
        kind: store_contract.Chosen(
            policy=item["policy"],
            reason=item.get("reason", ""),
            left_s=None if item.get("left_ms") is None else item["left_ms"] / 1000,
            alternatives=tuple(map(str, rows(item.get("alternatives")))),
            expected=item.get("expected", ""),
        )
        for kind, item in found.items()
    }


def record(answer: Mapping[str, Any]) -> store_contract.Record:
    stages = [
        store_contract.Stage(
            name=item["name"],
            after=tuple(item["after"].split("\n")) if item["after"] else (),
            parallel=item["parallel"],
            passes=item["passes"],
            declared=item.get("declared", False),
            started=item["started"],
            over=item["over"],
            running=item["running"],
            done=item["done"],
            share_ms=item.get("share_ms"),
            started_ms=item.get("started_ms"),
            ended_ms=item.get("ended_ms"),
        )
        for item in rows(answer["stages"])
    ]
    return store_contract.Record(
        id=answer["id"],
        state=answer["state"],
        template=answer["template"],
        tenant=answer["tenant"],
        created_ms=answer["created_ms"],
        deadline_ms=answer["deadline_ms"],
        now_ms=answer["now_ms"],
        stages=tuple(stages),
        outcome=answer.get("outcome"),
        ended_ms=answer.get("ended_ms"),
    )
