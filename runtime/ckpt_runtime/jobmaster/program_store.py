"""Uploaded pipelines: files of the session, under names chosen by the server, and holds on them.

A pipeline is one ``.py`` file or a ``.zip`` of a directory. It is kept as a zip archive, sent to each worker once, and
run in a plan process to get the job graph. The driver imports none of its code.

A held program is not deleted, and with high availability the next driver has it. A job has its own copy of its program,
so that a hold also restores a program that was deleted, or lost with an earlier driver, as long as a job runs it.

An uploaded archive is inspected in a process with limits: the driver neither parses nor runs any of its content. The
plan process and workers may later unpack an accepted archive: the limits bound that too.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import io
import json
import logging
import re
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt_runtime.client.private_files import make_private_directory
from ckpt_runtime.frontend.scripts import uses_session
from ckpt_runtime.jobmaster.gateway_values import (
    InvalidRequest,
    NotReady,
    PipelineInUse,
    PipelineNotFound,
    StoredPipeline,
)
from ckpt_runtime.processes.limited_process import LimitedProcessError, ProcessLimits, run_limited, serve
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.ha_store import HeldProgram, HeldProgramStore

T = TypeVar("T")

DEFAULT_FUNCTION = "pipeline"
MAX_FILES = 10_000
MAX_UNPACKED_BYTES = 256 << 20
FREE_UNPACKED_BYTES = 16 << 20
MAX_RATIO = 20
"""An archive may unpack to ``FREE_UNPACKED_BYTES`` and this many times its own size, up to ``MAX_UNPACKED_BYTES``."""
MAX_SOURCE_BYTES = 1 << 20
"""Maximum size of one Python file at the top level: these files are parsed."""
MAX_SOURCES = 200
LIMITS = ProcessLimits(time_s=20.0, memory_bytes=512 << 20, answer_bytes=1 << 20)


class ProgramRefusedError(ValueError):
    """The archive is not a program, or exceeds a limit named in the message. ``where`` is the faulty file, if any."""

    def __init__(self, where: str | None, reason: str) -> None:
        super().__init__(reason)
        self.where = where
        self.reason = reason


def entry_modules(archive: Path) -> list[str]:
    """Top-level modules that define the default entry function or are PySpark scripts, in the order of the archive.

    Blocks until the inspecting process has ended. Raises :class:`ProgramRefusedError`.
    """
    try:
        answer: dict[str, Any] = json.loads(run_limited(__name__, json.dumps(str(archive)).encode(), LIMITS))
    except LimitedProcessError as error:
        raise ProgramRefusedError(None, f"it cannot be read within the limits: {error}") from error
    if "refused" in answer:
        raise ProgramRefusedError(answer["where"], answer["refused"])
    return [str(module) for module in answer["modules"]]


def modules_of(archive: Path) -> list[str]:
    """As :func:`entry_modules`, in this process."""
    files = _readable(None, "it is not a readable zip archive", lambda: zipfile.ZipFile(archive))
    with files:
        entries = files.infolist()
        _check_size(entries, archive.stat().st_size)
        sources = [entry for entry in entries if entry.filename.endswith(".py") and "/" not in entry.filename]
        if not sources:
            raise ProgramRefusedError(None, "it must contain a Python module at its top level")
        if len(sources) > MAX_SOURCES:
            raise ProgramRefusedError(None, f"at most {MAX_SOURCES} Python modules at its top level")
        return [entry.filename.removesuffix(".py") for entry in sources if _defines_entry(files, entry)]


def _check_size(entries: Sequence[zipfile.ZipInfo], packed: int) -> None:
    """Checks the sizes that the archive declares: no member is ever unpacked beyond its declared size."""
    if len(entries) > MAX_FILES:
        raise ProgramRefusedError(None, f"it contains {len(entries)} files; at most {MAX_FILES} files")
    unpacked = sum(entry.file_size for entry in entries)
    limit = min(MAX_UNPACKED_BYTES, FREE_UNPACKED_BYTES + MAX_RATIO * packed)
    if unpacked > limit:
        raise ProgramRefusedError(
            None, f"its {packed} bytes unpack to {unpacked}; an archive of that size has at most {limit} bytes unpacked"
        )


def _defines_entry(files: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    name = entry.filename
    if entry.file_size > MAX_SOURCE_BYTES:
        message = f"its file {name!r} has {entry.file_size} bytes; a Python module at the top level has at most"
        raise ProgramRefusedError(None, f"{message} {MAX_SOURCE_BYTES}")
    source = _readable(None, f"its file {name!r} cannot be read", lambda: files.read(entry))
    tree = _readable(name, "it is not valid Python", lambda: ast.parse(source, name))
    defined = any(isinstance(node, ast.FunctionDef) and node.name == DEFAULT_FUNCTION for node in tree.body)
    return defined or uses_session(tree)


def _readable(where: str | None, problem: str, read: Callable[[], T]) -> T:
    """Reads possibly damaged content: any error of the standard library becomes a refusal of the archive."""
    try:
        return read()
    except Exception as error:
        raise ProgramRefusedError(where, f"{problem}: {str(error) or type(error).__name__}") from error


def _answer(request: bytes) -> bytes:
    answer: dict[str, Any]
    try:
        answer = {"modules": modules_of(Path(json.loads(request)))}
    except ProgramRefusedError as error:
        answer = {"where": error.where, "refused": error.reason}
    return json.dumps(answer).encode()


def main() -> None:
    """The process's entry point."""
    serve(_answer)


if __name__ == "__main__":
    main()


_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """``archive`` is the zip. ``default_entry`` is the only entry point, or that of the module with the archive's name;
    None when several modules could be meant."""

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
        known = self._programs.get(program_id)
        if known is not None and _content(path) == archive:  # it was inspected when it was stored
            entries = known.description.entry_points
        else:
            entries = tuple(f"{module}:{DEFAULT_FUNCTION}" for module in _keep(name, archive, path))
        description = StoredPipeline(program_id, name, uploaded_at_ms, entries)
        named = f"{name.rpartition('.')[0]}:{DEFAULT_FUNCTION}"
        default = named if named in entries else entries[0] if len(entries) == 1 else None
        self._programs[program_id] = StoredProgram(description, path, default)
        return description

    def put_back(self, program_id: str, archive: bytes, uploaded_at_ms: int) -> None:
        """As :meth:`add`, for an archive that was stored under this id before. Blocks.

        Raises InvalidRequest when the archive does not match the id or is not acceptable.
        """
        digest, _, name = program_id.partition("_")
        if hashlib.sha256(archive).hexdigest()[: len(digest)] != digest:
            raise InvalidRequest("jarid", program_id, "it must begin with the digest of the program that it names")
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


def _content(path: Path) -> bytes | None:
    """Returns the content of a stored archive; None if it cannot be read, so that an upload replaces it."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _keep(name: str, archive: bytes, path: Path) -> list[str]:
    """Moves an accepted archive into its place atomically; a refused one is deleted."""
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
"""Limit for all programs together; it reveals a client that never releases its holds."""


class ProgramHolds:
    """All methods run on the driver's event loop. ``running`` gives the archive of a program that a job runs."""

    def __init__(self, programs: ProgramStore, running: Callable[[str], bytes | None]) -> None:
        self._programs = programs
        self._running = running
        self._store: HeldProgramStore | None = None
        self._holds: dict[str, dict[str, int]] = {}
        self._changing = asyncio.Lock()

    def of(self, program_id: str) -> Mapping[str, int]:
        """The owners of holds, with the times at which the holds began."""
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
                logger.error("program %s is held but cannot be read: %s", program_id, error)

    def _put_back(self, store: HeldProgramStore, program_id: str, program: HeldProgram) -> None:
        self._programs.put_back(program_id, store.read_archive(program), program.uploaded_at_ms)

    async def hold(self, program_id: str, owner: str, now_ms: int, storage: Executor, planning: Executor) -> None:
        """Holds a program; may be repeated. Raises PipelineNotFound, and NotReady when it cannot be stored."""
        async with self._changing:  # one at a time: the later of two changes of a hold wins
            if owner in self.of(program_id):
                return
            if sum(map(len, self._holds.values())) >= MAX_HOLDS:
                raise InvalidRequest("owner", owner, f"there are already {MAX_HOLDS} holds; release some")
            try:
                self._programs.get(program_id)
            except PipelineNotFound:
                archive = self._running(program_id)
                if archive is None:
                    raise
                put_back = partial(self._programs.put_back, program_id, archive, now_ms)
                await asyncio.get_running_loop().run_in_executor(planning, put_back)
            owners = self._holds.setdefault(program_id, {})
            owners[owner] = now_ms  # from now on it is not deleted
            try:
                await self._keep(program_id, owner, now_ms, storage)
            except BaseException:
                del owners[owner]
                raise

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
