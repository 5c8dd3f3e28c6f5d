"""The public protocol of sinks: two-phase commit, driven by checkpoints.

A sink is a class that a program registers with ``spark.dataSource.register`` and writes to by its name. Every subtask
has a *writer*. Before a checkpoint, the writer makes its rows durable in a place where no reader sees them, and returns
*committables*: small values that locate the rows. They are part of the checkpoint. When the checkpoint has
completed, a *committer* makes the rows visible. After a failure the committer is given the committables of the restored
checkpoint again, so a commit may be repeated and has to find out whether it has happened before.

    writer.write* -> writer.prepare_commit -> (checkpoint completes) -> committer.commit -> (after a failure: again)

A committable is a ``msgspec.Struct``, which the engine stores as JSON; fields of type ``bytes`` may hold rows as an
Arrow IPC stream. Nothing is pickled. The engine's own sinks are built on this protocol and on nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import msgspec
import pyarrow as pa

from ckpt_runtime.readable_types import ready


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The facts about the subtask of a writer or committer.

    ``sink_id`` (16 hexadecimal digits) is kept in the sink's state and outlives the job: a job that starts from a
    snapshot continues with the id. ``ended_jobs`` are jobs that wrote under the id before this one and no longer run.
    ``restored_checkpoint_id`` is None on a fresh start. A savepoint of this job, up to number ``savepoint_id``, may
    cover output that is newer than the restored checkpoint. ``attempt`` counts deployments of the job from 0.
    ``last_checkpoint_id`` is that of the last barrier before a writer was created, or of the restored checkpoint.
    ``spark_url`` returns the URL, with a token, at which the session's Spark serves clients of Spark Connect; it waits
    until Spark has started.
    """

    sink_id: str
    job_id: str
    uid: str
    subtask_index: int
    parallelism: int
    attempt: int
    restored_checkpoint_id: int | None = None
    ended_jobs: tuple[str, ...] = ()
    savepoint_id: int = 0
    last_checkpoint_id: int = 0
    spark_url: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Transaction:
    """Identifies the commit of one checkpoint: equal at each repetition, and different from every other commit.

    ``writer_id`` is the sink of one job, or one of its subtasks if each commits for itself. Two jobs that were started
    from one savepoint have the same sink id and the same checkpoint ids, but different writer ids; the output that the
    savepoint itself covers has one writer id in both of them. Within one writer id, commits have growing checkpoint
    ids.

    ``batch_id`` counts the commits of a sink from 0, without gaps, as Spark counts the micro-batches of a query. It is
    part of the sink's state, so that it continues in a job that starts from a snapshot: two jobs that start from one
    savepoint use the same numbers. It is None if each subtask commits for itself.
    """

    writer_id: str
    checkpoint_id: int
    batch_id: int | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """Both parts in one text, for a target that knows one identifier."""
        return f"{self.writer_id}-{self.checkpoint_id}"


class BadRowError(ValueError):
    """A row that the target cannot hold; the message names the place and the value."""


class CommitOutcome(Enum):
    """The result of a commit."""

    COMMITTED = "committed"
    ALREADY_COMMITTED = "already committed"


class SinkWriter(ABC):
    """Writes the rows of one subtask. It is created for the first row of an attempt."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Takes the rows of a batch. It is empty only for a result table without rows (output mode complete).

        Raises BadRowError, before it has taken any row of the batch, for a row that the target cannot hold. The row
        fails the job, or is left out, as ``execution.bad-rows.mode`` says: then parts of the batch are written.
        """

    @abstractmethod
    def prepare_commit(self, checkpoint_id: int) -> Sequence[Any]:
        """Makes the rows since the last call durable and returns the committables of these rows.

        An empty sequence means that there is nothing to commit. What was returned belongs to the checkpoint from now
        on: only a committer may commit or abort it.
        """

    def check(self) -> None:
        """Raises failures since the last call. A writer that works in the background overrides it.

        It is called twice a second while no rows arrive.
        """

    def close(self) -> None:
        """Releases resources and discards the rows that no ``prepare_commit`` has returned. Called once."""


class SinkCommitter(ABC):
    """Makes prepared rows visible."""

    @abstractmethod
    def commit(self, transaction: Transaction, committables: Sequence[Any]) -> CommitOutcome:
        """Makes the rows of a completed checkpoint visible, all or none of them if the target can.

        The call is repeated after a failure at any moment, also after the commit itself, and also by another process.
        The same transaction and committables must then have no further effect.
        """

    def completed(self, checkpoint_id: int) -> None:
        """Hears that a checkpoint has completed, after its commits, if each subtask commits for itself.

        By then all subtasks have committed the output that the restored snapshot covers.
        """

    @property
    def is_busy(self) -> bool:
        """Whether background work has to end before the subtask ends, if each subtask commits for itself.

        It is called when the data has ended, or the job is being stopped; not when the job fails or is cancelled.
        """
        return False

    def abort(self, transaction: Transaction, committables: Sequence[Any]) -> None:
        """Discards rows that no snapshot covers and that will never be committed. It may be called again."""

    def close(self) -> None:
        """Releases resources. Called once."""


class Sink(ABC):
    """A format that programs write to. One object is created from the options wherever it is needed."""

    committable: ClassVar[type[msgspec.Struct]]
    """The type of the values that ``prepare_commit`` returns."""

    single_committer: ClassVar[bool] = True
    """One committer commits what all subtasks have prepared for a checkpoint, in one call and in the order of
    checkpoints. Otherwise each subtask commits what it prepared, and tries every checkpoint even if one fails."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """``options`` are those of ``writeStream``, the path among them. Raises ValueError for a bad one."""
        self.options = options

    @classmethod
    @abstractmethod
    def name(cls) -> str:
        """The name that ``writeStream.format`` takes."""

    def check(self, schema: pa.Schema) -> None:
        """Raises ValueError for rows that the sink cannot write. It is called when the program is planned."""

    @abstractmethod
    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        """Returns the writer of a subtask for this attempt."""

    @abstractmethod
    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        """Returns a committer. ``schema`` is None if each subtask commits for itself."""

    def clean_up(self, context: SinkContext) -> None:
        """Removes what earlier attempts and ended jobs have left and the restored snapshot does not cover.

        It is called in each subtask before its first row. The output that the restored snapshot covers may not be
        committed yet, unless each subtask commits its own.
        """

    def encode(self, committable: Any) -> str:
        """Returns the text that is stored for a committable."""
        return msgspec.json.encode(committable).decode()

    def decode(self, text: str) -> Any:
        """Returns the committable of a text of :meth:`encode`."""
        return msgspec.json.decode(text, type=ready(self.committable))


def is_sink(value: Any) -> bool:
    """Whether a value is a class that implements the protocol."""
    return isinstance(value, type) and issubclass(value, Sink)
