"""The job machine and the real coordinator together: the messages between them, and their effects in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import SubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointOverrides
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator, CoordinatorState, UnexpectedEventError
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason, CheckpointProperties, CheckpointType
from ckpt_runtime.configuration.configuration import ChangeNote, Configuration
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import ChangeAnswered, ChangeOutcome
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_machine import JobMachine, UnexpectedJobEventError
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds, subtasks_of
from ckpt_runtime.scheduler.restart_strategies import FixedDelay, NoRestart, RestartStrategy
from tests.support.driven import CAUSE, DrivenJob, checkpoint_events, job_events

SETTINGS = CheckpointConfiguration(interval_ms=1_000, timeout_ms=500)
PLAIN = Configuration({})


def graph_of(parallelism: int) -> JobGraph:
    return JobGraph("job", (JobVertex("v", (OperatorNode("v", "Source", "source"),), parallelism),), ())


class Job(DrivenJob):
    """Of two subtasks."""

    def __init__(
        self, strategy: RestartStrategy | None = None, overrides: CheckpointOverrides | None = None, **settings: Any
    ) -> None:
        configuration = replace(SETTINGS, **settings)
        plan = JobPlan(graph_of(2), PLAIN, configuration)
        effective = (overrides or CheckpointOverrides()).applied_to(configuration)
        machine = JobMachine(subtasks_of(plan.graph), strategy or FixedDelay(3, 100))
        super().__init__(JobCore(plan, machine, CheckpointCoordinator("job", plan.graph, effective), overrides))


def test_job_proceeds_from_slots_to_checkpoints():
    job = Job().acquire()
    assert job.kinds() == [job_out.StatusChanged, job_out.AcquireSlots]
    assert job.step(job_on.SlotsAcquired(0)) == [core.RecordAttempt(0)]
    job.step(core.AttemptRecorded(0))
    assert job.kinds() == [out.FindLeftovers, job_out.StatusChanged, core.DeployTasks]
    order = job.one(core.DeployTasks)
    assert (order.graph, order.configuration, order.restored) == (job.core.graph, PLAIN, None)
    job.each(job_on.TaskRunning)
    assert job.kinds() == [out.ScheduleTimer]
    assert job.core.coordinator.state is CoordinatorState.RUNNING


def test_early_end_of_data_is_reported_once_all_subtasks_run_and_not_of_an_ended_task():
    job = Job(interval_ms=None).deploy()
    for index in range(2):
        assert job.step(on.EndOfDataReached(job.task(index))) == []
    job.each(job_on.TaskRunning)
    assert out.InitializeLocation in job.kinds()
    job = Job(interval_ms=None).deploy()
    assert job.step(on.EndOfDataReached(ExecutionId("v", 0, 7))) == []
    assert job.each(job_on.TaskRunning).last == []


class TestCancelWithSavepoint:
    """Between the savepoint and the end of the job nothing may commit what the savepoint does not cover (FLIP-147)."""

    SAVEPOINT = on.TriggerRequested("sp", CheckpointProperties(CheckpointType.SAVEPOINT), "dir")

    def taken(self, job: Job) -> None:
        job.step(on.LocationReady(1, "sp-1"))
        for index in range(2):
            job.step(on.Acknowledged(1, job.task(index), "sp-1", SubtaskState()))
        job.step(on.MetadataWritten(1))
        assert job.one(out.RequestCompleted).request_id == "sp"

    def ticks(self, job: Job) -> bool:
        """Whether a periodic checkpoint is due at some time, as far as the last step says."""
        timers = [e for e in job.last if isinstance(e, out.ScheduleTimer | out.CancelTimer)]
        return isinstance(next(e for e in reversed(timers) if e.timer.kind is TimerKind.PERIODIC), out.ScheduleTimer)

    @pytest.mark.row("147.7")
    def test_checkpoints_are_not_triggered_between_savepoint_and_cancellation(self):
        job = Job().run()
        tick = job.one(out.ScheduleTimer)
        job.step(core.SavepointBeforeCancel(self.SAVEPOINT))
        assert job.last[0] == out.CancelTimer(TimerId(TimerKind.PERIODIC))
        self.taken(job)
        assert job.step(on.TimerFired(tick.timer, tick.generation), 5_000) == []
        job.step(on.TriggerRequested("late", CheckpointProperties()))
        assert job.one(out.RequestFailed).message == "The job is being cancelled with a savepoint."
        for index in range(2):
            assert job.step(on.EndOfDataReached(job.task(index))) == []
        job.steps(job_on.TaskFailed(job.task(0), CAUSE), job_on.TaskCanceled(job.task(1)))
        job.step(job_on.RestartTimerFired(1), 100)
        job.again()
        assert not self.ticks(job)
        job.step(job_on.CancelRequested())
        assert job.machine.state is JobState.CANCELLING

    @pytest.mark.row("147.7")
    def test_checkpoints_continue_after_a_failed_savepoint(self):
        job = Job().run()
        job.steps(core.SavepointBeforeCancel(self.SAVEPOINT), on.LocationFailed(1, "no"))
        assert job.one(out.RequestFailed).request_id == "sp"
        assert self.ticks(job)
        job.step(on.TriggerRequested("late", CheckpointProperties()))
        assert job.one(out.InitializeLocation)

    def test_failure_of_the_job_ends_a_savepoint_before_cancellation(self):
        job = Job().run()
        job.steps(core.SavepointBeforeCancel(self.SAVEPOINT), job_on.TaskFailed(job.task(0), CAUSE))
        assert job.one(out.RequestFailed).request_id == "sp"
        job.step(job_on.TaskCanceled(job.task(1)))
        job.step(job_on.RestartTimerFired(1), 100)
        job.again()
        assert self.ticks(job)

    def test_stop_replaces_a_savepoint_before_cancellation(self):
        job = Job().run()
        job.steps(core.SavepointBeforeCancel(self.SAVEPOINT), job_on.StopRequested("stop", False, "dir"))
        assert job.one(out.RequestFailed).request_id == "sp"
        assert not self.ticks(job)
        assert job.one(out.InitializeLocation).properties.is_synchronous

    @pytest.mark.row("147.7")
    def test_stop_that_fails_after_its_savepoint_does_not_resume_checkpoints(self):
        job = Job().run()
        job.step(core.SavepointBeforeCancel(self.SAVEPOINT))
        self.taken(job)
        job.step(job_on.StopRequested("stop", False, "dir"))
        assert job.one(job_out.StopFailed).request_id == "stop"
        assert not self.ticks(job)

    def test_a_job_that_does_not_run_takes_none(self):
        job = Job().deploy()
        job.step(core.SavepointBeforeCancel(self.SAVEPOINT))
        assert job.one(out.RequestFailed).reason is CheckpointFailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING
        assert self.ticks(job.each(job_on.TaskRunning))


def test_state_that_cannot_be_recorded_fails_the_attempt():
    job = Job().restore()
    job.step(core.AttemptNotRecorded(0, CAUSE))
    assert job.kinds() == [core.RecordFailure, job_out.StatusChanged, job_out.ScheduleRestart]
    assert job.step(core.AttemptRecorded(0)) == []


def test_checkpoints_that_fail_fail_the_job():
    job = Job().run()
    job.step(on.TimerFired(TimerId(TimerKind.PERIODIC), 1), after_ms=1_000)
    job.step(on.LocationFailed(job.one(out.InitializeLocation).checkpoint_id, "no directory"))
    assert job.one(core.RecordFailure).cause.exception == "CheckpointException"
    assert job.machine.state is JobState.CLEARING
    assert job.core.coordinator.state is CoordinatorState.CREATED


def test_failures_that_change_nothing_are_not_recorded():
    job = Job().run()
    for event in (
        job_on.TaskFailed(ExecutionId("v", 0, 7), CAUSE),
        job_on.SlotsFailed(0, CAUSE),
        job_on.StateRestoreFailed(0, CAUSE),
    ):
        assert job.step(event) == []


class TestStop:
    def location(self, job: Job) -> int:
        return job.one(out.InitializeLocation).checkpoint_id

    def stopped(self) -> Job:
        """With a savepoint, and an end that is still to be stored."""
        job = Job().run()
        job.step(job_on.StopRequested("stop", False, "savepoints"))
        number = self.location(job)
        job.step(on.LocationReady(number, "savepoints/1"))
        for index in range(2):
            job.step(on.Acknowledged(number, job.task(index), "savepoints/1", SubtaskState()))
        job.steps(on.MetadataWritten(number), on.StoreAdded(number))
        assert job.machine.state is JobState.ENDING
        job.each(job_on.TaskFinished)
        assert core.StoreResult in job.kinds()
        assert job_out.StopCompleted not in job.kinds()
        return job

    def test_the_good_case(self):
        job = self.stopped()
        job.step(core.ResultStored())
        assert job.one(job_out.StopCompleted) == job_out.StopCompleted("stop", "savepoints/1")

    def test_another_driver_leads_before_the_end_is_stored(self):
        """It may run the job again; the savepoint is the user's all the same."""
        job = self.stopped()
        job.step(core.LeadershipLost())
        failed = job.one(job_out.StopFailed)
        assert (failed.request_id, failed.location) == ("stop", "savepoints/1")
        assert job_out.StopCompleted not in job.kinds()

    def test_stop_that_fails_before_it_reaches_a_task_changes_nothing(self):
        job = Job(tolerable_failed_checkpoints=9).run()
        job.step(job_on.StopRequested("stop", False, "savepoints"))
        job.step(on.LocationFailed(self.location(job), "no directory"))
        assert job.one(job_out.StopFailed).request_id == "stop"
        assert job.machine.state is JobState.RUNNING
        assert any(e.timer.kind is TimerKind.PERIODIC for e in job.last if isinstance(e, out.ScheduleTimer))


def test_a_savepoint_of_the_user_is_known_to_the_next_deployment():
    job = Job().run()
    job.step(on.TriggerRequested("a", CheckpointProperties(CheckpointType.SAVEPOINT), "savepoints"))
    number = job.one(out.InitializeLocation).checkpoint_id
    job.step(on.LocationReady(number, "savepoints/1"))
    for index in range(2):
        job.step(on.Acknowledged(number, job.task(index), "savepoints/1", SubtaskState()))
    job.step(on.MetadataWritten(number))
    assert job.one(out.RequestCompleted).request_id == "a"
    assert job.core.savepoint_id == number


class TestPatch:
    def test_stored_then_in_force_then_answered(self):
        job = Job().run()
        job.step(core.PatchRequested("p", CheckpointOverrides(interval_ms=200)))
        assert job.kinds() == [core.StoreOverrides]
        assert job.core.coordinator.configuration.interval_ms == 1_000
        job.step(core.OverridesStored("p", '{"checkpointInterval": 200}'))
        assert job.kinds() == [out.ScheduleTimer, ChangeAnswered]
        assert job.core.coordinator.configuration.interval_ms == 200

    def test_patch_that_races_with_the_end_is_answered_when_the_end_is_stored(self):
        job = Job().run()
        job.step(core.PatchRequested("p", CheckpointOverrides(interval_ms=200)))
        job.each(job_on.TaskFinished)
        assert job.step(core.ChangeNotStored("p", "gone", final=True)) == []
        job.step(core.ResultStored())
        assert job.one(ChangeAnswered).outcome is ChangeOutcome.JOB_ENDED

    def test_another_driver_leads(self):
        job = Job().run()
        job.steps(core.PatchRequested("p", None), core.LeadershipLost())
        assert job.one(ChangeAnswered).outcome is ChangeOutcome.UNKNOWN
        assert job.step(core.OverridesStored("p", None)) == []
        job.step(core.PatchRequested("q", None))
        assert job.one(ChangeAnswered).outcome is ChangeOutcome.NOT_STORED

    def test_another_driver_leads_before_the_end_is_stored(self):
        job = Job().run()
        job.step(core.PatchRequested("p", None))
        job.each(job_on.TaskFinished)
        job.steps(core.ChangeNotStored("p", "gone", final=True), core.LeadershipLost())
        assert job.one(ChangeAnswered).outcome is ChangeOutcome.UNKNOWN
        assert job.one(job_out.JobEnded).status is JobStatus.SUSPENDED


def configured(
    job: Job,
    *,
    restarts: bool = True,
    strategy: RestartStrategy | None = None,
    graph: JobGraph | None = None,
    **settings: Any,
) -> core.ConfigurationRequested:
    """A request that was made of what is in force."""
    base = job.core.accepted_plan
    version = base.own.version + 1
    given = Configuration({"my.version": str(version)})
    own = base.own.changed(given, ChangeNote(version, 7, "alice", ("my.version",)))
    changed = replace(base.settings, **settings)
    plan = replace(base, graph=graph or replace(base.graph), configuration=given, settings=changed, own=own)
    return core.ConfigurationRequested(f"c{version}", plan, base, restarts, strategy)


def versions(job: Job) -> tuple[int, int]:
    """Accepted, and what the tasks run with."""
    return job.core.accepted_plan.own.version, job.core.plan.own.version


@pytest.mark.row("530.5")
class TestConfiguration:
    def outcome(self, job: Job) -> ChangeOutcome:
        return job.one(ChangeAnswered).outcome

    def test_stored_then_in_force_then_restarted_in_place(self):
        job = Job(NoRestart()).run()
        request = configured(job, timeout_ms=900)
        assert job.step(request) == [core.StorePlan("c2", request.plan.graph, request.plan.own, 0)]
        assert versions(job) == (1, 1)
        assert job.core.coordinator.configuration.timeout_ms == 500
        job.step(core.PlanStored("c2"))
        assert self.outcome(job) is ChangeOutcome.APPLIED
        assert versions(job) == (2, 1)
        assert job.core.coordinator.configuration.timeout_ms == 900
        assert job.machine.state is JobState.CLEARING
        job.each(job_on.TaskCanceled)
        assert job.last[-1] == job_out.AcquireSlots(1)
        job.steps(job_on.SlotsAcquired(1), core.AttemptRecorded(1))
        order = job.one(core.DeployTasks)
        assert (order.graph, order.configuration) == (request.plan.graph, request.plan.configuration)
        assert versions(job) == (2, 2)

    def test_the_restart_uses_up_no_budget(self):
        job = Job(FixedDelay(1, 0)).run()
        for _ in range(3):
            job.step(configured(job))
            job.step(core.PlanStored(f"c{versions(job)[0] + 1}"))
            job.each(job_on.TaskCanceled).again()
        assert versions(job) == (4, 4)
        job.each(job_on.TaskFailed, CAUSE).again()
        assert job.machine.state is JobState.RUNNING

    @pytest.mark.row("530.8")
    def test_live_option_is_in_force_at_once(self):
        job = Job().run()
        job.step(configured(job, restarts=False, timeout_ms=900))
        job.step(core.PlanStored("c2"))
        assert self.outcome(job) is ChangeOutcome.APPLIED
        assert job.core.coordinator.configuration.timeout_ms == 900
        assert (job.machine.state, versions(job)) == (JobState.RUNNING, (2, 2))

    @pytest.mark.row("530.2")
    def test_second_of_two_requests_for_one_version_is_refused(self):
        job = Job().run()
        first, second = configured(job), configured(job, timeout_ms=900)
        job.step(first)
        job.step(second)
        assert self.outcome(job) is ChangeOutcome.BUSY
        job.step(core.PlanStored("c2"))
        job.each(job_on.TaskCanceled).again()
        job.step(second)
        assert self.outcome(job) is ChangeOutcome.STALE
        assert job.core.coordinator.configuration.timeout_ms == 500

    @pytest.mark.row("530.9")
    def test_overrides_and_configuration_change_one_after_the_other(self):
        job = Job().run()
        job.step(core.PatchRequested("p", None))
        job.step(configured(job))
        assert self.outcome(job) is ChangeOutcome.BUSY
        job.step(core.OverridesStored("p", None))
        job.step(configured(job))
        job.step(core.PatchRequested("p", None))
        assert self.outcome(job) is ChangeOutcome.BUSY
        job.step(core.RescaleRequested("r", {"v": ParallelismBounds(1, 1)}))
        assert self.outcome(job) is ChangeOutcome.BUSY

    @pytest.mark.row("530.9")
    def test_overrides_take_precedence_over_a_change_until_they_are_deleted(self):
        job = Job(overrides=CheckpointOverrides(timeout_ms=77)).run()
        job.step(configured(job, restarts=False, interval_ms=50, timeout_ms=9_000))
        job.step(core.PlanStored("c2"))
        effective = job.core.coordinator.configuration
        assert (effective.interval_ms, effective.timeout_ms) == (50, 77)
        job.steps(core.PatchRequested("p", None), core.OverridesStored("p", None))
        effective = job.core.coordinator.configuration
        assert (effective.interval_ms, effective.timeout_ms) == (50, 9_000)

    def test_checkpoints_that_fail_by_new_settings_fail_the_job_before_it_restarts_for_them(self):
        job = Job(NoRestart()).run()
        job.step(on.TimerFired(TimerId(TimerKind.PERIODIC), 1), after_ms=1_000)
        number = job.one(out.InitializeLocation).checkpoint_id
        job.step(on.LocationReady(number, "chk-1"), after_ms=100)
        job.step(configured(job, timeout_ms=50))
        job.step(core.PlanStored("c2"))
        assert job.machine.state is JobState.FAILING

    @pytest.mark.row("530.10")
    def test_a_restart_waits_for_a_savepoint_that_a_user_asked_for(self):
        job = Job(interval_ms=None).run()
        job.step(on.TriggerRequested("s", CheckpointProperties(CheckpointType.SAVEPOINT), "/savepoints"))
        number = job.one(out.InitializeLocation).checkpoint_id
        job.step(configured(job))
        job.step(core.PlanStored("c2"))
        assert self.outcome(job) is ChangeOutcome.APPLIED
        assert (job.machine.state, versions(job)) == (JobState.RUNNING, (2, 1))
        job.step(on.LocationFailed(number, "no directory"))
        assert out.RequestFailed in job.kinds()
        assert job.machine.state is JobState.CLEARING

    def test_a_savepoint_whose_failure_fails_the_job_leaves_the_restart_to_its_strategy(self):
        job = Job(NoRestart()).run()
        job.step(on.TriggerRequested("s", CheckpointProperties(CheckpointType.SAVEPOINT), "/savepoints"))
        number = job.one(out.InitializeLocation).checkpoint_id
        job.step(on.LocationReady(number, "sp-1"), after_ms=100)
        job.step(configured(job))
        job.step(core.PlanStored("c2"))
        job.step(on.Declined(number, job.task(0), CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION, "disk"))
        assert job.one(out.RequestFailed).request_id == "s"
        assert job.machine.state is JobState.FAILING

    @pytest.mark.row("530.10")
    def test_a_restart_waits_for_the_savepoint_of_a_cancellation_that_ends_another_one(self):
        job = Job().run()
        job.step(on.TriggerRequested("s", CheckpointProperties(CheckpointType.SAVEPOINT), "/savepoints"))
        job.step(configured(job))
        job.step(core.PlanStored("c2"))
        trigger = on.TriggerRequested("c", CheckpointProperties(CheckpointType.SAVEPOINT), "/savepoints")
        job.step(core.SavepointBeforeCancel(trigger))
        assert job.one(out.RequestFailed).request_id == "s"
        assert job.machine.state is JobState.RUNNING
        job.step(on.LocationFailed(job.one(out.InitializeLocation).checkpoint_id, "no directory"))
        assert job.machine.state is JobState.CLEARING

    def test_failure_deploys_a_change_that_waits_for_its_restart(self):
        job = Job(FixedDelay(3, 0), interval_ms=None).run()
        job.step(on.TriggerRequested("s", CheckpointProperties(CheckpointType.SAVEPOINT), "/savepoints"))
        job.step(configured(job))
        job.step(core.PlanStored("c2"))
        job.each(job_on.TaskFailed, CAUSE).again()
        assert (job.machine.state, versions(job)) == (JobState.RUNNING, (2, 2))

    @pytest.mark.row("530.11")
    def test_another_parallelism_is_a_live_rescale(self):
        job = Job().run()
        job.step(configured(job, graph=graph_of(3)))
        assert job.last == [core.ReserveSlots("c2", 3, 3)]
        job.step(core.SlotsNotReserved("c2", "none is free"))
        assert self.outcome(job) is ChangeOutcome.NOT_STORED
        assert job.one(ChangeAnswered).message == "The job keeps its configuration: none is free"
        assert versions(job) == (1, 1)

    def test_live_change_is_applied_while_another_change_waits_for_its_restart(self):
        job = Job(interval_ms=None).run()
        job.step(on.TriggerRequested("s", CheckpointProperties(CheckpointType.SAVEPOINT), "/savepoints"))
        number = job.one(out.InitializeLocation).checkpoint_id
        job.step(configured(job))
        job.step(core.PlanStored("c2"))
        job.step(configured(job, restarts=False, timeout_ms=900))
        job.step(core.PlanStored("c3"))
        assert versions(job) == (3, 1)
        assert job.core.coordinator.configuration.timeout_ms == 900
        job.step(on.LocationFailed(number, "no directory"))
        job.each(job_on.TaskCanceled).again()
        assert versions(job) == (3, 3)

    @pytest.mark.row("530.6")
    def test_another_strategy_takes_over_the_state_of_the_old_one(self):
        job = Job(FixedDelay(5, 0)).run()
        for _ in range(2):
            job.each(job_on.TaskFailed, CAUSE).again()
        job.step(configured(job, restarts=False, strategy=FixedDelay(2, 0)))
        job.step(core.PlanStored("c2"))
        job.each(job_on.TaskFailed, CAUSE)
        assert job.one(core.StoreResult).ended.status is JobStatus.FAILED

    def test_change_that_is_not_stored_is_not_in_force(self):
        job = Job().run()
        job.step(configured(job, timeout_ms=900))
        job.step(core.ChangeNotStored("c2", "disk full"))
        assert self.outcome(job) is ChangeOutcome.NOT_STORED
        assert versions(job) == (1, 1)
        assert job.core.coordinator.configuration.timeout_ms == 500
        assert job.machine.state is JobState.RUNNING


class TestReplacement:
    def test_another_strategy_continues_with_the_used_attempts(self):
        job = Job(FixedDelay(5, 0)).run()
        for _ in range(2):
            job.each(job_on.TaskFailed, CAUSE).again()
        assert job.step(job_on.RestartStrategyReplaced(FixedDelay(2, 0))) == []
        job.each(job_on.TaskFailed, CAUSE)
        assert job.one(core.StoreResult).ended.status is JobStatus.FAILED


class TestEnd:
    def test_a_change_is_not_reported_before_it_is_stored(self):
        job = Job().finish()
        assert core.StoreResult in job.kinds()
        assert not {job_out.JobEnded, out.ShutdownComplete} & set(job.kinds())
        job.step(core.ResultNotStored())
        assert job.one(core.StoreResult).attempt == 1
        job.step(core.ResultStored())
        assert [kind for kind in job.kinds() if kind in (job_out.JobEnded, out.ShutdownComplete)] == [
            job_out.JobEnded,
            out.ShutdownComplete,
        ]
        assert job.one(job_out.StatusChanged).status is JobStatus.FINISHED
        assert job.step(core.ResultStored()) == []

    def test_a_driver_that_lost_its_lease_takes_it_back(self):
        job = Job().finish()
        job.step(core.LeadershipLost())
        assert job.one(job_out.JobEnded).status is JobStatus.SUSPENDED
        assert out.ShutdownComplete in job.kinds()
        assert job.step(core.ResultStored()) == []
        assert job.step(core.LeadershipLost()) == []

    def test_suspended_at_once(self):
        job = Job().run()
        job.step(job_on.SuspendRequested())
        assert job.one(job_out.JobEnded).status is JobStatus.SUSPENDED
        assert out.ShutdownComplete in job.kinds()


# --- every state with every event

EXECUTION = ExecutionId("v", 0, 0)
INPUTS: tuple[Any, ...] = (
    *job_events(EXECUTION),
    *checkpoint_events([ExecutionId("v", index, 0) for index in range(2)], graph_of(1)),
    core.SavepointBeforeCancel(on.TriggerRequested("a", CheckpointProperties())),
    core.PatchRequested("p", CheckpointOverrides(timeout_ms=77)),
    core.RescaleRequested("r", {"v": ParallelismBounds(1, 1)}),
    configured(Job()),
    core.LeadershipLost(),
    core.AttemptRecorded(0),
    core.AttemptNotRecorded(0, CAUSE),
    core.OverridesStored("p", None),
    core.OverridesRefused("p", "m"),
    core.SlotsReserved("r", 1),
    core.SlotsNotReserved("r", "m"),
    core.PlanStored("r"),
    core.ChangeNotStored("p", "m"),
    core.ChangeUnknown("p", "m"),
    core.ResultStored(),
    core.ResultNotStored(),
)


INNER = (on.TasksLeftRunning, on.Shutdown)
"""What the machines say to each other; from outside it contradicts what one of them knows."""


STATES: dict[JobState, Any] = {
    JobState.INITIALIZING: Job,
    JobState.ACQUIRING: lambda: Job().acquire(),
    JobState.RESTORING: lambda: Job().restore(),
    JobState.DEPLOYING: lambda: Job().deploy(),
    JobState.RUNNING: lambda: Job().run(),
    JobState.STOPPING: lambda: Job().run().steps(job_on.StopRequested("stop")),
    JobState.ENDING: lambda: Job().run().steps(job_on.StopRequested("stop"), job_on.SavepointCompleted("stop", "sp")),
    JobState.CLEARING: lambda: Job().run().steps(job_on.JobFailed(CAUSE)),
    JobState.BACKING_OFF: lambda: Job().run().each(job_on.TaskFailed, CAUSE),
    JobState.FAILING: lambda: Job(NoRestart()).run().steps(job_on.JobFailed(CAUSE)),
    JobState.CANCELLING: lambda: Job().run().steps(job_on.CancelRequested()),
    JobState.FINISHED: lambda: Job().finish(),
    JobState.FAILED: lambda: Job(NoRestart()).run().each(job_on.TaskFailed, CAUSE),
    JobState.CANCELED: lambda: Job().run().steps(job_on.CancelRequested()).each(job_on.TaskCanceled),
    JobState.SUSPENDED: lambda: Job().run().steps(job_on.SuspendRequested()),
}


def test_the_tables_are_complete():
    assert {type(event) for event in INPUTS} == set(get_args(core.JobInput))
    assert set(STATES) == set(JobState)


@pytest.mark.parametrize("event", INPUTS, ids=lambda event: type(event).__name__)
def test_input_is_handled_or_refused_by_name_in_every_state(event: core.JobInput) -> None:
    """What leaves is an output; the end is announced once its result is stored."""
    for state, build in STATES.items():
        job = build()
        assert job.machine.state is state
        try:
            job.step(event)
        except (UnexpectedJobEventError, UnexpectedEventError):
            assert job.machine.state is state or isinstance(event, INNER), state
            continue
        assert set(job.kinds()) <= set(get_args(core.JobOutput)), state
        reported = [output for output in job.last if isinstance(output, job_out.JobEnded)]
        stored = isinstance(event, core.ResultStored) or job.machine.status is JobStatus.SUSPENDED
        assert not reported or stored or job.core.is_fenced, state
