"""The savepoint catalogue: every savepoint below a directory with what is known of it, and which is good.

Found by listing the directory, whatever session or tool looks and whatever job wrote the snapshots: each savepoint has
its entry beside its metadata (``storage/savepoint_entry.py``), and of one without an entry its metadata tells what it
can. Blocks.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.snapshots.snapshot import Snapshot, open_snapshot
from ckpt_runtime.storage.checkpoint_storage import SHARED_NAME, TASK_OWNED_NAME
from ckpt_runtime.storage.disposal import SnapshotDisposal
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import (
    Location,
    check_bucket,
    check_directory,
    is_directory,
    is_plain_name,
    list_names,
    resolve,
)
from ckpt_runtime.storage.savepoint_entry import (
    CATALOGUE_NAME,
    Mark,
    MarkKind,
    SavepointEntry,
    change_entry,
    read_entry,
)
from ckpt_runtime.storage.snapshot_metadata import METADATA_NAME, has_metadata, snapshot_directory

MAX_DEPTH = 4
MAX_DIRECTORIES = 20_000
NOT_ALLOWED = (errno.EACCES, errno.EPERM)
_PASSED_OVER = (*NOT_ALLOWED, errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.ESRCH)
"""What says that a directory is no place for savepoints, and not that its storage is away."""
_NO_SNAPSHOTS = (SHARED_NAME, TASK_OWNED_NAME)


def find_places(
    directory: Location, depth: int = MAX_DEPTH, at_most: int | None = MAX_DIRECTORIES
) -> Iterator[Location]:
    """Directories with metadata, or that only an entry of the catalogue is left in, in the order of their names.

    This one is included; none lies in another. ``depth`` says how many levels below are looked at. What lies below and
    may not, or cannot, be listed is passed over. Raises :class:`StorageError` when this one cannot be listed, and
    :class:`InvalidLocationError` when it would have to look into more than ``at_most`` directories.
    """
    waiting = [(directory, depth)]
    for seen in itertools.count(1):
        if not waiting:
            return
        if at_most is not None and seen > at_most:
            message = (
                f"there are more than {at_most} directories below {directory.url}; name one nearer to the savepoints"
            )
            raise InvalidLocationError(message, directory.url)
        found, levels = waiting.pop()
        try:
            names = list_names(found)
        except StorageError as error:
            if found is directory or error.errno not in _PASSED_OVER:
                raise
            continue
        if METADATA_NAME in names or CATALOGUE_NAME in names:
            yield found
        elif levels > 0:
            inner = [name for name in names if is_plain_name(name) and name not in _NO_SNAPSHOTS]
            waiting += [(found.child(name), levels - 1) for name in reversed(inner) if is_directory(found.child(name))]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TakenBy:
    """What a job knows of its savepoint beyond the metadata. ``program`` is the digest that names the code."""

    job_name: str
    program: str
    configuration_version: int
    cluster: str
    requester: str | None = None


@dataclass(frozen=True, slots=True)
class CataloguedSavepoint:
    """A savepoint as the catalogue shows it. ``problem`` says why it is not good; ``entry`` None: it cannot be read."""

    location: str
    entry: SavepointEntry | None
    problem: str | None = None

    @property
    def is_good(self) -> bool:
        """Complete, and failed in neither its newest verification nor its newest drill."""
        return self.problem is None

    def is_of(self, job: str) -> bool:
        """Whether a job of this id or name took it."""
        return self.entry is not None and job in (self.entry.job_id, self.entry.job_name)


def described(metadata: CompletedCheckpoint, taken_by: TakenBy | None = None) -> SavepointEntry:
    """The entry of a savepoint: what its metadata says, and what only its job knew."""
    states = metadata.states.values()
    entry = SavepointEntry(
        job_id=metadata.job_id,
        savepoint_id=metadata.id,
        triggered_at_ms=metadata.timestamp,
        completed_at_ms=metadata.completion_timestamp,
        format=metadata.format.value,
        state_backend=metadata.state_backend,
        bytes=sum(state.bytes for state in states),
        files=len({file.path for state in states for file in state.files()}),
        written_by=metadata.written_by,
        lineage=metadata.lineage_id,
    )
    if taken_by is None:
        return entry
    return replace(
        entry,
        job_name=taken_by.job_name,
        program=taken_by.program,
        configuration_version=taken_by.configuration_version,
        cluster=taken_by.cluster,
        taken_by=taken_by.requester,
    )


def record_savepoint(url: str, taken_by: TakenBy) -> None:
    """Makes the entry of a savepoint that a job has just taken; marks that are there already stay.

    Raises :class:`StorageError` when there is none then.
    """
    snapshot = open_snapshot(url, own=True)
    entry = described(snapshot.metadata, taken_by)

    def with_facts(present: SavepointEntry) -> SavepointEntry:
        return replace(entry, verifications=present.verifications, drills=present.drills, disposing=present.disposing)

    change_entry(snapshot.directory, with_facts, lambda: entry)


def mark_savepoint(path: str | Location, kind: MarkKind, mark: Mark) -> SavepointEntry:
    """Notes the result of a verification or a drill. Raises as opening the savepoint does, and StorageError.

    :class:`InvalidLocationError` for a checkpoint: it is its job's, and goes without being asked for.
    """
    snapshot = open_savepoint(path)
    return change_entry(
        snapshot.directory, lambda entry: entry.marked(kind, mark), lambda: described(snapshot.metadata)
    )


def mark_damaged(path: str | Location, mark: Mark) -> None:
    """Notes a failed verification of a savepoint whose metadata cannot be read, if it has an entry. Raises as above."""
    directory = snapshot_directory(path if isinstance(path, Location) else resolve(path)).real()
    present = read_entry(directory)
    if present is not None:
        change_entry(directory, lambda entry: entry.marked(MarkKind.VERIFICATION, mark), lambda: present)


def open_savepoint(path: str | Location) -> Snapshot:
    """As ``open_snapshot``, by its own place. Raises :class:`InvalidLocationError` for a checkpoint."""
    snapshot = open_snapshot(snapshot_directory(path if isinstance(path, Location) else resolve(path)).real())
    if not snapshot.metadata.is_savepoint:
        url = snapshot.directory.url
        raise InvalidLocationError(f"{url} is a checkpoint; the catalogue is one of savepoints", url)
    return snapshot


def list_savepoints(directory: str | Location, job: str | None = None) -> list[CataloguedSavepoint]:
    """The savepoints below a directory, the latest first; then those that nothing can be told of.

    ``job`` is an id or a name. One that cannot be read now is shown as that. Raises :class:`NotFoundError` when there
    is no such directory, and StorageError when it cannot be listed, also because too much lies below it.
    """
    return sorted(_found(directory, job, look_if_possible), key=latest_first)


def _found(
    directory: str | Location, job: str | None, look: Callable[[Location], CataloguedSavepoint | None]
) -> list[CataloguedSavepoint]:
    base = directory if isinstance(directory, Location) else resolve(directory)
    check_listable(base)
    found = (catalogued for place in find_places(base) if (catalogued := look(place)) is not None)
    return [catalogued for catalogued in found if job is None or catalogued.is_of(job)]


def check_listable(directory: Location) -> None:
    """Raises :class:`NotFoundError` when there is no such directory, or no such bucket."""
    if directory.is_object_store:
        check_bucket(directory)
    elif not is_directory(directory):
        raise NotFoundError(f"there is no directory {directory.url}", directory.url)


def latest_good(directory: str | Location, job: str | None = None) -> CataloguedSavepoint | None:
    """The latest savepoint that is good and whose metadata can be read; None when there is none.

    Raises as :func:`list_savepoints`, and StorageError when one cannot be read now: an older one is not the latest.
    """
    for catalogued in sorted(_found(directory, job, look_at), key=latest_first):
        if catalogued.is_good:
            with suppress(CorruptFileError, NotFoundError, InvalidLocationError):
                open_savepoint(catalogued.location)
                return catalogued
    return None


def look_if_possible(place: Location) -> CataloguedSavepoint | None:
    """As :func:`look_at`; a place that cannot be looked at now is one with a problem."""
    try:
        return look_at(place)
    except StorageError as error:
        return CataloguedSavepoint(place.url, None, str(error))


def look_at(place: Location) -> CataloguedSavepoint | None:
    """One savepoint, or what is left of it; None for a checkpoint. Raises StorageError when it cannot be told now."""
    try:
        entry = read_entry(place)
        if entry is None:
            metadata = open_snapshot(place).metadata
            if not metadata.is_savepoint:
                return None
            entry = described(metadata)
        return CataloguedSavepoint(place.url, entry, _problem_of(place, entry))
    except (CorruptFileError, NotFoundError, InvalidLocationError) as error:
        return CataloguedSavepoint(place.url, None, str(error))


def _problem_of(place: Location, entry: SavepointEntry) -> str | None:
    if entry.disposing is not None:
        return "it is being deleted, or its deletion was broken off: dispose of it again"
    if not has_metadata(place):
        return "it has no metadata any more"
    for kind, marks in (("verification", entry.verifications), ("drill", entry.drills)):
        if marks and not marks[-1].passed:
            return f"its newest {kind} failed: {marks[-1].detail or 'no reason was given'}"
    return None


def latest_first(catalogued: CataloguedSavepoint) -> tuple[bool, int, str]:
    """The key to sort by. What cannot be read comes last."""
    entry = catalogued.entry
    return (entry is None, 0 if entry is None else -entry.completed_at_ms, catalogued.location)


def dispose_of(url: str, release: Callable[[], None] | None = None) -> None:
    """Deletes a snapshot that a user names: metadata, files, and the entry last.

    The entry lists the files until they are deleted, so that a repeated request finds an interrupted deletion and
    completes it. An entry without a snapshot is deleted. ``release`` is given for a claimed snapshot: it deletes the
    files that belong to the claiming job one by one, also when nothing else is left. Raises the errors of
    ``open_snapshot``, and StorageError.
    """
    location = resolve(url)
    try:
        snapshot = open_snapshot(location)
    except NotFoundError:
        directory = snapshot_directory(location)
        check_directory(directory.parent)
        left = read_entry(directory)
        if left is None and release is None:
            raise
        paths = () if left is None or left.disposing is None else left.disposing
        SnapshotDisposal.of(directory, paths).execute(release)
        return
    if release is not None:
        snapshot = replace(snapshot, metadata=snapshot.metadata.claimed())
    disposal = snapshot.disposal()
    if snapshot.metadata.is_savepoint:
        files = tuple("/".join(segments) for segments in disposal.files)
        try:
            change_entry(
                snapshot.directory,
                lambda entry: replace(entry, disposing=files),
                lambda: described(snapshot.metadata),
            )
        except (StorageError, ValueError) as error:  # storage that is full must not keep what would make room
            logger.warning("deleting %s, and nothing says so until it is done: %s", snapshot.directory.url, error)
    disposal.execute(release)
