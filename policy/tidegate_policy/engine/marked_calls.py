"""The rules for calls that gateways have marked (`Call.yields`, `Call.owed`, `Call.ahead`). They have no setting and run
before the regulators. There are no marks while all tenants keep to their parts and none of their prompts is long."""

from tidegate_policy.engine.call_census import CallCensus
from tidegate_policy.engine.decodes_first import DecodesFirst
from tidegate_policy.engine.owed_calls import OwedCalls
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.engine.yielding_prompts import YieldingPrompts


class MarkedCalls:
    """The rules of one engine."""

    def __init__(self) -> None:
        self._yielding, self._owed, self._decodes = YieldingPrompts(), OwedCalls(), DecodesFirst()

    def rules(self, census: CallCensus, *, bypass: bool) -> tuple[Regulator, ...]:
        """Those that apply to the next step, for an engine with these calls."""
        found: list[Regulator] = []
        if census.first and not bypass:
            found.append(self._owed)
        else:
            self._owed.skip()
        if census.yielding and not bypass:
            found.append(self._yielding)
        else:
            self._yielding.skip()
        if self._decodes.applies(marked=bool(found)) and not bypass:
            found.append(self._decodes)
        return tuple(found)
