"""The verdict on a job, and its reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, CheckpointStatsTracker, SubtaskStats
from ckpt_runtime.contract.jobs import Backpressure, BackpressureHealth, CheckpointHealth, JobHealth
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.jobmaster.executions import subtask_pressure, vertex_pressure
from ckpt_runtime.jobmaster.gateway_values import ExecutionState, JobDetails, JobOverview, SubtaskDetails, VertexDetails
from ckpt_runtime.jobmaster.health import HealthVerdict, job_health
from ckpt_runtime.network.control_messages import SubtaskMeasures
from ckpt_runtime.scheduler.job_status import JobStatus

NOW = 10_000_000
SETTINGS = CheckpointConfiguration(interval_ms=10_000, timeout_ms=60_000)
LATE = 2 * 10_000 + 60_000
STALL_TIMEOUT = 60_000


def subtask(
    index: int,
    *,
    stalled_ms: int = 0,
    still_ms: int = 0,
    backpressured: bool = False,
    state: ExecutionState = ExecutionState.RUNNING,
) -> SubtaskDetails:
    measures = SubtaskMeasures("v", index, *[0] * 5, *[0.0] * 3, backpressured=backpressured)
    return SubtaskDetails(
        index, 0, state, "", "", 0, -1, {}, measures, still_ms=max(still_ms, stalled_ms), stalled_ms=stalled_ms
    )


class Job:
    """One that has run for an hour. ``ended`` adds checkpoints to its history."""

    def __init__(self, status: JobStatus = JobStatus.RUNNING, running_ms: int = 3_600_000) -> None:
        self.tracker = CheckpointStatsTracker()
        self.settings = SETTINGS
        self.restarts = 0
        self.pressures: dict[str, Backpressure] = {}
        vertex = JobVertex("v", (OperatorNode("v", "Source", "source"),), 1)
        overview = JobOverview("j", "job", status, 0, -1, NOW, {})
        shown = VertexDetails("v", "Source", 1, 128, ExecutionState.RUNNING, 0, -1, ())
        since = {JobStatus.RUNNING: NOW - running_ms}
        self.details = JobDetails(overview, since, (shown,), JobGraph("job", (vertex,), ()))
        self._next = 1

    def pending(self, kind: CheckpointType = CheckpointType.CHECKPOINT) -> int:
        number, self._next = self._next, self._next + 1
        self.tracker.report_pending(number, NOW - 500, kind, None, {"v": 1}, NOW)
        return number

    def completed(self, ago_ms: int = 1_000, **more: Any) -> Job:
        number = self.pending(**more)
        self.tracker.report_subtask(number, "v", SubtaskStats(0, NOW - ago_ms, 1, CheckpointMetrics()))
        self.tracker.report_completed(number, "file:/c")
        return self

    def failed(self, reason: Reason = Reason.CHECKPOINT_EXPIRED, **more: Any) -> Job:
        self.tracker.report_failed(self.pending(**more), NOW, reason.message)
        return self

    def pressed(self, *shares: float) -> Job:
        subtasks = tuple(subtask_pressure(i, 0, share, 0, 1 - share) for i, share in enumerate(shares))
        self.pressures["v"] = vertex_pressure(NOW, subtasks)
        return self

    def health(self) -> JobHealth:
        return job_health(
            self.details, self.tracker.snapshot(), self.settings, self.pressures, self.restarts, STALL_TIMEOUT, NOW
        )

    def with_subtasks(self, *subtasks: SubtaskDetails) -> Job:
        [vertex] = self.details.vertices
        vertex = replace(vertex, subtasks=subtasks, parallelism=len(subtasks))
        self.details = replace(self.details, vertices=(vertex,))
        return self


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (JobStatus.CREATED, "needs 20 slots, the cluster has 8"),
        (JobStatus.FAILED, "ValueError: no such carrier"),
    ],
)
def test_a_job_that_waits_or_has_failed_says_why(status: JobStatus, reason: str) -> None:
    job = Job(status)
    job.details = replace(job.details, status_reason=reason)
    assert job.health().reasons == (f"it is {status.name}: {reason}",)


@pytest.mark.parametrize("sink", [{"kind": "committer"}, {"kind": "sink", "output_directory": "/out"}])
def test_a_job_without_checkpoints_whose_sink_commits_with_them_is_degraded(sink: dict[str, Any]) -> None:
    vertex = JobVertex("v", (OperatorNode("s", "sink of orders", **sink),), 1)
    job = Job().completed()
    job.details = replace(job.details, graph=JobGraph("job", (vertex,), ()))
    assert job.health().verdict is HealthVerdict.HEALTHY
    job.settings = CheckpointConfiguration(interval_ms=None)
    found = job.health()
    assert found.verdict is HealthVerdict.DEGRADED
    (reason,) = found.reasons
    assert (
        "no execution.checkpointing.interval is set, and rows of 'sink of orders' are committed with checkpoints"
        in reason
    )
    job.details = replace(job.details, overview=replace(job.details.overview, status=JobStatus.FINISHED))
    assert job.health().reasons == ()


def test_healthy_job_makes_its_checkpoints_or_needs_none() -> None:
    job = Job()
    job.settings = CheckpointConfiguration(interval_ms=None)
    assert job.health().verdict is HealthVerdict.HEALTHY
    found = Job().completed().completed(400).pressed(0.1, 0.2).health()
    assert (found.verdict, found.reasons) == (HealthVerdict.HEALTHY, ())
    assert found.checkpoints == CheckpointHealth(1.0, 2, 400)
    assert found.backpressure == BackpressureHealth(0.2, "Source")


def test_some_failures_degrade_and_nothing_but_failures_is_unhealthy() -> None:
    job = Job().completed().failed()
    assert (job.health().verdict, job.health().checkpoints.success_rate) == (HealthVerdict.DEGRADED, 0.5)
    assert job.health().reasons == ("1 of the last 2 checkpoints have failed",)
    only = Job(running_ms=1_000).failed().failed().health()
    assert (only.verdict, only.reasons) == (HealthVerdict.UNHEALTHY, ("none of the last 2 checkpoints has completed",))


@pytest.mark.parametrize("reason", [Reason.CHECKPOINT_SUBSUMED, Reason.CHECKPOINT_COORDINATOR_SUSPEND])
def test_aborts_without_a_fault_of_the_job_do_not_lower_the_success_rate(reason: Reason) -> None:
    assert Job().completed().failed(reason).health().checkpoints.success_rate == 1.0


def test_savepoints_do_not_count_for_the_health_of_a_job() -> None:
    found = Job().completed().failed(kind=CheckpointType.SAVEPOINT).health()
    assert (found.verdict, found.checkpoints.ended) == (HealthVerdict.HEALTHY, 1)


@pytest.mark.parametrize(("ago_ms", "verdict"), [(LATE, HealthVerdict.HEALTHY), (LATE + 1, HealthVerdict.UNHEALTHY)])
def test_a_last_checkpoint_may_be_two_intervals_and_a_timeout_old(ago_ms: int, verdict: HealthVerdict) -> None:
    assert Job().completed(ago_ms).health().verdict is verdict


def test_job_has_as_long_for_its_first_checkpoint_as_after_a_restart_and_misses_none_without_an_interval() -> None:
    assert Job(running_ms=LATE).health().verdict is HealthVerdict.HEALTHY
    assert Job(running_ms=LATE + 1).health().reasons == ("no checkpoint has completed, with an interval of 10000 ms",)
    assert Job(running_ms=LATE).completed(10 * LATE).health().verdict is HealthVerdict.HEALTHY
    job = Job()
    job.settings = replace(SETTINGS, interval_ms=None)
    assert job.health().verdict is HealthVerdict.HEALTHY


def test_a_restart_is_news_for_five_minutes() -> None:
    job = Job(running_ms=40_000).completed()
    job.restarts = 2
    assert job.health().reasons == ("it has restarted 2 times, last 40 s ago",)
    later = Job().completed()
    later.restarts = 2
    assert (later.health().verdict, later.health().restarts) == (HealthVerdict.HEALTHY, 2)


def test_back_pressure_names_the_vertex() -> None:
    found = Job().completed().pressed(0.1, 0.75).health()
    assert (found.verdict, found.reasons) == (HealthVerdict.DEGRADED, ("Source cannot send for 75% of the time",))


def test_a_job_in_which_no_row_moves_although_work_waits_is_unhealthy_and_names_the_stuck_subtask() -> None:
    upstream, stuck = subtask(0, stalled_ms=61_000, backpressured=True), subtask(1, stalled_ms=60_500)
    found = Job().completed().with_subtasks(upstream, stuck, subtask(2, still_ms=90_000)).health()
    assert found.verdict is HealthVerdict.UNHEALTHY
    assert found.reasons == ("no row of the job has moved although work waits: Source (2/3) for 60 s",)


def test_one_stuck_subtask_among_others_that_move_rows_degrades_the_job() -> None:
    found = Job().completed().with_subtasks(subtask(0, stalled_ms=STALL_TIMEOUT), subtask(1)).health()
    assert found.verdict is HealthVerdict.DEGRADED
    assert found.reasons == ("no row has moved although work waits: Source (1/2) for 60 s",)


def test_subtasks_that_cannot_send_are_named_when_nothing_else_is_stuck() -> None:
    pressed = [subtask(i, stalled_ms=70_000, backpressured=True) for i in range(5)]
    [reason] = Job().completed().with_subtasks(*pressed).health().reasons
    assert reason.endswith("Source (1/5) for 70 s, Source (2/5) for 70 s, Source (3/5) for 70 s and 2 more")


@pytest.mark.parametrize(
    "quiet",
    [
        subtask(0, stalled_ms=STALL_TIMEOUT - 1),
        subtask(0, still_ms=3_600_000),
        subtask(0, stalled_ms=STALL_TIMEOUT, state=ExecutionState.FINISHED),
    ],
)
def test_job_with_idle_ended_or_briefly_stuck_subtasks_is_healthy(quiet: SubtaskDetails) -> None:
    assert Job().completed().with_subtasks(quiet).health().verdict is HealthVerdict.HEALTHY


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (JobStatus.CREATED, HealthVerdict.DEGRADED),
        (JobStatus.RESTARTING, HealthVerdict.DEGRADED),
        (JobStatus.FAILING, HealthVerdict.UNHEALTHY),
        (JobStatus.FAILED, HealthVerdict.UNHEALTHY),
        (JobStatus.FINISHED, HealthVerdict.HEALTHY),
        (JobStatus.CANCELED, HealthVerdict.HEALTHY),
    ],
)
def test_job_that_does_not_run_is_judged_by_its_state(status: JobStatus, verdict: HealthVerdict) -> None:
    found = Job(status).failed().health()
    assert (found.verdict, found.state) == (verdict, status)
    assert bool(found.reasons) is (verdict is not HealthVerdict.HEALTHY)
