"""Watches a job's snapshots for the assets that stand for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any

from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.conditions.snapshot_watch import SnapshotWatch
from airflow_provider_ckpt.event_hub import ANY_JOB, Member, joined
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from ckpt_runtime.client.errors import CkptClientError

_RECORD = "ckpt_watch"
_LONGEST_PAUSE_SECONDS = 60.0
_GAP_SECONDS = 1.0
"""Minimum time between two looks, however fast checkpoints come."""
HANDOVER_SECONDS = 10.0
"""How long Airflow may take to store an event: it does so once a second, and does not notify the trigger."""


class CkptSnapshotsTrigger(BaseEventTrigger):
    """Gives an event for each snapshot that completes, at least once, for as long as a DAG wants them.

    It never ends by itself and never raises: a session that is away, a name that no job or several jobs have, and an
    unusable connection are logged in the triggerer's log, and tried again with growing pauses. Events of the session,
    whose stream all waits there share, say when to look; without them it polls. Its progress is in the asset's state
    store, so that another triggerer continues from there.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param job: the job, by name or id.
    :param snapshots: ``savepoints`` or ``checkpoints``.
    :param poll_interval: seconds between two looks, where no stream of events says when to look.
    """

    def __init__(self, *, ckpt_conn_id: str, job: str, snapshots: str, poll_interval: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ckpt_conn_id = ckpt_conn_id
        self.job = job
        self.snapshots = snapshots
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and the keyword arguments that make an equal trigger elsewhere."""
        arguments = {
            "ckpt_conn_id": self.ckpt_conn_id,
            "job": self.job,
            "snapshots": self.snapshots,
            "poll_interval": self.poll_interval,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Give events without end."""
        watch, pause = SnapshotWatch(self.job, self.snapshots, await self._stored()), 0.0
        with closing(_Progress(self._store, watch.mark)) as progress:
            while True:
                try:
                    async with joined(CkptHook(self.ckpt_conn_id), watch, ANY_JOB, self.poll_interval) as member:
                        while True:
                            found, pause = await self._look(watch, member, pause)
                            for facts in found:
                                yield TriggerEvent(facts)  # type: ignore[no-untyped-call]
                            await progress.has_come_to(watch.mark, told=bool(found))
                            await asyncio.sleep(min(self.poll_interval, _GAP_SECONDS))
                            await member.rest(pause or member.pace())
                except (CkptClientError, AirflowException) as error:
                    pause = self._tell(error, pause)
                await asyncio.sleep(pause)

    async def _look(self, watch: SnapshotWatch, member: Member, pause: float) -> tuple[list[Json], float]:
        """Return what is new, and the pause until the next look; 0 when the hub decides that."""
        member.looking()
        try:
            return await member.run(watch.look()), 0.0
        except (CkptClientError, AirflowException) as error:
            return [], self._tell(error, pause)

    def _tell(self, error: Exception, pause: float) -> float:
        """Log what prevents the look; return the pause for that, given the previous one."""
        self.log.warning("%s of job %r cannot be looked at: %s", self.snapshots, self.job, error)
        return min(max(pause, self.poll_interval, 1.0) * 2, _LONGEST_PAUSE_SECONDS) * random.uniform(0.8, 1.0)

    async def _stored(self) -> Json | None:
        if self.asset_state_store is None:
            return None
        found = await self.asset_state_store.aget(_RECORD)
        return found if isinstance(found, dict) else None

    async def _store(self, mark: Json | None) -> None:
        if self.asset_state_store is not None:
            await self.asset_state_store.aset(_RECORD, mark)


class _Progress:
    """Stores how far a watch has come, but not before Airflow has stored its events.

    A trigger's event waits in its process for a while. If the progress were stored and the process ended before that,
    the event would be lost.
    """

    def __init__(self, store: Callable[[Json | None], Awaitable[None]], mark: Json | None) -> None:
        self._store = store
        self._mark = self._stored = mark
        self._following: asyncio.Task[None] | None = None

    async def has_come_to(self, mark: Json | None, *, told: bool) -> None:
        """Record the progress; ``told`` when events were given since the last call."""
        if mark == self._mark:
            return
        self._mark = mark
        if self._following is not None and self._following.done():
            following, self._following = self._following, None
            following.result()
        if told and self._following is None:
            self._following = asyncio.create_task(self._follow())
        elif self._following is None:
            await self._write(mark)

    def close(self) -> None:
        """Stop storing progress."""
        if self._following is not None:
            self._following.cancel()

    async def _follow(self) -> None:
        while self._stored != self._mark:
            mark = self._mark
            await asyncio.sleep(HANDOVER_SECONDS)
            await self._write(mark)

    async def _write(self, mark: Json | None) -> None:
        await self._store(mark)
        self._stored = mark
