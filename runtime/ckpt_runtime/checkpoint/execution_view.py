"""What the coordinator knows of the running deployment: attempts, finished subtasks, ends of data. Keeps books only."""

from __future__ import annotations

from ckpt_runtime.checkpoint.events import JobRunning
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.plan_calculator import CheckpointPlan, calculate_plan
from ckpt_runtime.graph.job_graph import JobGraph


class ExecutionView:
    """One deployment of a job graph; empty between deployments."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._executions: dict[SubtaskKey, ExecutionId] = {}
        self._finished: set[SubtaskKey] = set()
        self._at_end_of_data: set[SubtaskKey] = set()
        self._finished_on_restore: frozenset[str] = frozenset()

    def replace_graph(self, graph: JobGraph) -> None:
        """The next deployment is one of another graph. Only between deployments."""
        self._graph = graph

    @property
    def is_deployed(self) -> bool:
        """Whether a deployment runs, so that a failure can still reach it."""
        return bool(self._executions)

    def deployed(self, event: JobRunning) -> None:
        """Raises ValueError unless there is exactly one execution for each subtask of the graph."""
        executions = {execution.key: execution for execution in event.executions}
        expected = {(vertex.id, index) for vertex in self._graph.vertices for index in range(vertex.parallelism)}
        if executions.keys() != expected or len(executions) != len(event.executions):
            raise ValueError(f"executions {sorted(executions)} are not the subtasks {sorted(expected)}")
        self._executions = executions
        self._finished = {execution.key for execution in event.finished}
        self._at_end_of_data = set()
        self._finished_on_restore = event.finished_on_restore

    def gone(self) -> None:
        """All tasks of the deployment are stopping."""
        self._executions = {}
        self._finished = set()
        self._at_end_of_data = set()

    def is_running(self, execution: ExecutionId) -> bool:
        return self._executions.get(execution.key) == execution and execution.key not in self._finished

    def finished(self, execution: ExecutionId) -> bool:
        """Notes the end of a subtask; returns False for one that is not running."""
        if not self.is_running(execution):
            return False
        self._finished.add(execution.key)
        return True

    def end_of_data(self, execution: ExecutionId) -> bool:
        """Notes that a subtask waits for its last checkpoint; returns False for one that is not running."""
        if not self.is_running(execution):
            return False
        self._at_end_of_data.add(execution.key)
        return True

    @property
    def all_wait_for_final_checkpoint(self) -> bool:
        """Whether every subtask has ended or waits for a last checkpoint, and at least one waits."""
        waiting = self._at_end_of_data - self._finished
        return bool(waiting) and len(waiting) + len(self._finished) == len(self._executions)

    @property
    def any_finished(self) -> bool:
        return bool(self._finished)

    def plan(self) -> CheckpointPlan:
        """For the present moment; nothing to wait for when no subtask runs."""
        if not self._executions:
            return CheckpointPlan(self._graph, (), (), frozenset())
        return calculate_plan(self._graph, self._executions, frozenset(self._finished), self._finished_on_restore)
