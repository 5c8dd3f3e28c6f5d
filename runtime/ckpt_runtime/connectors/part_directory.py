"""A directory that a transactional sink writes to: files become pending, then visible, by renaming. Knows no format.

Renaming is atomic on file systems; on object stores it is a copy and a deletion, and committing again after a crash in
between gives the same result. On S3 nothing is renamed: a file is an upload that its commit completes. Only files with
the sink's own name prefix are ever deleted.

The name of a file alone tells its writer, checkpoint and stage.

A file is *in progress* (hidden), then *pending* for one checkpoint (hidden), then *visible*.

A file belongs to one sink of one job. The sink's id outlives the job: a job that resumes from a snapshot has the same
sink id, and so finds the files of earlier jobs. The job's id distinguishes jobs that resumed from the same snapshot.

:func:`find_leftovers` finds the hidden files that remain after all processes of a job were killed.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ckpt_runtime.connectors.open_uploads import (
    Marker,
    OpenUpload,
    abort_uploads,
    complete_upload,
    read_marker,
    write_marker,
)
from ckpt_runtime.failure_report import printable
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_file,
    exists,
    file_size,
    list_names,
    make_directory,
    modification_time_s,
    naming,
    resolve,
)
from ckpt_runtime.storage.publish import fsync_directory

_SLUG_LENGTH = 40
_PENDING = ".pending"
_IN_PROGRESS = ".inprogress"
STAGED = "arrow"
"""The extension of files that are read before their commit: on S3, they are objects that are renamed."""
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_LONGEST_STEP = 255
"""The longest name of a directory on most file systems, in bytes."""
_ESCAPED = re.compile("[\x01-\x1f\x7f\"#%'*/:=?\\\\{\\[\\]^]")
"""Characters that Spark writes as ``%`` and two digits in the name of a partition's directory."""
_NAME = re.compile(
    r"\.?part-(?P<owner>[A-Za-z0-9_]+-[A-Za-z0-9_]+-[0-9a-f]{8,16})-s(?P<subtask>\d+)-a(?P<attempt>\d+)"
    r"-n(?P<sequence>\d+)-(?P<token>[0-9a-f]{8})(?:-c(?P<checkpoint>\d+))?\."
    r"(?P<extension>(?:parquet|arrow|csv|json|txt)(?:\.(?:gz|bz2))?)(?P<stage>\.pending|\.inprogress)?"
)


def owner_of(job_id: str, uid: str, sink_id: str) -> str:
    """Returns the common name prefix of all files of one sink of one job. ``sink_id`` is in hexadecimal digits."""
    return f"{_slug(job_id)}-{_slug(uid)}-{sink_id}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", text)[:_SLUG_LENGTH] or "_"


@dataclass(frozen=True, slots=True)
class PartName:
    """One file. ``token`` is random, so that no two writers share a name; ``checkpoint`` is None while in progress."""

    owner: str
    subtask: int
    attempt: int
    sequence: int
    token: str
    checkpoint: int | None = None
    extension: str = "parquet"

    @property
    def job_id(self) -> str:
        """The id of the job that wrote the file, if it has the form of the engine's job ids."""
        return self.owner.split("-")[0]

    @property
    def sink_id(self) -> str:
        return self.owner.split("-")[2]

    @property
    def uid(self) -> str:
        """The sink's uid, with ``_`` for each character that is neither a letter nor a digit."""
        return self.owner.split("-")[1]

    @property
    def hidden(self) -> str:
        """The name of the file before its commit: pending if it belongs to a checkpoint."""
        return self.in_progress if self.checkpoint is None else self.pending

    @property
    def in_progress(self) -> str:
        return f".{self._stem}.{self.extension}{_IN_PROGRESS}"

    @property
    def pending(self) -> str:
        return f".{self._stem}-c{self.checkpoint}.{self.extension}{_PENDING}"

    @property
    def visible(self) -> str:
        checkpoint = "" if self.checkpoint is None else f"-c{self.checkpoint}"
        return f"{self._stem}{checkpoint}.{self.extension}"

    @property
    def _stem(self) -> str:
        return f"part-{self.owner}-s{self.subtask}-a{self.attempt}-n{self.sequence}-{self.token}"


def parse_hidden(name: str) -> PartName | None:
    """The parts of an in-progress or pending file's name; None for any other file."""
    match = _NAME.fullmatch(name)
    if match is None or match["stage"] is None or (match["checkpoint"] is None) != (match["stage"] == _IN_PROGRESS):
        return None
    checkpoint = None if match["checkpoint"] is None else int(match["checkpoint"])
    part = PartName(
        match["owner"],
        int(match["subtask"]),
        int(match["attempt"]),
        int(match["sequence"]),
        match["token"],
        checkpoint,
        match["extension"],
    )
    return part if name in (part.pending, part.in_progress) else None


def is_visible_part(name: str) -> bool:
    """Whether a file has the visible name of a sink's."""
    match = _NAME.fullmatch(name)
    return match is not None and match["stage"] is None and not name.startswith(".")


def partition_directory(values: Iterable[tuple[str, str | None]]) -> str:
    """Returns the directory of a partition by the texts of its columns, with the names that Spark and Hive give it.

    Raises ValueError for a value that cannot be the name of a directory.
    """
    steps = []
    for name, value in values:
        step = f"{_escaped(name)}={_escaped(value) if value else _NULL_PARTITION}"
        if "\0" in step or len(step.encode()) > _LONGEST_STEP:
            raise ValueError(
                f"partitionBy: no directory can be named by {name}={printable(value or '', 80)!r}, which has "
                f"{len(step.encode())} bytes; allowed are {_LONGEST_STEP} bytes, and no zero character"
            )
        steps.append(step)
    return "/".join(steps)


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)


class CommitError(RuntimeError):
    """A pending file could not be made visible. The message names the file and what can be done."""


class PartDirectory:
    """One output directory. On S3, its files are uploads that stay open until their commit (``open_uploads.py``)."""

    def __init__(self, url: str, *, private: bool = False) -> None:
        """Raises ``InvalidLocationError`` for a path that is neither absolute nor a URL.

        Only the owner can access a ``private`` directory on this machine.
        """
        self.location: Location = resolve(url)
        self._private = private
        self._finished: dict[str, OpenUpload] = {}

    @property
    def url(self) -> str:
        return self.location.url

    def create(self) -> None:
        make_directory(self.location, private=self._private)

    def open_for_writing(self, part: PartName, partition: str = "") -> Any:
        """A new binary file, which :meth:`finish` ends. ``partition`` is the directory that it becomes visible in."""
        file = self.location.child(part.in_progress)
        if self._is_upload(part):
            write_marker(file, Marker(partition))
            return OpenUpload(self._visible(part, partition))
        with naming("write", file):
            return open(file.path, "wb") if file.is_local else file.filesystem.open(file.path, "wb")

    def finish(self, part: PartName, file: Any) -> None:
        """Closes a file after its bytes have become durable. Other object stores store a file when it is closed."""
        if isinstance(file, OpenUpload):
            file.finish()
            self._finished[part.in_progress] = file
            return
        with naming("write", self.location.child(part.in_progress)):
            if isinstance(file, io.BufferedWriter):
                file.flush()
                os.fsync(file.fileno())
            file.close()

    def open_for_reading(self, name: str) -> Any:
        """An existing binary file."""
        file = self.location.child(name)
        with naming("read", file):
            return file.filesystem.open(file.path, "rb")

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return exists(self.location.child(name))

    def make_pending(self, part: PartName, partition: str = "") -> None:
        """In progress -> pending, durable when this returns."""
        upload = self._finished.pop(part.in_progress, None)
        if upload is None:
            self._rename(part.in_progress, self.location.child(part.pending))
            return
        write_marker(self.location.child(part.pending), Marker(partition, upload.upload, tuple(upload.tags)))
        delete_file(self.location.child(part.in_progress))

    def commit(self, part: PartName, partition: str = "") -> bool | None:
        """Pending -> visible, in a directory below this one if it is a partition's.

        Returns True if this call made it visible, False if it was visible before, and None if it is missing.
        """
        visible = self._visible(part, partition)
        try:
            if self._is_upload(part):
                pending = self.location.child(part.pending)
                marker = read_marker(pending)
                outcome = complete_upload(visible, marker.upload, marker.tags)
                if outcome is not None:
                    delete_file(pending)
                return outcome
            if exists(self.location.child(part.pending)):
                if partition:
                    make_directory(visible.parent, private=False)
                self._rename(part.pending, visible)
                return True
        except NotFoundError:
            pass  # another job, started from the same savepoint, has just committed it
        return False if exists(visible) else None

    def visible_name(self, part: PartName) -> str:
        """The name of a committed file: an upload is named when it begins, before its checkpoint is known."""
        return (replace(part, checkpoint=None) if self._is_upload(part) else part).visible

    def discard(self, part: PartName) -> None:
        """Deletes a hidden file, and gives up its upload; not an error if it is missing."""
        hidden = self.location.child(part.hidden)
        if self._is_upload(part):
            try:
                abort_uploads(self._visible(part, read_marker(hidden).partition))
            except NotFoundError:
                return
        delete_file(hidden)

    def hidden_parts(self) -> list[PartName]:
        """The in-progress and pending files of all sinks, in name order."""
        parts = (parse_hidden(name) for name in list_names(self.location))
        return [part for part in parts if part is not None]

    def _is_upload(self, part: PartName) -> bool:
        return self.location.is_s3 and part.extension != STAGED

    def _visible(self, part: PartName, partition: str) -> Location:
        """Raises CommitError for a partition that is no directory below this one."""
        if partition and any("=" not in step or "\0" in step for step in partition.split("/")):
            raise CommitError(f"restored state names {partition!r}, which is not a partition's directory")
        place = self.location
        if partition:  # whose values may have characters that no name of the engine's has
            place = Location(place.filesystem, f"{place.path.rstrip('/')}/{partition}", place.scheme)
        return place.child(self.visible_name(part))

    def _rename(self, source: str, new: Location) -> None:
        old = self.location.child(source)
        with naming("rename", old):
            if not old.is_local:
                old.filesystem.mv(old.path, new.path)
                return
            os.replace(old.path, new.path)
            for changed in {os.path.dirname(old.path), os.path.dirname(new.path)}:
                fsync_directory(changed)


@dataclass(frozen=True, slots=True)
class HiddenFile:
    """One file. ``modified_s`` is in seconds since the epoch, ``size`` in bytes."""

    part: PartName
    size: int
    modified_s: float


def find_hidden_files(url: str) -> list[HiddenFile]:
    """Lists hidden files in name order, without files that disappear during the listing.

    Raises NotFoundError when there is no such directory, InvalidLocationError, or StorageError.
    """
    directory = PartDirectory(url)
    if not exists(directory.location):
        raise NotFoundError(f"cannot list {url}: the directory does not exist", url)
    found = []
    for part in directory.hidden_parts():
        file = directory.location.child(part.hidden)
        try:
            found.append(HiddenFile(part, file_size(file), modification_time_s(file)))
        except NotFoundError:
            continue
    return found


def remove_hidden_file(url: str, file: HiddenFile) -> None:
    """Removes the file; a missing file is not an error. Raises StorageError."""
    PartDirectory(url).discard(file.part)
