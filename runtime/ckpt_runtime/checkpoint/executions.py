"""Names for subtasks and their execution attempts. Plain values, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

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
