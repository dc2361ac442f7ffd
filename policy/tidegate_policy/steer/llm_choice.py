"""The selector `llm`: a language model chooses the policy (H-MAS 3.3), and the rules decide when it gives no valid answer.

The model reads numbers of the pool and one sentence about each allowed policy. It reads no prompt, and no name that a
client chose, so no tenant can instruct it. Its answer is one JSON object with the name of an allowed policy; every other
answer counts as none. The loop's driver asks the model shortly before each decision (`question`), and tells the loop the
answer (`Answer`), which counts for this decision alone. A decision never waits for the model. `stand_in` says why the rules
made the last decision.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate_policy import policies
from tidegate_policy.qos import Qos
from tidegate_policy.steer import features, rules
from tidegate_policy.steer.proposal import Memory, Proposal

MOST_ANSWER_CHARACTERS = 1000
SILENT = "the model gave no answer in time"
TOO_OLD = "the model answered a question that is too old"
NOT_ASKED = "the model was not asked before this decision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one question."""

    policy: str | None
    """An allowed policy; None when there is no valid answer."""
    trouble: str = ""
    """Why there is no valid answer. It never quotes the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a model is asked."""

    messages: Sequence[Mapping[str, str]]
    """Of a chat completion."""
    allow: tuple[str, ...]
    """The policies that a valid answer may name."""


class Pending:
    """The question for the next decision, and its answer. Neither is part of the state of the loop: a successor asks
    anew."""

    def __init__(self) -> None:
        self._asked_at_s = 0.0
        self._question: Question | None = None
        self._answer: Answer | None = None

    def ask(self, now: float, question: Question | None) -> None:
        """A question takes the place of the one before, and so does the lack of a question."""
        self._asked_at_s, self._question, self._answer = now, question, None

    def answered(self, question: Question, answer: Answer) -> None:
        """The model has answered, or failed to. An answer to an earlier question does not count."""
        if question is self._question:
            self._answer = answer

    def shift(self, by_s: float) -> None:
        """The clock was set."""
        self._asked_at_s += by_s

    def taken(self, now: float, *, oldest_s: float) -> Memory:
        """What came of the question for a decision now, as `LlmChoice` reads it. An older question does not count."""
        question, answer = self._question, self._answer
        self._question = self._answer = None
        if question is None:
            return {}
        if now - self._asked_at_s > oldest_s:
            return {"failed": TOO_OLD}
        if answer is None:
            return {"asked": True}
        return {"policy": answer.policy} if answer.policy else {"failed": answer.trouble}


def question(qos: Qos, active: str, allow: Collection[str]) -> Question | None:
    """The question about `allow`, the policies that may be active now; None when no call waits or too few came, because
    then the policy stays, and when no policy is allowed."""
    if not allow or not features.is_evidence(qos):
        return None
    stay = "Name the active policy if it should stay. " if active in allow else ""
    known = "\n".join(f"- {name}: {_sentence(name)}" for name in allow if name in policies.POLICIES)
    system = (
        "You choose the scheduling policy of a pool of LLM engines. Policies:\n"
        f"{known}\n"
        'Answer with one JSON object and nothing else: {"policy": "NAME"}. NAME is one of the policies above. '
        f"{stay}Meet as many targets as possible."
    )
    numbers = {
        "active_policy": active,
        "window_s": round(qos.window_s, 1),
        "engines": qos.engines,
        "silent_engines": qos.silent,
        "calls_arrived": qos.arrived,
        "calls_finished": qos.finished,
        "calls_waiting": qos.waiting,
        "calls_waiting_in_seconds_of_completions": round(features.wait_s(qos), 2),
        "calls_with_target": qos.with_target,
        "targets_missed": qos.missed,
        "ttft_s": {"p50": round(qos.ttft.quantile_s(0.5), 3), "p99": round(qos.ttft.quantile_s(0.99), 3)},
        "time_per_token_p99_s": round(qos.tpot.quantile_s(0.99), 4),
        "work_of_a_call_s": {
            "p50": round(qos.service.quantile_s(0.5), 3),
            "p90": round(qos.service.quantile_s(0.9), 3),
        },
        "work_deviation_over_mean": round(qos.service.dispersion, 2),
        "share_that_waited_longer_than_twice_its_work": round(qos.block_ratio, 3),
        "preemptions": qos.preemptions,
        "fairness_of_tenants": None if qos.fairness is None else round(qos.fairness, 3),
    }
    messages = [{"role": "system", "content": system}, {"role": "user", "content": json.dumps(numbers)}]
    return Question(messages=messages, allow=tuple(allow))


def answer_schema(allow: Collection[str]) -> Mapping[str, Any]:
    """The JSON schema of a valid answer, for engines that can enforce it."""
    return {
        "type": "object",
        "properties": {"policy": {"type": "string", "enum": sorted(allow)}},
        "required": ["policy"],
        "additionalProperties": False,
    }


def read(text: str, allow: Collection[str]) -> Answer:
    """What the model said, read strictly."""
    if len(text) > MOST_ANSWER_CHARACTERS:
        return Answer(policy=None, trouble=f"the answer has more than {MOST_ANSWER_CHARACTERS} characters")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Answer(policy=None, trouble="the answer is no JSON")
    if not isinstance(found, dict) or list(found) != ["policy"] or not isinstance(found["policy"], str):
        return Answer(policy=None, trouble='the answer is not of the form {"policy": "NAME"}')
    if found["policy"] not in allow:
        return Answer(policy=None, trouble="the answer names no allowed policy")
    return Answer(policy=found["policy"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmChoice:
    """The selector. What it reads in its memory is `asked` where an answer did not come, or the `policy` of the answer, or
    `failed` with the trouble of the answer. After a decision that the rules made in place of the model, its memory is the
    `trouble`."""

    fallback: rules.Rules = field(default_factory=rules.Rules)

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        chosen, failed = memory.pop("policy", None), memory.pop("failed", None)
        was_asked = memory.pop("asked", False)
        memory.pop("trouble", None)  # of an earlier decision
        if chosen in allow:
            if chosen == active:
                return None
            others = tuple(name for name in allow if name not in (chosen, active))
            return Proposal(
                policy=chosen, reason="llm: the model chose it", alternatives=others, expected="more targets are met"
            )
        if chosen is not None:  # the spec or the bans have changed since the answer
            failed = "the policy that the model chose is not allowed any more"
        elif was_asked:
            failed = SILENT
        proposed = self.fallback.propose(qos, active, allow)
        if proposed is not None and failed is None:
            failed = NOT_ASKED
        if failed is None:
            return None
        memory["trouble"] = failed
        return None if proposed is None else replace(proposed, reason=f"{proposed.reason} ({stand_in(failed)})")


def stand_in(trouble: str) -> str:
    """Why the rules decided in place of the model."""
    return f"by the rules, because {trouble}"


def _sentence(name: str) -> str:
    """The first paragraph of the module of a policy, after the name."""
    text = sys.modules[policies.POLICIES[name].__module__].__doc__ or ""
    return " ".join(text.split("\n\n")[0].partition(":")[2].split()) or name
