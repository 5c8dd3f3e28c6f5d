"""The savepoint catalogue: lists the savepoints below a directory, with facts about each and whether it is good.

There is no central index: any session or tool lists the directory, and finds savepoints of any job. Each savepoint has
an entry next to its metadata (``storage/savepoint_entry.py``); for one without an entry, the facts are taken from the
metadata as far as possible. All functions block.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.snapshots.positions import repositions_of
from ckpt_runtime.snapshots.snapshot import Snapshot, open_snapshot
from ckpt_runtime.storage.checkpoint_storage import SHARED_NAME, TASK_OWNED_NAME, SnapshotDisposal
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
from ckpt_runtime.storage.metadata import METADATA_NAME, has_metadata, snapshot_directory
from ckpt_runtime.storage.savepoint_entry import (
    CATALOGUE_NAME,
    Mark,
    MarkKind,
    SavepointEntry,
    change_entry,
    read_entry,
)

MAX_DEPTH = 4
MAX_DIRECTORIES = 20_000
NOT_ALLOWED = (errno.EACCES, errno.EPERM)
_PASSED_OVER = (*NOT_ALLOWED, errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.ESRCH)
"""Error numbers that mean that a directory cannot hold savepoints, not that its storage is unavailable."""
_NO_SNAPSHOTS = (SHARED_NAME, TASK_OWNED_NAME)


def find_places(
    directory: Location, depth: int = MAX_DEPTH, at_most: int | None = MAX_DIRECTORIES
) -> Iterator[Location]:
    """Yields directories that contain snapshot metadata or a catalogue entry, sorted by path.

    ``directory`` itself may be one of them; directories inside a found one are not searched. ``depth`` is how many
    levels below ``directory`` are searched. Subdirectories that cannot be listed, for example for lack of permission,
    are skipped. Raises :class:`StorageError` when ``directory`` cannot be listed, and :class:`InvalidLocationError`
    when more than ``at_most`` directories would have to be listed.
    """
    waiting = [(directory, depth)]
    for seen in itertools.count(1):
        if not waiting:
            return
        if at_most is not None and seen > at_most:
            message = (
                f"there are more than {at_most} directories below {directory.url}; name a directory closer to the "
                "savepoints"
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
class SavepointFacts:
    """Facts about a savepoint that only its job knows. ``program`` is the digest that identifies the code."""

    job_name: str
    program: str
    configuration_version: int
    cluster: str
    requester: str | None = None


@dataclass(frozen=True, slots=True)
class CataloguedSavepoint:
    """A savepoint as the catalogue shows it. ``problem`` is why it is not good; ``entry`` is None if unreadable."""

    location: str
    entry: SavepointEntry | None
    problem: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether it is complete and has not failed its latest verification or its latest restore drill."""
        return self.problem is None

    def is_of(self, job: str) -> bool:
        """Whether a job of this id or name took it."""
        return self.entry is not None and job in (self.entry.job_id, self.entry.job_name)


def described(metadata: CompletedCheckpoint, taken_by: SavepointFacts | None = None) -> SavepointEntry:
    """Makes the entry of a savepoint from its metadata and the facts that only its job knows."""
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
        repositioned=repositions_of(metadata),
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


def record_savepoint(url: str, taken_by: SavepointFacts) -> None:
    """Writes the entry of a savepoint that a job has just taken; existing marks are kept.

    Raises :class:`StorageError` when the entry could not be written.
    """
    snapshot = open_snapshot(url, own=True)
    entry = described(snapshot.metadata, taken_by)

    def with_facts(present: SavepointEntry) -> SavepointEntry:
        return replace(entry, verifications=present.verifications, drills=present.drills, disposing=present.disposing)

    change_entry(snapshot.directory, with_facts, lambda: entry)


def mark_savepoint(path: str | Location, kind: MarkKind, mark: Mark) -> SavepointEntry:
    """Adds the result of a verification or a drill to the entry.

    Raises the errors of :func:`open_savepoint`, and StorageError. A checkpoint is refused (InvalidLocationError),
    because it belongs to its job, which may delete it at any time.
    """
    snapshot = open_savepoint(path)
    return change_entry(
        snapshot.directory, lambda entry: entry.marked(kind, mark), lambda: described(snapshot.metadata)
    )


def mark_damaged(path: str | Location, mark: Mark) -> None:
    """Adds a failed verification to the entry of a savepoint whose metadata cannot be read, if it has an entry.

    Raises StorageError.
    """
    directory = snapshot_directory(path if isinstance(path, Location) else resolve(path)).real()
    present = read_entry(directory)
    if present is not None:
        change_entry(directory, lambda entry: entry.marked(MarkKind.VERIFICATION, mark), lambda: present)


def open_savepoint(path: str | Location) -> Snapshot:
    """Opens a savepoint after resolving symbolic links in its path.

    Raises the errors of ``open_snapshot``, and :class:`InvalidLocationError` for a checkpoint.
    """
    snapshot = open_snapshot(snapshot_directory(path if isinstance(path, Location) else resolve(path)).real())
    if not snapshot.metadata.is_savepoint:
        url = snapshot.directory.url
        raise InvalidLocationError(f"{url} is a checkpoint, but the catalogue only has savepoints", url)
    return snapshot


def list_savepoints(directory: str | Location, job: str | None = None) -> list[CataloguedSavepoint]:
    """The savepoints below a directory, latest first; unreadable ones are last and have a ``problem``.

    With ``job``, a job id or name, only the savepoints of that job are listed. Raises :class:`NotFoundError` when the
    directory does not exist, and StorageError when it cannot be listed or has too many directories below it.
    """
    return sorted(_found(directory, job, try_look_at), key=latest_first)


def _found(
    directory: str | Location, job: str | None, look: Callable[[Location], CataloguedSavepoint | None]
) -> list[CataloguedSavepoint]:
    base = directory if isinstance(directory, Location) else resolve(directory)
    check_listable(base)
    found = (catalogued for place in find_places(base) if (catalogued := look(place)) is not None)
    return [catalogued for catalogued in found if job is None or catalogued.is_of(job)]


def check_listable(directory: Location) -> None:
    """Raises :class:`NotFoundError` if the directory, or on an object store the bucket, does not exist."""
    if directory.is_object_store:
        check_bucket(directory)
    elif not is_directory(directory):
        raise NotFoundError(f"there is no directory {directory.url}", directory.url)


def latest_good(
    directory: str | Location, job: str | None = None, before_ms: int | None = None
) -> CataloguedSavepoint | None:
    """The latest savepoint that is good and has readable metadata; None if there is none.

    A savepoint whose sources a user has set to other positions is never returned: it is meant for one particular start.
    ``before_ms``: it completed before this time, so that a job that starts from it reads everything again since then.
    Raises the errors of :func:`list_savepoints`. Also raises StorageError if storage fails while a savepoint is read:
    returning an older one instead would be wrong.
    """
    for catalogued in sorted(_found(directory, job, look_at), key=latest_first):
        if catalogued.is_good and _is_eligible(catalogued.entry, before_ms):
            with suppress(CorruptFileError, NotFoundError, InvalidLocationError):
                open_savepoint(catalogued.location)
                return catalogued
    return None


def _is_eligible(entry: SavepointEntry | None, before_ms: int | None) -> bool:
    if entry is None or entry.repositioned:
        return False
    return before_ms is None or entry.completed_at_ms < before_ms


def try_look_at(place: Location) -> CataloguedSavepoint | None:
    """Like :func:`look_at`, but returns a savepoint with a ``problem`` instead of raising StorageError."""
    try:
        return look_at(place)
    except StorageError as error:
        return CataloguedSavepoint(place.url, None, str(error))


def look_at(place: Location) -> CataloguedSavepoint | None:
    """Reads one savepoint, complete, damaged or partly deleted; returns None for a checkpoint.

    Raises StorageError when storage fails, so that the state of the savepoint cannot be determined now.
    """
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
        return "its deletion is in progress or was interrupted: dispose of it again"
    if not has_metadata(place):
        return "its metadata no longer exists"
    for kind, marks in (("verification", entry.verifications), ("drill", entry.drills)):
        if marks and not marks[-1].passed:
            return f"its newest {kind} failed: {marks[-1].detail or 'no reason was given'}"
    return None


def latest_first(catalogued: CataloguedSavepoint) -> tuple[bool, int, str]:
    """A sort key: newest savepoints first, unreadable ones last."""
    entry = catalogued.entry
    return (entry is None, 0 if entry is None else -entry.completed_at_ms, catalogued.location)


def dispose_of(url: str, release: Callable[[], None] | None = None) -> None:
    """Deletes a snapshot that a user names: metadata, files, and the entry last.

    The entry lists the files until they are deleted, so that a repeated request finds an interrupted deletion and
    completes it. An entry without a snapshot is deleted. ``release`` is given for a claimed snapshot: it deletes the
    files that the claiming job owns one by one, and is called even if nothing else is left to delete. Raises the errors
    of ``open_snapshot``, and StorageError.
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
                snapshot.directory, lambda entry: replace(entry, disposing=files), lambda: described(snapshot.metadata)
            )
        except (StorageError, ValueError) as error:  # full storage must not prevent a deletion that frees space
            logger.warning("deleting %s without a record of the disposal: %s", snapshot.directory.url, error)
    disposal.execute(release)
