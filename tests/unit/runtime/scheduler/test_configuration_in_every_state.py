"""Another configuration (FLIP-530) in each state of a job, as docs/rest.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import SubtaskState
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import ChangeAnswered, ChangeOutcome
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.restart_strategies import FixedDelay
from tests.support.driven import CAUSE
from tests.unit.runtime.scheduler.test_job_core import Job, configured, versions

pytestmark = pytest.mark.row("530.10")

DELAY_MS = 100


def new() -> Job:
    """It may restart for one failure."""
    return Job(FixedDelay(1, DELAY_MS))


def failing_task(job: Job) -> Job:
    """The other one has not ended yet."""
    return job.steps(job_on.TaskFailed(job.task(0), CAUSE))


def backing_off() -> Job:
    return new().run().each(job_on.TaskFailed, CAUSE)


def ending() -> Job:
    """Stopped with a savepoint that is complete."""
    job = new().run().steps(job_on.StopRequested("stop", False, "dir"))
    number = job.one(out.InitializeLocation).checkpoint_id
    job.step(on.LocationReady(number, "sp"))
    for index in range(2):
        job.step(on.Acknowledged(number, job.task(index), "sp", SubtaskState()))
    job.step(on.MetadataWritten(number))
    return job.steps(on.StoreAdded(number))


TAKES: dict[JobState, Callable[[], Job]] = {
    JobState.INITIALIZING: new,
    JobState.ACQUIRING: lambda: new().acquire(),
    JobState.RESTORING: lambda: new().restore(),
    JobState.DEPLOYING: lambda: new().deploy(),
    JobState.RUNNING: lambda: new().run(),
    JobState.CLEARING: lambda: failing_task(new().run()),
    JobState.BACKING_OFF: backing_off,
}
REFUSES: dict[JobState, Callable[[], Job]] = {
    JobState.STOPPING: lambda: new().run().steps(job_on.StopRequested("stop", False, "dir")),
    JobState.CANCELLING: lambda: new().run().steps(job_on.CancelRequested()),
    JobState.FAILING: lambda: failing_task(Job(FixedDelay(0, 0)).run()),
    JobState.ENDING: ending,
}


def to_running(job: Job) -> int:
    """What the world around answers, until all tasks run; returns how often slots were asked for."""
    asked = 0
    while job.machine.state is not JobState.RUNNING:
        match job.machine.state:
            case JobState.INITIALIZING:
                job.step(job_on.Start())
            case JobState.ACQUIRING:
                asked += 1
                job.step(job_on.SlotsAcquired(job.machine.attempt))
            case JobState.RESTORING:
                job.step(core.AttemptRecorded(job.machine.attempt))
            case JobState.DEPLOYING:
                job.each(job_on.TaskRunning)
            case JobState.CLEARING:
                job.each(job_on.TaskCanceled)
            case JobState.BACKING_OFF:
                job.step(job_on.RestartTimerFired(1), DELAY_MS)
    return asked


@pytest.mark.parametrize("state", TAKES)
def test_stored_configuration_is_used_by_the_next_deployment(state: JobState) -> None:
    """One deployment, whatever was under way. The one restart of failures is there still, or was used up before."""
    job = TAKES[state]()
    assert job.machine.state is state
    request = configured(job, timeout_ms=900)
    job.step(request)
    assert versions(job) == (1, 1)
    job.step(core.PlanStored("c2"))
    assert job.one(ChangeAnswered).outcome is ChangeOutcome.APPLIED
    assert versions(job)[0] == 2
    assert job.core.coordinator.configuration.timeout_ms == 900
    assert to_running(job) == 1
    assert versions(job) == (2, 2)
    job.each(job_on.TaskFailed, CAUSE)
    used_up = state in (JobState.CLEARING, JobState.BACKING_OFF)
    assert job.machine.state is (JobState.FAILED if used_up else JobState.BACKING_OFF)


def test_a_planned_restart_comes_at_its_time() -> None:
    job = backing_off()
    planned = job.one(job_out.ScheduleRestart)
    job.step(configured(job), 40)
    assert job.step(core.PlanStored("c2"))[-1:] == [job.one(ChangeAnswered)]
    assert not [output for output in job.last if isinstance(output, job_out.ScheduleRestart | job_out.CancelRestart)]
    job.step(job_on.RestartTimerFired(planned.generation), DELAY_MS - 40)
    assert job.machine.state is JobState.ACQUIRING


@pytest.mark.parametrize("state", [JobState.ACQUIRING, JobState.RESTORING])
def test_a_preparation_begins_again(state: JobState) -> None:
    """What was asked for the old plan and comes late is of no use."""
    job = TAKES[state]()
    before = job.machine.attempt
    job.step(configured(job))
    job.step(core.PlanStored("c2"))
    assert job.one(job_out.AcquireSlots).attempt == before + 1
    assert job.step(job_on.SlotsAcquired(before)) == []


@pytest.mark.parametrize("state", REFUSES)
def test_configuration_of_an_ending_job_cannot_change(state: JobState) -> None:
    job = REFUSES[state]()
    assert job.machine.state is state
    assert job.step(configured(job, timeout_ms=900)) == [job.one(ChangeAnswered)]
    assert job.one(ChangeAnswered).outcome is ChangeOutcome.NOT_NOW
    assert state.value in job.one(ChangeAnswered).message
    assert versions(job) == (1, 1)


def test_change_that_races_with_the_end_is_answered_with_the_end() -> None:
    job = new().finish()
    assert job.machine.state is JobState.FINISHED
    assert job.step(configured(job, timeout_ms=900)) == []
    job.step(core.ResultStored())
    assert job.one(ChangeAnswered).outcome is ChangeOutcome.JOB_ENDED
    assert versions(job) == (1, 1)


def test_table_of_states_covers_every_state() -> None:
    ended = {state for state in JobState if state.is_terminal}
    assert set(TAKES) | set(REFUSES) | ended == set(JobState)


def with_rates(job: Job, rates: str | None) -> core.ConfigurationRequested:
    """A request that sets the rates of sources, and needs no restart."""
    request = configured(job, restarts=False)
    given = {} if rates is None else {"pipeline.source.rates": rates}
    graph = replace(request.plan.graph, configuration=given)
    return replace(request, plan=replace(request.plan, graph=graph, configuration=Configuration(given)))


def limits(job: Job) -> list[dict[str, str]]:
    return [dict(output.rates) for output in job.last if isinstance(output, core.LimitSources)]


@pytest.mark.row("ends.4")
def test_running_sources_get_new_rates_and_so_does_each_later_deployment() -> None:
    job = new().run()
    job.step(with_rates(job, "orders:5"))
    assert limits(job) == []  # before it is stored
    job.step(core.PlanStored("c2"))
    assert limits(job) == [{"orders": "5"}]
    assert versions(job) == (2, 2)
    job.step(with_rates(job, "orders:0"))
    job.step(core.PlanStored("c3"))
    assert limits(job) == [{"orders": "0"}]
    job.each(job_on.TaskFailed, CAUSE)
    to_running(job)
    assert job.core.graph.configuration == {"pipeline.source.rates": "orders:0"}
    job.step(with_rates(job, None))
    job.step(core.PlanStored("c4"))
    assert limits(job) == [{}]


@pytest.mark.row("ends.4")
def test_rates_changed_during_a_restore_are_sent_to_the_tasks_after_their_deployment() -> None:
    job = new().acquire()
    job.step(job_on.SlotsAcquired(job.machine.attempt))
    assert job.machine.state is JobState.RESTORING
    job.step(with_rates(job, "orders:0"))
    job.steps(core.PlanStored("c2"), core.AttemptRecorded(job.machine.attempt))
    deployed, limited = [o for o in job.last if isinstance(o, core.DeployTasks | core.LimitSources)]
    assert isinstance(deployed, core.DeployTasks)
    assert limited == core.LimitSources({"orders": "0"})
