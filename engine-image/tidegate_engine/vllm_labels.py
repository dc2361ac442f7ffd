"""A vLLM request as the schedulers' `Call`.

The labels arrive in `vllm_xargs`, which vLLM hands on as `SamplingParams.extra_args`; `tidegate_policy.labels` knows the
keys. A request without labels gets the defaults of the policy library and is served fairly. No request is rejected here:
a field that cannot be read has its default.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tidegate_policy import labels
from tidegate_policy.model import Call, CallId

if TYPE_CHECKING:
    from vllm.v1.request import Request


def call(
    now: float,
    request: "Request",
    *,
    output_prior: int | None = None,
    on_bad: Callable[[str], object] | None = None,
) -> Call:
    """The call of a request that enters the engine at `now`. `output_prior` and `on_bad` as in `labels.read`."""
    sent = getattr(request.sampling_params, "extra_args", None)
    return labels.read(
        now,
        sent if isinstance(sent, Mapping) else {},
        call_id=CallId(request.request_id),
        prompt_tokens=max(_integer(request.num_prompt_tokens), 0),
        max_tokens=max(_integer(request.max_tokens), 1),
        output_prior=output_prior,
        client_priority=client_priority(request),
        client_arrived_s=_real(request.arrival_time),
        on_bad=on_bad,
    )


def client_priority(request: "Request") -> float:
    """The number by which a client without labels orders its requests."""
    return _real(request.priority)


def labelled(request: "Request") -> bool:
    """Whether a label gives the request's urgency, so that its own `priority` does not order it."""
    sent = getattr(request.sampling_params, "extra_args", None)
    return isinstance(sent, Mapping) and "tg.urgency" in sent


def unlabelled(now: float, request: "Request", *, output_prior: int) -> Call:
    """The call of a request whose labels cannot be read at all."""
    return Call(
        id=CallId(request.request_id),
        arrived_at_s=now,
        prompt_tokens=max(_integer(request.num_prompt_tokens), 0),
        output_predicted=output_prior,
    )


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _real(value: object) -> float:
    """The value as a finite number; 0 if it is none."""
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) else 0.0
