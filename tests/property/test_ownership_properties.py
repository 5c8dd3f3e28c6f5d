"""Who owns which file, over any sequence of checkpoints, savepoints, failures, takeovers and claims.

The coordinator and the base of increments are the real ones; a database of a subtask is a set of table names, and the
storage a set of paths. Deletions take effect late, and notifications of tasks come late or never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    OperatorSubtaskState,
    SharedStateRegistry,
    StateFile,
    SubtaskState,
    is_shared,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import (
    CheckpointFailureReason,
    CheckpointOptions,
    CheckpointProperties,
    CheckpointType,
    SavepointFormat,
)
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint, Retention
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.shared_files import SharedFiles
from tests.support.effort import examples

GRAPH = JobGraph("job", (JobVertex("v", (OperatorNode("op", "op", "source"),), 2),), ())
NOW = Instant(0, 0)
SAVEPOINT = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.NATIVE)
WANTED = (CheckpointProperties(), CheckpointProperties(), CheckpointProperties(full=True), SAVEPOINT)
SETTINGS = CheckpointConfiguration(
    incremental=True,
    max_concurrent=3,
    tolerable_failed_checkpoints=10_000,
    retention=CheckpointRetention.RETAIN_ON_CANCELLATION,
)


@dataclass
class Snapshot:
    """Of one subtask: what its database held, and what a savepoint has begun to duplicate."""

    options: CheckpointOptions
    tables: frozenset[str]
    sources: dict[str, StateFile] | None = None


@dataclass
class Task:
    """One attempt of a subtask with its database."""

    execution: ExecutionId
    tables: frozenset[str] = frozenset()
    shared: SharedFiles = field(default_factory=SharedFiles)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    news: list[Callable[[], None]] = field(default_factory=list)


def files_of(checkpoint: CompletedCheckpoint) -> dict[str, StateFile]:
    """By their names in storage."""
    files = (file for state in checkpoint.states.values() for file in state.files())
    return {file.path if is_shared(file) else f"{checkpoint.directory}/{file.path}": file for file in files}


class Ownership(RuleBasedStateMachine):
    """``storage`` are the paths of files, ``users`` those of snapshots that stay the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.storage: set[str] = set()
        self.users: set[str] = set()
        self.claimed: set[str] = set()
        self.savepoints: dict[str, CompletedCheckpoint] = {}
        self.pointers: dict[int, RetainedCheckpoint] = {}
        self.ids = CheckpointIdCounter()
        self.names = count(1)
        self.job = 0
        self.tasks: list[Task] = []
        self.deletions: list[Callable[[], None]] = []
        self.start_job(None)

    # --- the shell

    def start_job(self, found: CompletedCheckpoint | None, mode: RecoveryClaimMode = RecoveryClaimMode.CLAIM) -> None:
        self.job += 1
        self.lead()
        self.deploy(found, mode)

    def lead(self) -> None:
        """What an earlier driver still had to delete it never deletes."""
        self.deletions = []
        recovered = list(self.pointers.values())
        self.coordinator = CheckpointCoordinator(f"job-{self.job}", GRAPH, SETTINGS, self.ids, recovered)

    def deploy(
        self, found: CompletedCheckpoint | None = None, mode: RecoveryClaimMode = RecoveryClaimMode.CLAIM
    ) -> None:
        self.attempt = next(self.names)
        self.tasks = []
        self.tell(on.RestoreRequested("restore", found, mode))

    def tell(self, event: Any) -> None:
        for effect in self.coordinator.handle(event, NOW):
            self.carry_out(effect)

    def carry_out(self, effect: Any) -> None:
        match effect:
            case out.InitializeLocation(number, properties):
                kind = "sp" if properties.is_savepoint else "chk"
                shared = "" if properties.is_savepoint else f"/{self.job}/shared"
                self.tell(on.LocationReady(number, f"/{self.job}/{kind}-{number}", shared))
            case out.WriteMetadata(checkpoint):
                self.storage.add(f"{checkpoint.directory}/_metadata")
                if checkpoint.is_savepoint:
                    self.savepoints[checkpoint.directory] = checkpoint
                self.tell(on.MetadataWritten(checkpoint.id))
            case out.AddToStore(checkpoint, owned):
                self.pointers[checkpoint.id] = RetainedCheckpoint(checkpoint, owned)
                self.tell(on.StoreAdded(checkpoint.id))
            case out.RestoreFrom(_, checkpoint):
                self.run_tasks(checkpoint)
            case _:
                self.delete_or_look(effect)
                self.send(effect)

    def delete_or_look(self, effect: Any) -> None:
        match effect:
            case out.RemoveFromStore(number):
                self.pointers.pop(number, None)
                self.tell(on.StoreRemoved(number))
            case out.DiscardCheckpoint(checkpoint):
                self.later(checkpoint.directory, checkpoint.id)
            case out.DiscardLocation(number, directory):
                self.later(directory, number)
            case out.DiscardState(_, directory, state):
                self.storage -= {f"{directory}/{file.path}" for file in state.files() if not is_shared(file)}
            case out.DeleteSharedFiles(paths):
                self.deletions.append(partial(self.storage.difference_update, paths))
            case out.FindLeftovers(below):
                self.tell(self.leftovers(below))

    def send(self, effect: Any) -> None:
        for task in self.tasks:
            match effect:
                case out.TriggerSources(number, _, options, _):
                    task.snapshots[number] = Snapshot(options, task.tables)
                    if not options.properties.is_savepoint:
                        task.shared.begun(number)
                case out.NotifyComplete(number):
                    task.news.append(partial(task.shared.completed, number))
                case out.NotifyAborted(number):
                    task.snapshots.pop(number, None)
                    task.news.append(partial(task.shared.aborted, number))

    def later(self, directory: str, number: int) -> None:
        def delete() -> None:
            self.remove(directory)
            self.tell(on.CleanupDone(number))

        self.deletions.append(delete)

    def remove(self, directory: str) -> None:
        self.storage -= {path for path in self.storage if path.startswith(f"{directory}/")}

    def leftovers(self, below: int | None) -> on.LeftoversFound:
        mine = [path for path in self.storage - self.users if path.startswith(f"/{self.job}/")]
        shared = [path for path in mine if "/shared/" in path]
        if below is None:
            used = {path for entry in self.pointers.values() for path in files_of(entry.checkpoint)}
            shared += self.claimed & self.storage - used
        else:
            return on.LeftoversFound((), tuple(sorted(p for p in shared if int(p.split("-")[1]) < below)))
        directories = {path.rpartition("/")[0] for path in mine if "/chk-" in path and path not in shared}
        found = sorted((int(directory.rpartition("-")[2]), directory) for directory in directories)
        return on.LeftoversFound(tuple(found), tuple(sorted(shared)))

    def run_tasks(self, found: CompletedCheckpoint | None) -> None:
        self.tasks = [Task(ExecutionId("v", index, self.attempt)) for index in range(2)]
        for task in self.tasks:
            if found is not None and (state := found.states.get(task.execution.key)) is not None:
                files = {n: f for op in state.operators.values() for h in op.keyed for n, f in h.files.items()}  # type: ignore[union-attr]
                task.tables = frozenset(files)
                if self.coordinator.latest_is_owned:
                    task.shared.restored(files)
        self.tell(on.JobRunning(tuple(task.execution for task in self.tasks)))

    # --- tasks

    @rule(index=st.integers(0, 1), compacts=st.booleans())
    def change(self, index: int, compacts: bool) -> None:
        task = self.tasks[index]
        task.tables = (frozenset() if compacts else task.tables) | {f"table{next(self.names)}"}

    @rule(properties=st.sampled_from(WANTED))
    def trigger(self, properties: CheckpointProperties) -> None:
        self.tell(on.TriggerRequested(f"r{next(self.names)}", properties, "target"))

    @rule(full=st.booleans(), index=st.integers(0, 1), compacts=st.booleans())
    def checkpoint(self, full: bool, index: int, compacts: bool) -> None:
        """A whole one, as most are: nothing goes wrong, and all hear of it."""
        self.change(index, compacts)
        self.trigger(CheckpointProperties(full=full))
        number = max(self.coordinator.pending_ids, default=0)
        for task in self.tasks:
            if number in task.snapshots and not task.snapshots[number].options.properties.is_savepoint:
                self.writes(task, number)
                self.hear(task.execution.subtask, 1)

    def writing(self) -> list[tuple[Task, int]]:
        return [(task, number) for task in self.tasks for number in sorted(task.snapshots)]

    @precondition(lambda self: self.writing())
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.writes(*data.draw(st.sampled_from(self.writing())))

    @precondition(lambda self: self.writing())
    @rule()
    def write_the_first(self) -> None:
        self.writes(*self.writing()[0])

    @rule(index=st.integers(0, 1), compacts=st.booleans())
    def checkpoint_after_one_in_vain(self, index: int, compacts: bool) -> None:
        """Something fails once the files of a task are there: it deletes them and declines."""
        self.change(index, False)
        self.trigger(CheckpointProperties())
        number, task = max(self.coordinator.pending_ids, default=0), self.tasks[index]
        snapshot = task.snapshots.pop(number, None)
        if snapshot is not None and not snapshot.options.properties.is_savepoint:
            before = set(self.storage)
            self.files(task, number, snapshot)
            self.storage &= before
            self.tell(on.Declined(number, task.execution, CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION))
        self.checkpoint(False, 1 - index, compacts)

    @rule(compacts=st.booleans())
    def savepoint_across_a_checkpoint(self, compacts: bool) -> None:
        """It has begun to duplicate when the checkpoint that it builds upon is subsumed."""
        self.trigger(SAVEPOINT)
        number = max(self.coordinator.pending_ids, default=0)
        mine = [task for task in self.tasks if number in task.snapshots]
        for task in mine:
            self.writes(task, number)
        self.checkpoint(False, 0, compacts)
        while self.deletions:
            self.delete()
        for task in mine:
            if number in task.snapshots:
                self.writes(task, number)

    def writes(self, task: Task, number: int) -> None:
        snapshot = task.snapshots[number]
        if snapshot.options.properties.is_savepoint and snapshot.sources is None:
            known = task.shared.duplicable() if snapshot.options.properties.is_incremental else {}
            retained = {path for entry in self.pointers.values() for path in files_of(entry.checkpoint)}
            snapshot.sources = {n: f for n, f in known.items() if n in snapshot.tables and f.path in retained}
            return
        del task.snapshots[number]
        directory, handles = snapshot.options.directory, self.files(task, number, snapshot)
        handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 127), "tables", handles)
        state = SubtaskState({"op": OperatorSubtaskState((handle,))}, 1)
        self.tell(on.Acknowledged(number, task.execution, directory, state))

    def files(self, task: Task, number: int, snapshot: Snapshot) -> dict[str, StateFile]:
        properties, unique = snapshot.options.properties, f"{task.execution.subtask}-{next(self.names)}"
        if properties.is_savepoint:
            lost = {file.path for file in (snapshot.sources or {}).values()} - self.storage
            assert not lost or number not in self.coordinator.pending_ids, f"{lost} deleted while they are duplicated"
            files = {name: StateFile(f"{name}-{unique}", 1, "c") for name in snapshot.tables}
            self.storage |= {f"{snapshot.options.directory}/{file.path}" for file in files.values()}
            return files
        known = task.shared.reusable(number) if properties.is_incremental else {}
        fresh = {name: f"{snapshot.options.shared_directory}/chk-{number}-{name}-{unique}" for name in snapshot.tables}
        files = {name: known.get(name) or StateFile(path, 1, "c") for name, path in fresh.items()}
        self.storage |= {path for name, path in fresh.items() if name not in known}
        task.shared.written(number, files)
        return files

    @precondition(lambda self: self.coordinator.pending_ids)
    @rule(data=st.data())
    def decline(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.coordinator.pending_ids))
        reason = CheckpointFailureReason.CHECKPOINT_DECLINED
        self.tell(on.Declined(number, self.tasks[0].execution, reason))

    @precondition(lambda self: any(task.news for task in self.tasks))
    @rule(index=st.integers(0, 1), lost=st.integers(0, 5))
    def hear(self, index: int, lost: int) -> None:
        news, self.tasks[index].news = self.tasks[index].news, []
        for report in news[lost == 0 :]:
            report()

    # --- the storage, the user, and what goes wrong

    @precondition(lambda self: self.deletions)
    @rule()
    def delete(self) -> None:
        self.deletions.pop(0)()

    @precondition(lambda self: self.savepoints)
    @rule(data=st.data())
    def dispose(self, data: st.DataObject) -> None:
        directory = data.draw(st.sampled_from(sorted(self.savepoints)))
        del self.savepoints[directory]
        self.remove(directory)

    @rule()
    def fail(self) -> None:
        """All tasks fail, and are deployed again."""
        self.tell(on.TasksLeftRunning())
        self.deploy()

    @rule()
    def take_over(self) -> None:
        """The driver crashes, and so do its tasks."""
        self.lead()
        self.deploy()

    @precondition(lambda self: len(self.pointers) == 1)
    @rule(mode=st.sampled_from(RecoveryClaimMode))
    def another_job(self, mode: RecoveryClaimMode) -> None:
        """The job is cancelled, and what it retains is what another one starts from."""
        (entry,) = self.pointers.values()
        self.tell(on.Shutdown("CANCELED"))
        while self.deletions:
            self.delete()
        self.pointers.clear()
        if mode is RecoveryClaimMode.NO_CLAIM:
            self.users |= files_of(entry.checkpoint).keys()
        else:
            self.users -= files_of(entry.checkpoint).keys()
        claims = mode is RecoveryClaimMode.CLAIM
        self.claimed = {path for path in files_of(entry.checkpoint) if "/shared/" in path} if claims else set()
        self.start_job(entry.checkpoint, mode)

    # --- what always holds

    @invariant()
    def nothing_lacks_a_file(self) -> None:
        for entry in self.pointers.values():
            lost = files_of(entry.checkpoint).keys() - self.storage
            assert not lost, f"checkpoint {entry.checkpoint.id} lacks {lost}"
        for directory, savepoint in self.savepoints.items():
            files = files_of(savepoint).keys()
            assert all(path.startswith(f"{directory}/") for path in files), "a savepoint shares a file"
            assert files <= self.storage, f"savepoint {directory} lacks {files - self.storage}"
        assert self.users <= self.storage, f"the user's {self.users - self.storage} are gone"

    def teardown(self) -> None:
        """After a failure and one checkpoint more every shared file of the job, or claimed by it, has an owner."""
        self.fail()
        self.trigger(CheckpointProperties())
        while self.writing() or self.deletions:
            for task, number in self.writing():
                self.writes(task, number)
            while self.deletions:
                self.delete()
        self.nothing_lacks_a_file()
        owned = {path for entry in self.pointers.values() for path in files_of(entry.checkpoint)}
        mine = {path for path in self.storage - self.users if path.startswith(f"/{self.job}/shared/")}
        unowned = (mine | self.claimed & self.storage - self.users) - owned
        assert not unowned, f"files without an owner: {unowned}"


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


# --- the test is graded


def nothing(*_: object) -> None:
    """Instead of what matters."""


written = SharedFiles.written


def never_notified(self: SharedFiles, checkpoint_id: int, files: dict[str, StateFile]) -> None:
    """What was written is the base at once."""
    written(self, checkpoint_id, files)
    self._base = dict(files)


PLANTED: list[tuple[str, Any, str, Any]] = [
    ("a duplicate races with deletion", Retention, "pin", nothing),
    ("registrations are lost at takeover", SharedStateRegistry, "register_all", nothing),
    ("a base that was never notified", SharedFiles, "written", never_notified),
]


@pytest.mark.row("203.11")
@pytest.mark.parametrize(("owner", "name", "bug"), [row[1:] for row in PLANTED], ids=[row[0] for row in PLANTED])
def test_a_planted_bug_is_found(owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, bug)
    search = settings(
        max_examples=500,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Ownership, settings=search)
