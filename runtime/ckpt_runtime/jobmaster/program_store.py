"""Uploaded pipelines: files of the session, under names that the server chose.

A pipeline is one ``.py`` file or a ``.zip`` of a directory. It is kept as a zip archive, sent to each worker once, and
run in a plan process to get the job graph. Nothing of it is imported in the driver.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_runtime.client.private_files import write_private
from ckpt_runtime.jobmaster.gateway import InvalidRequest, PipelineNotFound, StoredPipeline

DEFAULT_FUNCTION = "pipeline"
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_NAME = 200
MAX_FILES = 10_000
MAX_UNPACKED_BYTES = 1 << 30


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

    async def store(self, filename: str, content: AsyncIterator[bytes], uploaded_at_ms: int) -> StoredPipeline:
        """Raises InvalidRequest when the content is neither Python source nor a zip of it."""
        return self.add(filename, b"".join([chunk async for chunk in content]), uploaded_at_ms)

    def add(self, filename: str, content: bytes, uploaded_at_ms: int) -> StoredPipeline:
        """As :meth:`store`, for bytes at hand."""
        name = _NAME.sub("_", Path(filename.replace("\\", "/")).name) or "pipeline.py"
        if len(name) > MAX_NAME:
            raise InvalidRequest("jarfile", name[:MAX_NAME] + "...", f"a file name has at most {MAX_NAME} characters")
        archive = content if name.endswith(".zip") else _archive_of_module(name, content)
        modules = _modules(name, archive)
        program_id = f"{hashlib.sha256(archive).hexdigest()[:32]}_{name}"
        path = self._directory / f"{program_id}.archive"
        write_private(path, archive)
        entries = tuple(f"{module}:{DEFAULT_FUNCTION}" for module in modules)
        description = StoredPipeline(program_id, name, uploaded_at_ms, entries)
        self._programs[program_id] = StoredProgram(description, path, entries[0] if len(entries) == 1 else None)
        return description

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


def _archive_of_module(name: str, source: bytes) -> bytes:
    if not name.endswith(".py"):
        raise InvalidRequest("jarfile", name, "it must be a Python file (.py) or a zip archive of Python files (.zip)")
    module = name.removesuffix(".py")
    if not module.isidentifier():
        raise InvalidRequest("jarfile", name, "a Python file must be named like a module (letters, digits, underscore)")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr(zipfile.ZipInfo(name), source)
    return buffer.getvalue()


def _modules(name: str, archive: bytes) -> list[str]:
    """Top-level modules that define the default entry function. Parses them; runs nothing."""
    try:
        files = zipfile.ZipFile(io.BytesIO(archive))
    except zipfile.BadZipFile as error:
        raise InvalidRequest("jarfile", name, f"it is not a readable zip archive: {error}") from error
    with files:
        entries = files.infolist()
        if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
            raise InvalidRequest("jarfile", name, f"at most {MAX_FILES} files and {MAX_UNPACKED_BYTES} bytes unpacked")
        sources = [entry for entry in entries if entry.filename.endswith(".py") and "/" not in entry.filename]
        if not sources:
            raise InvalidRequest("jarfile", name, "it must hold a Python module at its top level")
        found = []
        for entry in sources:
            module = entry.filename.removesuffix(".py")
            if _defines_entry(entry.filename, _read(name, files, entry)):
                found.append(module)
        return found


def _read(name: str, files: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    try:
        return files.read(entry)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest("jarfile", name, f"its file {entry.filename!r} cannot be read: {error}") from error


def _defines_entry(filename: str, source: bytes) -> bool:
    try:
        tree = ast.parse(source, filename)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest("jarfile", filename, f"it is not valid Python: {error}") from error
    return any(isinstance(node, ast.FunctionDef) and node.name == DEFAULT_FUNCTION for node in tree.body)
