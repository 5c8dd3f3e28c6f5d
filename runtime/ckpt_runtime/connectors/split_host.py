"""Base of split readers: decides when they read, when they take input, and where ranges end.

An enumerator sends splits as rows of ``SPLIT_SCHEMA``; the splits of one discovery are a range. A reader reads in small
steps, and the subtask processes its mailbox between two steps. Never reads anything itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Collection
from typing import Any

import pyarrow as pa
from msgspec import Struct, to_builtins

from ckpt_runtime.checkpoint.measures import ENOUGH_LOOKS, OperatorMeasures
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.specs import EnumeratorSpec
from ckpt_runtime.operators.operator import (
    MAX_WATERMARK,
    Operator,
    OperatorContext,
    Output,
    SourceOperator,
    SourceStatus,
    WaitingInput,
)
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.sources import StartPosition

ENUMERATOR, OPEN_SPLITS, ENDED_SPLITS = "enumerator", "open-splits", "ended-splits"
"""The list states of a :class:`~ckpt_runtime.sources.Source`: that of its enumerator, and two of its readers."""
OFFSET, UNREAD_PARTITIONS = "offset", "splits"
"""The list states of a PySpark data source: that of its enumerator, and that of its readers."""

_TAKE_EVERY_MS = 10
_LEAST_TAKE_MS = 20
_GREATEST_TAKE_MS = 2_000


STEP_MS = 10
"""How often an enumerator looks whether its range has been processed."""
_ASK_EVERY_MS = 200
"""How often an enumerator asks the driver for the checkpoint that it waits for: the last one may have failed."""


class RangeEnumerator(SourceOperator):
    """Base of enumerators: counts the splits and ranges that were sent, and sends the number of each behind it.

    A source that has ended stays so for the same job.

    One ``in_step`` with other sources sends a range when all operators in which the sources meet have processed the one
    before; they tell the driver. The numbers of ranges begin again with each run that reads the data which is there.

    One whose ranges are ``in_calls`` of a sink sends a range when a checkpoint has completed that covers the one
    before. It asks for this checkpoint when the readers have read the range, so that reading does not count as the
    time of the checkpoint.
    """

    def __init__(self, spec: EnumeratorSpec) -> None:
        self._in_step = spec.in_step
        self._keeps_last = spec.keeps_last
        self._in_calls = spec.in_calls
        self._ended = False
        self._splits = 0
        self._ranges = 0
        self._processed = 0
        self._covering: int | None = None
        """The first checkpoint behind the rows of the last range."""
        self._covered = True
        self._ask_at = 0.0
        self._closing = False

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if self._in_step or self._in_calls:
            # The group of sources that are in step waits for the operators in which they meet, and not for this one.
            context.report_progress(Progress(None, idle=True))

    @abstractmethod
    def send_range(self) -> bool:
        """Sends the next range if there is one. Sets whether the data ends with it."""

    def poll(self) -> SourceStatus:
        if self.waits:
            self._ask_for_checkpoint()
            return SourceStatus.NOTHING_AVAILABLE
        if not self._ended and self.send_range():
            return SourceStatus.MORE_AVAILABLE
        return self._end_of_input() if self._ended else SourceStatus.NOTHING_AVAILABLE

    @property
    def waits(self) -> bool:
        """Whether the last range has not been processed, or has to be covered by a checkpoint and is not."""
        unprocessed = (self._in_step or self._in_calls) and self._ranges > self._processed
        return unprocessed or not self._covered

    @property
    def ranges_with_data(self) -> int:
        """How many ranges a snapshot counts. The one behind the data comes again with the same number at a restore."""
        return self._ranges - self._closing

    @property
    def ended_in(self) -> str | None:
        """The job in which the source has ended, for a snapshot."""
        return self.context.job_id if self._ended else None

    def _ask_for_checkpoint(self) -> None:
        """Called while the source waits."""
        now = self.context.monotonic_ms()
        if not self._covered and self._ranges <= self._processed and now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_MS
            self.context.report_progress(Progress(None, idle=True, wants_checkpoint=True))

    def snapshot(self, checkpoint_id: int) -> None:
        if self._covering is None and self._ranges <= self._processed:
            self._covering = checkpoint_id

    def notify_complete(self, checkpoint_id: int) -> None:
        if self._covering is not None and checkpoint_id >= self._covering:
            self._covered = True

    def align(self, minimum: int) -> None:
        self._processed = minimum

    def continue_behind(self, splits: int, ranges: int, ended_in: str | None) -> None:
        """Called at a restore. What was in flight at the snapshot behind a range is no part of any state."""
        self._ended = ended_in == self.context.job_id
        self._splits, self._ranges = splits, ranges if ended_in is None or self._ended else 0
        # Readers may have restored splits of a range that an earlier release has sent.
        self._covered = not (self._in_calls and self._ranges)
        if splits or ranges:
            self._send_end()

    def check_position(self, position: StartPosition, takes: Collection[str]) -> None:
        """Raises ValueError unless a user may set the source to a position of this kind."""
        if position.kind not in takes:
            raise ValueError(
                f"source {self.context.uid!r} cannot be set to {position.kind}: "
                f"it takes {', '.join(sorted(takes)) or 'no position'}"
            )

    def _end_of_input(self) -> SourceStatus:
        """The status of a source whose data has ended.

        One in step first takes part in a further batch, without rows: the time of its last rows takes effect with that,
        unless it is left to the next run.
        """
        if self._in_step and not self._keeps_last and not self._closing:
            self._closing = True
            self.end_range()
        return SourceStatus.NOTHING_AVAILABLE if self.waits else SourceStatus.END_OF_INPUT

    def end_range(self) -> None:
        """Called behind the splits of a range."""
        self._ranges += 1
        self._covering, self._covered, self._ask_at = None, not self._in_calls, 0.0
        self._send_end()

    def _send_end(self) -> None:
        self.output.emit_coming_watermark(self._splits, self._ranges)
        self.output.emit_watermark(self._splits)


class Reposition(Struct):
    """A position that a user has set, as an enumerator's stored item has it."""

    position: StartPosition


def repositioned_item(item: dict[str, Any], reading: list[Any], position: StartPosition) -> dict[str, Any]:
    """An enumerator's stored item with a position that a user has set. ``reading`` are the readers' stored splits."""
    return {**item, "ended_in": None, "reposition": {"position": to_builtins(position), "reading": reading}}


class SplitHost(Operator):
    """Reads the pending splits before it takes further ones.

    It requests the next step with a timer that is always due, because a subtask takes input only when no timer is due.
    While reading may be interrupted it also takes splits that precede a barrier, and periodically some others, since a
    barrier after them may be held back for lack of credit. MAX_WATERMARK is forwarded when all pending splits have been
    read. Any other watermark is the enumerator's: everything below that sequence number was sent. Such a watermark, or
    the first split of a later range, shows that this subtask has received all of its splits of a range.
    """

    requires_final_checkpoint = False

    def __init__(self, *, in_calls: bool = False) -> None:
        """``in_calls``: each range is a call of a sink. It is read to its end before a barrier, and then reported."""
        self._in_calls = in_calls
        self._held_since: float | None = None
        self._taken = 0
        self._take_after_ms = 0.0
        self._ends = False
        self._dealt_out = 0
        self._passed = 0
        self._numbers: deque[tuple[int, int]] = deque()

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._most_held_ms = Configuration(context.configuration).get(CheckpointingOptions.TIMEOUT) / 2

    def snapshot(self, checkpoint_id: int) -> None:
        self._held_since = None

    @property
    def holds_checkpoints_back(self) -> bool:
        """Whether it reads a batch that is one call, and no barrier has waited for half the time of a checkpoint."""
        if not (self._in_calls and self.reads):
            return False
        now = self.context.monotonic_ms()
        if self._held_since is None or self.context.waiting_input() is not WaitingInput.BARRIER:
            self._held_since = now
        return now - self._held_since < self._most_held_ms

    @property
    @abstractmethod
    def reads(self) -> bool:
        """Whether there is a split to read."""

    @property
    @abstractmethod
    def unread_range(self) -> int | None:
        """The first sequence number of the first range that was not read to its end here; None if all were."""

    @abstractmethod
    def take(self, row: dict[str, Any]) -> None:
        """Takes a row of ``SPLIT_SCHEMA``."""

    @abstractmethod
    def read_step(self) -> int | None:
        """Does one step, which emits at most one batch. Returns how many ms to wait before the next one, if any."""

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if not self.reads:
            self._taken = 0
        for row in batch.to_pylist():
            self.take(row)
        self._taken += 1
        pause = min(max(self._taken * _TAKE_EVERY_MS, _LEAST_TAKE_MS), _GREATEST_TAKE_MS)
        self._take_after_ms = self.context.monotonic_ms() + pause
        self.pass_ends_on()
        self.ask_for_next_step()

    def process_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms == MAX_WATERMARK:
            self._ends = True
        else:
            self._dealt_out = max(self._dealt_out, timestamp_ms)
        self.pass_ends_on()

    def process_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        """Range ``batch`` ends in front of the sequence number ``timestamp_ms``."""
        self._numbers.append((timestamp_ms, batch))
        self.process_watermark(timestamp_ms)

    def measured(self) -> OperatorMeasures:
        if not self.reads:
            self.looks += ENOUGH_LOOKS  # without splits there is nothing to look at
        return super().measured()

    def on_processing_time(self, now_ms: int) -> None:
        wait_ms = None
        if self.reads:
            wait_ms = self.read_step()
            self.pass_ends_on()
        self.ask_for_next_step(wait_ms)

    def continue_in_range(self, range_start: int) -> None:
        """Called at a restore in the middle of a range: some of its rows may have been emitted already."""
        self._passed = range_start

    def pass_ends_on(self) -> None:
        """Forwards the ends of ranges whose splits in this subtask have been read, and the end of data."""
        unread = self.unread_range
        read_up_to = self._dealt_out if unread is None else unread
        time = self.context.chain_time
        has_ended = read_up_to > self._passed
        self._passed = max(self._passed, read_up_to)
        if has_ended:
            time.batch, time.upto = 0, read_up_to
        while self._numbers and self._numbers[0][0] <= read_up_to:
            time.batch = self._numbers.popleft()[1]
            has_ended = True
            if self._in_calls:
                self.context.report_progress(Progress(time.batch))
        if has_ended:
            self.output.emit_end_of_range()
        if self._ends and unread is None:
            self._ends = False
            self.output.emit_watermark(MAX_WATERMARK)

    def ask_for_next_step(self, wait_ms: int | None = None) -> None:
        if not self.reads:
            return
        if wait_ms:
            self.context.set_timer(self.context.now_ms() + wait_ms)
        else:
            # A due timer precedes the input; a timer for the next millisecond lets the subtask take input first.
            self.context.set_timer(self.context.now_ms() + 1 if self._may_take_input() else 0)

    def _may_take_input(self) -> bool:
        """Whether the subtask may take input before all pending splits have been read."""
        if self.holds_checkpoints_back:
            return False
        waiting = self.context.waiting_input()
        if waiting is WaitingInput.ROWS:
            return self.context.monotonic_ms() >= self._take_after_ms
        return waiting is WaitingInput.BARRIER
