"""The chained operators of one subtask: each emits into the next, the last one into the result partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
from msgspec.structs import replace

from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.expressions.dictionaries import BatchDecoder
from ckpt_runtime.network.elements import CheckpointBarrier, ControlElement, Watermark
from ckpt_runtime.operators.operator import IDLE_WATERMARK, ChainTime, Operator, OperatorContext
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.task.in_flight import CapturedChannel
from ckpt_runtime.task.output import ResultPartition


class _NextOperator:
    """An operator's output inside a chain: a plain call into the next operator."""

    __slots__ = ("_decoder", "_next", "_time", "rows")

    def __init__(self, operator: Operator, time: ChainTime) -> None:
        self._next = operator
        self._time = time
        self._decoder = None if operator.takes_dictionaries else BatchDecoder()
        self.rows = 0

    def emit(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self.rows += batch.num_rows
            if self._decoder is not None:
                given, batch = batch, self._decoder.decoded(batch)
                if self._time.origins is not None and self._time.origins.batch is given:
                    self._time.origins = self._time.origins.of(batch, slice(None))
            self._next.process_batch(batch, 0)

    def emit_selected(self, batch: pa.RecordBatch, mask: pa.BooleanArray) -> None:
        self.rows += mask.true_count
        if self._decoder is not None:
            batch = self._decoder.decoded(batch)
        self._next.process_selected(batch, mask, 0)

    def emit_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms == IDLE_WATERMARK:
            self._next.output.emit_watermark(timestamp_ms)
        else:
            self._next.process_watermark(timestamp_ms)

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self._next.process_coming_watermark(timestamp_ms, batch)

    def emit_end_of_range(self) -> None:
        self._next.process_end_of_range()


class ChainEnd:
    """The last operator's output, which sends all elements to each outgoing edge. ``watermark`` is the last one
    emitted, ``time`` the event time of the chain.
    """

    def __init__(self, partitions: Sequence[ResultPartition]) -> None:
        self.partitions = list(partitions)
        self.rows = 0
        self.watermark: int | None = None
        self.time = ChainTime()
        self._decoder = BatchDecoder()

    @property
    def bytes(self) -> int:
        """Bytes of rows for all channels of all edges, so far."""
        return sum(partition.bytes for partition in self.partitions)

    @property
    def has_room(self) -> bool:
        # A plain loop, because every step calls this.
        for partition in self.partitions:  # noqa: SIM110
            if not partition.has_room:
                return False
        return True

    @property
    def usage(self) -> float:
        """The share, 0 to 1, of the channels that cannot take another buffer. Called by any thread."""
        full = [is_full for partition in self.partitions for is_full in partition.full_channels()]
        return sum(full) / len(full) if full else 0.0

    def emit(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        plain: pa.RecordBatch | None = None
        for partition in self.partitions:
            if partition.takes_dictionaries:
                partition.emit(batch)
                continue
            if plain is None:
                plain = self._decoder.decoded(batch)
            partition.emit(plain)

    def emit_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms != IDLE_WATERMARK:
            self.watermark = timestamp_ms
        for partition in self.partitions:
            partition.emit_watermark(timestamp_ms)

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self.send_control(Watermark(timestamp_ms, batch))

    def emit_end_of_range(self) -> None:
        for partition in self.partitions:
            partition.emit_end_of_range(self.time.batch, self.time.upto)

    def send_control(self, element: ControlElement) -> None:
        for partition in self.partitions:
            partition.send_control(element)

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[CapturedChannel]:
        """Sends a barrier ahead of the elements waiting here, at most ``limit`` bytes; returns the overtaken ones."""
        return self._capture(lambda partition, share: partition.overtake(barrier, share), limit)

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None) -> list[CapturedChannel]:
        """Like :meth:`overtake`, for a barrier that was sent in order, on the channels in which it is still queued."""
        return self._capture(lambda partition, share: partition.switch_to_unaligned(checkpoint_id, share), limit)

    def holds_barrier(self, checkpoint_id: int) -> bool:
        return any(partition.holds_barrier(checkpoint_id) for partition in self.partitions)

    @property
    def is_empty(self) -> bool:
        return all(partition.is_empty for partition in self.partitions)

    def _capture(
        self, capture: Callable[[ResultPartition, int | None], list[CapturedChannel]], limit: int | None
    ) -> list[CapturedChannel]:
        found: list[CapturedChannel] = []
        for edge, partition in enumerate(self.partitions):
            for channel in capture(partition, limit):
                channel.edge = edge
                found.append(channel)
                if limit is not None:
                    limit -= channel.bytes
        return found

    @property
    def error(self) -> BaseException | None:
        """The error of a lost channel; None while none is lost."""
        for partition in self.partitions:
            error = partition.error
            if error is not None:
                return error
        return None

    def check(self) -> None:
        error = self.error
        if error is not None:
            raise error

    def flush_due(self, now_ms: float, *, early: bool = True) -> bool:
        """See :meth:`ResultPartition.flush_due`."""
        sent = False
        for partition in self.partitions:
            sent |= partition.flush_due(now_ms, early=early)
        return sent

    @property
    def next_flush_ms(self) -> float | None:
        due: float | None = None
        for partition in self.partitions:
            at = partition.flush_at
            if at is not None and (due is None or at < due):
                due = at
        return due


class OperatorChain:
    """The operators in order, head first, with their contexts."""

    def __init__(self, operators: Sequence[Operator], contexts: Sequence[OperatorContext], end: ChainEnd) -> None:
        self.operators = list(operators)
        self.contexts = list(contexts)
        self.end = end
        self._outputs: list[_NextOperator | ChainEnd] = [
            *(_NextOperator(operator, end.time) for operator in self.operators[1:]),
            end,
        ]
        self._backends = [context.keyed_state for context in contexts if context.keyed_state is not None]
        self._opened = 0
        self._measured: list[OperatorMeasures] = []
        self._with_limit = [each for each in self.operators if type(each).is_full is not Operator.is_full]

    @property
    def head_rows(self) -> int:
        """Rows that the head has emitted so far."""
        return self._outputs[0].rows

    @property
    def operator_rows(self) -> tuple[int, ...]:
        """Rows that each operator has emitted so far, head first; 0 for a sink."""
        return tuple(output.rows for output in self._outputs)

    @property
    def head(self) -> Operator:
        return self.operators[0]

    def open(self) -> None:
        """Opens from the tail to the head, so that an operator may emit while it opens."""
        for position in reversed(range(len(self.operators))):
            self._opened += 1
            self.operators[position].open(self.contexts[position], self._outputs[position])

    @property
    def is_open(self) -> bool:
        return self._opened == len(self.operators)

    @property
    def requires_final_checkpoint(self) -> bool:
        return any(operator.requires_final_checkpoint for operator in self.operators)

    @property
    def has_work_left(self) -> bool:
        """Whether an operator still processes earlier input by timers."""
        return any(operator.has_work_left for operator in self.operators)

    @property
    def is_full(self) -> bool:
        """Whether an operator takes no further input for now."""
        return any(operator.is_full for operator in self._with_limit)

    @property
    def has_commits_left(self) -> bool:
        """Whether an operator still commits completed checkpoints."""
        return any(operator.has_commits_left for operator in self.operators)

    def measured(self, rows_in: int) -> tuple[OperatorMeasures, ...]:
        """The measures of the operators since the last call. ``rows_in`` counts the rows that the chain has
        received."""
        received = (rows_in, *(output.rows for output in self._outputs[:-1]))
        counts = []
        for operator, came, output in zip(self.operators, received, self._outputs, strict=True):
            counts.append(replace(operator.measured(), rows_in=came, rows_out=output.rows))
        before, self._measured = self._measured, counts
        return tuple(now.less(then) for now, then in zip(counts, before, strict=True)) if before else tuple(counts)

    def combined(self, uid: str, observed: Sequence[bytes]) -> bytes:
        """Combines the results of the ``observe`` with that uid over several intervals."""
        [operator] = [each for each in self.operators if each.context.uid == uid]
        return operator.combined(observed)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        for operator in self.operators:
            operator.prepare_snapshot(checkpoint_id)

    def finish(self) -> None:
        """Finishes the operators, head first: the rows that an operator then emits reach the operators after it."""
        for operator in self.operators:
            operator.finish()

    def state_metrics(self) -> dict[str, int]:
        """Metrics of the operators' state backends, prefixed with their uids. Called by any thread."""
        return {
            f"{context.uid}.{name}": figure
            for context in self.contexts
            if context.keyed_state is not None
            for name, figure in context.keyed_state.metrics().items()
        }

    @property
    def _notified(self) -> list[Operator | KeyedStateBackend]:
        return [*self.operators, *self._backends]

    def notify_complete(self, checkpoint_id: int) -> None:
        for part in self._notified:
            part.notify_complete(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        for part in self._notified:
            part.notify_aborted(checkpoint_id)

    def close(self) -> list[BaseException]:
        """Closes each opened operator and all state; returns the errors instead of stopping at the first."""
        parts: list[Operator | KeyedStateBackend] = []
        parts += reversed(self.operators[len(self.operators) - self._opened :])
        parts += reversed(self._backends)
        self._opened, self._backends = 0, []
        errors: list[BaseException] = []
        for part in parts:
            try:
                part.close()
            except (Exception, SystemExit) as error:
                errors.append(error)
        return errors
