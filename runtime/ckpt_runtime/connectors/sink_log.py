"""The log of Spark's streaming sink of files: ``_spark_metadata`` names the files that its batches have committed.

Spark's readers of such a directory see only these files. Others are those of batches that have not ended, or are there
because a batch was repeated. Never writes.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

import msgspec

from ckpt_runtime.graph.source_formats import SINK_LOG
from ckpt_runtime.storage.errors import NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, exists, list_names, read_bytes

_BATCH = re.compile(r"([0-9]+)(\.compact)?")
_MOST_BYTES = 1 << 28
_LOOKS = 5


class _Entry(msgspec.Struct):
    path: str


class SinkLog:
    """The log in a directory of Spark's sink. What was read of it is kept: batches never change."""

    def __init__(self, directory: Location) -> None:
        self._place = directory.child(SINK_LOG)
        self._batches: dict[str, frozenset[str]] = {}

    def __bool__(self) -> bool:
        """Whether the directory has a log."""
        return exists(self._place)

    def committed(self) -> frozenset[str]:
        """The paths of the committed files, as file systems have them. Raises StorageError for a log that is unknown.

        Spark deletes batches that a later one repeats, with the suffix ``.compact``: a listing may name deleted ones.
        """
        for _ in range(_LOOKS):
            try:
                needed = _needed(list_names(self._place))
                self._batches = {
                    name: self._batches[name] if name in self._batches else self._read(self._place.child(name))
                    for name in needed
                }
            except NotFoundError:
                continue
            return frozenset[str]().union(*self._batches.values())
        problem = f"batches of this log of Spark's sink were deleted {_LOOKS} times while they were read"
        raise StorageError(f"{self._place.url}: {problem}", self._place.url)

    def _read(self, batch: Location) -> frozenset[str]:
        lines = read_bytes(batch, _MOST_BYTES).splitlines()
        if lines[:1] != [b"v1"]:
            raise StorageError(
                f"{batch.url}: a batch of Spark's sink begins with 'v1', not with {lines[:1]}", batch.url
            )
        paths: set[str] = set()
        for line in lines[1:]:
            try:
                address = urlsplit(msgspec.json.decode(line, type=_Entry).path)
            except (msgspec.MsgspecError, ValueError) as error:
                problem = f"a line of this batch of Spark's sink is malformed: {error}"
                raise StorageError(f"{batch.url}: {problem}", batch.url) from error
            path = unquote(address.path, errors="surrogateescape")
            paths |= {path, address.netloc + path}  # the paths of object stores begin with the bucket
        return frozenset(paths)


def _needed(names: list[str]) -> list[str]:
    """The latest batch that repeats all before it, if there is one, and those behind it."""
    batches = sorted((int(found[1]), name) for name in names if (found := _BATCH.fullmatch(name)))
    repeating = [at for at, (_, name) in enumerate(batches) if name.endswith(".compact")]
    return [name for _, name in batches[max(repeating, default=0) :]]
