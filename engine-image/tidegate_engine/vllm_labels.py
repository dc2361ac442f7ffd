"""A vLLM request as the schedulers' `Call`, and as the `QueuedRequest` that a queue orders.

The labels arrive in `vllm_xargs`, which vLLM hands on as `SamplingParams.extra_args`; `tidegate_policy.labels` knows the
keys. A request without labels gets the defaults of the policy library and is served fairly.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate_policy import labels
from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import QueuedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


def ticket(now: float, request: "Request", cost: CostModel) -> QueuedRequest:
    """The ticket of a request that enters the engine at `now`."""
    params = request.sampling_params
    call = labels.read(
        now,
        (params.extra_args if params is not None else None) or {},
        call_id=CallId(request.request_id),
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
    )
    return QueuedRequest(call=call, service_s=cost.call_seconds(call))


def after_eviction(known: QueuedRequest, request: "Request", cost: CostModel) -> QueuedRequest:
    """The ticket of a request that lost its KV: it must recompute all its tokens, then decode the rest (Semantic Alg 4)."""
    generated = request.num_output_tokens
    call: Call = replace(
        known.call,
        prompt_tokens=request.num_tokens,
        output_predicted=max(known.call.output_predicted - generated, 1),
    )
    return QueuedRequest(call=known.call, service_s=cost.call_seconds(call))
