"""The driver's clean-up of files that a job's transactional sinks have hidden: the sinks' ids, and what is deleted.

Workers remove leftovers of earlier attempts when they open. At the end of a job there may be no workers: the job was
cancelled before it was deployed again, or they were killed. So the driver cleans up, through the same storage. Blocking
parts raise StorageError and may be called again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.sink_state import SinkLineage, new_sink_id, pending_names, restored_sink_ids
from ckpt_runtime.connectors.part_directory import PartDirectory
from ckpt_runtime.connectors.part_names import owner_of
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.snapshot_metadata import has_metadata

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
) -> dict[str, SinkLineage]:
    """Maps operator uids to sink lineages: with the id from the restored snapshot, or a new one if it has none."""
    known = {} if restored is None else restored_sink_ids(restored)
    return {
        uid: SinkLineage(known.get(sink) or new_sink_id(seed, sink), ended_jobs if sink in known else (), savepoint_id)
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
            directory.delete(part.hidden)
            logger.info("deleted %s/%s: no snapshot covers it", output.directory, part.hidden)


def _retained_names(storage: CheckpointStorage) -> set[str]:
    directories = map(storage.checkpoint, storage.list_checkpoints())
    return pending_names(open_snapshot(found, own=True).metadata for found in directories if has_metadata(found))
