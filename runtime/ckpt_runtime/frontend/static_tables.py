"""Static tables of a program: the rows that Spark computed while it was planned, stored beside the program's files.

A job with static tables has an archive that holds the program's own archive and one file for each table. It is stored
with the job and sent to workers as any other archive, so that a recovery or a rescale needs neither Spark nor what the
tables were read from. A table is a file of Arrow's IPC format, named by the digest of its content.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

DIRECTORY = ".ckpt-static-tables"
"""The folder beside the program's files that a worker unpacks tables to."""
_PROGRAM = "program.zip"


def with_tables(program: bytes, tables: Mapping[str, bytes]) -> bytes:
    """Returns the archive of a job: that of its program if it has no ``tables``, which are files by their digests."""
    if not tables:
        return program
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as files:
        files.writestr(zipfile.ZipInfo(_PROGRAM), program)
        for digest, content in sorted(tables.items()):
            files.writestr(zipfile.ZipInfo(_file_name(digest)), content)
    return archive.getvalue()


def program_of(archive: bytes, *, has_tables: bool) -> bytes:
    """Returns the archive of the program in the archive of a job."""
    if not has_tables:
        return archive
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        return files.read(_PROGRAM)


def unpack(archive: bytes, directory: str, *, has_tables: bool) -> None:
    """Unpacks the archive of a job, the program's files first: none of them can be the name of a table."""
    with zipfile.ZipFile(io.BytesIO(program_of(archive, has_tables=has_tables))) as files:
        files.extractall(directory)
    if has_tables:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            files.extractall(directory, [name for name in files.namelist() if name != _PROGRAM])


def path_of(directory: str, digest: str) -> str:
    """Returns the path of a table below the directory of a program's unpacked files."""
    return str(Path(directory, _file_name(digest)))


def read_table(path: str) -> pa.Table:
    """Returns the rows of a table. Raises OSError if its file is missing."""
    with pa.OSFile(path) as file:
        return pa.ipc.open_file(file).read_all()


def _file_name(digest: str) -> str:
    return f"{DIRECTORY}/{digest}.arrow"
