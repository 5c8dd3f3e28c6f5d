"""Uploaded pipelines: files of the session, under names chosen by the server, and holds on them.

A pipeline is one ``.py`` file or a ``.zip`` of a directory. It is kept as a zip archive, sent to each worker once, and
run in a plan process to get the job graph. The driver imports none of its code.

A held program is not deleted, and with high availability the next driver has it. A job has its own copy of its program,
so that a hold also restores a program that was deleted, or lost with an earlier driver, as long as a job runs it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import re
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt_runtime.client.private_files import make_private_directory
from ckpt_runtime.jobmaster.gateway_errors import InvalidRequest, NotReady, PipelineInUse, PipelineNotFound
from ckpt_runtime.jobmaster.gateway_values import StoredPipeline
from ckpt_runtime.jobmaster.program_archive import (
    DEFAULT_FUNCTION,
    MAX_SOURCE_BYTES,
    ProgramRefusedError,
    entry_modules,
)
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.ha_store import HeldProgram, HeldProgramStore

_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """``archive`` is the zip; ``default_entry`` is None when several modules could be meant."""

    description: StoredPipeline
    archive: Path
    default_entry: str | None


class ProgramStore:
    """Keeps archives in one directory. Ids are content hashes with the display name, so uploads are idempotent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._programs: dict[str, StoredProgram] = {}

    async def store(
        self, filename: str, content: AsyncIterator[bytes], uploaded_at_ms: int, pool: Executor | None = None
    ) -> StoredPipeline:
        """Raises InvalidRequest when the content is neither Python source nor a zip of it.

        A separate process reads it; a thread of ``pool`` waits for that process.
        """
        received = b"".join([chunk async for chunk in content])
        return await asyncio.get_running_loop().run_in_executor(
            pool, partial(self.add, filename, received, uploaded_at_ms)
        )

    def add(self, filename: str, content: bytes, uploaded_at_ms: int) -> StoredPipeline:
        """As :meth:`store`, for content in memory. Blocks."""
        name = _NAME.sub("_", Path(filename.replace("\\", "/")).name) or "pipeline.py"
        if len(name) > MAX_NAME:
            raise InvalidRequest("jarfile", name[:MAX_NAME] + "...", f"a file name has at most {MAX_NAME} characters")
        archive = content if name.endswith(".zip") else _archive_of_module(name, content)
        program_id = f"{hashlib.sha256(archive).hexdigest()[:32]}_{name}"
        return self._put(program_id, name, archive, uploaded_at_ms)

    def _put(self, program_id: str, name: str, archive: bytes, uploaded_at_ms: int) -> StoredPipeline:
        path = self._directory / f"{program_id}.archive"
        modules = _keep(name, archive, path)
        entries = tuple(f"{module}:{DEFAULT_FUNCTION}" for module in modules)
        description = StoredPipeline(program_id, name, uploaded_at_ms, entries)
        self._programs[program_id] = StoredProgram(description, path, entries[0] if len(entries) == 1 else None)
        return description

    def put_back(self, program_id: str, archive: bytes, uploaded_at_ms: int) -> None:
        """As :meth:`add`, for an archive that was stored under this id before. Blocks.

        Raises InvalidRequest when the archive does not match the id or is not acceptable.
        """
        digest, _, name = program_id.partition("_")
        if hashlib.sha256(archive).hexdigest()[: len(digest)] != digest:
            raise InvalidRequest("jarid", program_id, "it must begin with the digest of what it names")
        self._put(program_id, name, archive, uploaded_at_ms)

    def get(self, program_id: str) -> StoredProgram:
        """Raises PipelineNotFound."""
        program = self._programs.get(program_id)
        if program is None:
            raise PipelineNotFound(program_id)
        return program

    def list(self) -> tuple[StoredPipeline, ...]:
        return tuple(program.description for program in self._programs.values())

    def delete(self, program_id: str) -> None:
        """Raises PipelineNotFound. Jobs that run it have their own copy."""
        self.get(program_id).archive.unlink(missing_ok=True)
        del self._programs[program_id]


def _keep(name: str, archive: bytes, path: Path) -> list[str]:
    """Moves an accepted archive into its place atomically; a refused one leaves nothing behind."""
    make_private_directory(path.parent)
    # In the same directory, so that moving it into place is one step.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as draft:
        draft.write(archive)
    try:
        modules = entry_modules(Path(draft.name))
        Path(draft.name).replace(path)
    except ProgramRefusedError as error:
        raise InvalidRequest("jarfile", error.where or name, error.reason) from error
    finally:
        Path(draft.name).unlink(missing_ok=True)
    return modules


def _archive_of_module(name: str, source: bytes) -> bytes:
    if not name.endswith(".py"):
        raise InvalidRequest("jarfile", name, "it must be a Python file (.py) or a zip archive of Python files (.zip)")
    module = name.removesuffix(".py")
    if not module.isidentifier():
        raise InvalidRequest("jarfile", name, "a Python file must be named like a module (letters, digits, underscore)")
    if len(source) > MAX_SOURCE_BYTES:
        raise InvalidRequest("jarfile", name, f"it has {len(source)} bytes; a module has at most {MAX_SOURCE_BYTES}")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as files:
        # ZipInfo without a time: the id is the archive's digest, so equal uploads must give equal bytes.
        files.writestr(zipfile.ZipInfo(name), source)
    return buffer.getvalue()


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
