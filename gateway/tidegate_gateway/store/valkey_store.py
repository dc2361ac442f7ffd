"""The store over Valkey or Redis: workflows, backlogs, the active policy and tenants' counters.

This module has the connections to Valkey; the uploads of relQueries and the stream of prompts use its client. Each change
of a record is one atomic script from `lua/`. Keys carry a schema version and one hash tag for each pool, so that they share
a slot behind a proxy that shards; the cluster mode itself is not supported. Every key has a time to live. Instants are the
server's, so the clocks of gateways do not matter. An acknowledged change is stored, but Valkey may lose acknowledged writes
in a failover: clients are promised at-least-once with idempotency keys, not exactly-once. `store_contract` is the contract.
"""

import asyncio
import contextlib
import functools
import hashlib
import importlib.resources
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import orjson
from redis import asyncio as valkey
from redis import backoff, exceptions
from redis.asyncio import retry

from tidegate_gateway import gateway_settings, loop_steps, stage_declaration
from tidegate_gateway.store import known_leases, store_address, store_answers, store_contract
from tidegate_policy.admit.tenant_load import NO_LOAD, PoolLoad
from tidegate_policy.model import Backlog, EngineId

T = TypeVar("T")

logger = logging.getLogger("tidegate.gateway")

SCHEMA = "v1"
SCRIPTS = ("workflow", "list", "share", "spend", "relquery")
LAPSED = 100
"""Overdue workflows that are ended before a list is read."""
PAGE_BYTES = 256 * 1024
"""Of the records in one list."""
MOST_CANCELLED = 1000
"""Cancelled workflows that one exchange reports."""
OF_THE_GATEWAY = 4
"""Connections on which no tenant's command runs, so that the gateway keeps its lease whatever tenants ask for."""


class Valkey:
    """The store."""

    def __init__(self, settings: gateway_settings.Store, *, gateway: str) -> None:
        if settings.url is None:
            raise ValueError("a store needs its url")
        self.gateway = gateway
        self._steps = loop_steps.LoopSteps()
        self._settings = settings
        # The password has its own setting, so that it is never part of a url that could be logged.
        address = settings.url.replace("valkeys://", "rediss://").replace("valkey://", "redis://")
        self._pool = valkey.BlockingConnectionPool.from_url(
            address,
            password=settings.password,
            max_connections=settings.connections,
            timeout=settings.timeout_s,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            health_check_interval=30,
            retry=retry.Retry(backoff.NoBackoff(), 1),
        )
        self.client = valkey.Redis(connection_pool=self._pool)
        self._turns = loop_steps.TenantTurns(max(settings.connections - OF_THE_GATEWAY, 1))
        self._prefix = f"tidegate:{SCHEMA}:{{{settings.pool}}}:"
        self._scripts = {name: self.client.register_script(_script(name)) for name in SCRIPTS}
        self._since_ms = 0
        self._known_leases = known_leases.KnownLeases()

    async def ping(self) -> None:
        """Raises `store_contract.Unavailable` unless the store answers."""
        await self.guard(self.client.ping())

    async def close(self) -> None:
        await self.client.aclose()
        await self._pool.disconnect()

    async def create(
        self, workflow: store_contract.NewWorkflow, *, once: store_contract.Idempotency | None = None
    ) -> store_contract.Record:
        stages = [
            {
                "name": stage.name,
                "after": "\n".join(stage.after),
                "parallel": stage.calls_at_a_time,
                "passes": stage.repeat,
                "expected": stage.calls_at_a_time * stage.repeat,
            }
            for stage in workflow.stages
        ]
        return await self._workflow(
            "create",
            workflow.id,
            once or _own(),
            deadline_ms=workflow.deadline_ms,
            template=workflow.template,
            tenant=workflow.tenant,
            stages=stages,
        )

    async def join(
        self, workflow: str, stage: str, call: str, *, deadline_ms: int | None, tenant: str, key: str | None = None
    ) -> store_contract.Record:
        return await self._workflow(
            "join",
            workflow,
            None,
            stage=stage,
            call=call,
            call_key=key,
            deadline_ms=deadline_ms,
            tenant=tenant,
            by=tenant or None,
            template="",
        )

    async def finish(
        self, workflow: str, call: str, *, ok: bool, share_ms: int | None = None, tenant: str | None = None
    ) -> store_contract.Record:
        share = {} if share_ms is None else {"share_ms": share_ms}
        return await self._workflow("finish", workflow, None, turn_of=tenant, call=call, ok=ok, **share)

    async def complete_stage(
        self, workflow: str, stage: str, *, by: str | None = None, once: store_contract.Idempotency | None = None
    ) -> store_contract.Record:
        return await self._workflow("complete_stage", workflow, once or _own(), by=by, stage=stage)

    async def complete(
        self, workflow: str, *, by: str | None = None, once: store_contract.Idempotency | None = None
    ) -> store_contract.Record:
        return await self._workflow("complete", workflow, once or _own(), by=by)

    async def cancel(self, workflow: str, *, by: str | None = None) -> store_contract.Record:
        return await self._workflow("cancel", workflow, None, by=by)

    async def get(self, workflow: str, *, by: str | None = None) -> store_contract.Record:
        return await self._workflow("get", workflow, None, by=by)

    async def listed(
        self, state: store_contract.State | None, limit: int, *, by: str | None = None
    ) -> tuple[list[store_contract.Record], bool]:
        async with self._turns.of(by or ""):
            await self.expire(LAPSED)
        wanted = store_contract.STATES if state is None else (state,)
        keys = [self.key(f"created:{each}:{by}" if by else f"created:{each}") for each in wanted]
        answer = await self.run("list", keys, [limit, self.key("workflow:"), PAGE_BYTES], by=by or "")
        now_ms, more, *found = cast("list[Any]", answer)

        def record(raw: bytes) -> store_contract.Record:
            return store_answers.record(orjson.loads(raw) | {"now_ms": now_ms})

        return await self._steps.of(by).convert(found, record), bool(more)

    async def expire(self, limit: int) -> bool:
        seconds, microseconds = await self.guard(self.client.time())
        due = seconds * 1000 + microseconds // 1000
        asked = self.client.zrange(self.key("running"), "-inf", due - 1, byscore=True, offset=0, num=limit)
        overdue = await self.guard(asked)
        for workflow in map(_text, overdue):
            with contextlib.suppress(store_contract.Rejected):
                await self._workflow("get", workflow, None, turn_of=None)
        body = _encoded({"gateway": self.gateway, "id": "", "retention_ms": round(self._settings.retention_s * 1000)})
        await self.run("workflow", [self._prefix, self.key("creation:")], ["prune", body])
        return len(overdue) < limit

    async def ends(self, limit: int) -> list[store_contract.End]:
        rows = await self.guard(self.client.lpop(self.key("ends"), limit)) or ()
        return [store_contract.End(template=template, outcome=outcome) for template, outcome in map(orjson.loads, rows)]

    async def forget(self, gateway: str, limit: int) -> bool:
        ids = await self.guard(self.client.srandmember(self.key(f"calls:{gateway}"), limit)) or []
        for workflow in map(_text, ids):
            try:
                await self._workflow("forget", workflow, None, turn_of=None, gateway=gateway)
            except store_contract.Rejected:
                continue
        if ids and await self.guard(self.client.scard(self.key(f"calls:{gateway}"))):
            return False
        await self._share("bury", gateway=gateway)
        return True

    async def exchange(
        self, backlogs: Mapping[EngineId, Backlog], tenants: PoolLoad = NO_LOAD
    ) -> store_contract.Exchange:
        own = {engine: [item.calls, item.work_us, item.output_tokens] for engine, item in backlogs.items()}
        sync = functools.partial(
            self._share,
            "sync",
            lease_ms=round(self._settings.lease_s * 1000),
            backlogs=own,
            tenants=store_answers.told(tenants),
            since_ms=self._since_ms,
            most=MOST_CANCELLED,
        )
        try:
            answer = await sync()
        except store_contract.Slow:
            answer = await self._again(sync)
        self._since_ms = answer["since_ms"]
        others: dict[EngineId, Backlog] = {}
        for engine, (calls, work_us, output_tokens) in store_answers.numbers(answer["others"], 3):
            more = Backlog(calls=calls, work_us=work_us, output_tokens=output_tokens)
            others[EngineId(engine)] = others.get(EngineId(engine), Backlog()) + more
        return store_contract.Exchange(
            others=others,
            tenants=store_answers.pool_load(answer["tenants"]),
            gateways=answer["gateways"],
            dead=tuple(gateway for gateway in store_answers.rows(answer["dead"]) if gateway != self.gateway),
            cancelled=tuple(store_answers.rows(answer["cancelled"])),
            now_s=answer["now_ms"] / 1000,
            lost_s=self._known_leases.lost_s(
                now_ms=answer["now_ms"],
                lease_ms=round(self._settings.lease_s * 1000),
                before_ms=answer["lease_before_ms"],
                others=answer["others_before"],
            ),
            **store_answers.chosen(answer["policy"]),
        )

    async def _again(self, sync: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """The exchange may have been behind one slow command. If it is slow twice in a row, the store hangs."""
        try:
            return await sync()
        except store_contract.Slow as error:
            self._turns.fail(functools.partial(store_contract.NotSent, str(error)))
            raise

    async def leave(self) -> None:
        await self._share("leave")

    async def choose_policy(
        self,
        kind: Literal["override", "steered"],
        policy: str | None,
        reason: str,
        for_s: float | None,
        *,
        alternatives: tuple[str, ...] = (),
        expected: str = "",
    ) -> store_contract.Exchange:
        answer = await self._share(
            "set_policy",
            kind=kind,
            policy=policy,
            reason=reason,
            for_ms=None if for_s is None else round(for_s * 1000),
            alternatives=alternatives,
            expected=expected,
        )
        return store_contract.Exchange(**store_answers.chosen(answer))

    async def spend(self, tenant: str, tokens: int, per_minute: int, *, used: bool = False) -> float:
        keys = [self.key(f"tokens:{tenant}"), self.key(f"once:{_own().key}")]
        wait_ms = await self.run("spend", keys, [tokens, per_minute, int(used)], by=None if used else tenant)
        return int(cast("int", wait_ms)) / 1000

    def key(self, name: str) -> str:
        return self._prefix + name

    async def _workflow(
        self,
        operation: str,
        workflow: str,
        once: store_contract.Idempotency | None,
        *,
        turn_of: str | None = "",
        **arguments: Any,
    ) -> store_contract.Record:
        """An operation of `workflow.lua`. It takes the turn of the tenant that the request names, or of `turn_of`; None =
        it belongs to the gateway."""
        arguments = {
            "id": workflow,
            "gateway": self.gateway,
            "grace_ms": round(self._settings.grace_s * 1000),
            "retention_ms": round(self._settings.retention_s * 1000),
            "most_stages": stage_declaration.MOST_STAGES,
            "most_record_bytes": stage_declaration.MOST_RECORD_BYTES,
            "record_bytes": stage_declaration.RECORD_BYTES,
            "stage_bytes": stage_declaration.STAGE_BYTES,
            "most_calls": store_contract.MOST_CALLS,
            "most_tenant_bytes": self._settings.tenant_bytes,
            "most_bytes": self._settings.total_bytes,
            **arguments,
        }
        if once is not None:
            key = hashlib.sha256(f"{once.scope}\0{once.key}".encode()).hexdigest()
            arguments |= {"key": key, "print": once.print, "repeatable": bool(once.scope)}
        keys = [self._prefix, self.key(f"creation:{arguments.get('key', '')}")]
        by = arguments.get("tenant") or arguments.get("by") or turn_of
        answer = orjson.loads(cast("bytes", await self.run("workflow", keys, [operation, _encoded(arguments)], by=by)))
        if "error" in answer:
            raise store_contract.Rejected(answer["error"], answer.get("state"))
        return store_answers.record(answer)

    async def _share(self, operation: str, **arguments: Any) -> dict[str, Any]:
        names = ("leases", "backlogs", "policy", "cancelled", "steady", f"calls:{self.gateway}", "tenants")
        keys = [self.key(name) for name in names]
        body = _encoded({"gateway": self.gateway, **arguments})
        return cast("dict[str, Any]", orjson.loads(cast("bytes", await self.run("share", keys, [operation, body]))))

    async def run(self, name: str, keys: list[str], arguments: list[Any], *, by: str | None = None) -> object:
        """A script. `by` is the tenant whose turn it takes; None = it belongs to the gateway, which waits for no tenant."""
        if by is None:
            return await self.guard(self._scripts[name](keys=keys, args=arguments))
        return await self.in_turn(by, lambda: self._scripts[name](keys=keys, args=arguments))

    async def in_turn(self, by: str, command: Callable[[], Awaitable[T]]) -> T:
        """One command of the tenant `by`, when it is the tenant's turn. Raises `store_contract.Unavailable`."""
        async with self._turns.of(by):
            return cast("T", await self.guard(command()))

    async def guard(self, command: Any) -> Any:
        """One command, within the time that the settings allow. Raises `store_contract.Unavailable`. The commands that wait
        for their turns raise it too, unless this command was only slow."""
        try:
            return await self._checked(command)
        except store_contract.Slow:
            raise
        except store_contract.Unavailable as error:
            self._turns.fail(functools.partial(store_contract.NotSent, str(error)))
            raise

    async def _checked(self, command: Any) -> Any:
        try:
            return await self._within_time(command)
        except exceptions.ReadOnlyError as error:
            # A demoted primary: pooled connections would keep talking to it.
            await self._pool.disconnect(inuse_connections=False)
            raise store_contract.Unavailable("the store is read-only here") from error
        except exceptions.AskError as error:
            raise store_contract.Unavailable(
                "the store answers in cluster mode, which is not supported; name a store without it"
            ) from error
        except (exceptions.TimeoutError, TimeoutError) as error:
            raise store_contract.Slow(self._silent(error)) from error
        except (exceptions.RedisError, OSError, RuntimeError) as error:
            # uvloop raises a RuntimeError for a write to a connection that has just broken.
            raise store_contract.Unavailable(self._silent(error)) from error

    def _silent(self, error: Exception) -> str:
        address = store_address.shown(self._settings.url or "")
        return f"the store at {address} does not answer ({type(error).__name__})"

    async def _within_time(self, command: Any) -> Any:
        task = asyncio.current_task()
        before = 0 if task is None else task.cancelling()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await command
        finally:
            # The client library turns a cancellation that meets its own timeout into an error or a result.
            cancelled = task is not None and task.cancelling() > before
            del task  # the error of a cancelled task knows this frame: a cycle would keep all that the task has
            if cancelled:
                raise asyncio.CancelledError


def new_gateway_id() -> str:
    return secrets.token_hex(6)


def _own() -> store_contract.Idempotency:
    """A key of our own, so that a command that is sent twice over a broken connection counts once."""
    return store_contract.Idempotency(key=secrets.token_hex(16), scope="")


def _script(name: str) -> str:
    return importlib.resources.files("tidegate_gateway.store").joinpath("lua", f"{name}.lua").read_text("utf-8")


def _encoded(arguments: Mapping[str, Any]) -> bytes:
    return orjson.dumps({key: value for key, value in arguments.items() if value is not None})


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
