"""What must hold on every schedule, checked as it happens: checkpoints, files, the sink's content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.storage.claims import CLAIM_NAME, read_claim
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import METADATA_NAME
from ckpt_runtime.storage.state_files import locate
from tests.simulation.file_system import PROTOCOL
from tests.simulation.jobs.rows import Row
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.jobs.job_master import JobMaster
    from tests.simulation.jobs.world import World

SAVEPOINTS_PATH = "jobs/savepoints"


class CheckpointLedger:
    """Each checkpoint of a run ends once, completed or aborted, within its timeout (invariant 4)."""

    def __init__(self, master: JobMaster) -> None:
        self._master = master
        self.open: dict[int, float] = {}
        self.completed: set[int] = set()
        self.aborted: dict[int, str] = {}
        self._latest_timeout = 0
        self._greatest_timeout = 0

    def allow(self, timeout_ms: int) -> None:
        """A timeout that may be in force from now on."""
        self._greatest_timeout = max(self._greatest_timeout, timeout_ms)

    def triggered(self, checkpoint_id: int) -> None:
        if checkpoint_id in self.open or checkpoint_id in self.completed or checkpoint_id in self.aborted:
            raise Violation(f"checkpoint {checkpoint_id} is triggered twice")
        self.allow(self._master.coordinator.configuration.timeout_ms)
        self.open[checkpoint_id] = self._master.world.now

    def extended(self, checkpoint_id: int) -> None:
        raise Violation(f"checkpoint {checkpoint_id} is rescued although the policy is off")

    def ended_well(self, checkpoint_id: int) -> None:
        self._ended(checkpoint_id, "completed")
        self.completed.add(checkpoint_id)

    def ended_badly(self, checkpoint_id: int, failure: str) -> None:
        started = self._ended(checkpoint_id, failure)
        self.aborted[checkpoint_id] = failure
        if "expired" in failure and started > self._master.world.calm_since:
            raise Violation(f"checkpoint {checkpoint_id} expires although nothing fails any more")
        world = self._master.world
        waited, due = world.now - started, started + self._greatest_timeout
        if "expired" in failure and waited > self._greatest_timeout + 50 + world.spent_since(due):
            raise Violation(f"checkpoint {checkpoint_id} expires after {waited} ms")

    def _ended(self, checkpoint_id: int, how: str) -> float:
        started = self.open.pop(checkpoint_id, None)
        if started is None:
            raise Violation(f"checkpoint {checkpoint_id} ends twice: {how}")
        return started

    def check_all_ended(self) -> None:
        if self.open:
            raise Violation(f"checkpoints {sorted(self.open)} never ended")


class Snapshots:
    """Which snapshots count: those with a pointer, and those that are the user's. Their files exist (invariant 1)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pointers: dict[tuple[int, int], CompletedCheckpoint] = {}
        self._users: dict[str, CompletedCheckpoint] = {}
        self._latest: dict[int, CompletedCheckpoint] = {}
        self._protected: Counter[str] = Counter()
        self._known: dict[int, tuple[CompletedCheckpoint, list[str]]] = {}
        self._unfinished: set[str] = set()
        self._duplicable: dict[tuple[int, int], set[str]] = {}

    def point_to(self, master: JobMaster, checkpoint: CompletedCheckpoint) -> None:
        key = (master.number, checkpoint.id)
        if key not in self._pointers:
            self._pointers[key] = checkpoint
            self._latest[master.number] = checkpoint
            self._protect(checkpoint)
            self._world.completing(master, checkpoint)

    def latest_of(self, master: JobMaster) -> CompletedCheckpoint | None:
        """The newest that had a pointer in that run."""
        return self._latest.get(master.number)

    def forget(self, master: JobMaster, checkpoint_id: int, *, retained: bool) -> None:
        """The pointer goes. ``retained``: the files stay, the user's from now on."""
        checkpoint = self._pointers.pop((master.number, checkpoint_id), None)
        if checkpoint is not None:
            if retained:
                self.keep(checkpoint)
            self._release(checkpoint)

    def keep(self, checkpoint: CompletedCheckpoint) -> None:
        """A user's from now on."""
        if checkpoint.directory not in self._users:
            self._users[checkpoint.directory] = checkpoint
            self._protect(checkpoint)

    def release(self, checkpoint: CompletedCheckpoint) -> None:
        """No longer a user's: a job has claimed it, or the user disposes of it."""
        if self._users.pop(checkpoint.directory, None) is not None:
            self._release(checkpoint)

    def retained_of(self, run: int) -> list[CompletedCheckpoint]:
        """Checkpoints of an ended run that are the user's now, oldest first."""
        job_id = f"{run:032x}"
        mine = (kept for kept in self._users.values() if kept.job_id == job_id and not kept.is_savepoint)
        return sorted(mine, key=lambda kept: kept.id)

    def forget_unfinished(self) -> None:
        """A driver died: no one deletes what lies among the savepoints and was never reported to a user as one."""
        known = {path.rpartition("/")[0] for path, count in self._protected.items() if count > 0}
        files = self._world.files
        below = [path for path in files.directories if path.startswith(f"{SAVEPOINTS_PATH}/")]
        below += [path.rpartition("/")[0] for path in files.files if path.startswith(f"{SAVEPOINTS_PATH}/")]
        self._unfinished.update(path for path in below if path not in known)

    def _protect(self, checkpoint: CompletedCheckpoint) -> None:
        paths = self._paths(checkpoint)
        files = self._world.files.files
        missing = [path for path in paths if path not in files]
        if missing:
            raise Violation(f"checkpoint {checkpoint.id} in {checkpoint.directory} lacks files: {len(missing)}")
        self._protected.update(paths)

    def _release(self, checkpoint: CompletedCheckpoint) -> None:
        self._protected.subtract(self._paths(checkpoint))

    def _paths(self, checkpoint: CompletedCheckpoint) -> list[str]:
        """Found once: what a snapshot refers to does not change."""
        known = self._known.get(id(checkpoint))
        if known is None:
            known = self._known[id(checkpoint)] = (checkpoint, _paths(checkpoint))
        return known[1]

    def savepoint_begins(self, master: JobMaster, checkpoint_id: int, retained: Iterable[RetainedCheckpoint]) -> None:
        """What it may duplicate of what is retained now stays until it has ended."""
        shared = (path for entry in retained for path in self._paths(entry.checkpoint) if "/shared/" in path)
        self._duplicable[master.number, checkpoint_id] = set(shared)

    def deleting(self, path: str) -> None:
        """Called before a file goes."""
        master = self._world.master
        for checkpoint_id in master.coordinator.pending_ids:
            # Every job counts its checkpoints from one, so an id alone may be a savepoint of an earlier run.
            if path in self._duplicable.get((master.number, checkpoint_id), ()):
                self._world.broken = Violation(f"a file is deleted while savepoint {checkpoint_id} duplicates it")
        if self._protected[path]:
            owners = [c.directory for c in (*self._pointers.values(), *self._users.values()) if path in self._paths(c)]
            # Raised here it would look like a fault of the storage.
            self._world.broken = Violation(f"a file of {owners} is deleted")

    def check_leftovers(self) -> None:
        """After the job's end nothing is left but the user's snapshots."""
        left = [
            path
            for path in self._world.files.files
            if not self._protected[path] and path.rpartition("/")[0] not in self._unfinished
        ]
        left = [path for path in left if not self._is_needed_claim(path)]
        if self._pointers:
            raise Violation(f"pointers are left: {sorted(self._pointers)}")
        if left:
            kinds = sorted({path.split("/")[-2] for path in left})
            raise Violation(f"files are left that nothing refers to: {len(left)} in {kinds}")

    def _is_needed_claim(self, path: str) -> bool:
        """A retained checkpoint may need files that its job has claimed: then the claim outlives the job."""
        place, _, name = path.rpartition("/")
        claim = read_claim(resolve(f"{PROTOCOL}://{place}")) if name == CLAIM_NAME else None
        return claim is not None and any(self._protected[f"{place}/{file}"] for file in claim.files)


def _paths(checkpoint: CompletedCheckpoint) -> list[str]:
    """Of the metadata and all state files, as the store has them."""
    directory = resolve(checkpoint.directory)
    paths = {directory.child(METADATA_NAME).path: None}
    for key in sorted(checkpoint.states):
        for file in checkpoint.states[key].files():
            try:
                paths[locate(directory, file.path).path] = None
            except StorageError as error:
                raise Violation(f"checkpoint {checkpoint.id} refers to {file.path!r}: {error}") from error
    return list(paths)


class Sink:
    """What transactions committed, in a store that outlives all runs. Committing again is the same."""

    def __init__(self) -> None:
        self._committed: dict[str, tuple[int, int, list[Row]]] = {}

    @property
    def rows(self) -> list[Row]:
        return [row for _, _, rows in self._committed.values() for row in rows]

    def commit(self, transaction: str, run: int, checkpoint_id: int, rows: list[Row]) -> None:
        known = self._committed.setdefault(transaction, (run, checkpoint_id, rows))
        if known[2] != rows:
            raise Violation(f"transaction {transaction} is committed again with other rows")

    def rewind(self, run: int, checkpoint_id: int) -> None:
        """A user starts from an older savepoint and takes back what the sink got after it."""
        self._committed = {
            name: entry for name, entry in self._committed.items() if (entry[0], entry[1]) <= (run, checkpoint_id)
        }

    def check_not_undone(self, run: int, checkpoint_id: int) -> None:
        """A restore from that checkpoint must not repeat what is committed. Without rows nothing is repeated."""
        for name, (committed_run, number, rows) in self._committed.items():
            if rows and (committed_run, number) > (run, checkpoint_id):
                raise Violation(
                    f"transaction {name} is committed, but checkpoint {checkpoint_id} of run {run} is restored"
                )
