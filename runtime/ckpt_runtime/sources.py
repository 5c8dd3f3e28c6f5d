"""The public protocol of sources: splits that are discovered, read and resumed.

A source is a class that a program registers with ``spark.dataSource.register`` and reads by its name. A *split* is a
part of the data that one reader reads in order: a file, a partition of a topic. One *enumerator* per job discovers
splits; each split is assigned to one of the *readers*, one per subtask, and belongs to that reader's state until it has
ended. The engine requests rows from a reader step by step. With the rows, the reader returns its position in the split.
This position is part of each checkpoint: after a failure, a rescale or an upgrade a reader gets the split with its
position.

    enumerator.discover* -> reader.add(split, position) -> reader.read* -> (checkpoint completes) -> reader.completed

Descriptions and positions of splits and the state of an enumerator are values of JSON. Nothing is pickled. All calls of
one object are made by one thread and should return within milliseconds: the engine cannot take a checkpoint during a
call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Split:
    """A part of the data. ``description`` describes the data to read, as a value of JSON.

    ``id`` is unique among the splits of the source at one time. ``bounded``: the split has an end, which the reader
    reports. A job that is drained reads bounded splits to their ends, and leaves the others where they are.
    """

    id: str
    description: Any
    bounded: bool = True


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read: why, where it is in the source if that is known, and what was found there, as it is.

    The option ``badRows`` of ``readStream`` decides what happens to it; without the option it fails the job.
    """

    reason: str
    position: str | None
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The result of a read: rows of one split, and the ``position`` behind them, as a value of JSON.

    ``batch`` None means no rows. Columns of text may be dictionary-encoded: expressions over such a column are
    evaluated once for each value of the dictionary, and once for all batches that share one. ``ended``: the split has
    no further rows; the reader has forgotten it. ``bad`` are rows that could not be read, and are before ``position``,
    too. ``origin`` returns where in the source a row of the batch, by its number in it, is, and its bytes there: it is
    called for rows for which an expression fails, which may be kept as dead letters.
    """

    split_id: str
    position: Any
    batch: pa.RecordBatch | None = None
    ended: bool = False
    bad: Sequence[BadRow] = ()
    origin: Callable[[int], tuple[str, bytes | None]] | None = None


Offsets = Mapping[str, Mapping[str, int]]
"""Numbers of rows in numbered parts of data, such as ``{"topic": {"0": 534}}``.

Reports show a part that has no name as its number alone: ``{"logOffset": {"": 2}}`` as ``{"logOffset": 2}``.
"""

PositionKind = Literal["earliest", "latest", "timestamp", "offsets"]


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The position from which a user lets a source continue, in place of the one in a snapshot. ``earliest`` is the
    beginning of the available data, ``latest`` its end when the job starts. ``timestamp``: the first row that is not
    older than ``time_ms``, in ms since the epoch. ``offsets`` are a value of JSON, whose form is the source's own.
    """

    kind: PositionKind
    time_ms: int | None = None
    offsets: Any = None


def single_offset(offsets: Any, name: str, *, least: int | None = None) -> int:
    """The number in a position such as ``{"version": 12}``. Raises ValueError for any other value."""
    value = offsets.get(name) if isinstance(offsets, dict) and len(offsets) == 1 else None
    if type(value) is not int or (least is not None and value < least):
        raise ValueError(f"offsets {offsets!r} are not of the form {{{name!r}: a whole number}}")
    return value


class SplitEnumerator(ABC):
    """Finds splits. One object per job, created at each start of the job."""

    idle_ms: int = 500
    """How long to wait after :meth:`discover` has found nothing."""

    @abstractmethod
    def discover(self) -> Sequence[Split]:
        """Returns splits that it has not returned before; none if there are none now.

        What one call returns belongs together: event time advances when all rows of these splits have been read. A
        bounded enumerator is called until it returns nothing, which ends the source.
        """

    @abstractmethod
    def snapshot(self) -> Any:
        """The state with which an enumerator continues after the splits that it has returned so far, as a value of
        JSON.

        The value is stored later: it must not change any more.
        """

    def close(self) -> None:
        """Releases resources. Called once."""


class SplitReader(ABC):
    """Reads splits in one subtask."""

    @abstractmethod
    def add(self, split: Split, position: Any) -> None:
        """Takes a split, to be read from a position that :meth:`read` has returned; None means its beginning."""

    @abstractmethod
    def read(self, most_rows: int) -> SplitRows | None:
        """Returns the next rows of any of its splits, at most ``most_rows``; None if there are none now.

        It does not wait for rows. None also says that the rows of the range have been read, so that event time may
        advance, unless :attr:`holds_event_time`.
        """

    @property
    def holds_event_time(self) -> bool:
        """Whether rows are still unread that existed when the range of splits without an end began."""
        return False

    def begin_range(self) -> None:
        """Event time has advanced: rows that exist now belong to the next range of splits without an end."""

    @property
    def idle_ms(self) -> int:
        """How long to wait after :meth:`read` has found nothing."""
        return 10

    pauses_splits: ClassVar[bool] = False
    """Whether :meth:`pause` works. Otherwise the reader is taken to read its splits one after the other, and is not
    asked for rows while it is ahead of other sources that it is aligned with."""

    def pause(self, split_ids: Set[str]) -> None:
        """From now on :meth:`read` returns no rows of these splits, and again those of all others.

        A paused split does not make it hold event time (:attr:`holds_event_time`): the range ends where the split is.
        """

    def backlog(self) -> int | None:
        """How many rows wait to be read in its splits; None if that is not known.

        It is called a few times a second. The metric ``pendingRecords`` shows the number, and a job whose sources have
        many rows waiting may take its checkpoints at another interval.
        """
        return None

    def offsets(self) -> tuple[Offsets, Offsets] | None:
        """The offsets behind the rows that it has returned, and those behind the rows that exist; None if unknown.

        Reports of progress show them, put together from all readers. It is called with each checkpoint.
        """
        return None

    def begun(self) -> Offsets:
        """The offsets behind which it has begun to read, for the first report of a job; -1 in front of all rows."""
        return {}

    def completed(self, positions: Mapping[str, Any], ended: Sequence[Split]) -> None:
        """A checkpoint has completed that covers the ``positions`` of open splits, and splits that have ``ended``.

        Only sources whose :attr:`Source.acknowledges` is true are called. An ended split is reported once or more.
        """

    def close(self) -> None:
        """Releases resources. Called once."""


class Source(ABC):
    """A format that programs read. One object is created from the options wherever it is needed.

    Values in a snapshot are checked against the three types before the source gets them, as ``msgspec`` checks them:
    ``int``, ``dict[str, int]``, a ``TypedDict``. A snapshot with other values is refused with the place in the value.
    """

    state_type: Any = Any
    """The type of :meth:`SplitEnumerator.snapshot`."""
    description_type: Any = Any
    """The type of :attr:`Split.description`."""
    position_type: Any = Any
    """The type of :attr:`SplitRows.position`."""
    finds_bad_rows: ClassVar[bool] = False
    """Whether readers may report rows as bad (:attr:`SplitRows.bad`). Otherwise the option ``badRows`` is refused."""
    reports_bad: bool = False
    """Whether the program has said what happens to bad rows; set by the engine before a reader is opened. Otherwise the
    first one that a reader reports fails the job."""
    _spark: Callable[[], Any] | None = None
    start_positions: ClassVar[frozenset[PositionKind]] = frozenset()
    """The kinds of positions that :meth:`repositioned` takes. Snapshots record them for the tools."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """``options`` are those of ``readStream``, the path among them. Raises ValueError for a bad one."""
        self.options = options

    @classmethod
    @abstractmethod
    def name(cls) -> str:
        """The name that ``readStream.format`` takes."""

    @abstractmethod
    def schema(self, declared: pa.Schema | None) -> pa.Schema:
        """The schema of the rows. ``declared`` is that of ``readStream.schema``, None without it.

        Called when the program is planned, in each worker, too. Raises ValueError for a schema that it cannot have.
        """

    @property
    def spark(self) -> Callable[[], Any]:
        """Returns a session of the session's own Spark, a session of this subtask; it waits until Spark serves.

        Only enumerators and readers of a PySpark program may call it, in their own thread, since it may wait.
        """
        if self._spark is None:
            raise RuntimeError(
                f"source {self.name()!r} has no Spark: it only works in PySpark programs, while the job runs"
            )
        return self._spark

    @spark.setter
    def spark(self, connect: Callable[[], Any]) -> None:
        """Set by the engine."""
        self._spark = connect

    @property
    def is_bounded(self) -> bool:
        """Whether it ends by itself, with any trigger of its queries."""
        return False

    @property
    def acknowledges(self) -> bool:
        """Whether readers are notified of completed checkpoints: see :meth:`SplitReader.completed`."""
        return False

    @abstractmethod
    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        """Returns the enumerator, which continues after a ``state`` of :meth:`SplitEnumerator.snapshot`.

        ``state`` is None at a first start. ``bounded``: it finds the data that exists now and no later data.
        """

    def repositioned(
        self, schema: pa.Schema, state: Any, reading: Sequence[tuple[Split, Any]], position: StartPosition
    ) -> Any:
        """Returns the state of an enumerator that sends splits from ``position`` on.

        Called once when a job starts from a snapshot whose position a user has set. ``state`` is that of the snapshot's
        enumerator, and ``reading`` are the splits that its readers had, each with its position: they are no longer
        read. It may query the system that holds the data. Raises ValueError if the position does not exist there; the
        job fails then, before it has read anything.
        """
        raise ValueError(f"source {self.name()!r} cannot start at a given position")

    @abstractmethod
    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        """Returns the reader of a subtask."""


def is_source(value: Any) -> bool:
    """Whether a value is a class of a :class:`Source`."""
    return isinstance(value, type) and issubclass(value, Source)
