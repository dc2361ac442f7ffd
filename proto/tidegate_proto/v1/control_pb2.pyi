from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy", "reason", "parameters", "bypass")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    reason: str
    parameters: _containers.ScalarMap[str, float]
    bypass: bool
    def __init__(self, policy: _Optional[str] = ..., reason: _Optional[str] = ..., parameters: _Optional[_Mapping[str, float]] = ..., bypass: _Optional[bool] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy", "previous", "reordered")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    REORDERED_FIELD_NUMBER: _ClassVar[int]
    policy: str
    previous: str
    reordered: int
    def __init__(self, policy: _Optional[str] = ..., previous: _Optional[str] = ..., reordered: _Optional[int] = ...) -> None: ...

class Controls(_message.Message):
    __slots__ = ("max_running", "max_step_tokens")
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_running: int
    max_step_tokens: int
    def __init__(self, max_running: _Optional[int] = ..., max_step_tokens: _Optional[int] = ...) -> None: ...

class SetControlsRequest(_message.Message):
    __slots__ = ("controls",)
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    controls: Controls
    def __init__(self, controls: _Optional[_Union[Controls, _Mapping]] = ...) -> None: ...

class SetControlsResponse(_message.Message):
    __slots__ = ("controls",)
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    controls: Controls
    def __init__(self, controls: _Optional[_Union[Controls, _Mapping]] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("max_waiting_ids",)
    MAX_WAITING_IDS_FIELD_NUMBER: _ClassVar[int]
    max_waiting_ids: int
    def __init__(self, max_waiting_ids: _Optional[int] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("policy", "policy_reason", "policy_age_s", "controls", "running", "waiting", "kv_usage", "waiting_ids", "engine_version", "fallback_reason", "preemptions", "simulated_profile", "policy_parameters", "bypass", "waiting_by_lane")
    class PolicyParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class WaitingByLaneEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    WAITING_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_PROFILE_FIELD_NUMBER: _ClassVar[int]
    POLICY_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    WAITING_BY_LANE_FIELD_NUMBER: _ClassVar[int]
    policy: str
    policy_reason: str
    policy_age_s: float
    controls: Controls
    running: int
    waiting: int
    kv_usage: float
    waiting_ids: _containers.RepeatedScalarFieldContainer[str]
    engine_version: str
    fallback_reason: str
    preemptions: int
    simulated_profile: str
    policy_parameters: _containers.ScalarMap[str, float]
    bypass: bool
    waiting_by_lane: _containers.ScalarMap[str, int]
    def __init__(self, policy: _Optional[str] = ..., policy_reason: _Optional[str] = ..., policy_age_s: _Optional[float] = ..., controls: _Optional[_Union[Controls, _Mapping]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., waiting_ids: _Optional[_Iterable[str]] = ..., engine_version: _Optional[str] = ..., fallback_reason: _Optional[str] = ..., preemptions: _Optional[int] = ..., simulated_profile: _Optional[str] = ..., policy_parameters: _Optional[_Mapping[str, float]] = ..., bypass: _Optional[bool] = ..., waiting_by_lane: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WatchQosRequest(_message.Message):
    __slots__ = ("period_s", "idle_period_s")
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    idle_period_s: float
    def __init__(self, period_s: _Optional[float] = ..., idle_period_s: _Optional[float] = ...) -> None: ...

class QosReport(_message.Message):
    __slots__ = ("policy", "window_s", "arrived", "finished", "waiting", "preemptions", "ttft", "tpot", "service", "with_target", "missed", "blocked", "tenants", "policy_parameters", "bypass", "classes")
    class PolicyParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    WITH_TARGET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    policy: str
    window_s: float
    arrived: int
    finished: int
    waiting: int
    preemptions: int
    ttft: Histogram
    tpot: Histogram
    service: Histogram
    with_target: int
    missed: int
    blocked: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantQos]
    policy_parameters: _containers.ScalarMap[str, float]
    bypass: bool
    classes: _containers.RepeatedCompositeFieldContainer[ClassQos]
    def __init__(self, policy: _Optional[str] = ..., window_s: _Optional[float] = ..., arrived: _Optional[int] = ..., finished: _Optional[int] = ..., waiting: _Optional[int] = ..., preemptions: _Optional[int] = ..., ttft: _Optional[_Union[Histogram, _Mapping]] = ..., tpot: _Optional[_Union[Histogram, _Mapping]] = ..., service: _Optional[_Union[Histogram, _Mapping]] = ..., with_target: _Optional[int] = ..., missed: _Optional[int] = ..., blocked: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantQos, _Mapping]]] = ..., policy_parameters: _Optional[_Mapping[str, float]] = ..., bypass: _Optional[bool] = ..., classes: _Optional[_Iterable[_Union[ClassQos, _Mapping]]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("counts",)
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ...) -> None: ...

class TenantQos(_message.Message):
    __slots__ = ("tenant", "weight", "served_tokens", "waiting", "with_target", "missed")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WITH_TARGET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    served_tokens: int
    waiting: int
    with_target: int
    missed: int
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., served_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., with_target: _Optional[int] = ..., missed: _Optional[int] = ...) -> None: ...

class ClassQos(_message.Message):
    __slots__ = ("slo_class", "with_target", "missed")
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    WITH_TARGET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    slo_class: str
    with_target: int
    missed: int
    def __init__(self, slo_class: _Optional[str] = ..., with_target: _Optional[int] = ..., missed: _Optional[int] = ...) -> None: ...
