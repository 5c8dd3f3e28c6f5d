"""Holds on uploaded programs: a held program is not deleted, and with high availability the next driver has it.

A job has its own copy of its program, so that a hold also restores a program that was deleted, or lost with an
earlier driver, as long as a job runs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial

from ckpt_runtime.jobmaster.gateway_errors import InvalidRequest, NotReady, PipelineInUse, PipelineNotFound
from ckpt_runtime.jobmaster.program_store import ProgramStore
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.held_programs import HeldProgram, HeldProgramStore

logger = logging.getLogger(__name__)

MAX_HOLDS = 1000
"""Limit for all programs together, so that a client which never releases its holds is noticed."""


class ProgramHolds:
    """All methods run on the driver's event loop. ``running`` gives the archive of a program that a job runs."""

    def __init__(self, programs: ProgramStore, running: Callable[[str], bytes | None]) -> None:
        self._programs = programs
        self._running = running
        self._store: HeldProgramStore | None = None
        self._holds: dict[str, dict[str, int]] = {}
        self._changing = asyncio.Lock()

    def of(self, program_id: str) -> Mapping[str, int]:
        """The owners of holds, with the times since when they hold the program."""
        return self._holds.get(program_id, {})

    def programs(self) -> dict[str, str]:
        """Maps every owner of a hold to a program that it holds."""
        return {owner: program_id for program_id, owners in self._holds.items() for owner in owners}

    def check_unheld(self, program_id: str) -> None:
        """Raises PipelineInUse."""
        owners = self.of(program_id)
        if owners:
            raise PipelineInUse(program_id, sorted(owners))

    async def take_over(self, store: HeldProgramStore) -> None:
        """Adopts the holds under earlier drivers. Raises StorageError for an unreadable directory."""
        found = await asyncio.to_thread(store.adopt)
        self._store = store
        for program_id, program in found.items():
            # Before the archive is read: a hold on a damaged archive still has to be releasable.
            self._holds[program_id] = dict(program.holds)
            try:
                await asyncio.to_thread(self._put_back, store, program_id, program)
            except (StorageError, InvalidRequest) as error:
                logger.error("program %s is held and cannot be read: %s", program_id, error)

    def _put_back(self, store: HeldProgramStore, program_id: str, program: HeldProgram) -> None:
        self._programs.put_back(program_id, store.read_archive(program), program.uploaded_at_ms)

    async def hold(self, program_id: str, owner: str, now_ms: int, storage: Executor, planning: Executor) -> None:
        """Holds a program; repeating is fine. Raises PipelineNotFound, and NotReady when it cannot be stored."""
        async with self._changing:  # one at a time: the later of two changes of a hold wins
            if owner in self.of(program_id):
                return
            if sum(map(len, self._holds.values())) >= MAX_HOLDS:
                raise InvalidRequest("owner", owner, f"there are {MAX_HOLDS} holds already; release some")
            await self._have(program_id, now_ms, planning)
            owners = self._holds.setdefault(program_id, {})
            owners[owner] = now_ms  # from now on it is not deleted
            try:
                await self._keep(program_id, owner, now_ms, storage)
            except BaseException:
                del owners[owner]
                raise

    async def _have(self, program_id: str, now_ms: int, planning: Executor) -> None:
        try:
            self._programs.get(program_id)
        except PipelineNotFound:
            archive = self._running(program_id)
            if archive is None:
                raise
            put_back = partial(self._programs.put_back, program_id, archive, now_ms)
            await asyncio.get_running_loop().run_in_executor(planning, put_back)

    async def _keep(self, program_id: str, owner: str, now_ms: int, storage: Executor) -> None:
        store, program = self._store, self._programs.get(program_id)
        if store is None:
            return

        def keep() -> None:
            store.hold(program_id, program.description.uploaded_at_ms, program.archive.read_bytes(), owner, now_ms)

        await self._stored(storage, keep)

    async def release(self, program_id: str, owner: str, storage: Executor) -> None:
        """Ends a hold, if there is one. The program stays until it is deleted, or this driver ends."""
        async with self._changing:
            if owner not in self.of(program_id):
                return
            if self._store is not None:
                await self._stored(storage, partial(self._store.release, program_id, owner))
            owners = self._holds[program_id]
            del owners[owner]
            if not owners:
                del self._holds[program_id]

    async def _stored(self, storage: Executor, change: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(storage, change)
        except StorageError as error:
            raise NotReady(f"the hold could not be stored: {error}") from error
