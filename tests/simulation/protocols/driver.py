"""A simulated driver process: the real shell of a job, its core, storage effects and task gateway, observed.

Everything in memory is lost when it dies. High availability is ``record``'s, files are ``files``', time, pools and
slots are ``host``'s. Each event and each output is shown to the checkers before it is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter, CheckpointIdUnavailableError
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.graph.schema import checked
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry
from ckpt_runtime.jobmaster.submission import JobHistory
from ckpt_runtime.network.control_messages import AcknowledgeCheckpoint, DeclineCheckpoint, DeploymentMessage
from ckpt_runtime.scheduler import core_events as core_out
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import JobInput, JobOutput, LeadershipLost
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.restart_strategies import BackoffSettings
from tests.simulation.protocols.driver_checker import DriverChecker
from tests.simulation.protocols.event_loop import DriverCrash, SimulatedProcess
from tests.simulation.protocols.files import JOB, SAVEPOINTS
from tests.simulation.protocols.host import DriverHost, Peer
from tests.simulation.protocols.leases import LeaseHolder
from tests.simulation.protocols.plan_endpoint import PlanEndpoint
from tests.simulation.protocols.plan_model import ObservedStrategy, PlanModel
from tests.simulation.protocols.record import HaRecord
from tests.simulation.protocols.scenario import STRATEGIES
from tests.simulation.protocols.tasks import Deployment
from tests.simulation.simulated_driver import StrictShell, deliver, lose_worker, shell_of, submission_of

if TYPE_CHECKING:
    from tests.simulation.protocols.world import World

_RENEW_MS = 80
BACKOFF = BackoffSettings(15, 40, 2.0)


class _Ids(CheckpointIdCounter):
    """Sometimes there is no next id."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver.world.ha.counter)
        self._driver = driver

    def next_id(self) -> int:
        if self._driver.world.choices.fault("no checkpoint id", 0.004):
            self._driver.checker.no_id()
            raise CheckpointIdUnavailableError("simulated")
        return super().next_id()


class ObservedShell(StrictShell):
    """``driver`` is set before the first event."""

    driver: Driver

    def tell(self, event: JobInput) -> None:
        with self.driver.world.runs(self.driver, in_pool=False):
            super().tell(event)
        self.driver.world.check_broken()
        if self.core.is_fenced and self.driver.process.alive:
            self.driver.die()

    def _take(self, event: JobInput) -> None:
        driver = self.driver
        if driver.world.tracing and type(event).__module__ == core_out.__name__:
            driver.world.note(driver, event)
        driver.hears(event)
        super()._take(event)
        driver.changes.heard()
        driver.plan.check()
        driver.changes.check()

    def _execute(self, output: JobOutput) -> None:
        driver = self.driver
        if driver.world.tracing and type(output).__module__ == core_out.__name__:
            driver.world.note(driver, output)
        observe = _OBSERVES.get(type(output))
        if observe is not None:
            observe(driver, output)
        super()._execute(output)
        if type(output) is out.ShutdownComplete:
            driver.has_shut_down()


class Driver:
    """One process that leads in ``epoch`` until another one leads."""

    def __init__(self, world: World, epoch: int, lease: LeaseHolder | None = None) -> None:
        """``lease`` None: it leads until it ends and another one is started."""
        self.world = world
        self.epoch = epoch
        self.lease = lease
        self.origin = world.choices.delay("the origin of a clock", 0, 1 << 30)
        self.skew = world.choices.delay("the skew of a clock", 0, 240_000) - 120_000
        self.process = SimulatedProcess(f"driver {epoch}")
        self.deployment: Deployment | None = None
        self.order: core_out.DeployTasks
        self.ended: job_out.JobEnded | None = None
        self.ends_as = ""
        self.shut_down = False
        self.knows_leftovers = False
        self.backlog = False
        self.storing = ""
        """The request whose overrides are being stored."""
        self.tries_again = False
        """Whether something of the plan is stored for the second time; storage is still bad then."""
        self.failures: list[int] = []
        self.changes: PlanEndpoint = PlanEndpoint(self)
        overrides = CheckpointOverrides.from_document(self._stored_overrides())
        own = world.options.read(world.ha.document)
        meaning = world.options.meaning(own.given)
        mode = world.scenario.restored or RecoveryClaimMode.NO_CLAIM
        effective = world.options.effective(own.given)
        plan = JobPlan(world.ha.graph, effective, meaning.settings, world.origin, mode, own=own)
        self.plan = PlanModel(self, plan)
        self.checker = DriverChecker(self)
        self.ids = _Ids(self)
        history = self._history(self._recovered())
        submission = submission_of(JOB, plan, history, claims=world.claims, record=HaRecord(self), submitted_at_ms=0)
        strategy = self.plan.strategy = ObservedStrategy(STRATEGIES[meaning.strategy], self.plan)
        self.shell = shell_of(
            ObservedShell,
            self,
            submission,
            plan,
            overrides,
            DriverHost(self),
            ids=self.ids,
            listener=self.checker,
            first_delay_ms=world.choices.delay("first delay", 0, 200),
            strategy=strategy,
            backoff=BACKOFF,
        )
        self.shell.driver = self
        self.core = self.shell.core
        self.machine, self.coordinator = self.core.machine, self.core.coordinator

    def _stored_overrides(self) -> str | None:
        return self.world.ha.overrides

    def _recovered(self) -> list[Any]:
        return list(self.world.ha.pointers.values())

    def _history(self, recovered: list[Any]) -> JobHistory:
        """What is recorded, as ``job_recovery.py`` reads it."""
        ha = self.world.ha
        return JobHistory(
            checkpoints=tuple(recovered),
            next_checkpoint_id=max([ha.counter, *(entry.checkpoint.id + 1 for entry in recovered)]),
            next_attempt=ha.attempts,
            disposals=dict(ha.disposals),
            savepoints=dict(ha.savepoints),
            failures=self._earlier_failures(),
        )

    def _earlier_failures(self) -> tuple[ExceptionEntry, ...]:
        return checked(self.world.ha.failures, tuple[ExceptionEntry, ...])

    @property
    def leads(self) -> bool:
        """Whether no later epoch is claimed. A driver can only find this out from high availability."""
        return self.world.ha.epoch == self.epoch

    @property
    def is_deleting(self) -> bool:
        deletions = self.shell.storage._deletions
        return bool(deletions._running or deletions.unfinished)

    def fence(self) -> bool | None:
        """What it can know itself before or behind a write: None while it cannot be sure, without its lease renewed."""
        if self.lease is not None and not self.lease.holds:
            return None
        return self.leads

    def start(self) -> None:
        """Continues the job, or finishes cleaning up after it."""
        self._renew()
        result = self.world.ha.result
        if result is None:
            self.tell(job_on.Start())
        else:
            self.ends_as = result.status
            self.shell.clean_up_after(JobStatus(result.status))

    def _renew(self) -> None:
        if self.lease is not None:
            self.lease.renew(self)
        elif not self.leads:  # it asks storage
            at = self.world.loop.now + self.world.choices.delay("noticing another leader", 0, 20)
            self.world.loop.at(at, self.process, self.lost_leadership)
        elif not self.shut_down:
            self.world.loop.at(self.world.loop.now + _RENEW_MS, self.process, self._renew)

    def lost_leadership(self) -> None:
        """Another driver leads: nothing may be written or deleted any more."""
        if self.process.alive:
            self.world.note(self, "lost leadership")
            self.tell(LeadershipLost())

    def die(self) -> None:
        """The process is gone, and its workers with it, though not at once."""
        self.process.alive = False
        if self.deployment is not None:
            at = self.world.loop.now + self.world.choices.delay("workers outlive their driver", 0, 150)
            self.world.loop.at(at, None, self.deployment.die)

    def tell(self, event: JobInput) -> None:
        self.shell.tell(event)

    # --- steps of the machines

    def begins(self, event: on.CoordinatorEvent | job_on.JobEvent) -> None:
        self.world.note(self, event)
        self._state_before = self.machine.state
        if type(event).__module__ == on.__name__:
            self.checker.before(cast(on.CoordinatorEvent, event))

    def stepped(
        self, event: on.CoordinatorEvent | job_on.JobEvent, effects: Sequence[out.Effect | job_out.JobEffect]
    ) -> None:
        if self.world.tracing:
            self.world.note_all(self, effects)
        if type(event).__module__ == on.__name__:
            self.checker.after(cast(on.CoordinatorEvent, event), cast(list[out.Effect], effects))
        else:
            self.checker.job_step(cast(job_on.JobEvent, event), self._state_before)

    # --- events in

    def hears(self, event: JobInput) -> None:
        """Before the core does."""
        self.changes.before()
        kind = type(event)
        if kind in (core_out.SlotsReserved, core_out.SlotsNotReserved):
            self.changes.reserved(event)  # type: ignore[arg-type]
        elif kind in (core_out.PlanStored, core_out.ChangeNotStored):
            self.changes.written(event)  # type: ignore[arg-type]
        elif kind is on.LeftoversFound:
            self.knows_leftovers = True
        elif kind is job_on.TaskFinished:
            self.checker.finished(event.execution)  # type: ignore[union-attr]

    # --- outputs

    def _acquires(self, effect: job_out.AcquireSlots) -> None:
        self.plan.acquires(effect.attempt)
        self.changes.acquires()

    def _deploys(self, order: core_out.DeployTasks) -> None:
        self.checker.deploys(order)
        self.plan.deploys(order)
        self.changes.deploys(order.graph)
        if self.deployment is not None:
            self.checker.replaced(self.deployment)
        self.order = order

    def begin_deployment(self) -> int:
        """Its number; the workers get their parts of it at once."""
        self.deployment = Deployment(self, self.order)
        self.world.checker.deployed(self.deployment)
        return self.deployment.number

    def _cancels(self, effect: job_out.CancelTasks) -> None:
        self.changes.cancels()
        deployment = self.deployment
        if deployment is None or not deployment.tasks.keys() >= set(effect.executions):
            raise self.world.broke(f"tasks are to be cancelled that were not deployed: {effect.executions}")

    def _stop_ended(self, effect: job_out.StopCompleted | job_out.StopFailed) -> None:
        if effect.location is not None:
            self.checker.told_of_the_end()
        self.checker.stop_ended(effect)

    def _status_changed(self, effect: job_out.StatusChanged) -> None:
        if effect.status.is_globally_terminal:
            self.checker.told_of_the_end()

    def _fails(self, effect: core_out.RecordFailure) -> None:
        self.failures.append(self.world.next_failure())

    def _job_ended(self, effect: job_out.JobEnded) -> None:
        """The result is durable before anything of the job is deleted: it must never be run again from nothing."""
        self.ended = effect
        self.checker.told_of_the_end()
        self.checker.job_ended(effect, strategy_refused=self.plan.strategy_refused)

    def _stores_result(self, order: core_out.StoreResult) -> None:
        self.ends_as = order.ended.status.value

    def _stores_overrides(self, order: core_out.StoreOverrides) -> None:
        self.storing, self.tries_again = order.request_id, order.attempt > 0
        self.world.checker.clients.begins(order.request_id)

    def _stores_plan(self, order: core_out.StorePlan) -> None:
        self.tries_again = order.attempt > 0
        self.changes.storing(order)

    def _change_answered(self, answer: core_out.ChangeAnswered) -> None:
        if not answer.request_id.startswith("patch"):
            self.changes.answered(answer)
            return
        if answer.outcome is core_out.ChangeOutcome.JOB_ENDED:
            self.checker.told_of_the_end()
        if answer.outcome is core_out.ChangeOutcome.APPLIED:
            self.world.crash_point(self, "before the answer")
        self.world.checker.clients.hears(self, answer)

    def _request_ended(self, effect: out.RequestCompleted | out.RequestFailed) -> None:
        self.changes.savepoints.discard(effect.request_id)
        if isinstance(effect, out.RequestFailed):
            self.checker.cancellation_failed(effect.request_id)
        elif self.checker.cancellation_due(effect.request_id, effect.checkpoint_id):
            at = self.world.loop.now + self.world.choices.delay("cancellation", 1, 150)
            self.world.loop.at(at, self.process, self._cancel)

    def _cancel(self) -> None:
        """The user who asked for a savepoint before the cancellation now cancels."""
        if not self.shut_down and self.ended is None and self.world.ha.result is None:
            self.tell(job_on.CancelRequested())

    def has_shut_down(self) -> None:
        self.shut_down = True
        if not self.core.is_fenced and self.ended is not None and self.ended.status is JobStatus.SUSPENDED:
            self.die()
            self.world.released(self)

    def _discards_state(self, effect: out.DiscardState) -> None:
        """Of a task that did not know of the abort yet."""
        if effect.directory.startswith(SAVEPOINTS) and self.world.choices.fault("dies before late state", 0.2):
            raise DriverCrash

    def patch(self, changes: CheckpointOverrides | None) -> None:
        """``None`` is DELETE: back to the submitted values."""
        request_id = self.world.checker.clients.asks(self, changes)
        self.tell(core_out.PatchRequested(request_id, changes))

    # --- messages of workers

    def worker_message(self, deployment: Deployment, peer: Peer, message: DeploymentMessage) -> None:
        """On a lossy transport, checkpoints hear of earlier attempts as well."""
        if deployment is self.deployment and deliver(peer.slot, peer, message):
            return
        if self.world.scenario.lossy and not self.shut_down:
            match message:
                case AcknowledgeCheckpoint(_, vertex_id, subtask, number, directory, state, metrics):
                    execution = ExecutionId(vertex_id, subtask, deployment.attempt)
                    self.tell(on.Acknowledged(number, execution, directory, state, metrics))
                case DeclineCheckpoint(_, vertex_id, subtask, number, reason, text):
                    execution = ExecutionId(vertex_id, subtask, deployment.attempt)
                    self.tell(on.Declined(number, execution, CheckpointFailureReason[reason], text))

    def worker_gone(self, peer: Peer) -> None:
        lose_worker(peer.slot, peer)


_OBSERVES: dict[type[Any], Callable[[Driver, Any], None]] = {
    job_out.StatusChanged: Driver._status_changed,
    job_out.AcquireSlots: Driver._acquires,
    job_out.CancelTasks: Driver._cancels,
    job_out.StopCompleted: Driver._stop_ended,
    job_out.StopFailed: Driver._stop_ended,
    job_out.JobEnded: Driver._job_ended,
    core_out.DeployTasks: Driver._deploys,
    core_out.RecordFailure: Driver._fails,
    core_out.StoreResult: Driver._stores_result,
    core_out.StoreOverrides: Driver._stores_overrides,
    core_out.ChangeAnswered: Driver._change_answered,
    core_out.ReserveSlots: lambda driver, order: driver.changes.reserve(order),
    core_out.ReleaseReserve: lambda driver, order: driver.changes.release(order),
    core_out.StorePlan: Driver._stores_plan,
    core_out.SettlePlan: lambda driver, order: driver.changes.settling(order),
    out.DiscardState: Driver._discards_state,
    out.RequestCompleted: Driver._request_ended,
    out.RequestFailed: Driver._request_ended,
}
