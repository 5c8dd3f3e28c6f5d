"""Claims over any history of jobs that resume from one another: no complete snapshot ever lacks a file.

Files, claims, the retention of the coordinator and the storage effects are the real ones; what tasks would write is
made up. Jobs retain several checkpoints that share files, end with or without them, claim one of those of an earlier
job or a savepoint, and lose deletions with the driver that was about to make them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
    is_shared,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention, SettingsInForce
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint, Retention
from ckpt_runtime.checkpoint.statistics import CheckpointStatsTracker
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.jobmaster.job_host import Pool
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.jobmaster.storage_effects import StorageEffects
from ckpt_runtime.snapshots.job_claims import JobClaims, claim_snapshot
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.claims import Claimant, ClaimedError
from ckpt_runtime.storage.errors import AlreadyExistsError
from ckpt_runtime.storage.filesystem import Location, resolve
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.storage.state_files import StateFileWriter, locate
from tests.support.effort import examples

VERTEX = VertexDescriptor("v", "v", ("u",), 1, 128)
NOW = Instant(0, 0)
SAVEPOINT = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.NATIVE)
RETAINED = 2


class Host:
    """Calls at once, answers when the queue comes to it; a driver that is dying makes no deletion any more."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.dying = False

    def in_pool(self, pool: Pool | str, call: Callable[[], Any], answer: Callable[[Callable[[], Any]], None]) -> None:
        if not (self.dying and pool is Pool.DELETIONS):
            self.queue.append(partial(self._run, call, answer))

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> Any:
        raise AssertionError("nothing fails here")

    def _run(self, call: Callable[[], Any], answer: Callable[[Callable[[], Any]], None]) -> None:
        result = call()
        answer(lambda: result)

    def run(self) -> None:
        while self.queue:
            self.queue.popleft()()


class Job:
    """One run: ``base`` are shared files of its latest checkpoint, to which the next one may still refer."""

    def __init__(
        self, root: Path, number: int, cluster: str, origin: RetainedCheckpoint | None, claims: JobClaims | None
    ) -> None:
        self.job_id = f"{number:032x}"
        self.storage = CheckpointStorage(str(root), self.job_id)
        self.claims = claims
        self.first_id = self.next_id = 1 if origin is None else origin.checkpoint.id + 1
        self.base: dict[str, StateFile] = {}
        self.storage.initialize()
        self.take_over(() if origin is None else (origin,))

    def take_over(self, retained: tuple[RetainedCheckpoint, ...]) -> None:
        self.host = Host()
        self.retention = Retention(
            self.job_id,
            SettingsInForce(
                CheckpointConfiguration(retained=RETAINED, retention=CheckpointRetention.RETAIN_ON_CANCELLATION)
            ),
            retained,
            CheckpointStatsTracker(),
            lambda effect: self.host.queue.append(partial(self.effects.execute, effect)),
        )
        self.effects = StorageEffects(
            self.job_id, self.storage, JobRecord(), self.host, self.tell, lambda: self.retention.entries,  # type: ignore[arg-type]
            range(self.first_id, self.next_id), self.claims,
        )  # fmt: skip
        self.retention.find_leftovers(0)
        self.host.run()
        self.base = {}
        if retained and retained[-1].owned:
            self.base = {name: file for name, file in files_by_name(retained[-1].checkpoint).items() if is_shared(file)}

    def tell(self, event: Any) -> None:
        match event:
            case on.StoreRemoved():
                self.retention.on_store_removed(event, NOW)
            case on.LeftoversFound():
                self.retention.leftovers_found(event, self.next_id)
            case on.CleanupDone():
                self.retention.on_cleanup_done(event, NOW)

    def write(self, directory: Location, shared: Location | None, keep: set[str]) -> SubtaskState:
        """A new file, and those of the base that are kept: referred to, or once more without ``shared``."""
        target, prefix = (directory, "") if shared is None else (shared, f"chk-{self.next_id}-")
        kept = {name: file for name, file in self.base.items() if name in keep}
        for name in [f"f{self.next_id}", *(kept if shared is None else ())]:
            with StateFileWriter(target, 0, prefix) as writer:
                writer.write(name.encode())
                file = writer.finish()
            kept[name] = file if shared is None else StateFile(writer.location.url, file.length, file.checksum)
        with StateFileWriter(directory, 0) as writer:
            writer.write(b"listing")
            files = {**kept, "listing": writer.finish()}
        handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 127), "files", files)
        if shared is not None:
            self.base = kept
        return SubtaskState({"u": OperatorSubtaskState((handle,))}, 1)

    def checkpoint(self, keep: set[str]) -> None:
        directory = self.storage.initialize_checkpoint(self.next_id)
        state = self.write(directory, self.storage.shared, keep)
        wrong = self.retention.register(on.Acknowledged(self.next_id, ExecutionId("v", 0, 0), directory.url, state))
        assert wrong is None
        done = self.metadata(directory, CheckpointProperties(), state)
        self.retention.add(RetainedCheckpoint(done))
        self.next_id += 1
        self.host.run()

    def savepoint(self, directory: Location) -> None:
        self.metadata(directory, SAVEPOINT, self.write(directory, None, set(self.base)))
        self.next_id += 1

    def metadata(
        self, directory: Location, properties: CheckpointProperties, state: SubtaskState
    ) -> CompletedCheckpoint:
        states = {("v", 0): state}
        done = CompletedCheckpoint(self.next_id, self.job_id, 1, 2, directory.url, properties, (VERTEX,), states)
        write_metadata(directory, done.to_json())
        return done

    def end(self, status: str) -> None:
        self.retention.release(status)
        self.retention.delete_unused_shared_files()
        self.host.run()
        self.retention.delete_unused_shared_files()
        self.host.run()
        self.effects.finish(keeps_nothing=self.retention.keeps_nothing, outputs=(), savepoint_id=0)
        self.host.run()


def files_by_name(checkpoint: CompletedCheckpoint) -> dict[str, StateFile]:
    handles = (h for state in checkpoint.states.values() for op in state.operators.values() for h in op.keyed)
    return {name: file for h in handles if isinstance(h, IncrementalKeyedStateHandle) for name, file in h.files.items()}


class Claims(RuleBasedStateMachine):
    """Up to three jobs at once, of one cluster or two."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ckpt-property-"))
        self.living: list[Job] = []
        self.started = 0

    @property
    def snapshots(self) -> list[Path]:
        return sorted(path.parent for path in self.root.rglob("_metadata"))

    @precondition(lambda self: len(self.living) < 3)
    @rule()
    def start_fresh(self) -> None:
        self.started += 1
        self.living.append(Job(self.root, self.started, "a", None, None))

    @precondition(lambda self: len(self.living) < 3 and self.snapshots)
    @rule(data=st.data(), cluster=st.sampled_from("ab"))
    def claim(self, data: st.DataObject, cluster: str) -> None:
        self._claim(data.draw(st.sampled_from(self.snapshots)), cluster)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def upgrade(self, data: st.DataObject) -> None:
        """As the operators do it: the next version starts from a checkpoint that the previous one has left."""
        job = data.draw(st.sampled_from(self.living))
        self.living.remove(job)
        job.end("CANCELED")
        left = sorted(path.parent for path in Path(job.storage.location.path).glob("chk-*/_metadata"))
        if left:
            self._claim(data.draw(st.sampled_from(left)), "a")

    def _claim(self, path: Path, cluster: str) -> None:
        snapshot = open_snapshot(str(path)).metadata
        written = [job.storage.location.url for job in self.living]
        job_id = f"{self.started + 1:032x}"
        claimant = Claimant(job_id, cluster, CheckpointStorage(str(self.root), job_id).location.url)
        before = self.files()
        try:
            claims = claim_snapshot(snapshot, claimant, written)
        except (ClaimedError, ValueError, AlreadyExistsError):
            assert self.files() == before, "what was refused has changed something"
            return
        self.started += 1
        origin = RetainedCheckpoint(snapshot.claimed())
        self.living.append(Job(self.root, self.started, cluster, origin, claims))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        """Several in a row: a snapshot that was claimed is replaced soon."""
        job = data.draw(st.sampled_from(self.living))
        for _ in range(data.draw(st.integers(1, 4))):
            job.checkpoint(data.draw(st.sets(st.sampled_from(sorted(job.base)), max_size=3)) if job.base else set())

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def savepoint(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.living))
        directory = self.root / f"savepoint-{job.job_id[-6:]}-{job.next_id}"
        directory.mkdir()
        job.savepoint(resolve(str(directory)))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), lost=st.booleans())
    def crash(self, data: st.DataObject, lost: bool) -> None:
        """In the midst of a checkpoint whose deletions are lost, or at rest; a pointer names each that is retained."""
        job = data.draw(st.sampled_from(self.living))
        if lost:
            job.host.dying = True
            job.checkpoint(set())
        job.take_over(job.retention.entries)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), status=st.sampled_from(["CANCELED", "CANCELED", "FAILED", "FINISHED"]))
    def end(self, data: st.DataObject, status: str) -> None:
        job = data.draw(st.sampled_from(self.living))
        self.living.remove(job)
        job.end(status)

    def files(self) -> set[Path]:
        return {path for path in self.root.rglob("*") if path.is_file()}

    @invariant()
    def every_complete_snapshot_has_its_files(self) -> None:
        retained = [entry.checkpoint for job in self.living for entry in job.retention.entries]
        written = [Path(job.storage.location.path) for job in self.living]  # with what a dead driver has not deleted
        left = [open_snapshot(str(path)).metadata for path in self.snapshots if path.parent not in written]
        for snapshot in (*left, *retained):
            here = resolve(snapshot.directory)
            for file in (file for state in snapshot.states.values() for file in state.files()):
                assert Path(locate(here, file.path).path).exists(), (snapshot.directory, file.path)

    @invariant()
    def claims_are_those_of_living_jobs_or_of_retained_checkpoints(self) -> None:
        if not self.living and not self.snapshots:
            assert not list(self.root.rglob("claim"))

    def teardown(self) -> None:
        shutil.rmtree(self.root)


def test_complete_snapshots_never_lack_a_file() -> None:
    run_state_machine_as_test(
        Claims, settings=settings(max_examples=examples(12), stateful_step_count=25, deadline=None)
    )
