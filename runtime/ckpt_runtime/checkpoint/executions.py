"""Identifiers of subtasks and their execution attempts, and the states of the latter. Plain values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SubtaskKey = tuple[str, int]
"""(vertex id, subtask index)"""


@dataclass(frozen=True, slots=True, order=True)
class ExecutionId:
    """One attempt to run one subtask. A redeployed subtask gets a greater ``attempt``."""

    vertex_id: str
    subtask: int
    attempt: int

    @property
    def key(self) -> SubtaskKey:
        return (self.vertex_id, self.subtask)


class TaskState(StrEnum):
    """The state of a subtask in its worker, in Flink's terms."""

    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
