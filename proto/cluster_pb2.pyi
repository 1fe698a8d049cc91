from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_IDLE: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_LOADED: _ClassVar[WorkerState]
    WORKER_STATE_SERVING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_FAILED: _ClassVar[WorkerState]

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_ENGINE: _ClassVar[FaultKind]
    FAULT_KIND_LINK: _ClassVar[FaultKind]
    FAULT_KIND_PROTOCOL: _ClassVar[FaultKind]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_IDLE: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_LOADED: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_FAILED: WorkerState
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_ENGINE: FaultKind
FAULT_KIND_LINK: FaultKind
FAULT_KIND_PROTOCOL: FaultKind

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Coordinator(_message.Message):
    __slots__ = ("id", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ModelRef(_message.Message):
    __slots__ = ("name", "path", "repo", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPO_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    repo: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., repo: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_sequences", "kv_tokens", "prefix_cache_bytes", "max_draft_depth", "max_open_windows")
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    max_sequences: int
    kv_tokens: int
    prefix_cache_bytes: int
    max_draft_depth: int
    max_open_windows: int
    def __init__(self, max_sequences: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., prefix_cache_bytes: _Optional[int] = ..., max_draft_depth: _Optional[int] = ..., max_open_windows: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version", "coordinator", "model")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    coordinator: Coordinator
    model: ModelRef
    def __init__(self, protocol_version: _Optional[int] = ..., coordinator: _Optional[_Union[Coordinator, _Mapping]] = ..., model: _Optional[_Union[ModelRef, _Mapping]] = ...) -> None: ...

class Hardware(_message.Message):
    __slots__ = ("platform", "machine", "chip", "backend", "memory_total", "memory_limit", "memory_used", "dtypes", "bytes_per_second", "flops_per_second")
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    CHIP_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    platform: str
    machine: str
    chip: str
    backend: str
    memory_total: int
    memory_limit: int
    memory_used: int
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    bytes_per_second: float
    flops_per_second: float
    def __init__(self, platform: _Optional[str] = ..., machine: _Optional[str] = ..., chip: _Optional[str] = ..., backend: _Optional[str] = ..., memory_total: _Optional[int] = ..., memory_limit: _Optional[int] = ..., memory_used: _Optional[int] = ..., dtypes: _Optional[_Iterable[str]] = ..., bytes_per_second: _Optional[float] = ..., flops_per_second: _Optional[float] = ...) -> None: ...

class LoadedStage(_message.Message):
    __slots__ = ("epoch", "span", "first", "last", "fingerprint", "dtype", "kv_bits", "mtp", "weight_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BITS_FIELD_NUMBER: _ClassVar[int]
    MTP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    span: Span
    first: bool
    last: bool
    fingerprint: str
    dtype: str
    kv_bits: int
    mtp: bool
    weight_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., first: _Optional[bool] = ..., last: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_bits: _Optional[int] = ..., mtp: _Optional[bool] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("protocol_version", "package_version", "worker_id", "name", "hardware", "pinned", "model", "fingerprint", "loaded", "claimed_by", "state", "uptime_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_BY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    package_version: str
    worker_id: str
    name: str
    hardware: Hardware
    pinned: Span
    model: str
    fingerprint: str
    loaded: LoadedStage
    claimed_by: Coordinator
    state: WorkerState
    uptime_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., package_version: _Optional[str] = ..., worker_id: _Optional[str] = ..., name: _Optional[str] = ..., hardware: _Optional[_Union[Hardware, _Mapping]] = ..., pinned: _Optional[_Union[Span, _Mapping]] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., loaded: _Optional[_Union[LoadedStage, _Mapping]] = ..., claimed_by: _Optional[_Union[Coordinator, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., uptime_ms: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("coordinator", "epoch", "model", "span", "first", "last", "dtype", "kv_bits", "mtp", "limits", "measure", "lease_ms")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BITS_FIELD_NUMBER: _ClassVar[int]
    MTP_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    coordinator: Coordinator
    epoch: int
    model: ModelRef
    span: Span
    first: bool
    last: bool
    dtype: str
    kv_bits: int
    mtp: bool
    limits: Limits
    measure: bool
    lease_ms: int
    def __init__(self, coordinator: _Optional[_Union[Coordinator, _Mapping]] = ..., epoch: _Optional[int] = ..., model: _Optional[_Union[ModelRef, _Mapping]] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., first: _Optional[bool] = ..., last: _Optional[bool] = ..., dtype: _Optional[str] = ..., kv_bits: _Optional[int] = ..., mtp: _Optional[bool] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., measure: _Optional[bool] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: LoadBytes
    result: LoadResult
    def __init__(self, progress: _Optional[_Union[LoadBytes, _Mapping]] = ..., result: _Optional[_Union[LoadResult, _Mapping]] = ...) -> None: ...

class LoadBytes(_message.Message):
    __slots__ = ("done", "total")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class PassTime(_message.Message):
    __slots__ = ("width", "layer_us", "ends_us", "draft_us")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LAYER_US_FIELD_NUMBER: _ClassVar[int]
    ENDS_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    width: int
    layer_us: _containers.RepeatedScalarFieldContainer[float]
    ends_us: float
    draft_us: float
    def __init__(self, width: _Optional[int] = ..., layer_us: _Optional[_Iterable[float]] = ..., ends_us: _Optional[float] = ..., draft_us: _Optional[float] = ...) -> None: ...

class LoadResult(_message.Message):
    __slots__ = ("reused", "weight_bytes", "memory_used", "has_mtp", "kv_bytes_per_token", "state_bytes_per_sequence", "pass_times")
    REUSED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    HAS_MTP_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PASS_TIMES_FIELD_NUMBER: _ClassVar[int]
    reused: bool
    weight_bytes: int
    memory_used: int
    has_mtp: bool
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    pass_times: _containers.RepeatedCompositeFieldContainer[PassTime]
    def __init__(self, reused: _Optional[bool] = ..., weight_bytes: _Optional[int] = ..., memory_used: _Optional[int] = ..., has_mtp: _Optional[bool] = ..., kv_bytes_per_token: _Optional[int] = ..., state_bytes_per_sequence: _Optional[int] = ..., pass_times: _Optional[_Iterable[_Union[PassTime, _Mapping]]] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("coordinator", "epoch", "stage", "num_stages", "next_address", "next_worker_id", "plan_token", "hop_timeout_ms")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NEXT_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOP_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    coordinator: Coordinator
    epoch: int
    stage: int
    num_stages: int
    next_address: str
    next_worker_id: str
    plan_token: bytes
    hop_timeout_ms: int
    def __init__(self, coordinator: _Optional[_Union[Coordinator, _Mapping]] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., num_stages: _Optional[int] = ..., next_address: _Optional[str] = ..., next_worker_id: _Optional[str] = ..., plan_token: _Optional[bytes] = ..., hop_timeout_ms: _Optional[int] = ...) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("link_us",)
    LINK_US_FIELD_NUMBER: _ClassVar[int]
    link_us: float
    def __init__(self, link_us: _Optional[float] = ...) -> None: ...

class Signal(_message.Message):
    __slots__ = ("epoch", "hello", "heartbeat", "rollback", "cancel")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    hello: Hello
    heartbeat: Heartbeat
    rollback: Rollback
    cancel: Cancel
    def __init__(self, epoch: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("coordinator", "protocol_version", "pulse_ms")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PULSE_MS_FIELD_NUMBER: _ClassVar[int]
    coordinator: Coordinator
    protocol_version: int
    pulse_ms: int
    def __init__(self, coordinator: _Optional[_Union[Coordinator, _Mapping]] = ..., protocol_version: _Optional[int] = ..., pulse_ms: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("seq_id", "window", "kept", "trim")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    window: int
    kept: int
    trim: int
    def __init__(self, seq_id: _Optional[int] = ..., window: _Optional[int] = ..., kept: _Optional[int] = ..., trim: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("seq_id",)
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    def __init__(self, seq_id: _Optional[int] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("kind", "message", "peer")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    kind: FaultKind
    message: str
    peer: str
    def __init__(self, kind: _Optional[_Union[FaultKind, str]] = ..., message: _Optional[str] = ..., peer: _Optional[str] = ...) -> None: ...

class WorkerPulse(_message.Message):
    __slots__ = ("number", "worker_id", "state", "epoch", "heartbeat", "frames_done", "queued_in", "queued_out", "engine_stall_ms", "link_stall_ms", "busy_us", "memory_used", "memory_peak", "sequences", "open_windows", "kv_tokens", "prefix_entries", "prefix_bytes", "rows_done", "segments_skipped", "early_rollbacks", "bytes_in", "bytes_out", "messages_in", "messages_out", "fault")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_DONE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_IN_FIELD_NUMBER: _ClassVar[int]
    QUEUED_OUT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STALL_MS_FIELD_NUMBER: _ClassVar[int]
    LINK_STALL_MS_FIELD_NUMBER: _ClassVar[int]
    BUSY_US_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OPEN_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_DONE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    EARLY_ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_IN_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_OUT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker_id: str
    state: WorkerState
    epoch: int
    heartbeat: int
    frames_done: int
    queued_in: int
    queued_out: int
    engine_stall_ms: int
    link_stall_ms: int
    busy_us: int
    memory_used: int
    memory_peak: int
    sequences: int
    open_windows: int
    kv_tokens: int
    prefix_entries: int
    prefix_bytes: int
    rows_done: int
    segments_skipped: int
    early_rollbacks: int
    bytes_in: int
    bytes_out: int
    messages_in: int
    messages_out: int
    fault: Fault
    def __init__(self, number: _Optional[int] = ..., worker_id: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., epoch: _Optional[int] = ..., heartbeat: _Optional[int] = ..., frames_done: _Optional[int] = ..., queued_in: _Optional[int] = ..., queued_out: _Optional[int] = ..., engine_stall_ms: _Optional[int] = ..., link_stall_ms: _Optional[int] = ..., busy_us: _Optional[int] = ..., memory_used: _Optional[int] = ..., memory_peak: _Optional[int] = ..., sequences: _Optional[int] = ..., open_windows: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., prefix_entries: _Optional[int] = ..., prefix_bytes: _Optional[int] = ..., rows_done: _Optional[int] = ..., segments_skipped: _Optional[int] = ..., early_rollbacks: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., messages_in: _Optional[int] = ..., messages_out: _Optional[int] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("coordinator", "epoch")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    coordinator: Coordinator
    epoch: int
    def __init__(self, coordinator: _Optional[_Union[Coordinator, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class UnloadReply(_message.Message):
    __slots__ = ("memory_used",)
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    memory_used: int
    def __init__(self, memory_used: _Optional[int] = ...) -> None: ...

class HoldingsRequest(_message.Message):
    __slots__ = ("coordinator",)
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    coordinator: Coordinator
    def __init__(self, coordinator: _Optional[_Union[Coordinator, _Mapping]] = ...) -> None: ...

class SequenceHolding(_message.Message):
    __slots__ = ("seq_id", "length", "capacity", "open_windows", "bytes")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    OPEN_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    length: int
    capacity: int
    open_windows: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    def __init__(self, seq_id: _Optional[int] = ..., length: _Optional[int] = ..., capacity: _Optional[int] = ..., open_windows: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ...) -> None: ...

class PrefixHolding(_message.Message):
    __slots__ = ("entry", "length", "bytes")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    entry: int
    length: int
    bytes: int
    def __init__(self, entry: _Optional[int] = ..., length: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class HoldingsReply(_message.Message):
    __slots__ = ("epoch", "sequences", "prefixes", "memory_used", "queued_in", "queued_out")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_IN_FIELD_NUMBER: _ClassVar[int]
    QUEUED_OUT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceHolding]
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixHolding]
    memory_used: int
    queued_in: int
    queued_out: int
    def __init__(self, epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceHolding, _Mapping]]] = ..., prefixes: _Optional[_Iterable[_Union[PrefixHolding, _Mapping]]] = ..., memory_used: _Optional[int] = ..., queued_in: _Optional[int] = ..., queued_out: _Optional[int] = ...) -> None: ...
