"""A vLLM request as the schedulers' `Call`.

The labels arrive in `vllm_xargs`, which vLLM hands on as `SamplingParams.extra_args`; `tidegate_policy.labels` knows the
keys. A request without labels gets the defaults of the policy library and is served fairly.
"""

from typing import TYPE_CHECKING

from tidegate_policy import labels
from tidegate_policy.model import Call, CallId

if TYPE_CHECKING:
    from vllm.v1.request import Request


def call(now: float, request: "Request") -> Call:
    """The call of a request that enters the engine at `now`."""
    params = request.sampling_params
    return labels.read(
        now,
        (params.extra_args if params is not None else None) or {},
        call_id=CallId(request.request_id),
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
    )
