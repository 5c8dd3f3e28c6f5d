"""What has completed at a job since the last look, whichever job has the name by now. Pure: requests are steps."""

from __future__ import annotations

from typing import Final

from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.job_names import chosen
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import Checkpoint, CheckpointStatistics
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.models import JobLine
from ckpt_runtime.client.waiting import Steps

CHECKPOINTS: Final = "checkpoints"
SAVEPOINTS: Final = "savepoints"


class SnapshotWatch:
    """Gives each completed snapshot once, in the order of their ids.

    ``mark`` is how far it has come, ``{"job_id", "id"}``: kept by the caller, so that another process goes on from
    there. Without one what is there at the first look is not new. The job manager shows the newest entries only, 10 by
    default: more between two looks are not seen.
    """

    def __init__(self, job: str, snapshots: str, mark: Json | None = None) -> None:
        self._job = job
        self._savepoints = snapshots == SAVEPOINTS
        self.mark = mark

    def look(self) -> Steps[list[Json]]:
        """What is new.

        :raises CkptJobAmbiguous: for a name that several living jobs have.
        """
        lines: tuple[JobLine, ...] = yield requests.list_jobs()
        line = chosen(self._job, lines, ended=True)
        found: list[Json] = []
        before = self.mark
        if before is not None and (line is None or line.job_id != before["job_id"]):
            # The job that had the name: its last savepoint may be that of its stop.
            known = next((other for other in lines if other.job_id == before["job_id"]), None)
            if known is not None:
                found += yield from self._newer(known, before["id"])
        if line is None:
            return found
        same = before is not None and before["job_id"] == line.job_id
        found += yield from self._newer(line, before["id"] if same and before is not None else 0)
        if before is None:
            found = []
        return found

    def _newer(self, line: JobLine, than: int) -> Steps[list[Json]]:
        try:
            statistics: CheckpointStatistics = yield requests.checkpoint_statistics(line.job_id)
        except NotFound:  # gone meanwhile, or a Flink job without checkpoints
            return []
        wanted = {
            item.id: item for item in statistics.completed if item.is_savepoint == self._savepoints and item.id > than
        }
        self.mark = {"job_id": line.job_id, "id": max([than, *wanted])}
        return [snapshot_facts(line, wanted[number]) for number in sorted(wanted)]


def snapshot_facts(line: JobLine, item: Checkpoint) -> Json:
    """What an asset's event says of a snapshot."""
    return {
        "job": line.name,
        "job_id": line.job_id,
        "id": item.id,
        "path": item.external_path,
        "kind": item.kind,
        "format": item.savepoint_format,
        "size": item.state_size,
        "checkpointed_size": item.checkpointed_size,
        "triggered_at_ms": item.triggered_at_ms,
        "duration_ms": item.duration_ms,
    }
