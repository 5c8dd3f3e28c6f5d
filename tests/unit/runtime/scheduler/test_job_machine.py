"""The life of a job: deployment, failures, restarts, cancelling, stop with savepoint, every state with every event."""

from __future__ import annotations

import pytest

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.scheduler import job_effects as out
from ckpt_runtime.scheduler import job_events as on
from ckpt_runtime.scheduler.job_machine import JobMachine, UnexpectedJobEventError
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.restart_strategies import FixedDelay, NoRestart
from tests.support.driven import CAUSE, DrivenMachine, job_events

KEYS = (("v", 0), ("v", 1))


class Job(DrivenMachine):
    def __init__(self, strategy=None, **more):
        super().__init__(JobMachine(KEYS, strategy or FixedDelay(3, 100), **more))

    def each(self, kind, *arguments):
        return self.steps(*(kind(self.task(index), *arguments) for index in range(len(KEYS))))

    def deploy(self):
        """From ACQUIRING on."""
        return self.steps(on.SlotsAcquired(self.machine.attempt), on.StateRestored(self.machine.attempt))

    def run(self):
        if self.machine.state is JobState.INITIALIZING:
            self.step(on.Start())
        return self.deploy().each(on.TaskRunning)

    def stopping(self):
        return self.run().steps(on.StopRequested("stop"))

    def ending(self):
        return self.stopping().steps(on.SavepointCompleted("stop", "sp"))


def test_job_passes_all_states_from_start_to_finish():
    job = Job()
    assert job.machine.status is JobStatus.INITIALIZING
    assert job.step(on.Start()) == [out.StatusChanged(JobStatus.CREATED, 1_000_000), out.AcquireSlots(0)]
    assert job.step(on.SlotsAcquired(0)) == [out.RestoreState(0)]
    job.step(on.StateRestored(0))
    assert job.last == [out.StatusChanged(JobStatus.RUNNING, 1_000_000), out.Deploy((job.task(0), job.task(1)))]
    assert job.step(on.TaskRunning(job.task(0))) == []
    job.step(on.TaskRunning(job.task(1)))
    assert job.last == [out.AllTasksRunning((job.task(0), job.task(1)), frozenset())]
    assert job.step(on.TaskFinished(job.task(0))) == []
    job.step(on.TaskFinished(job.task(1)))
    assert job.kinds() == [out.StatusChanged, out.JobEnded]
    assert job.one(out.JobEnded).status is JobStatus.FINISHED


def test_a_task_that_finishes_while_others_deploy():
    job = Job()
    job.step(on.Start())
    job.deploy()
    job.steps(on.TaskFinished(job.task(0)), on.TaskRunning(job.task(1)))
    assert job.one(out.AllTasksRunning).finished == {job.task(0)}


class TestFailures:
    def test_restart_waits_for_the_tasks_and_for_its_time(self):
        job = Job().run()
        job.step(on.TaskFailed(job.task(0), CAUSE))
        assert job.kinds() == [out.StatusChanged, out.TasksLeaveRunning, out.CancelTasks]
        assert job.one(out.StatusChanged) == out.StatusChanged(JobStatus.RESTARTING, 1_000_000, CAUSE)
        assert job.one(out.CancelTasks).executions == (job.task(1),)
        job.step(on.TaskCanceled(job.task(1)), after_ms=30)
        assert job.last == [out.ScheduleRestart(1, 100)]
        assert job.step(on.RestartTimerFired(1), after_ms=60) == [out.ScheduleRestart(1, 100)]
        assert job.step(on.RestartTimerFired(0), after_ms=10) == []
        assert job.step(on.RestartTimerFired(1)) == [out.AcquireSlots(1)]
        job.run()
        assert job.machine.status is JobStatus.RUNNING
        assert job.task(0).attempt == 1

    def test_long_cancellation_needs_no_further_delay_and_failures_of_an_older_attempt_count_for_nothing(self):
        job = Job().run()
        job.step(on.TaskFailed(job.task(0), CAUSE))
        job.step(on.TaskFailed(job.task(1), CAUSE), after_ms=500)
        assert job.last == [out.AcquireSlots(1)]
        job = Job().run()
        assert job.step(on.TaskFailed(ExecutionId("v", 0, 7), CAUSE)) == []
        assert job.machine.state is JobState.RUNNING

    def test_failure_without_restart_strategy_or_recovery_ends_the_job(self):
        job = Job(NoRestart()).run()
        job.step(on.TaskFailed(job.task(0), CAUSE))
        assert job.machine.status is JobStatus.FAILING
        job.step(on.TaskCanceled(job.task(1)))
        assert job.one(out.JobEnded) == out.JobEnded(JobStatus.FAILED, 1_000_000, CAUSE)
        job = Job().run()
        job.steps(on.TaskFailed(job.task(0), CAUSE), on.JobFailed(CAUSE, recoverable=False))
        job.step(on.TaskCanceled(job.task(1)))
        assert job.one(out.JobEnded).status is JobStatus.FAILED

    def test_slots_that_do_not_come_restart_the_job_and_state_that_does_not_fit_ends_it(self):
        job = Job()
        job.steps(on.Start(), on.SlotsFailed(0, CAUSE))
        assert job.kinds() == [out.StatusChanged, out.ScheduleRestart]
        assert job.step(on.SlotsAcquired(0)) == []
        job = Job()
        job.steps(on.Start(), on.SlotsAcquired(0), on.StateRestoreFailed(0, CAUSE, recoverable=False))
        assert job.one(out.JobEnded).cause == CAUSE

    def test_task_canceled_without_a_request_and_failed_checkpoints_restart_the_job(self):
        job = Job().run()
        job.step(on.TaskCanceled(job.task(0)))
        assert job.machine.state is JobState.CLEARING
        job = Job().run()
        job.step(on.JobFailed(CAUSE))
        assert job.one(out.CancelTasks).executions == (job.task(0), job.task(1))

    def test_restarts_after_failed_checkpoints_pause_longer_with_every_strategy(self):
        job = Job(FixedDelay(100, 0))
        pauses = []
        for times in (1, 2, 3, 50, 1):
            job.run().step(on.JobFailed(CAUSE, failed_checkpoints=times))
            job.each(on.TaskCanceled)
            pauses.append(job.one(out.ScheduleRestart).at_rel_ms - job.now.rel_ms)
            job.step(on.RestartTimerFired(job.one(out.ScheduleRestart).generation), after_ms=pauses[-1])
        assert pauses == [1_000, 1_500, 2_250, 60_000, 1_000]

    def test_longer_pause_or_refusal_of_the_strategy_takes_precedence(self):
        job = Job(FixedDelay(1, 5_000)).run().steps(on.JobFailed(CAUSE, failed_checkpoints=1)).each(on.TaskCanceled)
        assert job.one(out.ScheduleRestart).at_rel_ms == 5_000
        job.step(on.RestartTimerFired(job.one(out.ScheduleRestart).generation), after_ms=5_000)
        job.run().step(on.JobFailed(CAUSE, failed_checkpoints=2))
        assert job.each(on.TaskCanceled).one(out.JobEnded).status is JobStatus.FAILED


class TestEnd:
    def test_cancel(self):
        job = Job().run()
        job.step(on.CancelRequested())
        assert job.kinds() == [out.StatusChanged, out.TasksLeaveRunning, out.CancelTasks]
        assert job.step(on.CancelRequested()) == []
        job.steps(on.TaskCanceled(job.task(0)), on.TaskFinished(job.task(1)))
        assert job.one(out.JobEnded).status is JobStatus.CANCELED
        assert job.step(on.CancelRequested()) == []

    def test_cancellation_ends_a_job_that_waits_for_its_restart_or_fails(self):
        job = Job().run().each(on.TaskFailed, CAUSE)
        assert job.machine.state is JobState.BACKING_OFF
        job.step(on.CancelRequested())
        assert out.CancelRestart in job.kinds()
        assert job.one(out.JobEnded).status is JobStatus.CANCELED
        job = Job(NoRestart()).run()
        job.step(on.TaskFailed(job.task(0), CAUSE))
        assert job.step(on.CancelRequested()) == [out.StatusChanged(JobStatus.CANCELLING, 1_000_000)]
        job.step(on.TaskCanceled(job.task(1)))
        assert job.one(out.JobEnded).status is JobStatus.CANCELED

    def test_suspend(self):
        job = Job().run()
        job.step(on.SuspendRequested())
        assert job.kinds() == [out.TasksLeaveRunning, out.CancelTasks, out.StatusChanged, out.JobEnded]
        assert job.machine.status.is_terminal
        assert not job.machine.status.is_globally_terminal

    def test_attempts_continue_where_an_earlier_driver_stopped(self):
        job = Job(first_attempt=5)
        assert job.step(on.Start())[-1] == out.AcquireSlots(5)


@pytest.mark.row("147.5")
class TestStopWithSavepoint:
    def test_savepoint_completes_before_or_after_the_tasks_finish(self):
        job = Job().stopping()
        assert job.kinds() == [out.StopPeriodicTrigger, out.TriggerSavepoint]
        assert job.step(on.SavepointCompleted("stop", "sp")) == []
        job.each(on.TaskFinished)
        assert job.one(out.StopCompleted) == out.StopCompleted("stop", "sp")
        assert job.one(out.JobEnded).savepoint == "sp"
        job = Job().stopping().each(on.TaskFinished)
        assert job.machine.state is JobState.STOPPING
        job.step(on.SavepointCompleted("stop", "sp"))
        assert job.one(out.JobEnded).status is JobStatus.FINISHED

    def test_a_savepoint_that_never_reached_a_task_changes_nothing(self):
        job = Job().stopping()
        job.step(on.SavepointFailed("stop", "no directory"))
        assert job.last == [out.StopFailed("stop", "no directory"), out.StartPeriodicTrigger()]
        assert job.machine.state is JobState.RUNNING

    def test_stop_that_fails_after_it_reached_tasks_restarts_the_job_with_any_strategy(self):
        job = Job(NoRestart()).stopping()
        job.step(on.SavepointFailed("stop", "expired", reached_tasks=True))
        assert job.kinds() == [out.StopFailed, out.StatusChanged, out.TasksLeaveRunning, out.CancelTasks]
        job.each(on.TaskCanceled)
        assert job.last == [out.AcquireSlots(1)]

    def test_task_failure_during_and_after_the_savepoint_fails_the_job_for_good(self):
        job = Job().ending()
        job.steps(on.TaskFailed(job.task(0), CAUSE), on.TaskCanceled(job.task(1)))
        assert job.one(out.JobEnded).status is JobStatus.FAILED
        assert job.one(out.JobEnded).savepoint == "sp"
        assert "sp" in job.one(out.StopFailed).message
        assert job.one(out.StopFailed).location == "sp"
        job = Job().stopping()
        job.steps(on.TaskFailed(job.task(0), CAUSE), on.TaskCanceled(job.task(1)))
        job.step(on.SavepointCompleted("stop", "sp"))
        assert job.one(out.JobEnded).status is JobStatus.FAILED
        assert "sp" in job.one(out.JobEnded).cause.message

    def test_a_restart_waits_for_the_fate_of_the_savepoint(self):
        job = Job().stopping()
        job.step(on.TaskFailed(job.task(0), CAUSE))
        assert job.step(on.TaskCanceled(job.task(1))) == []
        assert job.machine.state is JobState.CLEARING
        job.step(on.SavepointFailed("stop", "suspended"))
        assert job.kinds() == [out.StopFailed, out.ScheduleRestart]

    def test_stop_of_a_job_that_does_not_run_or_stops_is_refused(self):
        for job, why in (
            (Job(), "The job is not running."),
            (Job().run().each(on.TaskFinished), "The job is FINISHED."),
            (Job().stopping(), "Another stop is in progress."),
        ):
            state = job.machine.state
            assert job.step(on.StopRequested("second")) == [out.StopFailed("second", why)]
            assert job.machine.state is state

    def test_cancel_wins(self):
        job = Job().stopping()
        job.step(on.CancelRequested())
        job.each(on.TaskCanceled)
        assert job.one(out.StopFailed).request_id == "stop"
        assert job.one(out.JobEnded).status is JobStatus.CANCELED
        assert job.step(on.SavepointCompleted("stop", "sp")) == []

    def test_a_bounded_job_that_ends_before_its_savepoint(self):
        job = Job().stopping().each(on.TaskFinished)
        job.step(on.SavepointFailed("stop", "ended", reached_tasks=True))
        assert job.kinds() == [out.StopFailed, out.StatusChanged, out.JobEnded]
        assert job.machine.status is JobStatus.FINISHED


class TestRedeploy:
    NEW = (("v", 0), ("v", 1), ("v", 2))

    def test_running(self):
        job = Job(NoRestart()).run()
        job.step(on.RedeployRequested(self.NEW))
        job.each(on.TaskCanceled)
        assert job.last == [out.AcquireSlots(1)]
        job.deploy()
        assert len(job.one(out.Deploy).executions) == 3

    def test_redeployment_before_the_tasks_run_takes_effect_with_the_slots(self):
        job = Job()
        assert job.step(on.RedeployRequested(self.NEW)) == []
        job.steps(on.Start(), on.SlotsAcquired(0))
        assert job.step(on.RedeployRequested(KEYS))[-1] == out.AcquireSlots(1)
        assert job.step(on.StateRestored(0)) == []
        job = Job()
        job.step(on.Start())
        assert job.step(on.RedeployRequested(self.NEW)) == [out.AcquireSlots(1)]
        assert job.step(on.SlotsAcquired(0)) == []

    def test_stop_takes_precedence_over_another_deployment(self):
        job = Job().stopping()
        assert job.step(on.RedeployRequested(self.NEW)) == []


@pytest.mark.row("530.6")
class TestRestartStrategy:
    def test_new_strategy_counts_from_the_next_failure(self):
        job = Job(NoRestart()).run()
        assert job.step(on.RestartStrategyReplaced(FixedDelay(1, 100))) == []
        job.each(on.TaskFailed, CAUSE)
        assert job.machine.state is JobState.BACKING_OFF
        job = Job(FixedDelay(3, 100)).run().each(on.TaskFailed, CAUSE)
        assert job.step(on.RestartStrategyReplaced(NoRestart())) == []
        assert job.step(on.RestartTimerFired(1), after_ms=100) == [out.AcquireSlots(1)]


EVENTS = job_events(ExecutionId("v", 0, 0))
STATES = {
    JobState.INITIALIZING: Job,
    JobState.ACQUIRING: lambda: Job().steps(on.Start()),
    JobState.RESTORING: lambda: Job().steps(on.Start(), on.SlotsAcquired(0)),
    JobState.DEPLOYING: lambda: Job().steps(on.Start(), on.SlotsAcquired(0), on.StateRestored(0)),
    JobState.RUNNING: lambda: Job().run(),
    JobState.STOPPING: lambda: Job().stopping(),
    JobState.ENDING: lambda: Job().ending(),
    JobState.CLEARING: lambda: Job().run().steps(on.JobFailed(CAUSE)),
    JobState.BACKING_OFF: lambda: Job().run().each(on.TaskFailed, CAUSE),
    JobState.FAILING: lambda: Job(NoRestart()).run().steps(on.JobFailed(CAUSE)),
    JobState.CANCELLING: lambda: Job().run().steps(on.CancelRequested()),
    JobState.FINISHED: lambda: Job().run().each(on.TaskFinished),
    JobState.FAILED: lambda: Job(NoRestart()).run().each(on.TaskFailed, CAUSE),
    JobState.CANCELED: lambda: Job().run().steps(on.CancelRequested()).each(on.TaskCanceled),
    JobState.SUSPENDED: lambda: Job().run().steps(on.SuspendRequested()),
}


def test_tables_have_every_event_and_state_and_other_events_are_refused():
    assert {type(event) for event in EVENTS} == set(on.JobEvent.__args__)
    assert set(STATES) == set(JobState)
    with pytest.raises(UnexpectedJobEventError):
        Job().step("hello")


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_changes_states_as_the_table_says_or_is_refused(event):
    for state, build in STATES.items():
        job = build()
        assert job.machine.state is state
        status = job.machine.status
        try:
            job.step(event)
        except UnexpectedJobEventError:
            assert job.machine.state is state
            continue
        changes = [effect.status for effect in job.last if isinstance(effect, out.StatusChanged)]
        assert job.machine.status is (changes[-1] if changes else status), state
        if state.is_terminal:
            assert job.machine.state is state
        ended = [effect for effect in job.last if isinstance(effect, out.JobEnded)]
        assert bool(ended) is (job.machine.state.is_terminal and not state.is_terminal), state
