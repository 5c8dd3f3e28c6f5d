"""Uploaded pipelines: files of the session, under names chosen by the server.

A pipeline is one ``.py`` file or a ``.zip`` of a directory. It is kept as a zip archive, sent to each worker once, and
run in a plan process to get the job graph. The driver imports none of its code.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import tempfile
import zipfile
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt_runtime.client.private_files import make_private_directory
from ckpt_runtime.jobmaster.gateway_errors import InvalidRequest, PipelineNotFound
from ckpt_runtime.jobmaster.gateway_values import StoredPipeline
from ckpt_runtime.jobmaster.program_archive import (
    DEFAULT_FUNCTION,
    MAX_SOURCE_BYTES,
    ProgramRefusedError,
    entry_modules,
)

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
        """As :meth:`store`, for bytes at hand. Blocks."""
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
