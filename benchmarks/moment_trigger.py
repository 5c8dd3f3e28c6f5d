"""A trigger that fires at a moment known beforehand and does nothing else: what is measured with it is Airflow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent


class MomentTrigger(BaseTrigger):
    """:param at_ms: when to fire, in milliseconds since the epoch."""

    def __init__(self, *, at_ms: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at_ms = at_ms

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and the keyword arguments that make an equal trigger in another process."""
        return f"{type(self).__module__}.{type(self).__qualname__}", {"at_ms": self.at_ms}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """One event."""
        self.log.info("Waiting until %d ms", self.at_ms)
        await asyncio.sleep(max(0.0, self.at_ms / 1000 - time.time()))
        yield TriggerEvent({"status": "done", "at_ms": self.at_ms})  # type: ignore[no-untyped-call]
