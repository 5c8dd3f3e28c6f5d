"""The operator interface: the calls of a subtask's chain, their order, and the actions that an operator may take.

All calls come from one thread, the subtask's. Life of an operator::

    open -> (process_batch | process_watermark | process_coming_watermark | process_end_of_range | on_processing_time
             | poll | prepare_snapshot + snapshot | notify_complete | notify_aborted)* -> finish? -> close

``finish`` is called at end of data (drained), never on cancellation; ``close`` always, also after a failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa
from msgspec import Meta

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState, OperatorStateMode
from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.failure_report import printable
from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError

T = TypeVar("T")
_MAX_SHOWN_CHARS = 300
MAX_WATERMARK = (1 << 63) - 1
IDLE_WATERMARK = -(1 << 63)
"""Stands in a stream for: no rows come for now, and event time need not wait for this channel. Operators do not get
it; it passes by them."""
UNNUMBERED = -1
"""The number of the batch of a coming watermark that is sent at a restore, before the source names its last range."""
EventTime = Annotated[int, Meta(ge=-(1 << 63), le=MAX_WATERMARK)]
"""Milliseconds since the epoch, as a stored value."""


class Output(Protocol):
    """The output of an operator: the next operator of the chain, or the network."""

    def emit(self, batch: pa.RecordBatch) -> None:
        """Hands over one batch; never blocks, even if the consumer is slow (the subtask checks for room beforehand)."""

    def emit_watermark(self, timestamp_ms: int) -> None:
        """Hands over a watermark: no later row has an event time at or below it."""

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        """Hands over the watermark that follows the next range: see :meth:`Operator.process_coming_watermark`."""

    def emit_end_of_range(self) -> None:
        """Signals that all rows of a stream reader's range were emitted: see :meth:`Operator.process_end_of_range`."""


@runtime_checkable
class SelectingOutput(Output, Protocol):
    """An output that takes a batch with a mask, so that the next operator copies only the columns that it reads."""

    def emit_selected(self, batch: pa.RecordBatch, mask: pa.BooleanArray) -> None:
        """Hands over the rows for which ``mask`` is true; there is at least one."""


class OperatorStateStore:
    """List states of one operator in one subtask, restored before ``open``.

    Items are JSON values (dict, list, str, int, float, bool, None), so that any tool can read a savepoint.
    """

    def __init__(self, restored: tuple[OperatorListState, ...] = ()) -> None:
        self._restored = {state.name: state for state in restored}
        self._current: dict[str, OperatorListState] = {}

    def restored(self, name: str, schema: type[T]) -> tuple[T, ...]:
        """The items assigned to this subtask by the restored snapshot; empty without one.

        Raises CorruptStateError for items that do not match ``schema``.
        """
        state = self._restored.get(name)
        if state is None:
            return ()
        try:
            return tuple(checked(item, schema) for item in state.items)
        except DocumentError as error:
            items = printable(repr(state.items), _MAX_SHOWN_CHARS)
            raise CorruptStateError(
                f"the restored list state {name!r} cannot be used: {error}; it is {items}"
            ) from error

    def put(self, name: str, items: list[Any], mode: OperatorStateMode = OperatorStateMode.SPLIT) -> None:
        """Replaces the items that the next snapshot will hold. Call it in ``snapshot``."""
        self._current[name] = OperatorListState(name, mode, tuple(items))

    def snapshot(self) -> tuple[OperatorListState, ...]:
        """Returns each state as of its last ``put``; a restored state that was never put again is kept."""
        return tuple({**self._restored, **self._current}.values())


class WaitingInput(Enum):
    """The facts about postponed input for an operator that postpones it (with a timer that is due)."""

    NOTHING = "nothing, or the end of data"
    ROWS = "rows"
    BARRIER = "something that need not wait, perhaps behind rows: a barrier, the end of a job that does not drain"


@dataclass(frozen=True, slots=True)
class RowOrigins:
    """Where the rows of a batch have been read. ``rows`` are the numbers of the source's rows that they come from, of
    which ``named`` returns the place and the bytes."""

    batch: pa.RecordBatch
    rows: AnyArray
    named: Callable[[int], tuple[str, bytes | None]]

    def of(self, batch: pa.RecordBatch, rows: slice | AnyArray | pa.BooleanArray) -> RowOrigins:
        """Those of a batch that was computed from some of the rows: a range, numbers, or those that a mask keeps."""
        if isinstance(rows, pa.BooleanArray):
            rows = rows.fill_null(False).to_numpy(zero_copy_only=False)
        return RowOrigins(batch, self.rows[rows], self.named)


@dataclass(slots=True)
class ChainTime:
    """Facts that a source and a later operator of its chain exchange: most of them belong to ``withWatermark``.

    ``reached_ms`` is the greatest watermark that rows lead to since the source has set it to None. ``held``: the source
    reads nothing because it is ahead of others, which does not make it idle. ``batch`` is the number of the last range
    that has ended, 0 if it is not known, and ``upto`` the number of splits up to its end. ``origins`` are those of the
    batch that is being processed, if bad rows are kept and each operator from the source on has set them.
    """

    reached_ms: int | None = None
    held: bool = False
    batch: int = 0
    upto: int = 0
    origins: RowOrigins | None = None


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """What an operator may know and use.

    ``attempt`` counts deployments of the job from 0 and grows with each restart. ``now_ms`` is the processing-time
    clock (ms since epoch), which may jump in either direction; ``monotonic_ms`` is for measuring durations.
    ``restored_checkpoint_id`` is None on a fresh start. ``keyed_state`` is None unless the spec is keyed.
    ``set_timer(at_ms)`` asks for one ``on_processing_time`` call at or after that time; a later call replaces the
    request if it is earlier. If the clock is put back meanwhile, the call comes when the time that was left has passed,
    although the clock does not show ``at_ms`` yet. A due timer precedes input, so that an operator can postpone its
    input; ``waiting_input`` describes the postponed input. ``sink`` is None unless the operator is a sink or a
    committer. ``spark_url`` returns the URL of the session's Spark for clients; it waits until Spark serves.
    ``chain_time`` is one object for all operators of a chain. ``report_progress`` sends the event time of an aligned
    source to the driver.
    """

    job_id: str
    uid: str
    name: str
    subtask_index: int
    parallelism: int
    attempt: int
    operator_state: OperatorStateStore
    now_ms: Callable[[], int]
    monotonic_ms: Callable[[], float]
    set_timer: Callable[[int], None]
    configuration: dict[str, str] = field(default_factory=dict)
    keyed_state: KeyedStateBackend | None = None
    restored_checkpoint_id: int | None = None
    waiting_input: Callable[[], WaitingInput] = lambda: WaitingInput.NOTHING
    sink: SinkLineage | None = None
    spark_url: Callable[[], str] | None = None
    chain_time: ChainTime = field(default_factory=ChainTime)
    report_progress: Callable[[Progress], None] = lambda _: None


class Operator(ABC):
    """Base class of all operators; the default methods do nothing or pass the call on."""

    context: OperatorContext
    output: Output

    requires_final_checkpoint: bool = True
    """Whether the operator still has work to do when a checkpoint that covers the end of the data has completed.

    A subtask ends with its data if this is false for all of its operators (FLIP-147).
    """

    takes_dictionaries: bool = False
    """Whether columns of text in its batches may be dictionary-encoded. They are decoded for all other operators."""

    late_rows_dropped: int = 0
    """Rows dropped since ``open`` because the watermark had reached their event time; read by the heartbeat."""

    bad_rows_dropped: int = 0
    """Rows that were left out since ``open`` because an expression failed for them; read by the heartbeat."""

    looks: int = 0
    """How often a source has looked for rows since ``open`` and found none."""

    state_operator: str = ""
    """Spark's name of the operator, if it keeps state of keys."""

    rows_updated: int = 0
    """Rows that were put into state since ``open``."""

    rows_removed: int = 0
    """Rows that were removed from state since ``open`` because event time has passed them."""

    pending_rows: int | None = None
    """Rows that wait to be read, as far as a source knows; set by the operator's thread, read by the heartbeat."""

    alignment_drift_ms: int | None = None
    """By how much an aligned source is ahead of its group; set by the operator's thread, read by the heartbeat."""

    def open(self, context: OperatorContext, output: Output) -> None:
        """Called once before any data, with restored state in the context. May emit."""
        self.context = context
        self.output = output

    @property
    def has_work_left(self) -> bool:
        """Whether timers are still processing earlier input: the end of data, and so ``finish``, waits for that.

        Checkpoints continue during that time. Not called when the job stops without draining.
        """
        return False

    @property
    def holds_checkpoints_back(self) -> bool:
        """Whether a snapshot taken now could not be restored exactly; asked of the head of a chain.

        The subtask holds a trigger from the coordinator until this is False. A barrier is input, which the operator
        itself postpones.
        """
        return False

    @property
    def is_full(self) -> bool:
        """Whether the chain may take no rows and barriers for now, which counts as back-pressure. Asked at each step.

        Raises failures of the operator's background work.
        """
        return False

    @property
    def has_commits_left(self) -> bool:
        """Whether completed checkpoints are still being committed in the background: the subtask ends after that.

        Raises failures of that work.
        """
        return False

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        """Processes one non-empty batch of the given input gate."""

    def process_selected(self, batch: pa.RecordBatch, mask: pa.BooleanArray, input_index: int) -> None:
        """Processes the rows of a batch for which ``mask`` is true; there is at least one."""
        self.process_batch(batch.filter(mask), input_index)

    def together(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Sequence[int]] | None:
        """Puts rows that ``process_batch`` must get in one call next to each other, and returns where each run ends.

        A batch may be processed in parts, so that mails and barriers do not wait for slow rows. None means that it may
        be cut anywhere.
        """
        return None

    def process_watermark(self, timestamp_ms: int) -> None:
        """Event time of all inputs has reached ``timestamp_ms``. The default passes it on."""
        self.output.emit_watermark(timestamp_ms)

    def process_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        """Range ``batch`` of all inputs has ended, and event time will reach ``timestamp_ms`` behind the next one. The
        default passes it on.

        Spark knows this time while it processes a batch: stateful functions see it as the watermark, and state is
        removed by it behind the batch. Rows are late by the watermark of the batch before.
        """
        self.output.emit_coming_watermark(timestamp_ms, batch)

    def process_end_of_range(self) -> None:
        """All rows of the stream reader's range (Spark calls it a batch) that this operator gets have arrived.

        It travels along chains and forward edges only: where several channels meet, ranges do not end at one common
        moment.
        """
        self.output.emit_end_of_range()

    def on_processing_time(self, now_ms: int) -> None:
        """The time requested with ``context.set_timer`` has passed."""

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """Called before the barrier is forwarded: the last chance to emit rows that belong in front of it."""

    def snapshot(self, checkpoint_id: int) -> None:
        """The synchronous part: put list states into ``context.operator_state``; the subtask takes keyed state."""

    def measured(self) -> OperatorMeasures:
        """The counts since ``open``, and what else was measured since the last call. Called with each snapshot."""
        return OperatorMeasures(
            self.context.uid,
            self.state_operator,
            late=self.late_rows_dropped,
            updated=self.rows_updated,
            removed=self.rows_removed,
            bad=self.bad_rows_dropped,
            looks=self.looks,
            pending=self.pending_rows,
        )

    def combined(self, observed: Sequence[bytes]) -> bytes:
        """Combines partial results of ``observe``."""
        raise TypeError(f"operator {self.context.uid!r} observes nothing")

    def align(self, minimum: int) -> None:
        """The event time of the group of sources that this one belongs to; called for the head of a chain."""

    def limit(self, rates: Mapping[str, float]) -> None:
        """The rows per second that sources may read, by their uids; called for the head of a chain."""

    def notify_complete(self, checkpoint_id: int) -> None:
        """A checkpoint completed; ids may be skipped and calls may be missing. Covers all ids up to this one."""

    def notify_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint was aborted. Never roll back output that was prepared for it: a later checkpoint covers it."""

    def finish(self) -> None:
        """No more input: emit all remaining rows. Not called when the job stops without draining."""

    def close(self) -> None:
        """Releases resources and aborts output that was not prepared for commit; called once, also after failures."""


class SourceStatus(Enum):
    """Result of polling a source."""

    MORE_AVAILABLE = "more available"
    NOTHING_AVAILABLE = "nothing available"
    END_OF_INPUT = "end of input"


class SourceOperator(Operator):
    """Head of a chain without inputs. Its state (positions) is kept in ``operator_state``.

    ``most_rows`` is the maximum number of rows that the next poll should emit: the subtask adapts it to the time that
    the downstream operators take per row, since no barrier or mail is processed before they have processed them all.
    """

    most_rows: int = 1 << 20

    @abstractmethod
    def poll(self) -> SourceStatus:
        """Emits at most one batch and returns at once.

        After ``NOTHING_AVAILABLE`` it is polled again after :meth:`idle_ms`, or when a timer that it set is due.
        """

    def idle_ms(self) -> int:
        """How long to wait before polling again after ``NOTHING_AVAILABLE``."""
        return 10

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        raise TypeError(f"source {self.context.uid!r} has no input")
