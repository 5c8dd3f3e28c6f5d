"""Incremental checkpoints under any order of writing, completion, abort and notification: what is referred to exists.

Backends of a few subtasks, with real files and the real registry of shared files. The coordinator's rules around them
are a few lines: what is acknowledged is registered, a completion subsumes what is older, tasks hear of that late.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle, SharedStateRegistry, SubtaskState, is_shared
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.registry import register_backend
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.state_files import locate
from ckpt_runtime.task.in_flight import InFlight, PersistedBuffers
from ckpt_runtime.task.restored_input import create_keyed_backend
from ckpt_runtime.task.snapshot_files import write_snapshot
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, SnapshotMeasures, SubtaskSnapshot
from tests.support.effort import examples
from tests.support.pipelines.file_backend import FileKeyedStateBackend

GROUPS = 32
KEYS = range(40)
KEY = pa.schema([("k", pa.int64())])
VALUE = pa.schema([("v", pa.int64())])
GROUP_OF = key_groups_of(hash_arrays([pa.array(KEYS, pa.int64())], ["k"]), GROUPS).tolist()

register_backend("files", FileKeyedStateBackend)


@dataclass
class Checkpoint:
    """From its barriers to its end: what is still to be written, what was acknowledged, what it shows."""

    directory: Path
    to_write: dict[int, SubtaskSnapshot]
    shows: dict[int, int]
    states: dict[int, SubtaskState] = field(default_factory=dict)

    @property
    def handles(self) -> list[KeyedHandle]:
        states = self.states.values()
        return [handle for state in states for operator in state.operators.values() for handle in operator.keyed]

    def files(self) -> set[Path]:
        here = resolve(str(self.directory))
        return {Path(locate(here, file.path).path) for state in self.states.values() for file in state.files()}

    def release(self) -> None:
        for snapshot in self.to_write.values():
            snapshot.release()


class SharedFilesOfCheckpoints(RuleBasedStateMachine):
    """Forty keys with a number each, over one to three subtasks."""

    backend_name = "files"
    configuration: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ckpt-property-"))
        self.shared = self.root / "shared"
        self.shared.mkdir()
        self.registry = SharedStateRegistry()
        self.model: dict[int, int] = {}
        self.pending: dict[int, Checkpoint] = {}
        self.completed: Checkpoint | None = None
        self.acknowledged: dict[int, set[Path]] = {}
        self.users: set[Path] = set()
        self.full = False
        self.news: list[tuple[str, int]] = []
        self.next_id = 1
        self.backends: list[KeyedStateBackend] = []

    def teardown(self) -> None:
        self.stop()
        shutil.rmtree(self.root)

    def stop(self) -> None:
        for checkpoint in self.pending.values():
            checkpoint.release()
            shutil.rmtree(checkpoint.directory)
        self.pending = {}
        self.news = []
        for backend in self.backends:
            backend.close()
        assert list(self.root.glob("local-*")) == [], "local files stayed"

    def deployed(self, parallelism: int, found: Checkpoint | None, *, owned: bool) -> list[KeyedStateBackend]:
        ranges = [key_group_range(GROUPS, parallelism, index) for index in range(parallelism)]
        return [self.opened(groups, found, owned=owned) for groups in ranges]

    def opened(
        self, groups: KeyGroupRange, found: Checkpoint | None, *, owned: bool, names: str = "local-"
    ) -> KeyedStateBackend:
        parameters = BackendParameters(
            "op", groups, GROUPS, lambda: tempfile.mkdtemp(prefix=names, dir=self.root), self.configuration
        )
        if found is None:
            return create_keyed_backend(self.backend_name, parameters, (), "", owned=owned)
        handles = [handle for handle in found.handles if len(handle.key_groups.intersection(groups))]
        return create_keyed_backend(self.backend_name, parameters, handles, str(found.directory), owned=owned)

    def take(self, properties: CheckpointProperties) -> Checkpoint:
        number, self.next_id = self.next_id, self.next_id + 1
        directory = self.root / f"chk-{number}"
        directory.mkdir()
        shared = "" if properties.is_savepoint else str(self.shared)
        barrier = CheckpointBarrier(number, 0, CheckpointOptions(properties, str(directory), shared_directory=shared))
        return Checkpoint(
            directory,
            {
                index: SubtaskSnapshot(
                    barrier,
                    (OperatorSnapshot("op", (), backend.snapshot(number, properties)),),
                    InFlight(),
                    SnapshotMeasures(0, 0, 0, 0.0),
                )
                for index, backend in enumerate(self.backends)
            },
            dict(self.model),
        )

    @initialize(parallelism=st.integers(1, 3))
    def deploy(self, parallelism: int) -> None:
        self.backends = self.deployed(parallelism, None, owned=True)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3), value=st.integers(0, 2))
    def change(self, keys: list[int], value: int) -> None:
        """Two of the three values are numbers, the third is none."""
        for key in keys:
            (owner,) = [backend for backend in self.backends if GROUP_OF[key] in backend.key_groups]
            state = owner.value_state("s", KEY, VALUE)
            if value:
                state.put((key,), (value,))
                self.model[key] = value
            else:
                state.clear((key,))
                self.model.pop(key, None)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=9, unique=True))
    def read(self, keys: list[int]) -> None:
        """As operators do: keys are named beforehand, and the backend does its housekeeping afterwards."""
        for backend in self.backends:
            state = backend.value_state("s", KEY, VALUE)
            own = [key for key in keys if GROUP_OF[key] in backend.key_groups]
            backend.prefetch([(key,) for key in own])
            found = {key: state.get((key,)) for key in own}
            assert found == {key: None if key not in self.model else (self.model[key],) for key in own}
            backend.maintain()

    @precondition(lambda self: len(self.pending) < 3)
    @rule(full=st.integers(0, 3).map(lambda drawn: drawn == 0))
    def trigger(self, full: bool) -> None:
        number = self.next_id
        self.pending[number] = self.take(CheckpointProperties(full=full or self.full))

    @precondition(lambda self: any(checkpoint.to_write for checkpoint in self.pending.values()))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.write_all(data.draw(st.sampled_from([n for n, found in self.pending.items() if found.to_write])))

    def write_all(self, number: int) -> None:
        checkpoint = self.pending[number]
        for subtask in list(checkpoint.to_write):
            written = write_snapshot(checkpoint.to_write.pop(subtask), 0, PersistedBuffers())
            checkpoint.states[subtask] = written.state
            self.acknowledged.setdefault(number, set()).update(Path(at.path) for at in written.files.locations)
            # Refuses what refers to a file that is gone, or to one of the user's.
            self.registry.register(number, written.state)

    @precondition(lambda self: any(not checkpoint.to_write for checkpoint in self.pending.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.completes(data.draw(st.sampled_from([n for n, found in self.pending.items() if not found.to_write])))

    def completes(self, number: int) -> None:
        for older in [n for n in self.pending if n < number]:
            self.give_up(older)
        subsumed, self.completed = self.completed, self.pending.pop(number)
        for path in self.registry.unregister_unused(number):
            Path(resolve(path).path).unlink()
        if subsumed is not None and not subsumed.files() & self.users:
            shutil.rmtree(subsumed.directory)
        self.full = False
        self.news.append(("completed", number))
        newer = set().union(*(files for known, files in self.acknowledged.items() if known > number))
        needed = self.completed.files() | newer | self.users
        assert set(self.shared.iterdir()) == {path for path in needed if path.parent == self.shared and path.exists()}

    @rule(keys=st.lists(st.sampled_from(KEYS[:5]), max_size=2), value=st.integers(0, 2))
    def checkpoint(self, keys: list[int], value: int) -> None:
        """A whole one, as most are: nothing goes wrong."""
        self.change(keys, value)
        self.trigger(False)
        number = self.next_id - 1
        self.write_all(number)
        self.completes(number)
        self.hear(1)

    def give_up(self, number: int) -> None:
        checkpoint = self.pending.pop(number)
        checkpoint.release()
        shutil.rmtree(checkpoint.directory)
        self.news.append(("aborted", number))

    @precondition(lambda self: len(self.pending) > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(sorted(self.pending))))

    @precondition(lambda self: self.news)
    @rule(lost=st.integers(0, 4))
    def hear(self, lost: int) -> None:
        """In order, and late; now and then one is lost."""
        news, self.news = self.news, []
        for what, number in news[lost == 0 :]:
            for backend in self.backends:
                (backend.notify_complete if what == "completed" else backend.notify_aborted)(number)

    @precondition(lambda self: self.completed is not None and not self.pending)
    @rule(parallelism=st.integers(1, 3), owned=st.booleans())
    def restart(self, parallelism: int, owned: bool) -> None:
        """From the latest checkpoint, or from it as a user's snapshot, into which nothing may refer."""
        assert self.completed is not None
        self.stop()
        if not owned:
            self.users |= self.completed.files()
            self.registry = SharedStateRegistry()
            self.registry.register_all(self.next_id - 1, self.completed.states.values(), deletable=False)
            self.acknowledged = {}
            for path in set(self.shared.iterdir()) - self.users:
                path.unlink()  # of another job now
            self.full = True
        self.model = dict(self.completed.shows)
        self.backends = self.deployed(parallelism, self.completed, owned=owned)

    @precondition(lambda self: self.next_id % 4 == 0)
    @rule()
    def savepoint(self) -> None:
        savepoint = self.take(CheckpointProperties(CheckpointType.SAVEPOINT))
        for subtask, snapshot in savepoint.to_write.items():
            savepoint.states[subtask] = write_snapshot(snapshot, 0, PersistedBuffers()).state
        assert not any(is_shared(file) for state in savepoint.states.values() for file in state.files())
        self.check(savepoint)
        shutil.rmtree(savepoint.directory)

    @invariant()
    def the_completed_checkpoint_is_whole(self) -> None:
        assert all(path.exists() for path in self.users)
        if self.completed is not None:
            assert all(path.exists() for path in self.completed.files())

    @precondition(lambda self: self.completed is not None and self.next_id % 4 == 0)
    @rule()
    def look(self) -> None:
        assert self.completed is not None
        self.check(self.completed)

    def check(self, found: Checkpoint) -> None:
        backend = self.opened(KeyGroupRange(0, GROUPS - 1), found, owned=False, names="look-")
        state = backend.value_state("s", KEY, VALUE)
        content = {key: value[0] for key in KEYS if (value := state.get((key,))) is not None}
        backend.close()
        assert content == found.shows


class SharedFilesOfRocksDB(SharedFilesOfCheckpoints):
    """With a cache that most of the keys do not fit into."""

    backend_name = "rocksdb"
    configuration: ClassVar[dict[str, str]] = {
        "state.backend.rocksdb.cache.max-keys": "6",
        "state.backend.rocksdb.memory.fixed-per-slot": "8mb",
    }


class SharedPartsInMemory(SharedFilesOfCheckpoints):
    """The in-memory backend, whose increments are parts."""

    backend_name = "hashmap"
    configuration: ClassVar[dict[str, str]] = {"execution.checkpointing.incremental": "true"}


TestSharedFilesOfCheckpoints = SharedFilesOfCheckpoints.TestCase
TestSharedFilesOfCheckpoints.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
TestSharedFilesOfRocksDB = SharedFilesOfRocksDB.TestCase
TestSharedFilesOfRocksDB.settings = settings(max_examples=examples(12), stateful_step_count=30, deadline=None)
TestSharedPartsInMemory = SharedPartsInMemory.TestCase
TestSharedPartsInMemory.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
