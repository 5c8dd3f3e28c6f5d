"""The base of the contract's structs, and how their fields are spelled on the wire.

Flink mixes kebab case, camel case and snake case, at times within one object.

The structs of the contract have Python's names and take their spelling from here, as the argument ``rename``. The
suffix ``_ms`` names a unit and is not on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import Struct, structs

from ckpt_runtime.readable_types import ready

Spelling = Callable[[str], str]


def _spelled(style: Spelling, exceptions: dict[str, str]) -> Spelling:
    return lambda field: exceptions.get(field) or style(field.removesuffix("_ms"))


def kebab(**exceptions: str) -> Spelling:
    """``end_time_ms`` is ``end-time``."""
    return _spelled(lambda field: field.replace("_", "-"), exceptions)


def camel(**exceptions: str) -> Spelling:
    """``free_slots`` is ``freeSlots``."""
    return _spelled(_in_camel_case, exceptions)


def snake(**exceptions: str) -> Spelling:
    """``state_size`` is ``state_size``."""
    return _spelled(str, exceptions)


def _in_camel_case(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(map(str.capitalize, others))


# The session and its processes

CLUSTER_OVERVIEW = kebab(slot_agents="taskmanagers")
PIPELINE = snake(entries="entry", uploaded_at_ms="uploaded")
STARTED_JOB = snake(job_id="jobid", application_id="applicationId")
TASK_MANAGER = camel()
TASK_MANAGERS = snake(task_managers="taskmanagers")
THREAD = snake(name="threadName", text="stringifiedThreadInfo")
THREAD_DUMP = snake(threads="threadInfos")
LOG_FILE = snake(modified_at_ms="mtime")

# Jobs

JOB_LINE = kebab(job_id="jid", job_type="jobType", scheduler_type="schedulerType", drill="restore-drill")
JOB_DETAILS = kebab(
    job_id="jid",
    is_stoppable="isStoppable",
    scheduler_type="schedulerType",
    max_parallelism="maxParallelism",
    drill="restore-drill",
)
JOB_RESULT = kebab(job_id="id", status="application-status", failure="failure-cause")
EXECUTION_RESULT = kebab(queue="status", result="job-execution-result")
FAILURE = kebab(exception="class")
EXCEPTION = camel(stack_trace="stacktrace", exception="exceptionName", slot_agent_id="taskManagerId")
EXCEPTIONS = camel(history="exceptionHistory")
CHECKPOINT_HEALTH = kebab(last_completed_age_ms="last-completed-age")
PLAN = snake(job_id="jid")
VERTEX = kebab(slot_sharing_group="slotSharingGroupId", max_parallelism="maxParallelism", state="status", io="metrics")
VERTEX_TASK_MANAGER = kebab(slot_agent_id="taskmanager-id", state="status", io="metrics")
SUBTASK = kebab(
    index="subtask",
    state="status",
    io="metrics",
    slot_agent_id="taskmanager-id",
    durations_ms="status-duration",
    started_at_ms="start_time",
)
SUBTASK_TIMES = kebab(index="subtask")
IO_METRICS = kebab(
    backpressured_ms="accumulated-backpressured-time",
    idle_ms="accumulated-idle-time",
    busy_ms="accumulated-busy-time",
    complete="read-records-complete",
)
BACKPRESSURE = kebab(level="backpressureLevel", level_in_kebab="backpressure-level", measured_at_ms="end-timestamp")
SUBTASK_PRESSURE = kebab(
    index="subtask",
    attempt="attempt-number",
    level="backpressureLevel",
    level_in_kebab="backpressure-level",
    backpressured="ratio",
    idle="idleRatio",
    busy="busyRatio",
)
FLAME_GRAPH = camel(sampled_at_ms="endTimestamp")

# Configuration

JOB_CONFIG = kebab(job_id="jid", pipeline_id="jarid")
CHECKPOINT_CONFIG = snake(unaligned="unaligned_checkpoints", aligned_timeout_ms="aligned_checkpoint_timeout")
PARALLELISM_BOUNDS = camel(lower="lowerBound", upper="upperBound")

# Checkpoints and savepoints

CHECKPOINT = snake(
    class_name="className",
    savepoint_format="savepointFormat",
    triggered_at_ms="trigger_timestamp",
    kind="checkpoint_type",
    latest_ack_ms="latest_ack_timestamp",
    duration_ms="end_to_end_duration",
    num_acknowledged="num_acknowledged_subtasks",
    failed_at_ms="failure_timestamp",
    deadline_ms="deadline_timestamp",
)
RESTORED_CHECKPOINT = snake(restored_at_ms="restore_timestamp")
RETAINED_CHECKPOINT = kebab(triggered_at_ms="trigger-timestamp")
SUBTASK_CHECKPOINT = snake(duration_ms="end_to_end_duration")
PHASES = snake(asynchronous="async", synchronous="sync")
OPERATION = snake(queue="status", outcome="operation")
# Flink names the failure of a checkpoint in camel case, and that of a savepoint in kebab case.
OPERATION_OUTCOME = kebab(
    checkpoint_id="checkpointId", checkpoint_failure="failureCause", savepoint_failure="failure-cause"
)
SAVEPOINT = kebab()


T = TypeVar("T")


def always(default: T) -> T:
    """A field that every answer of this server has, but that readers do not require, since Flink may lack it.

    In structs with ``omit_defaults`` a field with a plain default is left out of answers while it has that default; a
    field made by this function is never left out. All instances share ``default``, so nothing may change it.
    """
    return msgspec.field(default_factory=lambda: default)


def read(document: Any, kind: type[T]) -> T:
    """Read a document as a value. Numbers may be given as text: Flink sends ``"NaN"``.

    Raises ``ValueError``, which names the field, for a missing value or one of the wrong type.
    """
    return msgspec.convert(document, ready(kind), strict=False)


def reader(kind: type[T], inside: str | None = None) -> Callable[[Any], T]:
    """Make a function that reads a document, or the part of it under the key ``inside``."""
    return lambda document: read(document if inside is None else document[inside], kind)


@runtime_checkable
class Flat(Protocol):
    """A struct that is shown to scripts in another form than its fields, because Flink nests some of them."""

    def flat(self) -> dict[str, Any]: ...


def plain(value: Any) -> Any:
    """JSON types with the Python names of the fields, for the output of commands and the results of operators.

    msgspec's own encoding would use the names on the wire.
    """
    if isinstance(value, Struct):
        value = value.flat() if isinstance(value, Flat) else structs.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
