"""Watches a job for events that an on-call engineer has to know: no checkpoint, a lag, or no savepoint for too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import ClassVar, Final

from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import TriggerEvent
from msgspec import json

from airflow_provider_ckpt.conditions.base import Json, MissingPolicy, moment
from airflow_provider_ckpt.event_hub import ANY_JOB, joined
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.jobs import chosen
from airflow_provider_ckpt.triggers.watching import WatchingTrigger
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import CkptApiError, CkptClientError, NotFound, is_passing
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobLine

NO_CHECKPOINT: Final = "no-checkpoint"
LAG: Final = "lag"
NO_SAVEPOINT: Final = "no-savepoint"
ALERTS: Final = (NO_CHECKPOINT, LAG, NO_SAVEPOINT)
PENDING: Final = ".pendingRecords"
"""The suffix of the metric for the rows that wait in front of a source, here and on Flink."""
_INTENDED_ENDS = TERMINAL_STATES - {"FAILED"}


class CkptAlertTrigger(WatchingTrigger):
    """Gives one event when something has been wrong at a job for too long, and the next one only after it was right.

    * ``no-checkpoint``: no checkpoint has completed for ``longer_than`` seconds. A session that does not answer, a job
      that is missing, and one that has FAILED complete none.
    * ``lag``: for ``longer_than`` seconds, more than ``above`` rows have waited in front of the job's sources, as far
      as they report it (``pendingRecords``).
    * ``no-savepoint``: the newest savepoint is older than ``longer_than`` seconds.

    A job that has FINISHED or was CANCELED gives no alert, and a job that has just started has the whole time. It never
    ends by itself and never raises. Its progress is in the asset's state store, so that another triggerer does not
    repeat the alert. Times are those of the job manager, which are compared with the triggerer's clock.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param job: the job, by name or id.
    :param alert: ``no-checkpoint``, ``lag`` or ``no-savepoint``.
    :param longer_than: how many seconds it may last.
    :param above: of ``lag``: the number of rows that may wait.
    :param poll_interval: seconds between two polls.
    :raises CkptArgumentInvalid: for an alert that does not exist
    """

    argument_names: ClassVar[tuple[str, ...]] = (*WatchingTrigger.argument_names, "alert", "longer_than", "above")
    record = "ckpt_alert"

    def __init__(
        self,
        *,
        ckpt_conn_id: str,
        job: str,
        alert: str,
        longer_than: float,
        above: int = 0,
        poll_interval: float = 30.0,
    ) -> None:
        super().__init__(ckpt_conn_id=ckpt_conn_id, job=job, poll_interval=poll_interval)
        if alert not in ALERTS:
            raise CkptArgumentInvalid("alert", alert, f"it must be one of {', '.join(ALERTS)}")
        self.alert = alert
        self.longer_than = longer_than
        self.above = above

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Give events without end."""
        watch = AlertWatch(self.job, self.alert, self.longer_than, self.above, await self.stored())
        with closing(self.progress_from(watch.mark)) as progress:
            while True:
                async for found in self._looks(watch):
                    if found is not None:
                        yield TriggerEvent({"ckpt_conn_id": self.ckpt_conn_id, **found})  # type: ignore[no-untyped-call]
                    await progress.advanced_to(watch.mark, has_events=found is not None)
                    await asyncio.sleep(self.poll_interval)

    async def _looks(self, watch: AlertWatch) -> AsyncIterator[Json | None]:
        """Poll repeatedly until the connection cannot be used, which counts as a session that does not answer."""
        try:
            async with joined(CkptHook(self.ckpt_conn_id), watch, ANY_JOB, self.poll_interval) as member:
                await member.settled()
                while True:
                    try:
                        found = await watch.look(member, _now_ms())
                    except (CkptClientError, AirflowException) as error:
                        found = self._no_answer(watch, error)
                    yield found
        except (CkptClientError, AirflowException) as error:
            yield self._no_answer(watch, error)

    def _no_answer(self, watch: AlertWatch, error: Exception) -> Json | None:
        self.log.warning("job %r cannot be checked: %s", self.job, error)
        return watch.no_answer(str(error), _now_ms())


def _now_ms() -> int:
    return round(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of one poll: the time in ms since which the condition is violated, or ``None`` while it holds; and a
    description."""

    since_ms: int | None
    words: str
    facts: Json = field(default_factory=dict)


class AlertWatch:
    """Decides at each poll whether to give an alert. The caller keeps its memory ``mark``, ``None`` before the first
    poll."""

    def __init__(self, job: str, alert: str, longer_than: float, above: int = 0, mark: Json | None = None) -> None:
        self._job = job
        self._alert = alert
        self._longer_than_ms = longer_than * 1000
        self._above = above
        self.mark = mark
        self.absence = MissingPolicy()
        self._sources: dict[str, list[tuple[str, list[str]]]] = {}
        """For each job, the vertices whose sources report waiting rows, each with the names of those metrics."""

    def concerns(self, event: StreamedEvent) -> bool:
        """Never: an alert is about the absence of events."""
        return False

    async def look(self, client: AsyncCalls, now_ms: int) -> Json | None:
        """Poll once; return the alert if one is due.

        :raises CkptJobAmbiguous: for a name that several living jobs have.
        """
        line = chosen(self._job, await client.list_jobs(), ended=True)
        if line is None:
            lags = self._alert == LAG
            seen = _Seen(None if lags else self._known_since(now_ms), f"no job is named {self._job!r}")
            return self._judged(seen, None, now_ms)
        if line.state in _INTENDED_ENDS:
            return self._judged(_Seen(None, f"{_named(line)} has ended"), line, now_ms)
        if self._alert == LAG:
            seen = await self._lag(client, line, now_ms)
        else:
            seen = await (self._checkpoints if self._alert == NO_CHECKPOINT else self._savepoints)(client, line)
        found = self._judged(seen, line, now_ms)
        return None if found is None else found | {"health": await _health(client, line)}

    def no_answer(self, trouble: str, now_ms: int) -> Json | None:
        """The session has not answered: there may have been no checkpoint; of a lag nothing is known."""
        if self._alert == LAG:
            return None
        return self._judged(_Seen(self._known_since(now_ms), f"the session does not answer: {trouble}"), None, now_ms)

    def _known_since(self, now_ms: int) -> int:
        known = None if self.mark is None else self.mark["since_ms"]
        return now_ms if known is None else int(known)

    def _judged(self, seen: _Seen, line: JobLine | None, now_ms: int) -> Json | None:
        """Remember the result of a poll; return the alert if it has lasted too long, and was not given yet."""
        before = self.mark or {}
        job_id = before.get("job_id") if line is None else line.job_id
        overdue = seen.since_ms is not None and now_ms - seen.since_ms > self._longer_than_ms
        given = overdue and bool(before.get("given"))
        self.mark = {"job_id": job_id, "since_ms": seen.since_ms, "given": overdue}
        if not overdue or given:
            return None
        lasted = f"for more than {self._longer_than_ms / 1000:g} s, since {moment(int(seen.since_ms or 0))}"
        return {
            "alert": self._alert,
            "job": self._job if line is None else line.name,
            "job_id": job_id,
            "state": None if line is None else line.state,
            "since_ms": seen.since_ms,
            "longer_than_s": self._longer_than_ms / 1000,
            "message": f"{_TITLES[self._alert]} {lasted}: {seen.words}",
            "health": None,
            **seen.facts,
        }

    # -- the three kinds ----------------------------------------------------------------------------------------

    async def _checkpoints(self, client: AsyncCalls, line: JobLine) -> _Seen:
        try:
            last = (await client.checkpoint_statistics(line.job_id)).latest_completed
        except NotFound:  # a Flink job without checkpoints, or a job that has since disappeared
            return _Seen(line.start_time_ms, f"{_named(line)} has no checkpoints")
        if last is None:
            return _Seen(line.start_time_ms, f"{_named(line)} has completed none since it started")
        at_ms = max(line.start_time_ms, last.triggered_at_ms + last.duration_ms)
        facts = {"last_id": last.id, "last_path": last.external_path, "last_at_ms": at_ms}
        return _Seen(at_ms, f"the last one of {_named(line)} was checkpoint {last.id}", facts)

    async def _savepoints(self, client: AsyncCalls, line: JobLine) -> _Seen:
        """The savepoints in the catalogue, if there is one, and in the history of the job."""
        found: list[tuple[int, str | None]] = []
        try:
            best = await client.latest_savepoint(job=self._job)
            found.append((best.completion_timestamp or best.trigger_timestamp or 0, best.location))
        except CkptApiError as error:
            if is_passing(error):
                raise
        try:
            last = (await client.checkpoint_statistics(line.job_id)).latest_savepoint
        except NotFound:
            last = None
        if last is not None and not last.discarded:
            found.append((last.triggered_at_ms + last.duration_ms, last.external_path))
        if not found:
            return _Seen(line.start_time_ms, f"{_named(line)} has none")
        at_ms, path = max(found, key=lambda item: item[0])
        facts = {"last_path": path, "last_at_ms": at_ms}
        return _Seen(at_ms, f"the newest one of {_named(line)} is {path}", facts)

    async def _lag(self, client: AsyncCalls, line: JobLine, now_ms: int) -> _Seen:
        lag = await self._waiting_rows(client, line)
        if lag is None:
            return _Seen(None, f"no source of {_named(line)} reports how many rows wait")
        known = None if (self.mark or {}).get("job_id") != line.job_id else (self.mark or {}).get("since_ms")
        since_ms = (known or now_ms) if lag > self._above else None
        words = f"{lag} rows wait in front of the sources of {_named(line)}, more than {self._above}"
        return _Seen(since_ms, words, {"lag": lag, "above": self._above})

    async def _waiting_rows(self, client: AsyncCalls, line: JobLine) -> int | None:
        """The sum over all sources; ``None`` when none reports it."""
        known = self._sources.get(line.job_id)
        if not known:
            known = []
            for vertex in (await client.job_details(line.job_id)).vertices:
                names = await client.subtask_metric_names(line.job_id, vertex.id)
                pending = [name for name in names if name.endswith(PENDING)]
                known += [(vertex.id, pending)] if pending else []
            self._sources = {line.job_id: known}
        sums = [await client.subtask_metric_sums(line.job_id, vertex, tuple(names)) for vertex, names in known]
        values = [value for found in sums for value in found.values()]
        return round(sum(values)) if values else None


_TITLES: Final = {
    NO_CHECKPOINT: "No checkpoint has completed",
    LAG: "The job has lagged",
    NO_SAVEPOINT: "No savepoint was taken",
}


def _named(line: JobLine) -> str:
    return f"job {line.job_id} ({line.name!r}, {line.state})"


async def _health(client: AsyncCalls, line: JobLine) -> Json | None:
    """The job manager's verdict and its reasons; ``None`` where there is none, as on Flink."""
    try:
        found: Json = json.decode(json.encode(await client.job_health(line.job_id)))
    except CkptApiError:
        return None
    return found
