"""What transactional sinks of a job have hidden, as the driver sees it: who they are, and what goes when the job ends.

Workers remove what earlier attempts left, when they open. At the end of a job there may be none: it was cancelled
before it was deployed again, or they were killed. So the driver looks, through the same storage. Blocking parts raise
StorageError and may be called again.
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
    """The directory of a sink, and what the names of the files that it hides there begin with."""

    directory: str
    owner: str


def sink_lineages(
    graph: JobGraph,
    seed: str,
    restored: CompletedCheckpoint | None,
    ended_jobs: tuple[str, ...] = (),
    savepoint_id: int = 0,
) -> dict[str, SinkLineage]:
    """By operator uid: the id that the restored snapshot has of each sink, a new one where it has none."""
    known = {} if restored is None else restored_sink_ids(restored)
    return {
        uid: SinkLineage(known.get(uid) or new_sink_id(seed, uid), ended_jobs if uid in known else (), savepoint_id)
        for uid in graph.output_directories
    }


def sink_outputs(job_id: str, graph: JobGraph, lineages: Mapping[str, SinkLineage]) -> tuple[SinkOutput, ...]:
    """Where a job's sinks hide files."""
    return tuple(
        SinkOutput(directory, owner_of(job_id, uid, lineages[uid].sink_id))
        for uid, directory in graph.output_directories.items()
    )


def clean_up_sinks(outputs: Iterable[SinkOutput], storage: CheckpointStorage, savepoint_id: int) -> None:
    """Deletes what the sinks of an ended job have hidden and neither a retained checkpoint nor a savepoint covers.

    A file in progress is covered by nothing. Savepoints up to ``savepoint_id`` may need what is pending for them.
    """
    retained: set[str] | None = None
    for output in outputs:
        directory = PartDirectory(output.directory)
        for part in directory.hidden_parts():
            if part.owner != output.owner:
                continue
            if part.checkpoint is not None:
                # Read when it is needed first, and once: most jobs leave nothing pending.
                retained = _retained_names(storage) if retained is None else retained
                if part.pending in retained or part.checkpoint <= savepoint_id:
                    continue
            directory.delete(part.hidden)
            logger.info("deleted %s/%s: no snapshot covers it", output.directory, part.hidden)


def _retained_names(storage: CheckpointStorage) -> set[str]:
    directories = map(storage.checkpoint, storage.list_checkpoints())
    return pending_names(open_snapshot(found, own=True).metadata for found in directories if has_metadata(found))
