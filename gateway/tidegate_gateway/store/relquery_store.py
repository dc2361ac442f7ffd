"""The relQueries in Valkey or Redis: their rows, their results in the order of their ends, and the lease of their
gateway.

`lua/relquery.lua` makes each change atomically and says which keys exist. A finished row is a row whose result is
recorded here: only rows without a result run again after a gateway has died. The errors are those of `store_contract`.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from tidegate_gateway import gateway_settings
from tidegate_gateway.store import store_answers, store_contract, tenant_ids, valkey_store

Status = Literal["in_progress", "completed", "failed", "cancelled", "expired"]
"""`completed`: every row has a result or an error. `failed`: the results grew beyond their bound."""

UPLOAD_MS = 120_000
"""How long rows wait for the creation of their relQuery."""
PUSHED = 512
"""Rows of one command."""
PAGE_BYTES = 256 * 1024
"""Rows or results that one command reads, at least one."""
OF_THE_GATEWAY = ("hold", "release")
"""The operations that wait for no tenant. For the others tenants take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelQueryRecord:
    """A relQuery as recorded, at the store's instant `now_ms`."""

    id: str
    """Unique in the pool (`tenant_ids`)."""
    tenant: str
    status: Status
    model: str
    total: int
    completed: int
    failed: int
    created_ms: int
    expires_ms: int
    now_ms: int
    ended_ms: int | None = None
    owner: str = ""
    """The gateway that runs its rows; "" = none does now."""

    @property
    def client_id(self) -> str:
        """Its id as clients see it."""
        return tenant_ids.of_client(self.id)

    @property
    def ended(self) -> bool:
        return self.status != "in_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRelQuery:
    id: str
    tenant: str
    model: str
    spec: bytes
    """What the rows have in common, as JSON."""
    upload: str
    """Where `push` put its rows, under an id that no other creation has."""
    total: int
    rows_bytes: int
    lasts_ms: int
    """From its creation to its deadline."""
    key: str | None = None
    """The Idempotency-Key of the request."""
    digest: str = ""
    """A hash of the request: the same key with another request is an error."""
    repeats: bool = False
    """It must be the relQuery of an earlier request with the key; nothing is created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of a gateway for running relQueries."""

    own: int
    """Those that the tenant of a new relQuery has."""
    free: int
    all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The answer to a renewal of leases."""

    lost: frozenset[str]
    """RelQueries that ended or that another gateway has taken over."""
    taken: tuple[RelQueryRecord, ...]
    """RelQueries whose gateway is dead, and that belong to the caller now."""


class RelQueryStore:
    """The relQueries of a pool."""

    def __init__(self, valkey: valkey_store.Valkey, store: gateway_settings.Store, own: gateway_settings.RelQueries):
        self._valkey = valkey
        self._bounds = own
        self.lease_s = store.lease_s
        self._common: dict[str, Any] = {
            "gateway": valkey.gateway,
            "retention_ms": round(store.retention_s * 1000),
            "lease_ms": round(store.lease_s * 1000),
            "most_running": own.per_tenant,
            "most_tenant_bytes": own.tenant_bytes,
            "most_bytes": own.store_bytes,
            "most_result_bytes": own.result_bytes,
        }

    @property
    def gateway(self) -> str:
        return self._valkey.gateway

    async def push(self, upload: str, rows: Sequence[bytes], *, by: str) -> None:
        """Puts rows of the tenant `by` behind those that the upload has already. They come with their time to live."""
        key = self._key("rows", upload)
        async with self._valkey.client.pipeline(transaction=True) as pipeline:
            for start in range(0, len(rows), PUSHED):
                pipeline.rpush(key, *rows[start : start + PUSHED])
            pipeline.pexpire(key, UPLOAD_MS)
            await self._valkey.in_turn(by, pipeline.execute)

    async def drop(self, upload: str, *, by: str) -> None:
        """Removes the rows of an upload that became no relQuery."""
        await self._valkey.in_turn(by, lambda: self._valkey.client.unlink(self._key("rows", upload)))

    async def create(self, new: NewRelQuery, here: Places) -> RelQueryRecord:
        """Creates a relQuery, which runs here if its tenant may have a further one of the places. With the key of an
        earlier request it is that one's relQuery. The same creation, sent twice over a broken connection, counts once."""
        once = ""
        if new.key is not None:
            once = hashlib.sha256(f"relquery\n{new.tenant}\0{new.key}".encode()).hexdigest()
        arguments: dict[str, Any] = {
            "id": new.id,
            "tenant": new.tenant,
            "model": new.model,
            "upload": new.upload,
            "total": new.total,
            "rows_bytes": new.rows_bytes,
            "lasts_ms": new.lasts_ms,
            "digest": new.digest,
            "own": here.own,
            "free": here.free,
            "places": here.all,
        }
        if new.repeats:
            arguments["repeats"] = True
        return await self._record("create", new.spec, once=once, **arguments)

    async def get(self, relquery: str, *, by: str | None = None) -> RelQueryRecord:
        return await self._record("get", id=relquery, by=by)

    async def cancel(self, relquery: str, *, by: str | None = None) -> RelQueryRecord:
        return await self._record("cancel", id=relquery, by=by)

    async def spec(self, relquery: str, *, by: str) -> bytes | None:
        """What the rows have in common, as JSON; None if the relQuery is unknown."""
        return cast("bytes | None", await self._run("spec", id=relquery, by=by))

    async def rows(self, relquery: str, first: int, most: int, *, by: str) -> list[bytes]:
        """At most `most` rows from the number `first` on, as many as a page holds; none if the relQuery has ended."""
        answer = await self._run("rows", id=relquery, after=first, most=most, most_bytes=PAGE_BYTES, by=by)
        return cast("list[bytes]", answer)

    async def finished(self, relquery: str, *, by: str) -> bytes:
        """The bitmap of the rows that have a result: the first row is the highest bit of the first byte."""
        return await self._valkey.in_turn(by, lambda: self._valkey.client.get(self._key("done", relquery))) or b""

    async def finish(
        self, relquery: str, row: int, result: bytes, *, ok: bool, by: str | None = None
    ) -> RelQueryRecord:
        """Records the result of a row. A later result of the same row, or of an ended relQuery, changes nothing."""
        return await self._record("finish", result, id=relquery, row=row, ok=ok, by=by)

    async def results(
        self, relquery: str, after: int, *, most: int, by: str | None = None
    ) -> tuple[RelQueryRecord, list[bytes]]:
        """The record, and the results that follow the first `after` results, as many as a page holds."""
        answer = await self._run("results", id=relquery, after=after, most=most, most_bytes=PAGE_BYTES, by=by)
        record, *results = cast("list[bytes]", answer)
        return _record(record), results

    async def hold(self, held: Sequence[str], most: int) -> Held:
        """Renews the leases of `held`, and takes over at most `most` relQueries whose leases have lapsed."""
        answer = orjson.loads(cast("bytes", await self._run("hold", held=list(held), most=most)))
        taken = tuple(_read(item) for item in store_answers.rows(answer["taken"]) for item in [orjson.loads(item)])
        return Held(lost=frozenset(store_answers.rows(answer["lost"])), taken=taken)

    async def release(self, held: Sequence[str]) -> None:
        """Another gateway may take these over at once."""
        await self._run("release", held=list(held))

    async def _record(self, operation: str, result: bytes = b"", *, once: str = "", **arguments: Any) -> RelQueryRecord:
        return _record(cast("bytes", await self._run(operation, result, once=once, **arguments)))

    async def _run(self, operation: str, result: bytes = b"", *, once: str = "", **arguments: object) -> object:
        given = {key: value for key, value in {**self._common, **arguments}.items() if value is not None}
        keys = [self._valkey.key("relquery:"), self._valkey.key(f"once:{once}") if once else ""]
        by = str(arguments.get("tenant") or arguments.get("by") or "") if operation not in OF_THE_GATEWAY else None
        return await self._valkey.run("relquery", keys, [operation, orjson.dumps(given), result], by=by)

    def _key(self, kind: str, name: str) -> str:
        return self._valkey.key(f"relquery:{kind}:{name}")


def new_id() -> str:
    return f"rq-{secrets.token_hex(10)}"


def _record(raw: bytes) -> RelQueryRecord:
    answer = orjson.loads(raw)
    if "error" in answer:
        raise store_contract.Rejected(answer["error"], answer.get("text"))
    return _read(answer)


def _read(answer: dict[str, Any]) -> RelQueryRecord:
    return RelQueryRecord(**{name: answer[name] for name in RelQueryRecord.__slots__ if name in answer})
