"""The gateway's state machine: events with their instants go in, actions come out.

The dispatcher holds the calls that wait in the gateway, the calls that are out at engines, and what each engine still
owes. It has no clock, no socket and no task. The gateway and virtual time both drive it through `gateway_core` and
carry out its actions. Every call that arrives leaves exactly once: by `on_end`, `on_cancel`, a `Shed` or a `GiveUp`.

Where a call waits is a setting. Without a bound on the calls at an engine every call goes to an engine on arrival (the
papers' early binding). With a bound the rest wait here, under the same policy as in engines, and bind to the first
engine that has room (late binding).
"""

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from tidegate_policy import policies
from tidegate_policy.admit import retries, workflow_gate
from tidegate_policy.dispatch import call_records, pool_shares, prefix_index, rules, traffic_split, waiting_calls
from tidegate_policy.dispatch.cached_prompts import CachedPrompts
from tidegate_policy.dispatch.core_actions import Action, GiveUp, Send, Shed
from tidegate_policy.dispatch.engine_table import Engine, EngineTable
from tidegate_policy.dispatch.routing import DispatchSettings, Prices, RoutingContext
from tidegate_policy.dispatch.waiting_limits import Limits
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, CallId, Decision, DropReason, EngineId, WorkflowId
from tidegate_policy.waiting_queue import WaitingQueue

EXPIRED_AT_ONCE = 64
"""Calls that one event sheds because their time is over."""
MOST_PASSED = 64
"""Waiting calls that an arrival passes over, because the engines with room serve none of them."""


class Dispatcher:
    """Calls in, actions out. Not thread-safe. Every method takes O(engines + log waiting) for each call that it moves, and
    O(tenants) while several tenants compete for a busy pool."""

    def __init__(
        self,
        engines: EngineTable,
        *,
        policy: policies.Policy,
        settings: DispatchSettings,
        limits: Limits,
        retry: retries.RetrySettings,
        rng: random.Random,
    ) -> None:
        self.settings = settings
        self._engines = engines
        self._rule = rules.create(settings)
        self.prefixes = prefix_index.PrefixIndex(settings.prefix_entries)
        self._queue = WaitingQueue(policy)
        self.gate = workflow_gate.WorkflowGate(bounded=limits.bound_workflows)
        self.tenants = pool_shares.PoolShares(
            policy, bounded=limits.share_among_tenants, engines=engines, prefixes=self.prefixes
        )
        self._cached = CachedPrompts(self.prefixes)
        self._waiting = waiting_calls.WaitingCalls()
        self.waiting_by_tenant: Mapping[str, int] = self._waiting.by_tenant
        """How many calls of each tenant wait; no entry is 0."""
        self._out: dict[CallId, call_records.Out] = {}
        self._retrying: set[CallId] = set()
        """Those of them that another engine has failed and that have no token yet."""
        self._limits = limits
        self._retry = retry
        self._rng = rng
        self._turn = 0
        self._draining = False
        self.split: traffic_split.TrafficSplit | None = None
        """Divides the calls among two revisions of the engines; None = there is one."""

    @property
    def policy(self) -> str:
        return self._queue.policy.name

    @property
    def policy_parameters(self) -> Mapping[str, float]:
        return self._queue.policy.parameters

    @property
    def alpha(self) -> float | None:
        """The weight of speed against load; None while the rule reads no such weight."""
        return self.settings.alpha if self._rule.reads_weights else None

    @property
    def beta(self) -> float | None:
        """The scale of the load in seconds squared; None while the rule reads none."""
        return self.settings.beta if self._rule.reads_weights else None

    @property
    def waiting(self) -> int:
        """Calls that wait in the gateway. Those of workflows that may not start yet, and those beyond the share of their
        tenant, are included."""
        return len(self._queue) + len(self.gate) + len(self.tenants)

    @property
    def waiting_by_class_and_tenant(self) -> Mapping[tuple[str, str], int]:
        """How many calls of each class and tenant wait; no entry is 0."""
        return self._waiting.by_class_and_tenant

    @property
    def inflight(self) -> int:
        """Calls at engines."""
        return len(self._out)

    def waiting_calls(self) -> list[Call]:
        """The waiting calls, next first; then those beyond their tenant's share, and those of workflows that may not start
        yet."""
        return [item.call for item in (*self._queue, *self.tenants, *self.gate)]

    def waiting_by_lane(self) -> dict[str, int]:
        """How many calls wait in each lane of the queue. Calls beyond their tenant's share, and calls of workflows that may
        not start yet, are in no lane."""
        return self._queue.by_lane()

    def waiting_since_s(self) -> dict[str, float]:
        """By class: the arrival of the call that began to wait first."""
        return self._waiting.since_s()

    def own_backlog(self, engine: EngineId) -> Backlog:
        """The work of the calls that are out at `engine`."""
        return sum((out.charge for out in self._out.values() if out.engine == engine), NO_BACKLOG)

    def next_expiry_at_s(self) -> float | None:
        """The instant at which `on_tick` has a call to shed, or a workflow to start; None while no call waits."""
        expires_at_s, starts_at_s = self._waiting.next_expiry_at_s(), self.gate.next_start_at_s()
        return min((at_s for at_s in (expires_at_s, starts_at_s) if at_s is not None), default=None)

    def expires_at_s(self, call_id: CallId) -> float | None:
        """The instant at which the call is shed unless it has got an engine; None if it does not wait."""
        waiting = self._waiting.by_id.get(call_id)
        return None if waiting is None else waiting.expires_at_s

    # Events.

    def on_arrival(self, now: float, call: Call, only: Container[EngineId] | None = None) -> list[Action]:
        """A call came in: it is sent, waits, or is shed. It may go to the engines of `only`; None = to all."""
        if self._draining:
            return [self._shed(call, DropReason.DRAINING)]
        accepting = self._engines.accepting(now)
        wanted = accepting if only is None else [engine for engine in accepting if engine.facts.id in only]
        if not (wanted or self._engines.may_recover(now, only)) and (accepting or not self._limits.hold_s):
            return [self._shed(call, DropReason.NO_ENGINES)]
        held = call.workflow is not None and self.gate.must_wait(now, call.workflow, call.tenant)
        actions: list[Action] = []
        self.tenants.competes(now, call)
        self._hold_again(now)
        waiting = call_records.Waiting(call, Prices(call), self._expires_at_s(now, call), only=only)
        if self.waiting >= self._limits.max_waiting and (held or not self._finds_room(now, waiting)):
            evicted = self.tenants.largest(now, call.tenant)
            if evicted is None:
                return [self._shed(call, DropReason.SATURATED)]
            self._forget(evicted.call)
            actions.append(self._shed(evicted.call, DropReason.EVICTED))
        item = self._queued(call, waiting.prices)
        self._wait(now, waiting)
        if held and call.workflow is not None:
            self.gate.hold(item, call.workflow)
        else:
            self._start(now, item)
        return [*actions, *self.pump(now, call.id)]

    def on_first_token(self, now: float, call_id: CallId) -> list[Action]:
        """The engine answers: the call is never moved again."""
        out = self._out.get(call_id)
        if out is None:
            return []
        self._answered(out)
        self.on_progress(now, call_id, 1)
        return self.pump(now) if self.tenants.on_first_token(out.call) else []

    def on_progress(self, now: float, call_id: CallId, tokens: int) -> None:
        """The call's prompt is done and `tokens` tokens came out: its charge shrinks to the work that is left."""
        out = self._out.get(call_id)
        engine = None if out is None else self._engines.get(out.engine)
        if out is not None and engine is not None:
            self._engines.on_tokens(now, engine, call_id, tokens)
            self._recharge(out, engine.cost.decode_charge(out.call, tokens))
        if out is not None and tokens > out.tokens:
            served = {call_id: policies.Computed(0 if out.tokens else out.call.prompt_tokens, tokens - out.tokens)}
            out.tokens = tokens
            self._queue.rekey(self._queue.policy.on_tokens(now, served))

    def on_prediction(self, now: float, call: Call) -> None:
        """What is predicted of a waiting call has changed: it is ordered anew. An id that does not wait here is ignored."""
        waiting = self._waiting.by_id.get(call.id)
        if waiting is None:
            return
        waiting.call, waiting.prices = call, Prices(call)
        item = self._queued(call, waiting.prices)
        if not (self.gate.update(item) or self.tenants.update(item)):
            self._queue.update(item)

    def on_attempt_failed(self, now: float, call_id: CallId, failure: retries.Failure) -> list[Action]:
        """An engine failed the call before its first token. The call goes to another engine in its old place in the queue,
        or is given up."""
        out = self._out.get(call_id)
        if out is None:
            return []
        inflight, retrying = len(self._out), len(self._retrying)
        again = retries.retry(failure, attempt=out.attempt, retrying=retrying, inflight=inflight, settings=self._retry)
        self._settle(now, call_id)
        if retries.blames_engine(failure):
            self.prefixes.on_failed(out.call, out.engine)
        if not again:
            return [GiveUp(call=out.call), *self.pump(now)]
        waiting = call_records.Waiting(
            call=out.call,
            prices=Prices(out.call),
            expires_at_s=self._expires_at_s(now, out.call),
            attempt=out.attempt + 1,
            avoid=out.avoid | {out.engine},
            only=out.only,
        )
        if not (self._may_serve(now, waiting) or self._holds(now)):
            return [self._shed(out.call, DropReason.NO_ENGINES), *self.pump(now)]
        item = self._queued(out.call, waiting.prices)
        self._wait(now, waiting)
        self._enter(now, item)
        self._queue.push_preempted(item)
        return self.pump(now)

    def on_end(self, now: float, call_id: CallId, *, ok: bool = True) -> list[Action]:
        """The call's last token came (`ok`), or it failed for good; it may wait for another engine then. An unknown id is
        ignored (a late echo of a cancel)."""
        item = self._take_out(now, call_id)
        if item is not None:
            self._forget(item.call)
        self._settle(now, call_id, ok=ok)
        return self.pump(now)

    def on_cancel(self, now: float, call_id: CallId) -> list[Action]:
        """The client went away."""
        return self.on_end(now, call_id, ok=False)

    def on_workflow_end(self, now: float, workflow: WorkflowId) -> list[Action]:
        """The workflow is over, so another one may start."""
        self.gate.over(workflow)
        return self.pump(now)

    def on_engine_gone(self, now: float, engine: EngineId) -> list[Action]:
        """The engine left the pool. The calls that are out there end by their own events. Calls that have failed on every
        engine that is left are shed."""
        self._engines.remove(engine)
        self.prefixes.on_cleared(engine)
        self.prefixes.on_prefix_cache(engine, exists=True)  # an engine that takes its name may have one
        self._rule.on_engine_gone(now, engine)
        stranded = [each for each in self._waiting.by_id.values() if each.is_choosy and not self._may_serve(now, each)]
        return [*[self._shed_waiting(now, each.call.id) for each in stranded], *self.pump(now)]

    def on_cache_lost(self, engine: EngineId) -> None:
        """The engine restarted, so its KV cache is empty."""
        self.prefixes.on_cleared(engine)

    def on_sent_elsewhere(self, sent: Iterable[prefix_index.SentPrompt]) -> None:
        """Engines have answered these prompts for other gateways. Engines that are not known here are left out."""
        for prompt in sent:
            if (engine := self._engines.get(prompt.engine)) is not None:
                self.prefixes.record(prompt, engine.cost.kv_tokens)

    def on_policy(self, now: float, policy: policies.Policy) -> int:
        """Orders the waiting calls by another policy; returns their number. The policy is told of all calls that are here,
        as if it had been in force since they came."""
        served = [
            policies.History(
                item=out.item,
                computed=policies.Computed(out.call.prompt_tokens if out.tokens else 0, out.tokens),
            )
            for out in self._out.values()
        ]
        policies.replay(policy, now, [*self._queue, *[known.item for known in served]], served)
        self._queue.switch(policy)
        self.tenants.on_policy(now, policy)
        return len(self._queue)

    def on_tick(self, now: float) -> list[Action]:
        """Sheds calls whose time in the gateway is over, at most `EXPIRED_AT_ONCE` of them: then it is to be told again."""
        expired: list[Action] = []
        while len(expired) < EXPIRED_AT_ONCE and (at_s := self._waiting.next_expiry_at_s()) is not None and at_s <= now:
            expired.append(self._shed_waiting(now, self._waiting.pop_expiry()))
        return [*expired, *self.pump(now)]

    def on_drain(self) -> None:
        """From here on new calls are shed; the waiting calls are still served."""
        self._draining = True

    def pump(self, now: float, arrived: CallId | None = None) -> list[Action]:
        """Starts workflows that may start, and sends calls from the head of the queue while some engine has room. A call
        that has just `arrived` does not search the whole queue for those that came before and fit."""
        self._hold_again(now)
        if len(self.gate):
            for item in self.gate.release(now):
                self._start(now, item)
        if len(self.tenants):
            for item in self.tenants.release(now):
                self._enqueue(now, item)
        actions: list[Action] = []
        passed = 0
        stuck: waiting_calls.StuckCalls | None = None
        while self._queue.candidates:
            item = self._queue.peek()
            call, rooms = item.call, self._engines.with_room(now)
            if not rooms and self.tenants.is_owed(now, call):
                rooms = self._engines.with_reserve(now, call.sequences)
            if not rooms:
                break
            waiting = self._waiting.by_id[call.id]
            allowed = [engine for engine in rooms if waiting.allows(engine.facts.id)] if waiting.is_choosy else rooms
            if not (trusted := self._engines.trusted(now, waiting, allowed)):
                stuck = stuck or waiting_calls.StuckCalls(self._waiting)
                if stuck.add(waiting, by_distrust=bool(allowed)):
                    break
            allowed = self._preferred(now, call, trusted)
            if not allowed and passed == MOST_PASSED and arrived is not None:
                actions += self._sent_out_of_turn(now, arrived)
                break
            if not allowed:
                self._queue.pass_over()
                passed += 1
            elif call.deadline_at_s is not None and call.deadline_at_s <= now:
                self._queue.remove(call.id)
                self._left(now, call)
                self._forget(call)
                actions.append(self._shed(call, DropReason.DEADLINE_UNREACHABLE))
            else:
                self._queue.start(now, call.id)
                actions.append(self._send(now, item, allowed))
        if passed:
            self._queue.end_scan()  # it looks at every lane, and most calls of `pump` pass over nothing
        for call_id in self.tenants.owed(now) if len(self._queue) else ():
            actions += self._sent_out_of_turn(now, call_id, owed=True)
        return actions

    # The machinery.

    def _finds_room(self, now: float, waiting: call_records.Waiting) -> bool:
        rooms = self._engines.with_room(now, waiting.only)
        return bool(self._engines.trusted(now, waiting, rooms))

    def _preferred(self, now: float, call: Call, engines: list[Engine]) -> list[Engine]:
        """Those of the engines to which a division of the calls leads this one."""
        return self.split.preferred(call, engines) if self.split is not None and now < self.split.until_s else engines

    def _sent_out_of_turn(self, now: float, call_id: CallId, *, owed: bool = False) -> list[Action]:
        """Sends a call of the queue if an engine with room may serve it. Those before it could have had that room. One that
        is `owed` a place may use room beyond the limits."""
        if (item := self._queue.get(call_id)) is None:
            return []
        rooms = self._engines.with_reserve(now, item.call.sequences) if owed else self._engines.with_room(now)
        if owed:
            item = replace(item, call=replace(item.call, owed=True, ahead=False))
        waiting = self._waiting.by_id[call_id]
        allowed = [engine for engine in rooms if waiting.allows(engine.facts.id)]
        engines = self._preferred(now, item.call, self._engines.trusted(now, waiting, allowed))
        if not engines:
            return []
        self._queue.start(now, call_id)
        return [self._send(now, item, engines)]

    def _start(self, now: float, item: policies.QueuedRequest) -> None:
        """The workflow of the call may run, so the call waits for the share of its tenant, or for an engine."""
        if (entering := self.tenants.arrived(now, item)) is not None:
            self._enqueue(now, entering)

    def _hold_again(self, now: float) -> None:
        """Calls of tenants that are not alone any more wait for the shares of these, the last ones of the queue first."""
        for item in self.tenants.surplus(now, self._queue) if len(self._queue) else ():
            self._queue.remove(item.call.id)
            self._left(now, item.call)
            self.tenants.hold(now, item)

    def _wait(self, now: float, waiting: call_records.Waiting) -> None:
        """The call begins to wait."""
        self._waiting.add(waiting)
        if waiting.only is not None:
            self.tenants.confine(now, waiting.call, waiting.only, self._out)

    def _forget(self, call: Call) -> None:
        """The call waits no more and goes to no engine."""
        self._waiting.pop(call)
        self.tenants.forget(call)

    def _enqueue(self, now: float, item: policies.QueuedRequest) -> None:
        self._enter(now, item)
        self._queue.push(item)

    def _enter(self, now: float, item: policies.QueuedRequest) -> None:
        """The call counts as one of its workflow, and for the policy, until `_left`."""
        self.tenants.enter(now, item)
        if item.call.workflow is not None:
            self.gate.enter(now, item.call.workflow, item.call.tenant, item.call.weight)
        self._queue.rekey(self._queue.policy.on_arrival(now, item))

    def _left(self, now: float, call: Call) -> None:
        self.tenants.leave(call)
        if call.workflow is not None:
            self.gate.leave(now, call.workflow)
        self._queue.rekey(self._queue.policy.on_end(now, call.id))

    def _take_out(self, now: float, call_id: CallId) -> policies.QueuedRequest | None:
        """Takes a call out of the calls that wait; None if it does not wait."""
        item = self._queue.remove(call_id)
        if item is not None:
            self._left(now, item.call)
            return item
        if call_id not in self._waiting.by_id:
            return None
        return self.gate.remove(call_id) or self.tenants.remove(now, self._waiting.by_id[call_id].call)

    def _send(self, now: float, item: policies.QueuedRequest, engines: Sequence[Engine]) -> Send:
        call = item.call
        routable = [engine.routable for engine in engines]
        waited = self._waiting.pop(call)
        self._cached.look_up(call, routable)
        turn, rng, prices = self._turn, self._rng, waited.prices
        context = RoutingContext(
            now=now, call=call, engines=routable, settings=self.settings, turn=turn, rng=rng, prices=prices
        )
        choice = self._rule.choose(context)
        chosen, price = choice.engine, context.price(choice.engine)
        decision = Decision(
            engine=chosen.id,
            rule=self.settings.rule,
            queue_s=chosen.queue_s,
            service_s=price.service_s,
            shared_s=chosen.shared_s,
            slack_s=context.slack_s(chosen),
            scores=choice.scores,
        )
        self._turn += 1
        target = self._engines.get(chosen.id)
        if target is None:
            raise AssertionError(f"rule {self.settings.rule!r} named engine {chosen.id!r}, which is not in the pool")
        self._engines.on_sent(now, target, call)
        target.set_own(target.own + price.charge)
        awaited = self.prefixes.on_sent(call, chosen.id)
        self._out[call.id] = call_records.Out(
            call, chosen.id, price.charge, waited.attempt, item, waited.avoid, waited.only, awaited
        )
        if waited.attempt > 1:
            self._retrying.add(call.id)
        self._rule.on_sent(now, call, chosen.id)
        call = self.tenants.on_sent(now, item, chosen.id)
        return Send(call=call, decision=decision, attempt=waited.attempt, cached_tokens=chosen.cached_tokens)

    def _answered(self, out: call_records.Out) -> None:
        """The engine has computed the prompt of the call."""
        if not out.answered and (engine := self._engines.get(out.engine)) is not None:
            self.prefixes.on_answered(out.call, out.engine, engine.cost.kv_tokens, out.awaited)
        out.answered, out.awaited = True, ()
        self._retrying.discard(out.call.id)

    def _settle(self, now: float, call_id: CallId, *, ok: bool = False) -> None:
        out = self._out.pop(call_id, None)
        if out is None:
            return
        if ok:
            self._answered(out)
        self._retrying.discard(call_id)
        self._recharge(out, NO_BACKLOG)
        self.prefixes.on_unanswered(out.engine, out.awaited)
        if (engine := self._engines.get(out.engine)) is not None:
            engine.estimate.forget(call_id)
        self.tenants.on_back(out.call, out.engine)
        self._left(now, out.call)
        self.tenants.forget(out.call)
        self._rule.on_end(now, out.call, out.engine)

    def _recharge(self, out: call_records.Out, left: Backlog) -> None:
        if (engine := self._engines.get(out.engine)) is not None:
            engine.set_own(engine.own + (left - out.charge))
        out.charge = left

    def _queued(self, call: Call, prices: Prices) -> policies.QueuedRequest:
        return policies.QueuedRequest(call=call, service_s=prices.mean_service_s(self._engines.kinds()))

    def _may_serve(self, now: float, waiting: call_records.Waiting) -> bool:
        return any(waiting.allows(engine.facts.id) for engine in self._engines.accepting(now))

    def _holds(self, now: float) -> bool:
        """Whether calls wait for an engine that does not exist yet."""
        return self._limits.hold_s > 0.0 and not self._engines.accepting(now)

    def _expires_at_s(self, now: float, call: Call) -> float:
        return self._limits.expires_at_s(now, call, holds=self._holds(now))

    def _shed_waiting(self, now: float, call_id: CallId) -> Shed:
        """Sheds a call that waits, with the reason why no engine will serve it."""
        item = self._take_out(now, call_id)
        if item is None:
            raise AssertionError(f"call {call_id!r} is to be shed but does not wait")
        waiting = self._waiting.by_id[call_id]
        self._forget(item.call)
        if not self._may_serve(now, waiting):
            return self._shed(item.call, DropReason.NO_ENGINES)
        timed = item.call.deadline_at_s is not None
        return self._shed(item.call, DropReason.DEADLINE_UNREACHABLE if timed else DropReason.TTL_EXPIRED)

    def _shed(self, call: Call, reason: DropReason) -> Shed:
        shortest_s = min((engine.routable.queue_s for engine in self._engines), default=1.0)
        return Shed(call=call, reason=reason, retry_after_s=min(max(1.0, shortest_s), 60.0))
