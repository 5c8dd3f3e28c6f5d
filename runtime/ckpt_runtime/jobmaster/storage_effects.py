"""Executes a job core's storage effects: each effect is a call in a pool, and its answer is an event of the core.

Only this module decides what a storage error means for the protocol: certainly failed, unknown, or that another
driver leads. The last is never a failure, since a failure deletes files: this driver gives the job up.

It is also the only place that orders deletions of a job's snapshot files. The coordinator decides what may be deleted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState, is_shared
from ckpt_runtime.checkpoint.events import CoordinatorEvent
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.failure_report import summary_of
from ckpt_runtime.jobmaster.job_host import JobHost, Pool, Result, SnapshotDeletions
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.scheduler.core_events import JobInput, LeadershipLost
from ckpt_runtime.snapshots.clean_up import (
    JobCleanUp,
    SinkOutput,
    clean_up_sinks,
    delete_file_of,
    delete_location,
    delete_shared_file,
    find_leftovers,
    find_unused_shared_files,
)
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.snapshots.snapshot import disposal_of
from ckpt_runtime.storage.checkpoint_pointer_store import FIRST_CHECKPOINT_ID
from ckpt_runtime.storage.checkpoint_storage import (
    CheckpointStorage,
    SnapshotDisposal,
    delete_checkpoint,
    initialize_savepoint,
    is_savepoint_of,
    shared_file_checkpoint,
)
from ckpt_runtime.storage.claims import place_of_snapshot
from ckpt_runtime.storage.driver_pools import crash_point
from ckpt_runtime.storage.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    NotLeaderError,
    StorageError,
    StorageTimeoutError,
)
from ckpt_runtime.storage.filesystem import check_directory, delete_empty_directory, is_directory, resolve
from ckpt_runtime.storage.metadata import has_metadata, write_metadata
from ckpt_runtime.structured_log import fields

logger = logging.getLogger(__name__)

RETRY_BASE_MS = 200.0
_RETRY_MAX_MS = 30_000.0


class _StorageCall:
    """A call for one checkpoint, with the meaning of its failure or timeout.

    ``failed`` makes the answer when the call certainly had no effect, ``unknown`` when it may have had one.
    """

    def __init__(
        self,
        checkpoint_id: int,
        failed: Callable[[int, str], CoordinatorEvent],
        unknown: Callable[[int, str], CoordinatorEvent],
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.abandoned = threading.Event()
        self.returned = threading.Event()
        self.failed = failed
        self._unknown = unknown

    def run(self, call: Callable[[], JobInput]) -> JobInput:
        """Runs in a pool thread. Every error becomes an answer, because the coordinator waits for one.

        Raises nothing but NotLeaderError: in that case only the new leader may change the job's files.
        """
        try:
            return call()
        except NotLeaderError:
            raise
        except Exception as error:
            return self.failure(error)
        finally:
            self.returned.set()

    def failure(self, error: Exception) -> JobInput:
        answer = self._unknown if isinstance(error, AmbiguousWriteError) else self.failed
        return answer(self.checkpoint_id, str(error))


class StorageEffects:
    """Storage of one job's checkpoints. ``tell`` receives the answers; ``retained`` returns the checkpoints that the
    coordinator retains.

    ``earlier_ids`` are the ids of checkpoints of earlier drivers. Its start is the job's first checkpoint id, even if
    the range is empty: checkpoints with lower ids belong to an earlier job of the same id and are not deleted.
    """

    def __init__(
        self,
        job_id: str,
        storage: CheckpointStorage,
        record: JobRecord,
        host: JobHost,
        tell: Callable[[JobInput], None],
        retained: Callable[[], Iterable[RetainedCheckpoint]],
        earlier_ids: range = range(FIRST_CHECKPOINT_ID, FIRST_CHECKPOINT_ID),
        claims: JobClaims | None = None,
    ) -> None:
        self._job_id = job_id
        self._storage = storage
        self._record = record
        self._host = host
        self._tell = tell
        self._retained = retained
        self._earlier_ids = earlier_ids
        self._claims = claims
        self._deletions = SnapshotDeletions(host, record.check)
        self._late: dict[int, _StorageCall] = {}
        self._disposals: dict[int, SnapshotDisposal] = {}
        self._begun_before: Mapping[int, SnapshotDisposal] = {}
        # By id: the directory, and the last checkpoint that had begun when it was deleted.
        self._aborted_savepoints: dict[int, tuple[str, int]] = {}
        self._last_id = 0
        self._kept: set[int] = set()
        self._ended_before = False
        self._directory_known = False
        self._closed = False
        self.cleaned_up = False
        """Whether the clean-up after the job's end is complete."""

    @property
    def directory(self) -> str:
        """The URL of the job's own checkpoint directory."""
        return self._storage.location.url

    def prepare(self) -> int:
        """Makes the job's checkpoint directory, in a pool thread. Raises StorageError when it cannot be used.

        Returns the first id above those of all checkpoint directories, which an earlier job of this id left.
        """
        self._storage.initialize()
        self._directory_known = True
        self._storage.claim(self._record.cluster)
        first = max(self._storage.list_checkpoints(), default=0) + 1
        self._earlier_ids = range(first, first)
        return first

    def sweep(self, ids: range, keep: Set[int]) -> None:
        """Deletes checkpoints of an ended job that have no pointer and that an earlier driver did not delete in time.

        ``ids`` must hold only unused ids of this job. After this, the final clean-up deletes nothing older.
        """
        self._ended_before = True

        def delete() -> None:
            check_directory(self._storage.location.parent)
            for checkpoint_id in self._storage.list_checkpoints():
                if checkpoint_id in ids and checkpoint_id not in keep:
                    delete_checkpoint(self._storage, checkpoint_id)

        self._deletions.submit(f"delete files of an earlier driver in {self._storage.location.url}", delete)

    def dispose(self, disposals: Mapping[int, SnapshotDisposal]) -> None:
        """Continues the deletions that an earlier driver had begun outside the job's directory."""
        self._begun_before = dict(disposals)
        for checkpoint_id, disposal in disposals.items():
            what = f"delete checkpoint {checkpoint_id} in {disposal.directory.url}"
            self._deletions.submit(what, partial(self._dispose, checkpoint_id, disposal))

    def discard_savepoints(self, directories: Mapping[int, str]) -> None:
        """Deletes unfinished savepoints of an earlier driver; a savepoint with metadata is complete and stays."""

        def delete(checkpoint_id: int, directory: str) -> None:
            if not is_savepoint_of(resolve(directory), self._job_id):
                raise InvalidLocationError("it does not have the name of a savepoint of this job", directory)
            if has_metadata(resolve(directory)):
                self._record.settle_savepoint(checkpoint_id)
            else:
                self._delete_location(checkpoint_id, directory)

        for checkpoint_id, directory in directories.items():
            self._deletions.submit(f"delete {directory}", partial(delete, checkpoint_id, directory))

    def finish(self, *, keeps_nothing: bool, outputs: tuple[SinkOutput, ...], savepoint_id: int) -> None:
        """Cleans up after a job that never runs again; a suspended job may be running under another driver.

        The coordinator has shut down. Deletions that have failed so far are retried until they succeed. Then the files
        that the sinks have hidden at ``outputs`` and that no snapshot covers are deleted, then the job's directory,
        with everything of the job in it if it ``keeps_nothing``, and last the records of the job.
        """
        self._closed = True
        steps = self._last_steps(keeps_nothing, outputs, savepoint_id)

        def go_on() -> None:
            """Begins the next step; is called whenever everything before it is done."""
            for step in steps:
                self._deletions.submit(*step)
                self._deletions.when_done(go_on)
                return

        self._deletions.when_done(go_on)

    def _last_steps(
        self, keeps_nothing: bool, outputs: tuple[SinkOutput, ...], savepoint_id: int
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        def delete_hidden_files() -> None:
            """Checks storage first: while it is unavailable, it is unknown what retained checkpoints cover."""
            check_directory(self._storage.location if self._directory_known else self._storage.location.parent)
            clean_up_sinks(outputs, self._storage, savepoint_id)

        for checkpoint_id, (directory, _) in list(self._aborted_savepoints.items()):
            yield self._settling(checkpoint_id, directory)
        yield f"delete hidden files of the sinks of job {self._job_id}", delete_hidden_files
        first_id = self._earlier_ids.start
        # Checkpoints that an earlier driver has released may be retained as well.
        first_kept = first_id if self._ended_before else min(self._kept, default=first_id)
        clean_up = JobCleanUp(self._storage, first_id, keeps_nothing, self._directory_known, first_kept)
        yield f"clean up {self._storage.location.url}", clean_up
        if self._claims is not None:
            yield f"release the claims of job {self._job_id}", self._claims.release
        yield f"forget job {self._job_id}", self._record.forget
        self.cleaned_up = True

    def close(self) -> None:
        """Drops pending deletions; later answers of storage are ignored."""
        self._closed = True
        self._deletions.close()

    def completed(self, checkpoint_id: int) -> None:
        """Retries failed deletions now, because storage has just answered, and settles aborted savepoints.

        A task may have written state for a savepoint before it knew of the abort, and this driver may die before it
        deletes that state. Until then a note leads the next driver to the directory. No state comes any more once the
        tasks have acknowledged a checkpoint that began after the abort.
        """
        self._deletions.retry()
        for aborted, (directory, last_id) in list(self._aborted_savepoints.items()):
            if checkpoint_id > last_id:
                self._deletions.submit(*self._settling(aborted, directory))

    def _settling(self, checkpoint_id: int, directory: str) -> tuple[str, Callable[[], None]]:
        """Deletes what was written late, then the note."""

        def settle() -> None:
            with suppress(NotFoundError):
                delete_location(directory)
            self._record.settle_savepoint(checkpoint_id)

        self._aborted_savepoints.pop(checkpoint_id, None)
        return f"delete late state in {directory}", settle

    def execute(self, effect: object) -> None:
        """Starts one effect. Each call has an answer for the case that it is not begun or does not return."""
        call = _call_of(effect)
        if call is None:
            self._delete(effect)
            return
        match effect:
            case out.InitializeLocation(checkpoint_id, properties, directory):
                self._last_id = checkpoint_id
                self._in_pool(call, lambda: self._initialize(effect, call), pool=self._pool_of(properties, directory))
            case out.WriteMetadata(checkpoint):
                pool = self._pool_of(checkpoint.properties, checkpoint.directory)
                self._in_pool(call, lambda: self._write_metadata(checkpoint), pool=pool)
            case out.ResolveMetadata(checkpoint, attempt):
                pool = self._pool_of(checkpoint.properties, checkpoint.directory)
                self._in_pool(call, lambda: self._resolve_metadata(checkpoint), backoff_ms(attempt), pool)
            case out.AddToStore(checkpoint, owned):
                self._in_pool(call, lambda: self._add_pointer(checkpoint, owned))
            case out.ResolveStore(checkpoint, attempt, owned):
                self._in_pool(call, lambda: self._resolve_pointer(checkpoint, owned), backoff_ms(attempt))
            case out.RemoveFromStore(checkpoint_id, attempt, discards):
                if discards is None:
                    self._kept.add(checkpoint_id)
                self._in_pool(call, lambda: self._remove_pointer(checkpoint_id, discards), backoff_ms(attempt))

    def _pool_of(self, properties: CheckpointProperties, directory: str | None) -> Pool | str:
        """The user chooses a savepoint's directory: if storage hangs there, that must not stop checkpoints."""
        return (directory or "") if properties.is_savepoint else Pool.OWN

    def _delete(self, effect: object) -> None:
        """Starts a deletion. The coordinator continues after the first attempt; the deletions handle retries."""
        submit = self._deletions.submit
        match effect:
            case out.FindLeftovers(below):
                states = [state for entry in self._retained() for state in entry.checkpoint.states.values()]
                self._look_for_leftovers(states, below, attempt=1)
            case out.DiscardCheckpoint(checkpoint):
                what = f"delete checkpoint {checkpoint.id} in {checkpoint.directory}"
                submit(what, partial(self._discard, checkpoint), partial(self._cleaned, checkpoint.id))
            case out.DiscardLocation(checkpoint_id, directory):
                what = f"delete {directory}"
                delete = partial(self._delete_location, checkpoint_id, directory)
                submit(what, delete, partial(self._cleaned, checkpoint_id))
            case out.DiscardState():
                directory = effect.directory
                for file in effect.state.files():
                    if is_shared(file):
                        continue  # the registry knows when the file is no longer needed
                    submit(f"delete {file.path} in {directory}", partial(delete_file_of, directory, file.path))
            case out.DeleteSharedFiles(paths):
                claimed = [] if self._claims is None else [path for path in paths if self._is_claimed(path)]
                for path in paths if not claimed else sorted(set(paths) - set(claimed)):
                    submit(f"delete {path}", partial(delete_shared_file, self._storage, path))
                if claimed and self._claims is not None:
                    what = f"delete {len(claimed)} files of a claimed snapshot, such as {claimed[0]}"
                    submit(what, partial(self._claims.delete, claimed, self._earlier_ids.start))
            case _:
                raise TypeError(f"{effect!r} is not a storage effect")

    def _is_claimed(self, path: str) -> bool:
        """Whether other jobs may need the file: it was not written for a checkpoint of this job."""
        try:
            file = resolve(path)
        except StorageError:  # its deletion will raise the same error
            return False
        written_for = shared_file_checkpoint(file.name)
        earlier = written_for is not None and written_for < self._earlier_ids.start
        return earlier or not self._storage.location.contains(file)

    def _cleaned(self, checkpoint_id: int) -> None:
        if not self._closed:
            self._tell(on.CleanupDone(checkpoint_id))

    def _in_pool(
        self, call: _StorageCall, run: Callable[[], JobInput], delay_ms: float = 0.0, pool: Pool | str = Pool.OWN
    ) -> None:
        if delay_ms:
            self._host.call_later(delay_ms, partial(self._in_pool, call, run, 0.0, pool))
            return
        if self._closed:
            return
        self._late = {key: late for key, late in self._late.items() if not late.returned.is_set()}
        if call.checkpoint_id in self._late:
            # Asking again would only make another thread hang.
            hangs = StorageTimeoutError("an earlier storage call has not returned", "storage")
            # Deferred like an answer of the pool, which never comes from within the call that asks for it.
            self._host.call_later(0, partial(self._failed, call, hangs))
            return
        self._host.in_pool(pool, partial(call.run, run), partial(self._answered, call))

    def _answered(self, call: _StorageCall, result: Result[JobInput]) -> None:
        if self._closed:
            return
        try:
            event = result()
        except NotLeaderError as error:
            logger.error("job %s: this driver no longer runs it: %s", self._job_id, error)
            self._tell(LeadershipLost())
        except Exception as error:  # the pool's own: a call turns its errors into answers
            if isinstance(error, StorageTimeoutError):
                # Set before the answer: afterwards nothing would delete what the hanging call still creates.
                call.abandoned.set()
                self._late[call.checkpoint_id] = call
            self._failed(call, error)
        else:
            self._tell(event)

    def _failed(self, call: _StorageCall, error: Exception) -> None:
        if self._closed:
            return
        about_it = fields(job_id=self._job_id, checkpoint_id=call.checkpoint_id)
        logger.warning("job %s, checkpoint %d: %s", self._job_id, call.checkpoint_id, error, extra=about_it)
        self._tell(call.failure(error))

    def _look_for_leftovers(self, states: list[SubtaskState], below: int | None, attempt: int) -> None:
        """Retries until storage answers; checkpointing continues."""
        if self._closed:
            return

        def answered(result: Result[JobInput]) -> None:
            if self._closed:
                return
            try:
                event = result()
            except Exception as error:
                logger.warning("cannot list leftover files, will try again: %s", summary_of(error))
                again = partial(self._look_for_leftovers, states, below, attempt + 1)
                self._host.call_later(backoff_ms(attempt), again)
            else:
                self._tell(event)

        self._host.in_pool(Pool.DELETIONS, partial(self._find_leftovers, states, below), answered)

    # The methods below run in pool threads; their errors become answers (see _StorageCall).

    def _initialize(self, effect: out.InitializeLocation, call: _StorageCall) -> JobInput:
        # Before the directory is made: if a later driver reused this id, it would find files of this checkpoint in
        # its directory.
        self._record.reserve(effect.checkpoint_id)
        crash_point("checkpoint-reserved")
        shared = ""
        if effect.properties.is_savepoint:
            location = initialize_savepoint(
                effect.target_directory or "",
                self._job_id,
                self._host.token,
                lambda directory: self._record.expect_savepoint(effect.checkpoint_id, directory.url),
            )
        else:
            location = self._storage.initialize_checkpoint(effect.checkpoint_id)
            self._directory_known = True
            shared = self._storage.shared.url
        if call.abandoned.is_set():  # the checkpoint has failed: nothing else would delete its directory
            with suppress(StorageError):
                delete_empty_directory(location)
        crash_point("checkpoint-located")
        return on.LocationReady(effect.checkpoint_id, location.url, shared)

    def _write_metadata(self, checkpoint: CompletedCheckpoint) -> JobInput:
        self._record.check()
        crash_point("metadata-before")
        write_metadata(resolve(checkpoint.directory), checkpoint.to_json())
        crash_point("metadata-after")
        return self._metadata_written(checkpoint)

    def _metadata_written(self, checkpoint: CompletedCheckpoint) -> JobInput:
        """A savepoint is complete only once this driver has recorded it as the leader.

        The driver may have been paused while it wrote the metadata: a successor deletes a savepoint whose metadata it
        does not find, and metadata that comes later makes nothing complete. Checkpoints have pointers for this.
        """
        if checkpoint.properties.is_savepoint:
            try:
                self._record.settle_savepoint(checkpoint.id)
            except NotLeaderError:
                raise
            except StorageError as error:
                return on.MetadataUnknown(checkpoint.id, f"the savepoint is written, but not recorded: {error}")
        return on.MetadataWritten(checkpoint.id)

    def _resolve_metadata(self, checkpoint: CompletedCheckpoint) -> JobInput:
        """Writes the metadata if it is missing. If that fails, the outcome stays unknown: the first may yet succeed.

        On a local disk no write can still be in progress: there, if the directory is missing and its parent exists, the
        metadata certainly does not exist.
        """
        directory = resolve(checkpoint.directory)
        try:
            check_directory(directory.parent)
            if not has_metadata(directory):
                self._record.check()
                write_metadata(directory, checkpoint.to_json())
        except NotFoundError as error:
            if directory.is_local:
                return on.MetadataFailed(checkpoint.id, str(error))
            raise
        return self._metadata_written(checkpoint)

    def _add_pointer(self, checkpoint: CompletedCheckpoint, owned: bool) -> JobInput:
        crash_point("pointer-before")
        self._record.add(checkpoint, owned)
        crash_point("pointer-after")
        return on.StoreAdded(checkpoint.id)

    def _resolve_pointer(self, checkpoint: CompletedCheckpoint, owned: bool) -> JobInput:
        """If adding the pointer again fails, that does not show whether the first attempt succeeded."""
        # Checked first: adding an existing pointer would be refused as if another driver had written it.
        if self._record.contains(checkpoint.id):
            return on.StoreAdded(checkpoint.id)
        return self._add_pointer(checkpoint, owned)

    def _remove_pointer(self, checkpoint_id: int, discards: str | None) -> JobInput:
        """First records the files outside the job's own directory: after a crash they could not be found otherwise."""
        if discards is not None and resolve(discards) != self._storage.checkpoint(checkpoint_id):
            with suppress(NotFoundError, CorruptFileError, InvalidLocationError):
                self._disposals[checkpoint_id] = disposal_of(discards, claimed=True)
        crash_point("removal-before")
        self._record.remove(checkpoint_id, self._disposals.get(checkpoint_id))
        crash_point("removal-after")
        return on.StoreRemoved(checkpoint_id)

    def _delete_location(self, checkpoint_id: int, directory: str) -> None:
        delete_location(directory)
        if resolve(directory) != self._storage.checkpoint(checkpoint_id):
            self._aborted_savepoints[checkpoint_id] = (directory, self._last_id)

    def _find_leftovers(self, states: list[SubtaskState], below: int | None) -> JobInput:
        """Finds leftover files. Raises StorageError when it has to be tried again."""
        try:
            if below is not None:
                ids = range(self._earlier_ids.start, below)
                check_directory(self._storage.location)
                return on.LeftoversFound((), find_unused_shared_files(self._storage, ids, states))
            found = find_leftovers(self._storage, self._earlier_ids, states)
            self._record.check()
            # Files of a claimed snapshot are leftovers only once its metadata is deleted, and are sought only once.
            for checkpoint_id, disposal in self._begun_before.items():
                self._dispose(checkpoint_id, disposal)
            claimed = () if self._claims is None else self._claims.unused(states)
            return replace(found, shared=(*found.shared, *claimed))
        except InvalidLocationError as error:
            logger.warning("cannot find out which files are left over, so they are kept: %s", error)
            return on.LeftoversFound(())

    def _discard(self, checkpoint: CompletedCheckpoint) -> None:
        """Deletes a completed checkpoint; outside the job's own directory, the files that its metadata refers to.

        If its metadata was unusable when the pointer was removed, nothing is deleted: reading it again raises.
        """
        if resolve(checkpoint.directory) == self._storage.checkpoint(checkpoint.id):
            delete_checkpoint(self._storage, checkpoint.id)
            return
        noted = self._disposals.get(checkpoint.id)
        self._dispose(checkpoint.id, noted or disposal_of(checkpoint.directory, claimed=True))
        self._disposals.pop(checkpoint.id, None)

    def _dispose(self, checkpoint_id: int, disposal: SnapshotDisposal) -> None:
        """Disposes of a snapshot; runs again if its success was not recorded, although the snapshot may already be
        deleted.
        """
        place = place_of_snapshot(disposal.directory)
        if place == disposal.directory or is_directory(place):
            disposal.execute()
        else:
            check_directory(place.parent)
        if self._claims is not None:
            self._claims.settle(place)
        self._record.settle(checkpoint_id)


def backoff_ms(attempt: int) -> float:
    """The pause in milliseconds before a storage call is retried; 0 before the first attempt, which is number 0."""
    return 0.0 if attempt <= 0 else min(_RETRY_MAX_MS, RETRY_BASE_MS * 2 ** min(attempt - 1, 30))


def _call_of(effect: object) -> _StorageCall | None:
    """The call for an effect whose outcome the coordinator waits for; None for another effect."""
    match effect:
        case out.InitializeLocation(checkpoint_id):
            return _StorageCall(checkpoint_id, on.LocationFailed, on.LocationFailed)
        case out.WriteMetadata(checkpoint):
            return _StorageCall(checkpoint.id, on.MetadataFailed, on.MetadataUnknown)
        case out.ResolveMetadata(checkpoint):
            return _StorageCall(checkpoint.id, on.MetadataUnknown, on.MetadataUnknown)
        case out.AddToStore(checkpoint):
            return _StorageCall(checkpoint.id, on.StoreFailed, on.StoreUnknown)
        case out.ResolveStore(checkpoint):
            return _StorageCall(checkpoint.id, on.StoreUnknown, on.StoreUnknown)
        case out.RemoveFromStore(checkpoint_id):
            return _StorageCall(checkpoint_id, on.StoreRemoveFailed, on.StoreRemoveFailed)
    return None


def answer_to_failed(effect: object, message: str) -> CoordinatorEvent | None:
    """The answer to an effect that certainly was not begun; None for one without an answer.

    Files whose deletion was not begun are deleted at the end of the job.
    """
    call = _call_of(effect)
    if call is not None:
        return call.failed(call.checkpoint_id, message)
    match effect:
        case out.DiscardCheckpoint(checkpoint):
            return on.CleanupDone(checkpoint.id)
        case out.DiscardLocation(checkpoint_id):
            return on.CleanupDone(checkpoint_id)
    return None
