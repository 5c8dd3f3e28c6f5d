"""Tracks the state of each subtask of one deployment for the job machine. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey


class DeployedTaskState(Enum):
    """The states of a task that matter to the job."""

    DEPLOYING = "deploying"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELED = "canceled"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (DeployedTaskState.FINISHED, DeployedTaskState.CANCELED, DeployedTaskState.FAILED)


class DeployedTasks:
    """The executions of one attempt, all DEPLOYING at first."""

    def __init__(self, subtasks: Iterable[SubtaskKey], attempt: int) -> None:
        self._states = {ExecutionId(vertex, index, attempt): DeployedTaskState.DEPLOYING for vertex, index in subtasks}

    @property
    def executions(self) -> tuple[ExecutionId, ...]:
        return tuple(self._states)

    @property
    def alive(self) -> tuple[ExecutionId, ...]:
        return tuple(execution for execution, state in self._states.items() if not state.is_terminal)

    @property
    def finished(self) -> frozenset[ExecutionId]:
        return frozenset(execution for execution, state in self._states.items() if state is DeployedTaskState.FINISHED)

    @property
    def all_up(self) -> bool:
        """Whether every task runs or has finished."""
        return all(state in (DeployedTaskState.RUNNING, DeployedTaskState.FINISHED) for state in self._states.values())

    @property
    def all_finished(self) -> bool:
        return all(state is DeployedTaskState.FINISHED for state in self._states.values())

    def move(self, execution: ExecutionId, state: DeployedTaskState) -> bool:
        """Records a change; returns False for an unknown, ended or unchanged execution."""
        present = self._states.get(execution)
        if present is None or present.is_terminal or present is state:
            return False
        self._states[execution] = state
        return True
