"""Looks at every step of one driver's coordinator and raises :class:`Violation` at the first wrong.

The numbers in messages of errors are those of ARCHITECTURE's invariants where there is one. It learns what happens from
events, effects, statistics and the simulated storage, and keeps its own books: it never asks the coordinator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, is_shared
from ckpt_runtime.checkpoint.completion import TriggerRequest
from ckpt_runtime.checkpoint.coordinator import CoordinatorState
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.core_events import DeployTasks
from ckpt_runtime.scheduler.job_events import JobEvent
from ckpt_runtime.scheduler.job_status import JobState, JobStatus
from ckpt_runtime.scheduler.replacement import subtasks_of
from tests.simulation.protocols.failure_model import FailureModel, reason_of
from tests.simulation.protocols.files import DIRECTORY, SAVEPOINTS, path_of
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.tasks import Deployment

_TIMER_SLACK_MS = 6
_IO_ANSWERS = (on.CleanupDone, on.StoreRemoved)


@dataclass(slots=True)
class _Open:
    """A checkpoint between trigger and end. ``restored`` are the vertices that had finished before its deployment."""

    started: int
    properties: CheckpointProperties
    request_id: str | None
    waits_for: set[SubtaskKey]
    graph: JobGraph
    restored: frozenset[str]
    located: bool = False
    writing: bool = False
    extended: bool = False
    whole: int = field(init=False)

    def __post_init__(self) -> None:
        self.whole = len(self.waits_for)

    @property
    def acknowledged(self) -> int:
        return self.whole - len(self.waits_for)


class DriverChecker:
    """Keeps the books on one driver. Its memory is lost with it, and its pending answers are no longer expected."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._world = driver.world
        self._shared = driver.world.checker
        self.require = self._shared.require
        self.open: dict[int, _Open] = {}
        self.requests: set[str] = set()
        self.stops: set[str] = set()
        self.cancels: set[str] = set()
        """Requests of savepoints behind which the job is to be cancelled."""
        self._last_id: int | None = None
        self._queued: dict[str, bool] = {}
        self._finished: set[tuple[str, int]] = set()
        self._restart_from = 0
        self._failures = FailureModel()
        self._pause_from: int | None = None
        self._ticks: deque[int] = deque(maxlen=3)
        self._locating: int | None = None
        self._cleaning = 0
        self._must_fail: list[int] = []
        """What the account says of each time that checkpoints fail the job in one step: how often in a row."""
        self._without_id = 0
        self._event: Any = None
        self._restoring: CompletedCheckpoint | None = None
        self._tick_at: int | None = None
        self._base: int | None = None
        self._ticked_now = False
        self._rhythm_before: tuple[int | None, int] = (None, 0)
        self.mine: set[int] = set()
        self.confirmed: set[int] = set()
        """Checkpoints whose pointers it knew to be there while it led."""
        self._completed: set[int] = set()
        self.has_completed = False
        self.known_directories: set[str] = set()
        self.known_shared: dict[str, int] = {}
        """Shared files by the last checkpoint that used them."""
        for entry in self._world.ha.pointers.values():
            used = self._world.files.files_of(entry.checkpoint).shared
            self.known_shared.update((path, entry.checkpoint.id) for path in used)
        self.released: set[int] = set()
        self.removing: dict[int, str | None] = {}
        """What is to be deleted behind a pointer."""
        self.outlives: int | None = None

    @property
    def cleaning(self) -> int:
        """How many checkpoints are being cleaned."""
        return self._cleaning

    def restoring(self, checkpoint: CompletedCheckpoint | None) -> None:
        """Nothing may complete after it is decided what to restore."""
        publishing = [n for n, entry in self.open.items() if entry.writing and entry.properties.notifies_and_subsumes]
        self.require(not publishing, f"decides what to restore while {publishing} are being published")
        self._restoring = checkpoint
        self._shared.restoring(self._driver, checkpoint)

    def deploys(self, order: DeployTasks) -> None:
        """Under a number that no other deployment has, from what the coordinator has said last."""
        driver, now = self._driver, self._world.loop.now
        self.require(now >= self._restart_from, f"deploys at {now}, the pause ends at {self._restart_from}")
        recorded = self._world.ha.attempts > order.attempt
        self.require(recorded or not driver.leads, f"attempt {order.attempt} is deployed before it is recorded")
        checkpoint = None if order.restored is None else order.restored.checkpoint_id
        expected = None if self._restoring is None else self._restoring.id
        self.require(checkpoint == expected, f"deploys from {checkpoint}, to be restored is {expected}")
        self._shared.attempts(driver, order.attempt)
        self._finished = set()

    def replaced(self, deployment: Deployment) -> None:
        """At no time do two deployments of one driver run."""
        alive = [task.execution for task in deployment.tasks.values() if not task.ended]
        self.require(not alive, f"deploys again while {alive} run")

    def finished(self, execution: ExecutionId) -> None:
        self._finished.add(execution.key)

    # --- one step

    def before(self, event: on.CoordinatorEvent) -> None:
        self._event = event
        self._must_fail = []
        self._without_id = 0
        self._ticked_now = False
        configuration = self._driver.coordinator.configuration
        self._rhythm_before = (configuration.interval_ms, configuration.min_pause_ms)
        kind = type(event)
        if kind is on.TriggerRequested:
            self.requests.add(event.request_id)  # type: ignore[union-attr]
            self._queued[event.request_id] = event.properties.is_savepoint  # type: ignore[union-attr]
        elif kind is on.Acknowledged:
            if event.checkpoint_id in self.mine:  # type: ignore[union-attr]
                self._acknowledged(event)  # type: ignore[arg-type]
        elif kind is on.LeftoversFound:
            self.known_directories.update(name for _, name in event.checkpoints)  # type: ignore[union-attr]
        elif kind is on.Shutdown:
            self.outlives = max((n for n in self._world.ha.pointers if n != self._world.origin_id), default=None)
        elif kind is on.JobRunning:
            self._failures.reset()
            self._ticks.clear()
            self._base = self._tick_at = None
        elif kind in (on.ConfigurationPatched, on.BacklogChanged, on.PeriodicTriggerStarted):
            self._ticks.clear()
            if kind is on.PeriodicTriggerStarted:
                self._base = self._tick_at = None
        elif kind is on.PeriodicTriggerStopped:
            self._base = self._tick_at = None
        elif kind in _IO_ANSWERS:
            self._cleaning -= 1
        elif kind in (on.LocationReady, on.LocationFailed) and self._locating == event.checkpoint_id:  # type: ignore[union-attr]
            self._locating = None

    def after(self, event: on.CoordinatorEvent, effects: list[out.Effect]) -> None:
        driver = self._driver
        fails = 0
        if self._without_id:
            self._count_without_id(effects)
        for effect in effects:
            check = _CHECKS.get(type(effect))
            if check is not None:
                check(self, effect)
            elif type(effect) is out.FailJob:
                fails += 1
            elif type(effect) is out.RestoreFrom:
                self.restoring(effect.checkpoint)
        if fails:
            self._failed_by_checkpoints()
        if fails != len(self._must_fail) and driver.coordinator.state is CoordinatorState.RUNNING:
            raise Violation(f"the job is failed {fails} times because of checkpoints, expected {len(self._must_fail)}")
        self._check_event(event, effects)
        if type(event) is on.ConfigurationPatched and driver.leads and not driver.shut_down:
            if driver.coordinator.state not in (CoordinatorState.CLOSING, CoordinatorState.CLOSED):
                self._shared.clients.in_force(driver)
                self._check_next_tick()
            self._check_deadlines()

    def _acknowledged(self, event: on.Acknowledged) -> None:
        entry = self.open.get(event.checkpoint_id)
        if entry is not None and event.execution.attempt == self._driver.machine.attempt:
            entry.waits_for.discard(event.execution.key)
        for file in event.state.files():  # a task that wrote it into a deleted directory has reported it now
            path = path_of(file.path if is_shared(file) else f"{event.directory}/{file.path}")
            if self._driver.leads:
                self._world.files.orphans.discard(path)
            if is_shared(file):
                self.known_shared[path] = event.checkpoint_id

    def _check_event(self, event: on.CoordinatorEvent, effects: list[out.Effect]) -> None:
        kind = type(event)
        if kind is on.SubtaskFinished:
            key = event.execution.key  # type: ignore[union-attr]
            waiting = [n for n, entry in self.open.items() if key in entry.waits_for and not entry.writing]
            self.require(not waiting, f"{waiting} wait for {key}, which has ended")
        elif kind is on.Shutdown and event.fenced:  # type: ignore[union-attr]
            touched = [effect for effect in effects if type(effect) in _TOUCHING]
            self.require(not touched, f"a driver that lost its lease continues with {touched}")

    def _count_without_id(self, effects: list[out.Effect]) -> None:
        """Those of savepoints do not count."""
        for effect in effects:
            if isinstance(effect, out.RequestFailed) and effect.checkpoint_id is None:
                self._without_id -= effect.reason is Reason.IO_EXCEPTION and self._queued.get(effect.request_id, False)
        tolerable = self._driver.coordinator.configuration.tolerable_failed_checkpoints
        for _ in range(self._without_id):
            self._note_failure(fails_job=self._failures.failed_without_id(tolerable))

    # --- effects

    def _initialize(self, effect: out.InitializeLocation) -> None:
        driver = self._driver
        number = effect.checkpoint_id
        self._shared.triggers += 1
        configuration = driver.coordinator.configuration
        request = driver.coordinator.pending_request(number)
        savepoint = effect.properties.is_savepoint
        forced = savepoint and not configuration.unaligned_enabled
        others = sum(1 for other in self.open if other != number)
        limit = configuration.max_concurrent
        self.require(forced or others < limit, f"{number} is triggered beside {others} others, at most {limit} may be")
        self.require(self._cleaning <= limit, f"{number} is triggered while {self._cleaning} are being cleaned")
        self.require(self._locating is None, f"{number} is triggered while {self._locating} is being triggered")
        self._locating = number
        last = self._last_id
        self.require(last is None, f"{number} is triggered between savepoint {last} and the cancellation")
        if request is not None:
            self.require(not request.periodic or not self.cancels, f"periodic {number} goes before a cancellation")
            self._check_order(number, request, savepoint)
            if request.periodic:
                self._check_rhythm(number)

    def _check_order(self, number: int, request: TriggerRequest, savepoint: bool) -> None:
        if request.request_id is not None:
            self._queued.pop(request.request_id, None)
        waiting = [name for name, is_savepoint in self._queued.items() if is_savepoint]
        self.require(savepoint or not waiting, f"{number} is triggered before the savepoints {waiting}")
        self.require(not request.periodic or not self._queued, f"periodic {number} goes before {sorted(self._queued)}")

    def _check_rhythm(self, number: int) -> None:
        driver = self._driver
        now, configuration = self._world.loop.now, driver.coordinator.configuration
        if self._pause_from is not None:
            ready = self._pause_from + configuration.min_pause_ms
            self.require(now >= ready, f"periodic {number} is triggered at {now}, the pause ends at {ready}")
        self._ticks.append(now)
        interval = configuration.interval_ms
        if self._driver.process.paused_until >= self._ticks[0]:
            self._ticks.clear()  # late ticks come close to the next one
        if len(self._ticks) == 3 and interval is not None and not driver.backlog:
            span = now - self._ticks[0]
            self.require(
                span >= interval - 5, f"three periodic checkpoints within {span} ms, the interval is {interval}"
            )

    def _schedule_timer(self, effect: out.ScheduleTimer) -> None:
        """571.4: after a change the next tick is an interval after the last, as early as now and the pause allow."""
        if effect.timer.kind is not on.TimerKind.PERIODIC:
            return
        event = self._event
        ticks = isinstance(event, on.TimerFired) and event.timer.kind is on.TimerKind.PERIODIC
        if ticks and self._tick_at is not None and not self._ticked_now:
            self._base, self._ticked_now = self._tick_at, True
        self._tick_at = effect.at_rel_ms - self._driver.origin

    def _check_next_tick(self) -> None:
        configuration, now = self._driver.coordinator.configuration, self._world.loop.now
        running = self._driver.coordinator.state is CoordinatorState.RUNNING and not self.stops
        if self._base is None or self._tick_at is None or configuration.interval_ms is None or not running:
            return
        if not self._driver.backlog and self._rhythm_before != (configuration.interval_ms, configuration.min_pause_ms):
            pause_end = 0 if self._pause_from is None else self._pause_from + configuration.min_pause_ms
            due = max(now, self._base + configuration.interval_ms, pause_end)
            # A queued tick that falls into the pause restarts the rhythm at the end of the pause.
            self.require(
                self._tick_at in (due, pause_end), f"the next tick comes at {self._tick_at}, it is due at {due}"
            )

    def _write(self, effect: out.WriteMetadata) -> None:
        """I7: every task of the plan has acknowledged or was finished before."""
        checkpoint = effect.checkpoint
        if checkpoint.is_savepoint:
            self._world.published[checkpoint.directory] = checkpoint
        entry = self.open[checkpoint.id]
        entry.writing = True
        described = [(vertex.id, vertex.parallelism) for vertex in checkpoint.vertices]
        taken_of = [(vertex.id, vertex.parallelism) for vertex in entry.graph.vertices]
        self.require(described == taken_of, f"{checkpoint.id} says it is of {described}, it was taken of {taken_of}")
        for key in subtasks_of(entry.graph):
            state = checkpoint.states.get(key)
            if state is None:
                ended = key in checkpoint.finished and (key in self._finished or key[0] in entry.restored)
                self.require(ended, f"{checkpoint.id} has no state of {key}, which has not finished")
            else:
                taken = self._shared.snapshots_of(checkpoint.id, *key)
                paths = [file.path for file in state.files() if not is_shared(file)]
                self.require(all(path in taken for path in paths), f"{checkpoint.id} has a foreign state of {key}")

    def _add(self, effect: out.AddToStore) -> None:
        checkpoint = effect.checkpoint
        files = self._world.files
        origin = self._world.origin
        if origin is not None and checkpoint.id == origin.id:
            return
        plain = checkpoint.properties.type is CheckpointType.SAVEPOINT
        self.require(not plain, f"the savepoint {checkpoint.id} enters the store")
        self.require(effect.owned is not checkpoint.is_savepoint, f"{checkpoint.id} is owned: {effect.owned}")
        users = frozenset[str]().union(*files.user_owned.values())
        foreign = files.files_of(checkpoint).shared & users
        self.require(not foreign, f"checkpoint {checkpoint.id} refers to {sorted(foreign)} of the user's snapshot")

    def _notify_complete(self, effect: out.NotifyComplete) -> None:
        driver = self._driver
        number = effect.checkpoint_id
        confirmed = driver.leads or number in self.confirmed
        self.require(confirmed, f"a driver that does not lead completes {number}")
        self.require(number in self.mine, f"{number} of another driver is notified")
        self.require(number in self._shared.completed, f"{number} is notified without being complete")
        if driver.leads:
            self.require(number > self._shared.notified, f"{number} is notified after {self._shared.notified}")
            self._shared.notified = number

    def _notify_aborted(self, effect: out.NotifyAborted) -> None:
        driver = self._driver
        number = effect.checkpoint_id
        self.require(not self._has_completed(number), f"{number} is aborted after it was completed")
        latest = max(self._world.ha.pointers, default=-1)
        if driver.leads:
            self.require(effect.latest_completed <= latest, f"tells of {effect.latest_completed}, newest is {latest}")

    def _request_completed(self, effect: out.RequestCompleted) -> None:
        self._request_ended(effect.request_id)
        files = self._world.files
        path = effect.external_path
        self.require(files.has_metadata(path), f"{path} is reported to be complete")
        if path.startswith(SAVEPOINTS):
            self.require(path in self._world.published, f"{path} is not a savepoint")
            savepoint = self._world.published[path]
            missing = files.missing(savepoint)
            self.require(not missing, f"{path} is reported to be complete, and lacks {missing}")
            files.savepoints[path] = savepoint

    def _request_failed(self, effect: out.RequestFailed) -> None:
        self._request_ended(effect.request_id)

    def _request_ended(self, request_id: str) -> None:
        self.require(request_id in self.requests, f"request {request_id} is answered twice")
        self.requests.discard(request_id)
        self._queued.pop(request_id, None)

    def _removes(self, effect: out.RemoveFromStore) -> None:
        self.released.add(effect.checkpoint_id)
        self.removing[effect.checkpoint_id] = effect.discards
        if effect.attempt == 0:
            self._cleaning += 1

    def _discards(self, effect: out.DiscardCheckpoint) -> None:
        self.released.discard(effect.checkpoint.id)
        self._cleaning += 1

    def _discards_location(self, effect: out.DiscardLocation) -> None:
        self.released.discard(effect.checkpoint_id)
        self._cleaning += 1

    # --- statistics

    def triggered(self, number: int, properties: CheckpointProperties | None = None) -> None:
        """Ids rise over all drivers (I6)."""
        used = self._world.ha.counter
        self.require(number >= used or not self._driver.leads, f"id {number}, below {used} all are used up")
        request = self._driver.coordinator.pending_request(number)
        assert request is not None
        self.mine.add(number)
        if not request.properties.is_savepoint:
            self.known_directories.add(f"{DIRECTORY}/chk-{number}")
        deployment = self._driver.deployment
        assert deployment is not None
        graph, restored = deployment.graph, deployment.finished_vertices
        waits = set(subtasks_of(graph)) - self._finished
        now = self._world.loop.now
        self.open[number] = _Open(now, request.properties, request.request_id, waits, graph, restored)

    def ended_well(self, number: int) -> None:
        entry = self._end(number)
        now = self._world.loop.now
        stored = entry.properties.notifies_and_subsumes
        self._shared.completed[number] = stored
        self._completed.add(number)
        self._failures.succeeded(number)
        self._pause_from = now
        self.require(number not in self._shared.aborted, f"{number} is completed after it was aborted")
        if stored and self._driver.leads:
            self.require(number in self._world.ha.pointers, f"{number} is completed without a durable pointer")
            self.require(number > self._shared.newest, f"{number} is completed after {self._shared.newest}")
            self._shared.newest = number
            self.has_completed = True
            if not entry.properties.is_savepoint:
                self._shared.last_completion_at = now

    def ended_badly(self, number: int, message: str) -> None:
        entry = self._end(number)
        driver = self._driver
        if self._driver.leads and number < self._world.ha.counter:  # a later driver may use any other id
            self._shared.aborted.add(number)
        reason = reason_of(message)
        self._shared.reasons.add(reason)
        pointer = number in self._world.ha.pointers and self._driver.leads
        subsumed = reason is Reason.CHECKPOINT_SUBSUMED
        self.require(not subsumed or not entry.properties.is_savepoint, f"savepoint {number} is subsumed")
        later = subsumed and not any(other > number for other in self._shared.completed)
        self.require(not later, f"{number} is subsumed by an older one")
        self.require(not pointer, f"{number} is aborted, but its pointer is durable")
        self.require(not self._has_completed(number), f"{number} is aborted after it was completed")
        if reason is Reason.CHECKPOINT_EXPIRED:
            due = entry.started + driver.coordinator.configuration.timeout_ms
            self.require(self._world.loop.now >= due, f"{number} expires at {self._world.loop.now}, before {due}")
            self._check_not_worth_rescuing(number, entry)
        by_running_task = None
        event = self._event
        if isinstance(event, on.Declined) and event.checkpoint_id == number and reason is event.reason:
            by_running_task = event.execution.key not in self._finished
        tolerable = driver.coordinator.configuration.tolerable_failed_checkpoints
        fails_job = self._failures.failed(number, reason, entry.properties, tolerable, by_running_task)
        self._note_failure(fails_job=fails_job)

    def _has_completed(self, number: int) -> bool:
        """A later driver may have used the id before this one has reserved it."""
        return number in self._completed or (self._driver.leads and number in self._shared.completed)

    def no_id(self) -> None:
        """High availability gives no id for the next trigger."""
        self._without_id += 1

    def _end(self, number: int) -> _Open:
        entry = self.open.pop(number, None)
        if entry is None:
            raise Violation(f"checkpoint {number} ends twice, or never began")
        if self._locating == number:
            self._locating = None
        if type(self._event) is not on.ConfigurationPatched:  # which may end it by moving its deadline into the past
            self._check_deadline(number, entry)
        return entry

    def _check_deadline(self, number: int, entry: _Open) -> None:
        """Invariant 4. A driver that was paused comes late, and one that publishes waits for the storage."""
        driver = self._driver
        settings = driver.coordinator.configuration
        rescue = settings.rescue_max_extension_ms if settings.rescue_enabled else 0
        due = entry.started + settings.timeout_ms + rescue + _TIMER_SLACK_MS
        in_time = entry.writing or self._world.loop.now <= due or driver.process.paused_until >= entry.started
        self.require(in_time, f"checkpoint {number} of {entry.started} is alive at {self._world.loop.now}, due {due}")

    def _check_not_worth_rescuing(self, number: int, entry: _Open) -> None:
        """The first extension of one that was nearly done, which a change of the timeout alone may take away."""
        settings = self._driver.coordinator.configuration
        done = 100 * entry.acknowledged >= settings.rescue_min_progress * entry.whole
        by_timer = type(self._event) is on.TimerFired
        time_left = self._world.loop.now < entry.started + settings.timeout_ms + settings.rescue_max_extension_ms
        if settings.rescue_enabled and done and by_timer and time_left and not entry.extended:
            raise Violation(f"{number} expires with {entry.acknowledged} of {entry.whole} subtasks done")

    def extended(self, number: int) -> None:
        """The rescue policy gives it more time."""
        entry, settings = self.open[number], self._driver.coordinator.configuration
        entry.extended = True
        done = 100 * entry.acknowledged >= settings.rescue_min_progress * entry.whole
        self.require(
            settings.rescue_enabled and done, f"{number} is rescued with {entry.acknowledged} of {entry.whole} done"
        )

    def _check_deadlines(self) -> None:
        for number, entry in self.open.items():
            self._check_deadline(number, entry)

    # --- cancellation with a savepoint

    def cancellation_failed(self, request_id: str) -> None:
        """Its savepoint failed: the job continues as if there had been no request."""
        self.cancels.discard(request_id)

    def cancellation_due(self, request_id: str, savepoint_id: int) -> bool:
        """Whether the job is cancelled now. From the savepoint on nothing is committed that is not in it."""
        if request_id not in self.cancels:
            return False
        self._last_id = savepoint_id
        return True

    @property
    def is_cancelled_next(self) -> bool:
        """The savepoint is there: nothing else is begun."""
        return self._last_id is not None

    def may_commit(self, number: int) -> bool:
        return self._last_id is None or number <= self._last_id

    # --- the job

    def _note_failure(self, *, fails_job: bool) -> None:
        if fails_job:
            self._must_fail.append(self._failures.times)

    def _failed_by_checkpoints(self) -> None:
        """The job comes back after a pause that grows until a checkpoint completes; the first of one step counts."""
        times = self._must_fail[0] if self._must_fail else 0
        self._restart_from = self._world.loop.now + (min(15 * 2 ** (times - 1), 40) if times else 0)

    def job_step(self, event: JobEvent, before: JobState) -> None:
        """The job machine has taken an event."""
        if type(event) is job_on.SavepointFailed and event.reached_tasks and before is JobState.STOPPING:
            goes_on = self._driver.machine.state is JobState.RUNNING
            self.require(not goes_on, "the job continues with tasks whose sources may have stopped")

    def told_of_the_end(self) -> None:
        """A user gets a report; if it says that the job has ended, no driver may run it again."""
        driver = self._driver
        if driver.machine.status.is_globally_terminal and not driver.core.is_fenced:
            self.require(self._world.ha.result is not None, "the end of the job is reported before it is stored")

    def job_ended(self, effect: job_out.JobEnded, *, strategy_refused: bool) -> None:
        """Nothing is damaged: a job fails for good by its strategy's will, or after the savepoint of a stop."""
        fails = effect.status is JobStatus.FAILED
        allowed = strategy_refused or effect.savepoint is not None
        self.require(not fails or allowed, "the job fails for good without its strategy or a stop")

    # --- stops

    def stop_ended(self, effect: job_out.StopCompleted | job_out.StopFailed) -> None:
        self.require(effect.request_id in self.stops, f"stop {effect.request_id} is answered twice")
        self.stops.discard(effect.request_id)
        if isinstance(effect, job_out.StopCompleted):
            known = effect.location in self._world.files.savepoints
            self.require(known, f"stop {effect.request_id} names {effect.location}, which is not a savepoint")


_TOUCHING = frozenset(
    {
        out.WriteMetadata,
        out.AddToStore,
        out.RemoveFromStore,
        out.DiscardCheckpoint,
        out.DiscardLocation,
        out.DiscardState,
        out.DeleteSharedFiles,
    }
)
_CHECKS: dict[type[Any], Any] = {
    out.InitializeLocation: DriverChecker._initialize,
    out.WriteMetadata: DriverChecker._write,
    out.AddToStore: DriverChecker._add,
    out.ScheduleTimer: DriverChecker._schedule_timer,
    out.NotifyComplete: DriverChecker._notify_complete,
    out.NotifyAborted: DriverChecker._notify_aborted,
    out.RequestCompleted: DriverChecker._request_completed,
    out.RequestFailed: DriverChecker._request_failed,
    out.DiscardCheckpoint: DriverChecker._discards,
    out.DiscardLocation: DriverChecker._discards_location,
    out.RemoveFromStore: DriverChecker._removes,
}
