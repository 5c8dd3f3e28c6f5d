"""Turns a pipeline on disk into the content of an upload: a file of Python with the modules beside it that it imports,
or a directory, as a reproducible zip. A file that imports no such module is uploaded as it is.

A ``.jar`` is also uploaded as it is: a Flink cluster runs it, and a session refuses it.

Reads files only; nothing of the pipeline is imported or run here.
"""

from __future__ import annotations

import ast
import io
import re
import zipfile
from collections.abc import Iterator, Mapping
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

    For a directory, files in hidden folders and caches are left out; equal contents give equal bytes. A ``.py`` has the
    name of its module, with underscores in place of the characters that no such name has. If it imports modules beside
    it, it is a zip of this name.
    """
    try:
        if path.is_dir():
            files = {file.relative_to(path).as_posix(): file for file in _files(path)}
            return f"{path.resolve().name or 'pipeline'}.zip", _zip(path, files)
        if not path.is_file():
            raise PackagingError(f"{path}: no such file or directory")
        if path.suffix.lower() not in _UPLOADED_AS_IT_IS:
            raise PackagingError(f"{path}: a pipeline is a .py file, a .zip archive, a directory, or a .jar for Flink")
        if path.stat().st_size > MAX_ARCHIVE_BYTES:
            raise PackagingError(f"{path}: larger than {MAX_ARCHIVE_BYTES} bytes")
        if path.suffix.lower() != ".py":
            return path.name, path.read_bytes()
        module, files = _with_imported(path)
        if len(files) == 1:
            return f"{module}.py", path.read_bytes()
        return f"{module}.zip", _zip(path, files)
    except OSError as error:
        raise PackagingError(f"{path}: {error.strerror or error}") from error


def pack_script(script: Path) -> tuple[str, bytes]:
    """Returns the name of a script's module, as of :func:`pack_pipeline`, and a zip of it with the modules and packages
    beside it that it imports. Raises :class:`PackagingError`.
    """
    try:
        module, files = _with_imported(script)
        return module, _zip(script, files)
    except OSError as error:
        raise PackagingError(f"{script}: {error.strerror or error}") from error


def _with_imported(script: Path) -> tuple[str, dict[str, Path]]:
    """The name of a file's module, and the file with the modules and packages beside it that it imports, by their names
    in an archive.

    Imports are found in the text of the file and of these modules; packages are complete, with their data.
    """
    module = re.sub(r"\W|^(?=\d)", "_", script.stem)
    found = {f"{module}.py": script}
    todo = [script]
    while todo:
        for name in sorted(_imported(todo.pop())):
            file, folder = script.with_name(f"{name}.py"), script.with_name(name)
            # A folder without Python files has data, and only by chance the name of an installed package.
            beside = [file] * file.is_file() + [*_files(folder)] * any(folder.rglob("*.py"))
            new = {each.relative_to(script.parent).as_posix(): each for each in beside if each != script}
            todo.extend(new[each] for each in new.keys() - found.keys() if each.endswith(".py"))
            found |= new
    if found[f"{module}.py"] != script:
        raise PackagingError(
            f"{script}: it imports {module}.py, which has the name of its own module; rename one of them"
        )
    return module, dict(sorted(found.items()))


def _imported(file: Path) -> set[str]:
    """The top-level modules and packages that a file imports by their full names; none if it is not Python's syntax."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):
        return set()  # the run of the script shows the error, if it executes the file
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.partition(".")[0] for name in names}


def _zip(root: Path, files: Mapping[str, Path]) -> bytes:
    """A zip of files by their names in it; ``root`` is what errors name."""
    target = io.BytesIO()
    size = 0
    count = 0
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            size += file.stat().st_size
            if size > MAX_ARCHIVE_BYTES:
                raise PackagingError(f"{root}: more than {MAX_ARCHIVE_BYTES} bytes of files")
            entry = zipfile.ZipInfo(name, _EPOCH)
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
