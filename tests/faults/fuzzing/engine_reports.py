"""What engines tell of themselves: the pages /metrics and /v1/models, and the messages of EngineControl.

The first byte of an input chooses the parser. Property: it gives numbers within their bounds, or None, and raises nothing.
"""

import contextlib
import math

from fuzzing import memory_gateway
from google.protobuf import message

from tidegate_control import translation
from tidegate_gateway.engines import health_check, metrics_scrape
from tidegate_policy import qos
from tidegate_proto.v1 import control_pb2 as v1

_PAGE = b"""# HELP vllm:num_requests_running Requests.
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 4
vllm:num_requests_waiting{engine="0"} 1e3
vllm:generation_tokens_total{engine="0"} 1.5e+06
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:gpu_cache_usage_perc 0.5
"""
_MODELS = b'{"object":"list","data":[{"id":"a","max_model_len":4096},{"id":"b"}]}'
_HISTOGRAM = v1.Histogram(counts=[1, 2, 3])
_REPORT = v1.QosReport(
    policy="fcfs",
    window_s=1.0,
    arrived=3,
    ttft=_HISTOGRAM,
    tpot=_HISTOGRAM,
    service=_HISTOGRAM,
    tenants=[v1.TenantQos(tenant="a", weight=1.0, served_tokens=5)],
    classes=[v1.ClassQos(slo_class="c", with_target=2, missed=1)],
    policy_parameters={"p": 0.5},
)
_STATE = v1.EngineState(
    policy="fcfs",
    controls=v1.Controls(max_running=5, max_step_tokens=100),
    running=1,
    kv_usage=0.5,
    waiting_ids=["a"],
    waiting_by_lane={"lane": 2},
    policy_parameters={"p": 0.5},
)
SEEDS = [
    b"\0" + _PAGE,
    b"\0" + _PAGE.replace(b"\n", b"\r\n"),
    b"\1" + _MODELS,
    b"\2" + _REPORT.SerializeToString(),
    b"\3" + _STATE.SerializeToString(),
]
DICTIONARY = (
    *(name.decode() for names in metrics_scrape.NAMES.values() for name in names),
    "NaN", "+Inf", "-Inf", "1e400", "-1", "1_0", "{", '{le="a"}', "}", "\\x0a", "\\x09", "\\xc2\\xa0", "\\xd9\\xa3",
    '"data":[', '"id":', '"max_model_len":', "null", "1e999", "true", "[[[[",
    "\\x00\\x00\\x00\\x00\\x00\\x00\\xf8\\x7f", "\\x00\\x00\\x00\\x00\\x00\\x00\\xf0\\x7f",
    "\\xff\\xff\\xff\\xff\\x0f",
)  # fmt: skip


async def _read(kind: int, raw: bytes) -> None:
    if kind == 0:
        load = metrics_scrape.read(raw)
        counts = [count for count in (load.running, load.waiting, load.generated) if count is not None]
        if any(count < 0 for count in counts) or not 0 <= (load.kv_usage or 0.0) <= 1:
            raise memory_gateway.Finding(f"an absurd load was read: {load}")
    elif kind == 1:
        models, context = health_check._models(raw)
        if not all(isinstance(model, str) for model in models) or (context is not None and context < 1):
            raise memory_gateway.Finding(f"absurd models were read: {models}, {context}")
    elif kind == 2:
        report = translation.from_report(v1.QosReport.FromString(raw))
        if report is not None:
            _use(report.window)
    else:
        state = translation.from_state(v1.EngineState.FromString(raw))
        if state is not None and not math.isfinite(state.kv_usage):
            raise memory_gateway.Finding("a state that is not finite was read")


def _use(window: qos.Qos) -> None:
    for histogram in (window.ttft, window.tpot, window.service):
        histogram.quantile_s(0.95)


def try_input(data: bytes) -> None:
    if data:
        with contextlib.suppress(message.DecodeError):  # gRPC gives no message for such bytes
            memory_gateway.run(_read(data[0] % 4, data[1:]))
