"""Deletes files that the coordinator discards and files of ended jobs: checkpoints, shared files, sinks' hidden files.

It also lists what earlier drivers left. A call that is repeated after an error continues the work. A file that is
already deleted is not an error, but while storage is unavailable no file counts as deleted.

When sinks open, workers remove hidden files that earlier attempts left. At the end of a job there may be no workers,
because the job was cancelled before it was deployed again, or because they were killed: so the driver cleans up.
All functions block and raise StorageError.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState, is_shared
from ckpt_runtime.checkpoint.events import LeftoversFound
from ckpt_runtime.checkpoint.sink_state import SinkLineage, new_sink_id, pending_names, restored_sink_ids
from ckpt_runtime.connectors.part_directory import PartDirectory, owner_of
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.checkpoint_pointer_store import FIRST_CHECKPOINT_ID
from ckpt_runtime.storage.checkpoint_storage import (
    CheckpointStorage,
    delete_checkpoint,
    delete_job_directory,
    delete_state_file,
    release_job_directory,
    shared_file_checkpoint,
    shared_file_owner,
)
from ckpt_runtime.storage.claims import read_claim
from ckpt_runtime.storage.filesystem import check_directory, delete_file, delete_tree, list_names, resolve
from ckpt_runtime.storage.metadata import METADATA_NAME, has_metadata
from ckpt_runtime.storage.state_files import locate


def delete_file_of(directory: str, path: str) -> None:
    """Deletes a state file, given by the path that a checkpoint in ``directory`` has for it."""
    owner = resolve(directory)
    check_directory(owner.parent)
    delete_state_file(owner, locate(owner, path))


def delete_location(directory: str) -> None:
    """Deletes a directory, metadata first: a half-deleted checkpoint of an earlier driver must not look complete."""
    location = resolve(directory)
    check_directory(location.parent)
    delete_file(location.child(METADATA_NAME))
    delete_tree(location)


def delete_shared_file(storage: CheckpointStorage, path: str) -> None:
    """Deletes a shared file, also one from another job's claimed snapshot, which this job owns now."""
    file, own = resolve(path), storage.location
    owner = own if own.contains(file) else shared_file_owner(file)
    check_directory(own if own.contains(file) else owner.parent)
    delete_state_file(owner, file)


@dataclass(slots=True)
class JobCleanUp:
    """Deletes unused files of an ended job, or all of its files; then the directory, if it is empty.

    Unused files exist, for example, if storage failed when a checkpoint was aborted. Files from before the job's first
    checkpoint ``first_id`` stay, and so do files that are not named as the job names its own. The job's checkpoints
    below ``first_kept`` are deleted: an earlier driver may have died while deleting one. ``directory_known``: this
    driver has seen the job's directory, so if it is missing, its storage is unavailable; otherwise an earlier driver
    may have deleted it.
    """

    storage: CheckpointStorage
    first_id: int
    keeps_nothing: bool
    directory_known: bool = False
    first_kept: int = FIRST_CHECKPOINT_ID

    def __call__(self) -> None:
        check_directory(self.storage.location if self.directory_known else self.storage.location.parent)
        first_kept = sys.maxsize if self.keeps_nothing else self.first_kept
        ids = range(self.first_id, first_kept)
        for checkpoint_id in self.storage.list_checkpoints():
            if checkpoint_id in ids or not has_metadata(self.storage.checkpoint(checkpoint_id)):
                delete_checkpoint(self.storage, checkpoint_id)
        if self.keeps_nothing and self.first_id == FIRST_CHECKPOINT_ID and read_claim(self.storage.location) is None:
            delete_tree(self.storage.shared)
            delete_tree(self.storage.task_owned)
        else:
            _delete_unused_shared_files(self.storage, range(self.first_id, sys.maxsize))
        release_job_directory(self.storage)
        self.directory_known = False  # from here on this attempt itself may have deleted it
        delete_job_directory(self.storage)


def _delete_unused_shared_files(storage: CheckpointStorage, ids: range) -> None:
    """Deletes files that were written for checkpoints of ``ids`` and that no remaining one of them refers to.

    Another job may have claimed one of them and replaced it since: then its unreferenced files belong to that job.
    """
    if not find_unused_shared_files(storage, ids, ()):
        return
    states: list[SubtaskState] = []
    for checkpoint_id in storage.list_checkpoints():
        if checkpoint_id in ids:
            states += open_snapshot(storage.checkpoint(checkpoint_id), own=True).metadata.states.values()
    if read_claim(storage.location) is not None:  # checked last: a claim on a checkpoint read above is harmless
        return
    for url in find_unused_shared_files(storage, ids, states):
        delete_shared_file(storage, url)


def find_leftovers(storage: CheckpointStorage, ids: range, states: Iterable[SubtaskState]) -> LeftoversFound:
    """Lists leftovers. Earlier drivers may have used ``ids``; ``states`` are those of the retained checkpoints.

    Raises StorageError.
    """
    if not ids:
        return LeftoversFound(())
    check_directory(storage.location)
    checkpoints = tuple(
        (number, storage.checkpoint(number).url) for number in storage.list_checkpoints() if number in ids
    )
    return LeftoversFound(checkpoints, find_unused_shared_files(storage, ids, states))


def find_unused_shared_files(storage: CheckpointStorage, ids: range, states: Iterable[SubtaskState]) -> tuple[str, ...]:
    """URLs of shared files that were written for checkpoints of ``ids`` and that no state refers to, sorted.

    A file that a state refers to is not listed, however its path is spelled; nor is a file that is not named as the job
    names its shared files. Raises StorageError.
    """
    used = {resolve(file.path).url for state in states for file in state.files() if is_shared(file)}
    found = []
    for name in list_names(storage.shared):
        checkpoint_id = shared_file_checkpoint(name)
        if checkpoint_id is not None and checkpoint_id in ids:
            found.append(storage.shared.child(name).url)
    return tuple(url for url in found if url not in used)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SinkOutput:
    """The directory of a sink, and the prefix of the names of the files that it hides there."""

    directory: str
    owner: str


def sink_lineages(
    graph: JobGraph,
    seed: str,
    restored: CompletedCheckpoint | None,
    ended_jobs: tuple[str, ...] = (),
    savepoint_id: int = 0,
    job_id: str = "",
) -> dict[str, SinkLineage]:
    """Maps operator uids to sink lineages: with the id from the restored snapshot, or a new one if it has none.

    A sink that starts from the beginning continues with the ids of its own job alone.
    """
    known = {} if restored is None else restored_sink_ids(restored)
    if restored is not None and restored.job_id != job_id:
        known = {uid: sink_id for uid, sink_id in known.items() if uid not in graph.fresh_operators}
    return {
        uid: SinkLineage(known[sink], ended_jobs, savepoint_id, continues=True)
        if sink in known
        else SinkLineage(new_sink_id(seed, sink), (), savepoint_id)
        for uid, sink in graph.sinks.items()
    }


def sink_outputs(job_id: str, graph: JobGraph, lineages: Mapping[str, SinkLineage]) -> tuple[SinkOutput, ...]:
    """The outputs in which a job's sinks hide files."""
    return tuple(
        SinkOutput(directory, owner_of(job_id, uid, lineages[uid].sink_id))
        for uid, directory in graph.output_directories.items()
    )


def clean_up_sinks(outputs: Iterable[SinkOutput], storage: CheckpointStorage, savepoint_id: int) -> None:
    """Deletes hidden files of an ended job's sinks that neither a retained checkpoint nor a savepoint covers.

    No snapshot covers a file in progress. Savepoints up to ``savepoint_id`` may need the files pending for them.
    """
    retained: set[str] | None = None
    for output in outputs:
        directory = PartDirectory(output.directory)
        for part in directory.hidden_parts():
            if part.owner != output.owner:
                continue
            if part.checkpoint is not None:
                # Read only on first need, and once: most jobs leave nothing pending.
                retained = _retained_names(storage) if retained is None else retained
                if part.pending in retained or part.checkpoint <= savepoint_id:
                    continue
            directory.discard(part)
            logger.info("deleted %s/%s: no snapshot covers it", output.directory, part.hidden)


def _retained_names(storage: CheckpointStorage) -> set[str]:
    directories = map(storage.checkpoint, storage.list_checkpoints())
    return pending_names(open_snapshot(found, own=True).metadata for found in directories if has_metadata(found))
