"""The common parts of triggers that watch a job without an end: their arguments, and their progress."""

from __future__ import annotations

import asyncio
from abc import ABC
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from airflow.triggers.base import BaseEventTrigger

from airflow_provider_ckpt.conditions.base import Json

HANDOVER_SECONDS = 10.0
"""How long Airflow may take to store an event: it does so once a second, and does not notify the trigger."""


class WatchingTrigger(BaseEventTrigger, ABC):
    """Gives events about one job for as long as a DAG is scheduled on them.

    Its progress is a document in the asset's state store, so that another triggerer continues from there.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param job: the job, by name or id.
    :param poll_interval: seconds between two polls.
    """

    argument_names: ClassVar[tuple[str, ...]] = ("ckpt_conn_id", "job", "poll_interval")
    """The arguments of ``__init__``, each of which is an attribute of the same name."""
    record: ClassVar[str]
    """The key of the progress in the asset's state store."""

    def __init__(self, *, ckpt_conn_id: str, job: str, poll_interval: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ckpt_conn_id = ckpt_conn_id
        self.job = job
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and the keyword arguments that make an equal trigger in another process."""
        arguments = {name: getattr(self, name) for name in self.argument_names}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def stored(self) -> Json | None:
        """The progress that an earlier trigger has stored; ``None`` if there is none."""
        if self.asset_state_store is None:
            return None
        found = await self.asset_state_store.aget(self.record)
        return found if isinstance(found, dict) else None

    def progress_from(self, mark: Json | None) -> Progress:
        """The progress of a watch that begins with ``mark``; the caller closes it."""
        return Progress(self._store, mark)

    async def _store(self, mark: Json | None) -> None:
        if self.asset_state_store is not None:
            await self.asset_state_store.aset(self.record, mark)


class Progress:
    """Stores how far a watch has advanced, but not before Airflow has stored its events.

    A trigger's event waits in its process for a while. If the progress were stored and the process ended before that,
    the event would be lost.
    """

    def __init__(self, store: Callable[[Json | None], Awaitable[None]], mark: Json | None) -> None:
        self._store = store
        self._mark = self._stored = mark
        self._following: asyncio.Task[None] | None = None

    async def advanced_to(self, mark: Json | None, *, has_events: bool) -> None:
        """Record the progress; ``has_events`` when events were given since the last call."""
        if mark == self._mark:
            return
        self._mark = mark
        if self._following is not None and self._following.done():
            following, self._following = self._following, None
            following.result()
        if has_events and self._following is None:
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
