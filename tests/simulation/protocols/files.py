"""The simulated files of one schedule, and what must never be deleted of them.

The store itself is that of the simulation of whole jobs. Workers write into it directly; drivers go through the
engine's storage layer, whose write of a snapshot's metadata may fail, be lost, or arrive late.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, is_shared
from ckpt_runtime.storage.metadata import METADATA_NAME
from tests.simulation.file_system import PROTOCOL, ROOT, FileStore
from tests.simulation.protocols.event_loop import DriverCrash

if TYPE_CHECKING:
    from tests.simulation.protocols.world import World

JOB = "a" * 32
ORIGIN_JOB = "b" * 32
DIRECTORY = f"{ROOT}/{JOB}"
SAVEPOINTS = f"{ROOT}/savepoints"


def path_of(url: str) -> str:
    """The store's name of what lies at the URL."""
    return url.removeprefix(f"{PROTOCOL}://")


class SnapshotFiles(NamedTuple):
    """What a snapshot's metadata refers to, with the metadata itself; paths of the store."""

    private: frozenset[str]
    shared: frozenset[str]


class Files(FileStore):
    """``savepoints`` were reported to users as complete; ``user_owned`` has the files of a snapshot by its directory.

    ``orphans`` are files of which no driver heard while it led. ``late`` is metadata of drivers that no longer led when
    it arrived: they were paused in the midst of writing it.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.savepoints: dict[str, CompletedCheckpoint] = {}
        self.user_owned: dict[str, frozenset[str]] = {}
        self.disposed = 0
        self.orphans: set[str] = set()
        self.late: set[str] = set()
        self._world = world
        self._known: dict[tuple[int, str], SnapshotFiles] = {}
        self._answer_is_lost = False
        self.fails = self._fails

    def _fails(self, operation: str) -> bool:
        lost, self._answer_is_lost = self._answer_is_lost and operation == "read fails", False
        return lost

    # --- what lies where

    def files_of(self, checkpoint: CompletedCheckpoint) -> SnapshotFiles:
        key = (checkpoint.id, checkpoint.directory)
        known = self._known.get(key)
        if known is None:
            files = [file for state in checkpoint.states.values() for file in state.files()]
            directory = path_of(checkpoint.directory)
            private = {f"{directory}/{file.path}" for file in files if not is_shared(file)}
            shared = frozenset(path_of(file.path) for file in files if is_shared(file))
            known = self._known[key] = SnapshotFiles(frozenset({*private, f"{directory}/{METADATA_NAME}"}), shared)
        return known

    def missing(self, checkpoint: CompletedCheckpoint) -> list[str]:
        files = self.files_of(checkpoint)
        return sorted(path for path in (*files.private, *files.shared) if path not in self.files)

    def is_retained(self, url: str) -> bool:
        """Whether a checkpoint that a driver counts on refers to the shared file."""
        path = path_of(url)
        checkpoints = [entry.checkpoint for entry in self._world.ha.pointers.values()]
        return any(path in self.files_of(known).shared for known in checkpoints if not known.is_savepoint)

    def has_metadata(self, url: str) -> bool:
        return f"{path_of(url)}/{METADATA_NAME}" in self.files

    def in_directory(self, url: str) -> list[str]:
        """Names of the files in it."""
        prefix = path_of(url) + "/"
        return [path[len(prefix) :] for path in self.files if path.startswith(prefix)]

    # --- workers and users

    def write(self, url: str) -> None:
        """By a worker: writing into a directory that was deleted makes it again."""
        path = path_of(url)
        self.files[path] = b"x"
        self.orphans.add(path)

    def forget(self, directory: str) -> None:
        """Its owner, the user, disposes of a snapshot. No pointer may lead there (invariant 10)."""
        for entry in self._world.ha.pointers.values():
            if entry.checkpoint.directory == directory:
                raise self._world.broke(f"{directory} is disposed of, but checkpoint {entry.checkpoint.id} is retained")
        self.disposed += 1
        self.savepoints.pop(directory, None)
        for path in self.user_owned.pop(directory, frozenset()):
            self.files.pop(path, None)
        for name in self.in_directory(directory):
            del self.files[f"{path_of(directory)}/{name}"]

    # --- drivers

    def put(self, path: str, content: bytes) -> None:
        driver = self._world.running
        if driver is None or not path.endswith(f"/{METADATA_NAME}"):
            super().put(path, content)
            return
        land = partial(self._land, path, content)
        try:
            self._world.step(driver, "writing metadata")
        except DriverCrash:
            if self._world.choices.chance("request is on its way", 0.5):
                land()
            raise
        choices, how = self._world.choices, "done"
        if choices.fault("metadata goes wrong", 0.06):
            how = choices.pick("how metadata goes wrong", ("refused", "refused", "unknown", "lost", "late"))
        if how == "refused":
            raise PermissionError(f"simulated: {path} was not written")
        if how == "late":
            at = self._world.loop.now + choices.delay("late metadata", 20, 200)
            self._world.loop.at(at, None, land)
        elif how != "lost":
            land()
        if how != "done":
            self._answer_is_lost = True
            raise OSError(f"simulated: no answer to the write of {path}")

    def _land(self, path: str, content: bytes) -> None:
        driver = self._world.running
        directory = path.rpartition("/")[0]
        gone = directory not in self.directories
        if gone or driver is None or not driver.leads:
            self.late.add(path)
        self.files[path] = content

    def delete(self, path: str) -> None:
        self._check_deletion(path)
        super().delete(path)

    def _check_deletion(self, path: str) -> None:
        """Raised here alone, a violation would look like a fault of storage."""
        for directory, files in self.user_owned.items():
            if path in files:
                self._world.broke(f"a file of {directory}, which belongs to the user, is deleted")
        for directory, savepoint in self.savepoints.items():
            if path in self.files_of(savepoint).private:
                self._world.broke(f"a file of savepoint {directory} is deleted")
        for number, entry in self._world.ha.pointers.items():
            needed = self.files_of(entry.checkpoint)
            if path in needed.private or path in needed.shared:
                self._world.broke(f"{path} of checkpoint {number} is deleted, and its pointer is there")
