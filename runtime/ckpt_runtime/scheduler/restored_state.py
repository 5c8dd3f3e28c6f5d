"""Assigns the states of a snapshot to the subtasks of the plan that starts from it. Pure."""

from __future__ import annotations

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.state_assignment import assign_states
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler.core_events import RestoredState
from ckpt_runtime.scheduler.job_plan import JobPlan


def restored_state(checkpoint: CompletedCheckpoint, plan: JobPlan, graph: JobGraph, *, owned: bool) -> RestoredState:
    """``graph`` is the plan's current or future graph. Raises StateAssignmentError if the states do not fit.

    A job's own checkpoint may lack operators of the savepoint it began with; this was decided at submission.
    """
    allowed = plan.allow_non_restored_state or plan.savepoint is not checkpoint
    assignment = assign_states(checkpoint, graph, allowed)
    return RestoredState(
        checkpoint.id,
        checkpoint.directory,
        assignment.subtasks,
        assignment.finished_vertices,
        assignment.in_flight,
        owned=owned,
    )
