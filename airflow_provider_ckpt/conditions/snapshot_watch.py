"""Watches which snapshots complete at a job, also when its name moves to another job. Pure: requests are steps."""

from __future__ import annotations

from typing import Final

from airflow_provider_ckpt.conditions.base import Json, MissingPolicy
from airflow_provider_ckpt.job_names import chosen
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import Checkpoint, CheckpointStatistics
from ckpt_runtime.client.errors import CkptApiError, NotFound, is_passing
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.client.models import JobLine
from ckpt_runtime.client.savepoint_models import Savepoint
from ckpt_runtime.client.waiting import Steps

CHECKPOINTS: Final = "checkpoints"
SAVEPOINTS: Final = "savepoints"


class SnapshotWatch:
    """Gives each completed snapshot once, in the order of their ids.

    ``mark`` is how far the watch has come, ``{"job_id", "id", "at_ms"}``: the caller keeps it, so that another process
    continues from there. Without a mark, snapshots that exist at the first look are not new; all snapshots of a job
    that starts later are new. The job manager shows the newest entries only, 10 by default: if more complete between
    two looks, the rest are not seen. Savepoints that were taken before the first look, while no process watched, are
    found in the catalogue, if they lie in the session's default directory.
    """

    def __init__(self, job: str, snapshots: str, mark: Json | None = None) -> None:
        self._job = job
        self._savepoints = snapshots == SAVEPOINTS
        self.mark = mark
        self.absence = MissingPolicy()
        self._misses = self._savepoints and mark is not None

    def look(self) -> Steps[list[Json]]:
        """Looks for what is new.

        :raises CkptJobAmbiguous: for a name that several living jobs have.
        """
        lines: tuple[JobLine, ...] = yield requests.list_jobs()
        line = chosen(self._job, lines, ended=True)
        found: list[Json] = []
        before = self.mark
        if self._misses and before is not None:
            found += yield from self._missed(before)
            self._misses = False
        if before is not None and (line is None or line.job_id != before["job_id"]):
            # The job that had the name: its last savepoint may be the one of its stop.
            known = next((other for other in lines if other.job_id == before["job_id"]), None)
            if known is not None:
                found += yield from self._newer(known, before["id"])
        if line is None:
            if before is None and self.absence.missing(self._job) is not None:
                # It has not begun: whatever completes of it is new, also before the first look at it.
                self.mark = {"job_id": None, "id": 0, "at_ms": None}
            return _each_once(found)
        self.absence.seen()
        same = before is not None and before["job_id"] == line.job_id
        found += yield from self._newer(line, before["id"] if same and before is not None else 0)
        if before is None:
            found = []
        return _each_once(found)

    def concerns(self, event: StreamedEvent) -> bool:
        """Whether an event may tell of something new, or of another job of the name."""
        if event.type != ("savepoint-completed" if self._savepoints else "checkpoint-completed"):
            return event.type == "job-status"
        return self.mark is None or event.job_id == self.mark["job_id"]

    def _missed(self, before: Json) -> Steps[list[Json]]:
        """Return the newer snapshots of the watched jobs that the catalogue has."""
        try:
            savepoints: tuple[Savepoint, ...] = yield requests.list_savepoints(job=self._job)
        except CkptApiError as error:
            if is_passing(error):
                raise
            return []  # Flink has none, and a session may have no default directory
        at_ms = before.get("at_ms")
        return [
            _catalogued_facts(item)
            for item in sorted(savepoints, key=lambda item: item.completion_timestamp or 0)
            if item.good and item.savepoint_id is not None and item.completion_timestamp is not None
            if (
                item.savepoint_id > before["id"]
                if item.job_id == before["job_id"]
                else at_ms is not None and item.completion_timestamp > at_ms
            )
        ]

    def _newer(self, line: JobLine, than: int) -> Steps[list[Json]]:
        try:
            statistics: CheckpointStatistics = yield requests.checkpoint_statistics(line.job_id)
        except NotFound:  # gone meanwhile, or a Flink job without checkpoints
            return []
        wanted = {
            item.id: item for item in statistics.completed if item.is_savepoint == self._savepoints and item.id > than
        }
        ends = [item.triggered_at_ms + item.duration_ms for item in wanted.values()]
        at_ms = max([(self.mark or {}).get("at_ms") or 0, line.start_time_ms, *ends])
        self.mark = {"job_id": line.job_id, "id": max([than, *wanted]), "at_ms": at_ms}
        return [snapshot_facts(line, wanted[number]) for number in sorted(wanted)]


def _each_once(found: list[Json]) -> list[Json]:
    """Remove duplicates of snapshots that are both in the catalogue and in the history."""
    return list({(facts["job_id"], facts["id"]): facts for facts in found}.values())


def _catalogued_facts(item: Savepoint) -> Json:
    """As :func:`snapshot_facts`; the catalogue does not distinguish the savepoint of a stop from others."""
    return {
        "job": item.job_name,
        "job_id": item.job_id,
        "id": item.savepoint_id,
        "path": item.location,
        "kind": "SAVEPOINT",
        "format": item.format,
        "size": item.size,
        "checkpointed_size": item.size,
        "triggered_at_ms": item.trigger_timestamp,
        "duration_ms": item.duration_ms,
    }


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
