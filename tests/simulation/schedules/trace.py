"""Steps as one line of text each: the type and the fields that tell schedules apart, without the bulk of states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointProperties
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
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(_value(item) for item in value))}}}"
    return _SHORT.get(type(value), str)(value)


_SHORT: dict[type[Any], Callable[[Any], str]] = {
    CompletedCheckpoint: lambda checkpoint: f"#{checkpoint.id}",
    RestoredState: lambda restored: f"#{restored.checkpoint_id}",
    ExecutionId: lambda execution: f"{execution.vertex_id}/{execution.subtask}@{execution.attempt}",
    CheckpointProperties: lambda p: p.type.value + ("+full" if p.full else "") + ("+drain" if p.drain else ""),
    JobGraph: lambda graph: "+".join(f"{vertex.id}*{vertex.parallelism}" for vertex in graph.vertices),
    Configuration: lambda configuration: f"{len(configuration)} options",
    SubtaskState: lambda state: f"{len(state.files())} files",
}
