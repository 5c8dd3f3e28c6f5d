"""Simulated storage: directories with files, and what high availability keeps. Checks each change, decides nothing.

The state that survives every crash. A deletion that takes away a file which something durable refers to is a
:class:`Violation` at once, whoever asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.storage.job_store import StoredJob
from tests.simulation.schedules.violation import Violation

METADATA = "_metadata"


@dataclass(slots=True)
class JobResult:
    """How the job ended; ``dirty`` until everything else of it is cleaned up."""

    status: str
    dirty: bool = True


@dataclass(slots=True)
class HaStore:
    """High availability. ``epoch`` is the fence; ``revision`` rises with each write of the plan.

    A pointer can be written by a driver whose epoch has passed, since the check and the write are two steps; the plan
    is written by compare-and-set, and a new leader writes it again before it reads it. ``stale`` pointers are those
    that were written too late: no leader counts on their checkpoints. From the adoption of an epoch on, no earlier
    driver stores a result or removes a pointer. ``disposals`` are directories outside the job's own that are to be
    deleted, by the id of the checkpoint whose pointer is gone; ``failures`` the history that a later driver shows.
    ``signs`` are those of life in this epoch, the last one at ``last_sign``; ``released`` by who has led in it.
    ``attempts`` is the first number that no deployment has used up. ``graph`` is what the job runs, and ``document``
    has its configuration.
    """

    graph: JobGraph
    document: StoredJob
    overrides: str | None = None
    revision: int = 1
    epoch: int = 0
    signs: int = 0
    last_sign: int = 0
    released: bool = False
    counter: int = 1
    attempts: int = 0
    pointers: dict[int, RetainedCheckpoint] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    result: JobResult | None = None
    results_of: int = 0
    removals_of: int = 0
    disposals: dict[int, str] = field(default_factory=dict)
    failures: tuple[int, ...] = ()
    failures_revision: int = 0
    job_is_stored: bool = True


@dataclass(slots=True)
class _Files:
    private: frozenset[str]
    shared: frozenset[str]


class FileStore:
    """Directories by name, files by name in them, and shared files by absolute path."""

    def __init__(self, ha: HaStore) -> None:
        self.directories: dict[str, set[str]] = {}
        self.shared: set[str] = set()
        self.savepoints: dict[str, CompletedCheckpoint] = {}
        self.user_owned: dict[str, frozenset[str]] = {}
        self.disposed = 0
        self.user_shared: frozenset[str] = frozenset()
        self.orphans: set[tuple[str, str]] = set()
        self.half_made: set[str] = set()
        self._ha = ha
        self._wanted: dict[tuple[int, str], _Files] = {}

    def files_of(self, checkpoint: CompletedCheckpoint) -> _Files:
        """What its metadata refers to."""
        key = (checkpoint.id, checkpoint.directory)
        known = self._wanted.get(key)
        if known is None:
            paths = [file.path for state in checkpoint.states.values() for file in state.files()]
            private = frozenset(path for path in paths if not path.startswith("/"))
            known = _Files(private | {METADATA}, frozenset(path for path in paths if path.startswith("/")))
            self._wanted[key] = known
        return known

    def is_retained(self, path: str) -> bool:
        """Whether a checkpoint that a driver may count on refers to the shared file."""
        checkpoints = [entry.checkpoint for entry in self._ha.pointers.values()]
        live = (known for known in checkpoints if known.id not in self._ha.stale and not known.is_savepoint)
        return any(path in self.files_of(checkpoint).shared for checkpoint in live)

    def missing(self, checkpoint: CompletedCheckpoint) -> list[str]:
        """Files of it that do not exist."""
        files = self.files_of(checkpoint)
        present = self.directories.get(checkpoint.directory, set())
        return sorted((files.private - present) | (files.shared - self.shared))

    def make_directory(self, name: str) -> None:
        self.directories.setdefault(name, set())

    def write(self, directory: str, name: str) -> None:
        """As an object store: writing into a directory that was deleted makes it again.

        A file is an orphan until its driver has heard of it.
        """
        self.directories.setdefault(directory, set()).add(name)
        self.orphans.add((directory, name))

    def delete_directory(self, name: str) -> None:
        """With everything in it."""
        if name in self.user_owned or name in self.savepoints:
            raise Violation(f"{name}, which belongs to the user, is deleted")
        for entry in self._ha.pointers.values():
            if entry.checkpoint.directory == name and entry.checkpoint.id not in self._ha.stale:
                raise Violation(f"{name} is deleted, but the pointer to checkpoint {entry.checkpoint.id} is there")
        self.directories.pop(name, None)

    def dispose(self, name: str) -> None:
        """By its owner, the user; what it shares with others stays. No pointer may lead there (invariant 10)."""
        for entry in self._ha.pointers.values():
            if entry.checkpoint.directory == name and entry.checkpoint.id not in self._ha.stale:
                raise Violation(f"{name} is disposed of, but checkpoint {entry.checkpoint.id} is retained there")
        self.disposed += 1
        self.savepoints.pop(name, None)
        self.user_owned.pop(name, None)
        self.directories.pop(name, None)

    def delete_files(self, directory: str, names: list[str]) -> None:
        """Single private files."""
        for entry in self._ha.pointers.values():
            mine = entry.checkpoint.directory == directory and entry.checkpoint.id not in self._ha.stale
            lost = self.files_of(entry.checkpoint).private & set(names) if mine else None
            if lost:
                raise Violation(f"{sorted(lost)} of checkpoint {entry.checkpoint.id} are deleted")
        if directory in self.savepoints and self.files_of(self.savepoints[directory]).private & set(names):
            raise Violation(f"files of savepoint {directory} are deleted")
        files = self.directories.get(directory)
        if files is not None:
            files.difference_update(names)
            if not files:
                del self.directories[directory]

    def delete_shared(self, paths: tuple[str, ...]) -> None:
        gone = frozenset(paths)
        if gone & self.user_shared:
            raise Violation(f"{sorted(gone & self.user_shared)} of the user's snapshot are deleted")
        for entry in self._ha.pointers.values():
            if self.files_of(entry.checkpoint).shared & gone and entry.checkpoint.id not in self._ha.stale:
                raise Violation(f"shared files {sorted(gone)} of checkpoint {entry.checkpoint.id} are deleted")
        self.shared -= gone
