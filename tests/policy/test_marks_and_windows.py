"""What a call carries that is owed a place or yields, and the prompts that count, as calls move through the dispatcher."""

from dataclasses import replace

from test_dispatcher import Gate, call

from tidegate_gateway.store.store_answers import pool_load
from tidegate_gateway.store.store_answers import told as told_to_store
from tidegate_policy.admit.tenant_load import PoolLoad
from tidegate_policy.model import Call, CallId, EngineId

FIRST = frozenset({EngineId("e0")})


def of(tenant: str, name: str, **more: object) -> Call:
    return replace(call(name), tenant=tenant, **more)  # type: ignore[arg-type]


def gate(places: float, max_inflight: int = 50, **more: int) -> Gate:
    """A gateway that others have told the places."""
    made = Gate("fcfs", max_inflight=max_inflight, engines=2, **more)
    made.tenants.on_others(0.0, PoolLoad(places=places), 1)
    return made


def marks(made: Gate, tenant: str) -> list[tuple[bool, bool]]:
    return [(item.call.owed, item.call.yields) for item in made._queue if item.call.tenant == tenant]


def test_tenants_may_come_before_the_first_engine() -> None:
    made = Gate("fcfs", engines=0, hold_s=30.0)
    made.tenants.on_others(0.0, PoolLoad(places=40.0), 2)
    for number in range(4):
        assert made.on_arrival(0.0, of("ab"[number % 2], str(number))) == []
    assert made.tenants.load(0.0).tenants


def test_the_short_prompt_of_a_tenant_within_its_part_goes_before_the_long_prompts_of_others() -> None:
    made = gate(40.0)
    made.on_arrival(0.0, of("chat", "before"))
    made.on_arrival(1.0, of("documents", "long", prompt_tokens=4000))
    made.on_arrival(1.0, of("chat", "short"))
    made.on_arrival(1.0, of("chat", "also long", prompt_tokens=4000))
    made.on_arrival(1.0, of("documents", "own"))
    ahead = {out.call.id: out.item.call.ahead for out in made._out.values()}
    assert ahead == {"before": False, "long": False, "short": True, "also long": False, "own": True}
    assert not any(out.item.call.owed for out in made._out.values()), "nobody has too much"
    made.on_first_token(1.1, CallId("also long"))
    made.on_arrival(1.1, of("documents", "second"))
    assert not made._out[CallId("second")].item.call.ahead, "the long prompt is its own tenant's"
    made.on_first_token(1.2, CallId("long"))
    made.on_arrival(1.2, of("chat", "later"))
    assert not made._out[CallId("later")].item.call.ahead


def test_a_prompt_whose_beginning_is_still_being_computed_counts_as_a_long_one() -> None:
    """Calls that start before the beginning is computed compute it too, so only later ones are short."""
    made, alike = gate(40.0), {"prompt_tokens": 4000, "blocks": (1, 2, 3), "block_tokens": 1300.0}
    made.on_arrival(0.0, of("chat", "before"))
    made.on_arrival(1.0, of("documents", "first", **alike))
    made.on_arrival(1.0, of("chat", "first too", **alike))
    made.on_arrival(1.0, of("chat", "short"))
    assert not made._out[CallId("first too")].item.call.ahead
    assert made._out[CallId("short")].item.call.ahead
    made.on_first_token(1.5, CallId("first"))
    made.on_arrival(1.5, of("documents", "second", **alike))
    made.on_arrival(1.5, of("documents", "other", prompt_tokens=4000))
    assert made._out[CallId("second")].item.call.ahead, "the beginning is computed, and the chat's prompt is long"
    assert not made._out[CallId("other")].item.call.ahead


def test_a_prompt_whose_beginning_another_engine_has_computed_counts_as_a_long_one_where_it_goes() -> None:
    made, alike = gate(40.0), {"prompt_tokens": 4000, "blocks": (1, 2, 3), "block_tokens": 1300.0}
    other = frozenset({EngineId("e1")})
    made.on_arrival(0.0, of("chat", "before"))
    made.on_arrival(1.0, of("documents", "first", **alike), FIRST)
    made.on_first_token(1.5, CallId("first"))
    made.on_arrival(1.5, of("documents", "long", prompt_tokens=4000))
    ahead = {}
    for name, only in (("warm", FIRST), ("cold", other)):
        (sent,) = made.on_arrival(1.6, of("chat", name, **alike), only)
        ahead[name] = sent.call.ahead
    assert ahead == {"warm": True, "cold": False}
    made.on_first_token(1.7, CallId("long"))
    (sent,) = made.on_arrival(1.7, of("documents", "short"))
    assert sent.call.ahead, "the prompt that went to the other engine is a long one of the chat"


def test_long_prompts_that_enter_at_another_gateway_count_too() -> None:
    made, other = gate(40.0), gate(40.0)
    for each in (made, other):
        each.on_arrival(0.0, of("chat", "before"))
    other.on_arrival(1.0, of("documents", "long", prompt_tokens=4000))
    told = other.tenants.load(1.0)
    assert told.long_prompts == {"documents"}
    assert pool_load([told_to_store(told), {}]) == told
    made.tenants.on_others(1.0, told, 2)
    made.on_arrival(1.1, of("chat", "short"))
    made.on_arrival(1.1, of("documents", "own"))
    assert made._out[CallId("short")].item.call.ahead
    assert not made._out[CallId("own")].item.call.ahead
    assert other.tenants.load(60.0).long_prompts == frozenset(), "its first token was not seen"


def test_a_new_prediction_changes_no_mark() -> None:
    made = gate(8.0, max_inflight=4)
    for number in range(40):
        made.on_arrival(0.0, of("flood", f"flood {number}"))
    for number in range(2):
        made.on_arrival(1.0, of("quiet", f"quiet {number}"))
    before = marks(made, "quiet")
    assert (True, False) in before
    for number in range(2):
        made.on_prediction(1.1, of("quiet", f"quiet {number}", output_predicted=100))
    assert marks(made, "quiet") == before


def test_a_call_that_enters_again_has_the_marks_of_that_time() -> None:
    made = gate(8.0)
    shares = made.tenants._whole
    for number in range(40):
        made.on_arrival(0.0, of("flood", f"flood {number}"))
    made.on_arrival(1.0, of("quiet", "quiet"))
    (item,) = [out.item for out in made._out.values() if out.call.tenant == "quiet"]
    assert item.call.owed
    for number in range(40):
        made.on_cancel(2.0, CallId(f"flood {number}"))
    assert not shares.is_owed(3.0, "quiet")
    assert not shares.marked(3.0, item).call.owed


def test_the_prompts_of_calls_that_may_go_to_all_engines_leave_the_window_of_a_part() -> None:
    made = gate(60.0)
    made.on_arrival(0.0, of("other", "confined"), FIRST)
    made.on_arrival(0.0, of("other", "plain"))
    for number in range(4):
        for sent in made.on_arrival(float(number), of("busy", str(number), prompt_tokens=20_000)):
            made.on_first_token(number + 0.5, sent.call.id)
    (part,) = made.tenants._parts.values()
    assert len(part.shares._tenants["busy"].prompts) == 0
    assert len(made.on_arrival(4.0, of("busy", "next", prompt_tokens=20_000), FIRST)) == 1


def test_a_part_that_is_made_late_counts_no_prompt_that_is_computed() -> None:
    made = gate(60.0)
    made.on_arrival(0.0, of("other", "plain"))
    for number in range(4):
        for sent in made.on_arrival(float(number), of("busy", str(number), prompt_tokens=20_000)):
            made.on_first_token(number + 0.5, sent.call.id)
    assert len(made.on_arrival(4.0, of("busy", "next", prompt_tokens=20_000), FIRST)) == 1
    (part,) = made.tenants._parts.values()
    assert len(part.shares._tenants["busy"].prompts) == 1


def test_a_call_that_moves_between_the_shares_leaves_no_prompt_behind() -> None:
    made = gate(60.0)
    made.on_arrival(0.0, of("other", "plain"))
    for number in range(12):
        made.on_arrival(0.0, of("busy", f"all {number}", prompt_tokens=20_000))
        made.on_arrival(0.0, of("busy", f"part {number}", prompt_tokens=20_000), FIRST)
    for step in range(40):
        for out in list(made._out.values()):
            made.on_end(1.0 + step, out.call.id)
    (part,) = made.tenants._parts.values()
    for shares in (part.shares, made.tenants._whole):
        assert (len(shares), len(shares._tenants["busy"].prompts), shares._tenants["busy"].memory.tokens) == (0, 0, 0)


def test_bounds_follow_the_memory_and_the_limits_of_engines() -> None:
    made = gate(40.0)
    shares = made.tenants._whole
    made.on_arrival(0.0, of("a", "1"))
    made.on_arrival(0.0, of("b", "2"))
    shares.bounds(1.0)
    before = shares._place_tokens
    for name in ("e0", "e1"):
        known = made.table.get(EngineId(name))
        assert known is not None
        smaller = replace(known.cost, kv_tokens=known.cost.kv_tokens // 4)
        made.on_engine(1.0, replace(known.facts, cost=smaller))
    shares.bounds(1.0)
    assert shares._place_tokens == before / 4


def test_a_tenant_that_floods_one_engine_yields_there_although_it_is_within_its_share_of_the_pool() -> None:
    made = Gate("fcfs", max_inflight=50, engines=4)
    made.tenants.on_others(0.0, PoolLoad(places=200.0), 1)
    made.on_arrival(0.0, of("chat", "before"), FIRST)
    for number in range(210):
        made.on_arrival(1.0, of("flood", f"flood {number}"), FIRST)
    made.on_arrival(2.0, of("chat", "chat"), FIRST)
    held = [item.call.id for item in made.tenants]
    assert held, "the flood wants more than the places of the engine"
    for number in range(30):
        made.on_first_token(3.0, CallId(f"flood {number}"))
        made.on_end(3.0, CallId(f"flood {number}"))
    later = [made._out[name].item.call for name in held if name in made._out]
    assert later
    assert {(call.yields, call.owed) for call in later} == {(True, False)}
    mine = made._out[CallId("chat")].item.call
    assert (mine.yields, mine.owed) == (False, True), "its prompt is computed before those of the flood"
