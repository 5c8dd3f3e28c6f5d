"""The stages that slot agents come in: launched by a provider, complete or not yet, ending or failed.

Spark runs and fails the tasks of a barrier stage together, so slots come and go by stages. Runs on the event loop; only
a provider's report of an end comes from another thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ckpt_runtime.jobmaster.slots import SlotsUnavailableError

logger = logging.getLogger(__name__)

StageEnded = Callable[[int, BaseException | None], None]


class SlotProvider(Protocol):
    """Where slot agents come from: Spark barrier stages, or plain processes in tests."""

    @property
    def capacity(self) -> int:
        """How many slots could run at once, as far as it is known; 0 when it is not."""

    def launch(self, stage_id: int, slots: int, control_port: int, secret: str, ended: StageEnded) -> None:
        """Starts ``slots`` agents; ``ended`` may be called from any thread, once, when all of them are over."""

    def cancel(self, stage_id: int) -> None: ...


@dataclass(slots=True)
class _Stage:
    expected: int
    arrived: int = 0
    ending: bool = False

    @property
    def complete(self) -> bool:
        return self.arrived >= self.expected


class SlotStages:
    """All stages that have not ended. ``on_ended`` hears of each end."""

    def __init__(self, provider: SlotProvider, secret: str, on_ended: StageEnded) -> None:
        self._provider = provider
        self._secret = secret
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._stages: dict[int, _Stage] = {}
        self._failures: list[BaseException] = []
        self._next = 0
        self.control_port = 0

    def __bool__(self) -> bool:
        return bool(self._stages)

    @property
    def living(self) -> list[int]:
        return list(self._stages)

    @property
    def capacity(self) -> int:
        return self._provider.capacity

    @property
    def launching(self) -> bool:
        """Whether agents of a launched stage have not registered yet."""
        return any(not stage.complete and not stage.ending for stage in self._stages.values())

    def launch(self, slots: int) -> int:
        """Returns the stage's id. Raises SlotsUnavailableError."""
        # Never given again: an agent of a stage that was given up may register much later.
        stage_id, self._next = self._next, self._next + 1
        self._stages[stage_id] = _Stage(slots)
        self._failures.clear()  # of launches that nobody waited for in the end
        logger.info("launching barrier stage %d with %d slots", stage_id, slots)
        try:
            self._provider.launch(stage_id, slots, self.control_port, self._secret, self._report_end)
        except Exception as error:
            del self._stages[stage_id]
            raise SlotsUnavailableError(f"the barrier stage could not be launched: {error}") from error
        return stage_id

    def arrive(self, stage_id: int) -> bool:
        """An agent of the stage registers; False when nobody wants it any more."""
        if not self.is_open(stage_id):
            return False
        self._stages[stage_id].arrived += 1
        return True

    def is_open(self, stage_id: int) -> bool:
        """Whether the stage lives and is not about to end."""
        stage = self._stages.get(stage_id)
        return stage is not None and not stage.ending

    def is_complete(self, stage_id: int) -> bool:
        """Whether no further agent of the stage is awaited."""
        stage = self._stages.get(stage_id)
        return stage is None or stage.complete

    def begin_end(self, stage_id: int) -> bool:
        """False when it ends already."""
        if not self.is_open(stage_id):
            return False
        self._stages[stage_id].ending = True
        return True

    def cancel(self, stage_id: int) -> None:
        """Of a stage whose agents do not answer."""
        self._provider.cancel(stage_id)

    def raise_failure(self) -> None:
        """Raises SlotsUnavailableError when a stage could not run and no other one is on its way."""
        if self._failures and not self.launching:
            error = self._failures[-1]
            self._failures.clear()
            raise SlotsUnavailableError(f"the barrier stage could not run: {error}") from error

    def _report_end(self, stage_id: int, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the session has ended before its stage
            self._loop.call_soon_threadsafe(self._end, stage_id, error)

    def _end(self, stage_id: int, error: BaseException | None) -> None:
        stage = self._stages.pop(stage_id, None)
        # Once agents have come, the loss of one explains the end, and its owner hears of that.
        if error is not None and stage is not None and not stage.ending and not stage.arrived:
            self._failures.append(error)
        self._on_ended(stage_id, error)
