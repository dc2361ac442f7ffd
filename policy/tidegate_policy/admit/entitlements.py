"""What may calls of a service class and of a tenant expect? The two classes of the settings that `promises` reads.

They are not compiled (tools/compiled_core): settings are checked by the types of these fields, and a compiled class does
not keep all of them.
"""

from dataclasses import dataclass
from typing import Literal

from tidegate_policy.model import DEFAULT_URGENCY

OBJECTIVE = 95.0
"""Percent of the calls with a target that should meet it, unless their class says otherwise."""
OBJECTIVES = (50.0, 99.999)
"""The smallest and the largest objective of a class, in percent."""
Feature = Literal["remote_images", "chat_template", "prompt_embeds", "beam_search", "media_options"]
"""A field of requests that engines get only where it is permitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """A service class that a call may name."""

    name: str
    """The `x-tidegate-class` of its calls."""
    ttft_s: float | None = None
    """Target of the time to the first token; null = none."""
    tpot_s: float | None = None
    """Target of the time per further token; null = none."""
    deadline_s: float | None = None
    """From arrival to the last token: when the call is due. The answer keeps its worth after that."""
    weight: float = 1.0
    """Share of service under policies that share by weight; it multiplies the weight of the tenant."""
    sheddable: bool = False
    """Calls of the class are shed first, as soon as the gateway's queue is half full and their tenant has its part of
    that, or their workflow would have to wait for others."""
    allow: tuple[Feature, ...] = ()
    """Features that calls of the class may use."""
    objective: float = OBJECTIVE
    """Percent of the calls with a target that should meet it; alerts and error budgets use it, decisions do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What a tenant is entitled to. A tenant without an entry gets these defaults."""

    name: str = ""
    """The `x-tidegate-tenant` of its calls; "" = calls that name none."""
    weight: float = 1.0
    """Share of service while several tenants compete."""
    max_urgency: int = DEFAULT_URGENCY
    """The most urgent level that the tenant may claim; 0 is the most urgent."""
    tokens_per_minute: int | None = None
    """Prompt and answer tokens a minute over all gateways; null = no limit."""
