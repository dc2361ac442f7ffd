"""Given to vLLM as `--scheduler-cls`: a vLLM that has lost a method which our queue implements and vLLM never calls."""

from vllm.v1.core.sched.request_queue import RequestQueue

del RequestQueue.remove_request

from tidegate_engine.plugin import scheduler  # noqa: E402, F401  # after the loss
