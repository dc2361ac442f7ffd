"""Which deadline, targets, urgency and weight does a call get?

The client claims, the SLO class and the tenant's entitlement bound the claims, and the workflow's stage grants a share
of the time that is left. A claim may loosen what the class promises and never tightens it. No call is due before the
fastest engine could have answered it, so a claim that no engine can keep wins nothing over an honest one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from tidegate_policy import immutable
from tidegate_policy.admit import entitlements
from tidegate_policy.cost import CostModel
from tidegate_policy.model import DEFAULT_URGENCY, Call, CallId, WorkflowId
from tidegate_policy.predict import tool_use
from tidegate_policy.predict.output_length import Kind, LengthPrediction


@immutable.value(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a client asks for its call."""

    urgency: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    """From the arrival of the call."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """A call as its client made it, without its text."""

    id: CallId
    model: str
    tenant: str = ""
    slo_class: str | None = None
    claims: Claims = field(default_factory=Claims)
    prompt_tokens: int | None = None
    """Tokens of all prompts where they are known; None = predicted from `characters` and `media`."""
    characters: int = 0
    """Characters of the texts of all prompts."""
    media: int = 0
    """Images and sounds of all prompts."""
    most_prompt_tokens: int | None = None
    """Tokens of all prompts at most: engines reject longer ones, which is no work. None = unknown."""
    messages: int = 0
    sequences: int = 1
    """Sequences that an engine runs for the call: `n` times its prompts."""
    max_tokens: int | None = None
    session: str | None = None
    workflow: str | None = None
    stage: str | None = None
    group: str | None = None
    """The request group (relQuery) of the call."""
    group_size: int = 0
    """Calls of the group in all; 0 = unknown."""
    blocks: tuple[int, ...] = ()
    """The chained hashes of the leading blocks of the prompt (`dispatch.prompt_blocks`)."""
    block_share: float = 0.0
    """The share of the prompt that one block holds."""
    offers_tools: bool = False
    """Its answer may invoke a tool."""

    @property
    def conversation(self) -> str | None:
        """The calls between which the client may run tools: those of its session, else of its workflow."""
        return self.workflow if self.session is None else self.session


@immutable.value(frozen=True, slots=True, kw_only=True)
class StageGrant:
    """What a workflow grants a call of one of its stages."""

    workflow: WorkflowId
    stage: str
    tenant: str
    """The workflow's, also where a call without authentication names none."""
    template: str
    """"" = none. Calls of one stage and template of a tenant are alike."""
    due_at_s: float
    """The instant by which the call should finish: its share of the workflow's time (HexGen eq 5)."""
    deadline_at_s: float | None
    """The instant after which the answer is worthless; None = never."""
    rest_s: float
    """Seconds of work expected in the workflow after the call."""
    is_over: bool = False
    """The workflow has ended: the call repeats one that it had, and shows nothing of how workflows go."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class Draft:
    """A call that may come in, before its tokens are booked and its workflow has granted a budget."""

    facts: CallFacts
    arrival_at_s: float
    slo_class: entitlements.SloClass
    tenant: entitlements.Tenant
    prompt_tokens: int
    tokens_to_book: int
    """Tokens that the call will probably use, to be booked where the tenant has a limit."""

    def kind(self, grant: StageGrant | None) -> Kind:
        """The calls from whose answers this call's length is predicted."""
        if grant is not None:
            return (grant.tenant, grant.template, grant.stage, self.facts.model)
        return own_kind(self.facts, self.slo_class.name)


def own_kind(facts: CallFacts, slo_class: str) -> Kind:
    """The kind of a call that no workflow has granted a budget. The rows of a relQuery are alike."""
    return (facts.tenant, facts.group or "", slo_class, facts.model)


def entitled(
    draft: Draft, grant: StageGrant | None, tenants: Mapping[str, entitlements.Tenant], anyone: entitlements.Tenant
) -> Draft:
    """The draft with the entitlement of the workflow's tenant. Its tokens are booked for the tenant that the call names."""
    if grant is None or grant.tenant == draft.facts.tenant:
        return draft
    return replace(draft, tenant=tenants.get(grant.tenant) or anyone)


def promise(
    draft: Draft,
    grant: StageGrant | None,
    length: LengthPrediction,
    tool: tool_use.NextTool,
    models: Sequence[CostModel],
) -> Call:
    """The call that the draft becomes. `models` are the distinct cost models of the live engines; empty = none is known."""
    facts, slo_class, claims, now = draft.facts, draft.slo_class, draft.facts.claims, draft.arrival_at_s
    ttft_s = _latest(claims.ttft_s, slo_class.ttft_s)
    tpot_s = _latest(claims.tpot_s, slo_class.tpot_s)
    due_at_s = _due_at_s(draft, grant, _implied_s(ttft_s, tpot_s, length.expected), length.expected)
    if due_at_s is not None:
        fastest_s = min(
            (model.alone_seconds(draft.prompt_tokens, length.expected, sequences=facts.sequences) for model in models),
            default=0.0,
        )
        due_at_s = max(due_at_s, now + fastest_s)
    return Call(
        id=facts.id,
        arrived_at_s=now,
        prompt_tokens=draft.prompt_tokens,
        output_predicted=length.expected,
        output_upper=length.upper,
        sequences=facts.sequences,
        model=facts.model,
        tenant=grant.tenant if grant else facts.tenant,
        slo_class=slo_class.name,
        weight=draft.tenant.weight * slo_class.weight,
        urgency=max(DEFAULT_URGENCY if claims.urgency is None else claims.urgency, draft.tenant.max_urgency),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        due_at_s=due_at_s,
        deadline_at_s=_earliest(
            grant.deadline_at_s if grant else None, None if claims.deadline_s is None else now + claims.deadline_s
        ),
        left_s=grant.rest_s if grant else 0.0,
        workflow=grant.workflow if grant else None,
        stage=facts.stage,
        session=facts.session,
        group=facts.group,
        group_size=facts.group_size,
        tool=tool.tool,
        tool_s=tool.tool_s,
        tool_return_tokens=tool.return_tokens,
        blocks=facts.blocks,
        block_tokens=facts.block_share * draft.prompt_tokens,
    )


def _due_at_s(draft: Draft, grant: StageGrant | None, implied_s: float | None, output_tokens: int) -> float | None:
    """The earliest of the stage's budget, the call's own deadline, and what its targets imply (`implied_s`; H-MAS: D_r).
    The call's own two are no earlier than the two of its class."""
    slo_class, claims = draft.slo_class, draft.facts.claims
    claimed_s = _earliest(slo_class.deadline_s if claims.deadline_s is None else claims.deadline_s, implied_s)
    promised_s = _earliest(slo_class.deadline_s, _implied_s(slo_class.ttft_s, slo_class.tpot_s, output_tokens))
    own_s = _latest(claimed_s, promised_s)
    return _earliest(grant.due_at_s if grant else None, None if own_s is None else draft.arrival_at_s + own_s)


def _implied_s(ttft_s: float | None, tpot_s: float | None, output_tokens: int) -> float | None:
    """Seconds from arrival to the last token when both targets are just met."""
    return None if ttft_s is None or tpot_s is None else ttft_s + tpot_s * output_tokens


def _earliest(one_s: float | None, other_s: float | None) -> float | None:
    if one_s is None or other_s is None:
        return other_s if one_s is None else one_s
    return min(one_s, other_s)


def _latest(claimed_s: float | None, promised_s: float | None) -> float | None:
    if claimed_s is None or promised_s is None:
        return promised_s if claimed_s is None else claimed_s
    return max(claimed_s, promised_s)
