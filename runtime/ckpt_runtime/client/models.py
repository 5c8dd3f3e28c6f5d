"""The structs of the REST contract and the functions that read them, by the names that the client uses."""

from __future__ import annotations

from ckpt_runtime.contract.base import read, reader
from ckpt_runtime.contract.checkpoints import OperationOutcome, OperationStatus
from ckpt_runtime.contract.cluster import ClusterOverview, EntryPoint, Holder, Pipeline, RetiredJobId, ThreadInfo
from ckpt_runtime.contract.cluster import TaskManager as SlotAgent
from ckpt_runtime.contract.configuration import ConfigChange, ConfigVersion, JobConfig, OptionChange
from ckpt_runtime.contract.jobs import (
    RETAINS,
    TERMINAL_STATES,
    Backpressure,
    BackpressureHealth,
    CheckpointHealth,
    ExceptionEntry,
    ExceptionHistory,
    ExecutionResult,
    IoMetrics,
    JobDetails,
    JobHealth,
    JobLine,
    OperatorPreview,
    PlanPreview,
    QueueStatus,
    RemoteFailure,
    RestorePreview,
    RunOptions,
    StatePreview,
    Subtask,
    SubtaskPressure,
    SubtaskTimes,
    UpgradeInProgress,
    Vertex,
    VertexDetails,
)

__all__ = [
    "RETAINS",
    "TERMINAL_STATES",
    "Backpressure",
    "BackpressureHealth",
    "Bounds",
    "CheckpointHealth",
    "ClusterOverview",
    "ConfigChange",
    "ConfigVersion",
    "EntryPoint",
    "ExceptionEntry",
    "ExceptionHistory",
    "ExecutionResult",
    "Holder",
    "IoMetrics",
    "JobConfig",
    "JobDetails",
    "JobHealth",
    "JobLine",
    "OperationOutcome",
    "OperationStatus",
    "OperatorPreview",
    "OptionChange",
    "Pipeline",
    "PlanPreview",
    "QueueStatus",
    "RemoteFailure",
    "RestorePreview",
    "RetiredJobId",
    "RunOptions",
    "SlotAgent",
    "StatePreview",
    "Subtask",
    "SubtaskPressure",
    "SubtaskTimes",
    "ThreadInfo",
    "UpgradeInProgress",
    "Vertex",
    "VertexDetails",
    "read",
    "read_backpressure",
    "read_execution_result",
    "read_operation_status",
    "reader",
]

Bounds = tuple[int, int]
"""The lower and the upper bound of a vertex's parallelism: the least the job runs with, and the most it uses."""

read_backpressure = reader(Backpressure)
read_execution_result = reader(ExecutionResult)
read_operation_status = reader(OperationStatus)
