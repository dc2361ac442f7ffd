"""What a gateway knows of a tenant: what it has and wants here and at other gateways, and how much it sent of late."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate_policy.admit import held_calls, held_memory, prompt_window
from tidegate_policy.admit.tenant_load import TenantLoad
from tidegate_policy.model import Call

LATE_S = 20.0
"""The work of a tenant of late decays with this time."""


@dataclass(slots=True)
class Told:
    """A number that this gateway has told the others."""

    last: int = 0
    before: int = 0
    """The time before: by now they have answered that with what they had then."""

    def tell(self, number: int) -> None:
        """The others learn the number now."""
        self.before, self.last = self.last, number

    def gained(self, number: int) -> int:
        """What the number has gained since."""
        return number - min(self.before, self.last)


@dataclass(slots=True)
class TenantRecord:
    """One tenant, as one gateway knows it."""

    held: held_calls.HeldCalls
    waiting: int = 0
    """Held calls."""
    weight: float = 1.0
    seen_at_s: float = -math.inf
    seen_as: int = 0
    """The tenants that were seen later, or became known later, have higher numbers."""
    sequences: int = 0
    """Those in the queue or at engines."""
    memory: held_memory.HeldMemory = field(default_factory=held_memory.HeldMemory)
    """Of the calls in the queue or at engines."""
    place_tokens: float = math.inf
    """KV tokens of one place; equal for all tenants."""
    keeps: bool = False
    """It sent no more work than its part, when the bounds were computed."""
    light: bool = False
    """It sent much less than that."""
    above: float = math.inf
    below: float = -math.inf
    """The bounds of all tenants stay as they were computed while this one wants more than `above` and less than `below`."""
    sent_s: float = 0.0
    """The work that it sent of late, in seconds of the whole pool, as it was at `sent_at_s`."""
    sent_at_s: float = 0.0
    prompts: prompt_window.PromptWindow = field(default_factory=prompt_window.PromptWindow)

    elsewhere: int = 0
    """Places that it has at other gateways."""
    waiting_elsewhere: int = 0
    rate_elsewhere: float = 0.0
    """As `rate`, of the work that it sent to other gateways."""
    told: Told = field(default_factory=Told)
    """`entered`, as this gateway told the others."""

    @property
    def entered(self) -> int:
        """Places that its calls in the queue or at engines take: one for each sequence, or more if they take more of the
        KV memory."""
        return max(self.sequences, math.ceil(self.memory.tokens / self.place_tokens))

    @property
    def has(self) -> int:
        """Places that it has at all gateways."""
        return self.entered + self.elsewhere

    def has_at_engines(self, queued: int) -> float:
        """As `has`, without the places of its sequences in the queue, which are `queued`. The queues of other gateways are
        taken to be like that of this one."""
        return self.has * (1.0 - min(queued / self.sequences, 1.0)) if self.sequences else self.has

    @property
    def holds(self) -> int:
        """Places that its held calls want."""
        return max(self.waiting, math.ceil(self.held.tokens / self.place_tokens))

    @property
    def has_calls(self) -> bool:
        """Whether it wants or has any place."""
        return bool(self.sequences or self.waiting or self.elsewhere or self.waiting_elsewhere)

    @property
    def wanted(self) -> int:
        """Places that it has or wants at all gateways."""
        return self.entered + self.holds + self.elsewhere + self.waiting_elsewhere

    def places_of(self, call: Call) -> float:
        """Places that a held call wants."""
        return max(float(call.sequences), held_memory.tokens_of(call) / self.place_tokens)

    def tell(self) -> int:
        """The others learn now what it has here, of which they are told if it has much. Returns the places that it has or
        wants here."""
        entered = self.entered
        self.told.tell(entered)
        return entered + self.holds if self.waiting else entered

    def load(self, now: float) -> TenantLoad:
        """What the other gateways may be told of the tenant."""
        return TenantLoad(self.entered, self.holds, self.weight, self.rate(now))

    def free(self, bound: float, gateways: int) -> float:
        """Places that its calls may take here within a bound on all gateways. What the tenant has gained here since
        gateways told each other what it has, it may have gained at each of the others too. Calls that begin together end
        together, so the others may have told what they had when nearly all had ended: the gain counts from the least that
        was told here."""
        free = bound - self.has
        if gateways == 1:
            return free
        gained = self.told.gained(self.entered)
        free -= max(gained, 0) * (gateways - 1)
        lost = max(-gained, 0)
        return free if free <= lost else lost + (free - lost) / gateways

    def may_take(self, bound: float, gateways: int) -> float:
        """As `free`; one at least if it has no calls here."""
        free = self.free(bound, gateways)
        return free if self.sequences or free >= 1.0 else 1.0

    def rate(self, now: float) -> float:
        """The part of the pool's time that the work takes that it sent here of late."""
        return self.sent_s * math.exp(-max(now - self.sent_at_s, 0.0) / LATE_S) / LATE_S

    def keeps_at_s(self, part: float) -> float:
        """The instant at which a tenant that sends nothing more here has sent no more than this part of the pool's time."""
        most = part - self.rate_elsewhere
        return self.sent_at_s + LATE_S * math.log(self.sent_s / (LATE_S * most)) if most > 0.0 else math.inf


def by_wants(tenants: Mapping[str, TenantRecord], names: list[str]) -> list[str]:
    """Those of the tenants first that want the least for their weight."""
    keys = [(tenants[name].wanted / tenants[name].weight, index) for index, name in enumerate(names)]
    return [names[index] for _, index in sorted(keys)]
