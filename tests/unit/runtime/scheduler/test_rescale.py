"""A job at another parallelism: slots, checkpoint, stored, deployed; and every way in which that ends early."""

from __future__ import annotations

import json

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import SubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator, CoordinatorState
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import ChangeOutcome
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.durable_change import MAX_ATTEMPTS
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import ParallelismBounds, declared_bounds, rescaled, subtasks_of, with_bounds_of
from ckpt_runtime.scheduler.restart_strategies import FixedDelay
from tests.support.driven import CAUSE, DrivenJob

pytestmark = pytest.mark.row("203.14")

GRAPH = JobGraph("job", (JobVertex("v", (OperatorNode("v", "Source", "source"),), 2),), ())


class Job(DrivenJob):
    """A running job of two subtasks that takes checkpoints on request only."""

    def __init__(self) -> None:
        settings = CheckpointConfiguration(timeout_ms=500, tolerable_failed_checkpoints=9)
        machine, coordinator = (
            JobMachine(subtasks_of(GRAPH), FixedDelay(3, 100)),
            CheckpointCoordinator("job", GRAPH, settings),
        )
        super().__init__(JobCore(JobPlan(GRAPH, Configuration({}), settings), machine, coordinator))
        self.run()

    def ask(self, lower: int, upper: int | None = None, name: str = "r") -> Job:
        bounds = {"v": ParallelismBounds(lower, lower if upper is None else upper)}
        return self.steps(core.RescaleRequested(name, bounds))

    def begin_checkpoint(self) -> int:
        located = self.one(out.InitializeLocation)
        self.steps(on.LocationReady(located.checkpoint_id, f"chk-{located.checkpoint_id}"))
        return located.checkpoint_id

    def complete_checkpoint(self) -> Job:
        number = self.begin_checkpoint()
        for execution in self.machine.tasks.alive:
            self.steps(on.Acknowledged(number, execution, f"chk-{number}", SubtaskState()))
        return self.steps(on.MetadataWritten(number), on.StoreAdded(number))

    def to_storing(self, parallelism: int = 4) -> Job:
        return self.ask(parallelism).steps(core.SlotsReserved("r", parallelism)).complete_checkpoint()

    @property
    def answer(self) -> core.ChangeAnswered:
        return self.one(core.ChangeAnswered)

    @property
    def parallelism(self) -> tuple[int, int]:
        """In force, and wanted."""
        return self.core.graph.slots, self.core.target_graph.slots

    @property
    def bounds(self) -> tuple[int, int]:
        """As declared."""
        (found,) = declared_bounds(self.core.target_graph).values()
        return found.lower, found.upper


def test_slots_first_then_a_checkpoint_then_stored_then_deployed() -> None:
    job = Job().ask(4)
    assert job.last == [core.ReserveSlots("r", 4, 4)]
    job.steps(core.SlotsReserved("r", 4))
    assert out.InitializeLocation in job.kinds()
    job.complete_checkpoint()
    order = job.one(core.StorePlan)
    assert (order.graph.slots, order.attempt) == (4, 0)
    assert (job.machine.state, job.parallelism) == (JobState.RUNNING, (2, 4))
    job.steps(core.PlanStored("r"))
    assert job.answer.outcome is ChangeOutcome.APPLIED
    assert job_out.CancelTasks in job.kinds()
    assert core.ReleaseReserve not in job.kinds()
    job.each(job_on.TaskCanceled)
    assert job.last[-1] == job_out.AcquireSlots(1)
    assert job.parallelism == (4, 4)
    job.steps(job_on.SlotsAcquired(1), core.AttemptRecorded(1))
    deploy = job.one(core.DeployTasks)
    assert len(deploy.executions) == 4
    assert deploy.restored is not None
    assert deploy.restored.checkpoint_id == 1
    job.each(job_on.TaskRunning)
    assert job.core.coordinator.state is CoordinatorState.RUNNING


def test_rescale_to_the_present_parallelism_is_answered_at_once() -> None:
    job = Job().ask(2)
    assert job.last == [core.ChangeAnswered("r", ChangeOutcome.APPLIED)]


def test_fewer_slots_than_wanted_within_the_bounds() -> None:
    job = Job().ask(1, 8)
    assert job.last == [core.ReserveSlots("r", 8, 1)]
    job.steps(core.SlotsReserved("r", 3)).complete_checkpoint()
    job.steps(core.PlanStored("r")).each(job_on.TaskCanceled).again()
    assert job.parallelism == (3, 3)


def test_rescale_that_gets_no_more_slots_than_the_job_has_does_not_restart_it() -> None:
    job = Job().ask(1, 8).steps(core.SlotsReserved("r", 2))
    assert job.kinds() == [core.ReleaseReserve, core.StorePlan]
    job.steps(core.PlanStored("r"))
    assert job.last == [core.ChangeAnswered("r", ChangeOutcome.APPLIED)]
    assert job.machine.state is JobState.RUNNING
    assert job.bounds == (1, 8)
    job.ask(1, 8, "again").steps(core.SlotsReserved("again", 2))
    assert job.last == [core.ReleaseReserve(), core.ChangeAnswered("again", ChangeOutcome.APPLIED)]


def test_bounds_that_change_no_parallelism_are_stored_without_a_restart() -> None:
    job = Job()
    assert job.bounds == (2, 2)
    job.ask(1, 2)
    (order,) = job.last
    assert isinstance(order, core.StorePlan)
    assert order.graph.vertices == GRAPH.vertices
    job.steps(core.PlanStored("r"))
    assert job.last == [core.ChangeAnswered("r", ChangeOutcome.APPLIED)]
    assert (job.machine.state, job.machine.attempt, job.bounds) == (JobState.RUNNING, 0, (1, 2))
    restored = JobGraph.from_json(json.loads(json.dumps(order.graph.to_json())))
    assert declared_bounds(restored) == {"v": ParallelismBounds(1, 2)}
    assert order.graph.fingerprint == GRAPH.fingerprint


def test_a_plan_that_is_made_again_keeps_what_was_declared() -> None:
    bounds = {"v": ParallelismBounds(1, 8)}
    present = rescaled(GRAPH, bounds, 3)
    again = with_bounds_of(GRAPH.with_parallelism({"v": 3}), present)
    assert (declared_bounds(again), again.vertices) == (bounds, present.vertices)
    assert with_bounds_of(GRAPH, GRAPH) is GRAPH


def test_bounds_that_could_not_be_stored_are_not_declared() -> None:
    job = Job().ask(1, 2).steps(core.ChangeNotStored("r", "another one is stored", final=True))
    assert job.answer.outcome is ChangeOutcome.NOT_STORED
    assert (job.bounds, job.machine.state) == ((2, 2), JobState.RUNNING)
    assert job.parallelism == (2, 2)


class TestRefused:
    @pytest.mark.parametrize(
        ("before", "parallelism", "outcome", "message"),
        [
            ([], 200, ChangeOutcome.REFUSED, "exceeds its maximum parallelism 128"),
            ([job_on.StopRequested("stop")], 4, ChangeOutcome.NOT_NOW, "stopping"),
            ([core.LeadershipLost()], 4, ChangeOutcome.NOT_STORED, ""),
        ],
    )
    def test_rescale_that_is_not_possible_is_refused(self, before, parallelism, outcome, message) -> None:
        answer = Job().steps(*before).ask(parallelism).answer
        assert answer.outcome is outcome
        assert message in answer.message

    def test_rescale_during_another_rescale_is_refused(self) -> None:
        job = Job().ask(4).ask(3, name="other")
        assert job.last == [core.ChangeAnswered("other", ChangeOutcome.BUSY)]
        job.steps(core.SlotsReserved("other", 3))
        assert job.last == []


class TestTheJobGoesOnAsItWas:
    """The answer and the exception history say why, and no slot stays."""

    def assert_given_up(self, job: Job, why: str, state: JobState = JobState.RUNNING) -> None:
        assert job.machine.state is state
        assert job.answer.outcome is ChangeOutcome.NOT_STORED
        assert job.answer.message == f"The job keeps its parallelism: {why}"
        assert core.ReleaseReserve() in job.last
        recorded = job.one(core.RecordFailure)
        assert (recorded.cause.exception, recorded.cause.message) == ("RescaleException", job.answer.message)
        assert job.parallelism == (2, 2)
        job.ask(3, name="next")
        if state is JobState.RUNNING:
            assert job.kinds() == [core.ReserveSlots]

    def test_slots_that_do_not_come_or_are_lost_and_a_plan_that_is_not_stored_leave_the_job_as_it_was(self) -> None:
        self.assert_given_up(Job().ask(4).steps(core.SlotsNotReserved("r", "none is free")), "none is free")
        reserved = Job().ask(4).steps(core.SlotsReserved("r", 4))
        self.assert_given_up(reserved.steps(core.SlotsNotReserved("r", "lost")), "lost")
        self.assert_given_up(Job().to_storing().steps(core.ChangeNotStored("r", "disk full")), "disk full")

    def test_the_checkpoint_fails(self) -> None:
        job = Job().ask(4).steps(core.SlotsReserved("r", 4), on.LocationFailed(1, "no directory"))
        assert "its checkpoint failed" in job.answer.message
        assert core.ReleaseReserve() in job.last
        assert job.machine.state is JobState.RUNNING

    def test_the_job_fails(self) -> None:
        job = Job().ask(4)
        job.steps(job_on.TaskFailed(ExecutionId("v", 0, 0), CAUSE))
        assert [output.cause.exception for output in job.last if isinstance(output, core.RecordFailure)] == [
            "ValueError",
            "RescaleException",
        ]
        assert job.answer.outcome is ChangeOutcome.NOT_STORED

    def test_failure_stop_and_cancellation_take_precedence(self) -> None:
        failed = Job().ask(4).steps(core.SlotsReserved("r", 4))
        failed.begin_checkpoint()
        failed.steps(job_on.TaskFailed(ExecutionId("v", 0, 0), CAUSE))
        stopped = Job().ask(4).steps(job_on.StopRequested("stop"))
        assert out.InitializeLocation in stopped.kinds()
        canceled = Job().ask(4).steps(job_on.CancelRequested())
        for job, why in ((failed, "clearing"), (stopped, "stopping"), (canceled, "cancelling")):
            assert job.answer.message == f"The job keeps its parallelism: it is {why}"


class TestWhileItIsStored:
    def test_a_failure_restarts_the_job_as_it_was_and_then_it_is_rescaled(self) -> None:
        job = Job().to_storing().steps(job_on.JobFailed(CAUSE)).each(job_on.TaskCanceled)
        assert core.ReleaseReserve not in job.kinds()
        job.steps(core.PlanStored("r"))
        assert job.answer.outcome is ChangeOutcome.APPLIED
        assert job.machine.state is JobState.BACKING_OFF
        job.step(job_on.RestartTimerFired(1), after_ms=200)
        job.again()
        assert job.parallelism == (4, 4)

    def test_a_stop_that_fails_leaves_the_job_rescaled(self) -> None:
        job = Job().to_storing().steps(job_on.StopRequested("stop"))
        number = next(output.checkpoint_id for output in job.last if isinstance(output, out.InitializeLocation))
        job.steps(core.PlanStored("r"))
        assert job.machine.state is JobState.STOPPING
        job.steps(on.LocationFailed(number, "no directory"))
        assert job_out.StopFailed in job.kinds()
        assert job.machine.state is JobState.CLEARING
        job.each(job_on.TaskCanceled).again()
        assert job.parallelism == (4, 4)

    def test_an_unknown_outcome_is_settled_and_then_in_force(self) -> None:
        job = Job().to_storing()
        for attempt in range(1, MAX_ATTEMPTS):
            job.steps(core.ChangeUnknown("r", "?"))
            assert [type(output) for output in job.last] == [core.StorePlan]
            assert job.last[0].attempt == attempt
        job.steps(core.ChangeNotStored("r", "!"))
        assert job.answer.outcome is ChangeOutcome.UNKNOWN
        assert core.SettlePlan in job.kinds()
        assert job.ask(3, name="other").answer.outcome is ChangeOutcome.BUSY
        job.steps(core.ChangeUnknown("r", "?"))
        assert [type(output) for output in job.last] == [core.SettlePlan]
        job.steps(core.PlanStored("r"))
        assert job.machine.state is JobState.CLEARING
        assert core.ChangeAnswered not in job.kinds()

    def test_an_unknown_outcome_that_is_settled_as_not_stored_leaves_the_job_as_it_was(self) -> None:
        job = Job().to_storing()
        for _ in range(MAX_ATTEMPTS):
            job.steps(core.ChangeUnknown("r", "?"))
        job.steps(core.ChangeNotStored("r", "away"))
        assert [type(output) for output in job.last] == [core.SettlePlan]
        job.steps(core.ChangeNotStored("r", "it was not stored", final=True))
        assert job.kinds() == [core.RecordFailure, core.ReleaseReserve]
        assert job.parallelism == (2, 2)
        assert job.ask(2, name="next").answer.outcome is ChangeOutcome.APPLIED

    def test_ended_job_and_job_of_another_driver_are_not_rescaled(self) -> None:
        job = Job().to_storing().steps(core.ChangeUnknown("r", "?"), core.ChangeNotStored("r", "!", final=True))
        assert job.answer.outcome is ChangeOutcome.NOT_STORED
        job = Job().to_storing().steps(core.LeadershipLost())
        assert job.answer.outcome is ChangeOutcome.UNKNOWN
        assert job.steps(core.PlanStored("r")).last == []
        assert job.parallelism == (2, 2)

    def test_the_end_of_the_job_is_reported_once_it_is_stored(self) -> None:
        job = Job().to_storing().each(job_on.TaskFinished)
        job.steps(core.PlanStored("r"))
        assert core.ChangeAnswered not in job.kinds()
        job.steps(core.ResultStored())
        assert job.answer.outcome is ChangeOutcome.JOB_ENDED


def test_a_job_that_does_not_run_is_rescaled_without_slots_or_checkpoint() -> None:
    job = Job().each(job_on.TaskFailed, CAUSE)
    assert job.machine.state is JobState.BACKING_OFF
    job.ask(1)
    assert job.kinds() == [core.StorePlan]
    job.steps(core.PlanStored("r"))
    assert job.answer.outcome is ChangeOutcome.APPLIED
    job.step(job_on.RestartTimerFired(1), after_ms=200)
    job.again()
    assert job.parallelism == (1, 1)
