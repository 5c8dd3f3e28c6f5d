"""Names of a transactional sink's files. A name alone tells the file's writer, checkpoint and stage.

A file is *in progress* (hidden), then *pending* for one checkpoint (hidden), then *visible*. Pure: no file is touched.

A file belongs to one sink of one job. The sink's id outlives the job: a job that resumes from a snapshot has the same
sink id, and so finds the files of earlier jobs. The job's id distinguishes jobs that resumed from the same snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SLUG_LENGTH = 40
_PENDING = ".pending"
_IN_PROGRESS = ".inprogress"
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile("[\x01-\x1f\x7f\"#%'*/:=?\\\\{\\[\\]^]")
"""Characters that Spark writes as ``%`` and two digits in the name of a partition's directory."""
_NAME = re.compile(
    r"\.?part-(?P<owner>[A-Za-z0-9_]+-[A-Za-z0-9_]+-[0-9a-f]{8,16})-s(?P<subtask>\d+)-a(?P<attempt>\d+)"
    r"-n(?P<sequence>\d+)-(?P<token>[0-9a-f]{8})(?:-c(?P<checkpoint>\d+))?\."
    r"(?P<extension>(?:parquet|arrow|csv|json)(?:\.(?:gz|bz2|zst))?)(?P<stage>\.pending|\.inprogress)?"
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
        return f"{self._stem}-c{self.checkpoint}.{self.extension}"

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


def partition_directory(values: Iterable[tuple[str, str | None]]) -> str:
    """Returns the directory of a partition by the texts of its columns, with the names that Spark and Hive give it."""
    return "/".join(f"{_escaped(name)}={_escaped(value) if value else _NULL_PARTITION}" for name, value in values)


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)
