"""Inspects an uploaded archive in a process with limits: the driver neither parses nor runs any of its content.

The plan process and workers may later unpack an accepted archive: the limits bound that too.
"""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckpt_runtime.frontend.scripts import builds_session
from ckpt_runtime.processes.limited_process import LimitedProcessError, ProcessLimits, run_limited, serve

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
            raise ProgramRefusedError(None, "it must hold a Python module at its top level")
        if len(sources) > MAX_SOURCES:
            raise ProgramRefusedError(None, f"at most {MAX_SOURCES} Python modules at its top level")
        return [entry.filename.removesuffix(".py") for entry in sources if _defines_entry(files, entry)]


def _check_size(entries: Sequence[zipfile.ZipInfo], packed: int) -> None:
    """Checks the sizes that the archive declares: no member is ever unpacked beyond its declared size."""
    if len(entries) > MAX_FILES:
        raise ProgramRefusedError(None, f"it holds {len(entries)} files; at most {MAX_FILES} files")
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
    return defined or builds_session(tree)


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
