"""Watches which snapshots complete at a job, also when its name moves to another job, for the assets of snapshots."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import closing
from typing import ClassVar, Final

from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import TriggerEvent

from airflow_provider_ckpt.conditions.base import Json, MissingPolicy
from airflow_provider_ckpt.event_hub import ANY_JOB, Member, joined
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.jobs import chosen
from airflow_provider_ckpt.triggers.watching import WatchingTrigger
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import CkptApiError, CkptClientError, NotFound, is_passing
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.contract.jobs import JobLine

CHECKPOINTS: Final = "checkpoints"
SAVEPOINTS: Final = "savepoints"
_LONGEST_PAUSE_SECONDS = 60.0
_GAP_SECONDS = 1.0
"""Minimum time between two polls, however fast checkpoints come."""


class CkptSnapshotsTrigger(WatchingTrigger):
    """Gives at least one event for each snapshot that completes, for as long as a DAG uses them.

    It never ends by itself and never raises: a session that does not answer, a name that no job or several jobs have,
    and an unusable connection are logged in the triggerer's log, and tried again with growing pauses. The events of the
    session, whose stream all waits share, trigger the polls; without them it polls. Its progress is in the asset's
    state store, so that another triggerer continues from there.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param job: the job, by name or id.
    :param snapshots: ``savepoints`` or ``checkpoints``.
    :param poll_interval: seconds between two polls, if no stream of events triggers them.
    """

    argument_names: ClassVar[tuple[str, ...]] = (*WatchingTrigger.argument_names, "snapshots")
    record = "ckpt_watch"

    def __init__(self, *, ckpt_conn_id: str, job: str, snapshots: str, poll_interval: float) -> None:
        super().__init__(ckpt_conn_id=ckpt_conn_id, job=job, poll_interval=poll_interval)
        self.snapshots = snapshots

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Give events without end."""
        watch, pause = SnapshotWatch(self.job, self.snapshots, await self.stored()), 0.0
        with closing(self.progress_from(watch.mark)) as progress:
            while True:
                try:
                    async with joined(CkptHook(self.ckpt_conn_id), watch, ANY_JOB, self.poll_interval) as member:
                        while True:
                            found, pause = await self._look(watch, member, pause)
                            for facts in found:
                                yield TriggerEvent(facts)  # type: ignore[no-untyped-call]
                            await progress.advanced_to(watch.mark, has_events=bool(found))
                            await asyncio.sleep(min(self.poll_interval, _GAP_SECONDS))
                            await member.rest(pause or member.pace())
                except (CkptClientError, AirflowException) as error:
                    pause = self._log_trouble(error, pause)
                await asyncio.sleep(pause)

    async def _look(self, watch: SnapshotWatch, member: Member, pause: float) -> tuple[list[Json], float]:
        """Return the new snapshots, and the pause until the next poll; 0 when the hub decides that."""
        member.begins()
        try:
            await member.settled()
            return await watch.look(member), 0.0
        except (CkptClientError, AirflowException) as error:
            return [], self._log_trouble(error, pause)

    def _log_trouble(self, error: Exception, pause: float) -> float:
        """Log the error that prevents the poll; return the pause after it, given the previous pause."""
        self.log.warning("%s of job %r cannot be checked: %s", self.snapshots, self.job, error)
        return min(max(pause, self.poll_interval, 1.0) * 2, _LONGEST_PAUSE_SECONDS) * random.uniform(0.8, 1.0)


class SnapshotWatch:
    """Gives each completed snapshot once, in the order of their ids.

    ``mark`` is the progress of the watch, ``{"job_id", "id", "at_ms"}``: the caller keeps it, so that another process
    continues from there. Without a mark, snapshots that exist at the first poll are not new; all snapshots of a job
    that starts later are new. The job manager shows the newest entries only, 10 by default: if more complete between
    two polls, the rest are not seen. Savepoints that were taken before the first poll, while no process watched, are
    found in the catalogue if they are in the session's default directory.
    """

    def __init__(self, job: str, snapshots: str, mark: Json | None = None) -> None:
        self._job = job
        self._savepoints = snapshots == SAVEPOINTS
        self.mark = mark
        self.absence = MissingPolicy()
        self._misses = self._savepoints and mark is not None

    async def look(self, client: AsyncCalls) -> list[Json]:
        """Request the new snapshots.

        :raises CkptJobAmbiguous: for a name that several living jobs have.
        """
        lines = await client.list_jobs()
        line = chosen(self._job, lines, ended=True)
        found: list[Json] = []
        before = self.mark
        if self._misses and before is not None:
            found += await self._missed(client, before)
            self._misses = False
        if before is not None and (line is None or line.job_id != before["job_id"]):
            # The job that had the name: its last savepoint may be the one of its stop.
            known = next((other for other in lines if other.job_id == before["job_id"]), None)
            if known is not None:
                found += await self._newer(client, known, before["id"])
        if line is None:
            if before is None and self.absence.missing(self._job) is not None:
                # The watch of this job has not begun: all of its completed snapshots are new, even those before its
                # first poll.
                self.mark = {"job_id": None, "id": 0, "at_ms": None}
            return _each_once(found)
        self.absence.seen()
        same = before is not None and before["job_id"] == line.job_id
        found += await self._newer(client, line, before["id"] if same and before is not None else 0)
        if before is None:
            found = []
        return _each_once(found)

    def concerns(self, event: StreamedEvent) -> bool:
        """Whether an event may mean a new snapshot, or another job of the name."""
        if event.type != ("savepoint-completed" if self._savepoints else "checkpoint-completed"):
            return event.type == "job-status"
        return self.mark is None or event.job_id == self.mark["job_id"]

    async def _missed(self, client: AsyncCalls, before: Json) -> list[Json]:
        """Return the newer snapshots of the watched jobs that the catalogue has."""
        try:
            savepoints = await client.list_savepoints(job=self._job)
        except CkptApiError as error:
            if is_passing(error):
                raise
            return []  # Flink has none, and a session may have no default directory
        at_ms = before.get("at_ms")
        # The catalogue does not distinguish the savepoint of a stop from others.
        return [
            {
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
            for item in sorted(savepoints, key=lambda item: item.completion_timestamp or 0)
            if item.good and item.savepoint_id is not None and item.completion_timestamp is not None
            if (
                item.savepoint_id > before["id"]
                if item.job_id == before["job_id"]
                else at_ms is not None and item.completion_timestamp > at_ms
            )
        ]

    async def _newer(self, client: AsyncCalls, line: JobLine, than: int) -> list[Json]:
        try:
            statistics = await client.checkpoint_statistics(line.job_id)
        except NotFound:  # the job has since disappeared, or is a Flink job without checkpoints
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


def snapshot_facts(line: JobLine, item: Checkpoint) -> Json:
    """The content of an asset's event about a snapshot."""
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
