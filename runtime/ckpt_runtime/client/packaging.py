"""Turns a pipeline on disk into the content of an upload: a ``.py`` as it is, a directory as a reproducible zip.

A ``.jar`` is also uploaded as it is: a Flink cluster runs it, and a session refuses it.

Reads files only; nothing of the pipeline is imported or run here.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ckpt_runtime.client.errors import CkptClientError

MAX_ARCHIVE_BYTES = 100 * 1024 * 1024
_UPLOADED_AS_IT_IS = frozenset({".py", ".zip", ".jar"})
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv"})
# The earliest time that a zip can store, used for all files: with their own times, equal contents would give different
# zips.
_EPOCH = (1980, 1, 1, 0, 0, 0)


class PackagingError(CkptClientError):
    """The path is not a pipeline: missing, of another kind, empty, too large, or with links to the outside."""


def pack_pipeline(path: Path) -> tuple[str, bytes]:
    """File name and content to upload. Raises :class:`PackagingError`.

    For a directory, files in hidden folders and caches are left out; equal contents give equal bytes.
    """
    try:
        if path.is_dir():
            return f"{path.resolve().name or 'pipeline'}.zip", _zip(path)
        if not path.is_file():
            raise PackagingError(f"{path}: no such file or directory")
        if path.suffix.lower() not in _UPLOADED_AS_IT_IS:
            raise PackagingError(f"{path}: a pipeline is a .py file, a .zip archive, a directory, or a .jar for Flink")
        if path.stat().st_size > MAX_ARCHIVE_BYTES:
            raise PackagingError(f"{path}: larger than {MAX_ARCHIVE_BYTES} bytes")
        return path.name, path.read_bytes()
    except OSError as error:
        raise PackagingError(f"{path}: {error.strerror or error}") from error


def _zip(root: Path) -> bytes:
    target = io.BytesIO()
    size = 0
    count = 0
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in _files(root):
            size += file.stat().st_size
            if size > MAX_ARCHIVE_BYTES:
                raise PackagingError(f"{root}: more than {MAX_ARCHIVE_BYTES} bytes of files")
            entry = zipfile.ZipInfo(file.relative_to(root).as_posix(), _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, file.read_bytes())
            count += file.suffix == ".py"
    if count == 0:
        raise PackagingError(f"{root}: contains no .py file")
    return target.getvalue()


def _files(root: Path) -> Iterator[Path]:
    inside = root.resolve()
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        if any(part.startswith(".") or part in _SKIPPED for part in parts) or not file.is_file():
            continue
        if not file.resolve().is_relative_to(inside):
            raise PackagingError(f"{file}: is a link to a place outside {root}")
        yield file
