"""Steps as one line of text each: the type and the fields that tell schedules apart, without the bulk of states."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler.core_events import RestoredState

_LEFT_OUT = frozenset({"metrics", "cause", "message", "properties_json"})


def describe(what: Any) -> str:
    """An event or effect in short; anything else as text."""
    if not (is_dataclass(what) and hasattr(what, "__slots__")):
        return str(what)
    fields = (f"{name}={_value(getattr(what, name))}" for name in what.__slots__ if name not in _LEFT_OUT)
    return f"{type(what).__name__}({', '.join(fields)})"


def _value(value: Any) -> str:
    if isinstance(value, CompletedCheckpoint):
        return f"#{value.id}"
    if isinstance(value, ExecutionId):
        return f"{value.vertex_id}/{value.subtask}@{value.attempt}"
    if isinstance(value, CheckpointProperties):
        return value.type.value + ("+full" if value.full else "") + ("+drain" if value.drain else "")
    if isinstance(value, JobGraph):
        return "+".join(f"{vertex.id}*{vertex.parallelism}" for vertex in value.vertices)
    if isinstance(value, RestoredState):
        return f"#{value.checkpoint_id}"
    if isinstance(value, Configuration):
        return f"{len(value)} options"
    if isinstance(value, SubtaskState):
        return f"{len(value.files())} files"
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(_value(item) for item in value))}}}"
    return str(value)
