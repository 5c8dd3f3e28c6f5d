"""An enumerator and its readers, run by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    EdgeDescriptor,
    OperatorListState,
    OperatorSubtaskState,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.connectors.registry import create_connector
from ckpt_runtime.connectors.split_source import SplitEnumeratorOperator, SplitReaderOperator
from ckpt_runtime.graph.formats import source_schema
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.specs import EnumeratorSpec, RangeReaderSpec
from ckpt_runtime.operators.operator import MAX_WATERMARK, SourceStatus
from ckpt_runtime.operators.slice_size import SliceSize
from ckpt_runtime.snapshots.positions import repositioned, start_position
from tests.unit.runtime.connectors.harness import JOB, Collector, context, opened, redistributed, snapshot_of

States = list[list[OperatorListState]]


class Job:
    """An enumerator and its readers. ``run`` lets them work; ``checkpoint`` returns what a restore takes."""

    def __init__(
        self,
        format_: str | type,
        options: dict[str, str],
        declared: pa.Schema | None = None,
        *,
        parallelism: int = 1,
        restored: tuple[States, States] | None = None,
        most_rows: int | None = None,
        job_id: str = JOB,
        attempt: int = 0,
        configuration: dict[str, str] | None = None,
    ) -> None:
        schema = source_schema(format_, options, declared)
        head, tails = restored or ([[]], [[] for _ in range(parallelism)])
        enumerator = create_connector(EnumeratorSpec(format_, options, schema))
        assert isinstance(enumerator, SplitEnumeratorOperator)
        self.enumerator = enumerator
        self.readers: list[SplitReaderOperator] = []
        self.outputs: list[Collector] = []
        self.ended = False
        self._turn = 0
        for subtask in range(parallelism):
            reader = create_connector(RangeReaderSpec(format_, options, schema))
            assert isinstance(reader, SplitReaderOperator)
            if most_rows is not None:
                reader._size = SliceSize(most_rows, most_rows)
            self.readers.append(reader)
            where = context(
                subtask,
                parallelism,
                state=tails[subtask],
                attempt=attempt,
                restored=None if restored is None else attempt,
                configuration=configuration,
            )
            self.outputs.append(opened(reader, where))
        self._sent = opened(self.enumerator, context(state=head[0], job_id=job_id))
        self._deliver()

    def discover(self) -> bool:
        """Lets the enumerator find splits, and says whether it found any."""
        status = self.enumerator.poll()
        self._deliver()
        if status is SourceStatus.END_OF_INPUT and not self.ended:
            self.ended = True
            for reader in self.readers:
                reader.process_watermark(MAX_WATERMARK)
        return status is SourceStatus.MORE_AVAILABLE

    def read(self, steps: int = 1) -> None:
        for _ in range(steps):
            for reader in self.readers:
                reader.on_processing_time(0)

    def run(self) -> list[dict[str, Any]]:
        """Finds and reads everything that is there, and returns all rows so far."""
        while self.discover():
            pass
        while any(reader.has_work_left for reader in self.readers):
            self.read()
        return self.rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for output in self.outputs for row in output.rows]

    def checkpoint(self, number: int, parallelism: int | None = None) -> tuple[States, States]:
        head = [list(snapshot_of(self.enumerator, number))]
        tails = [snapshot_of(reader, number) for reader in self.readers]
        return head, redistributed(tails, parallelism or len(self.readers))

    def complete(self, number: int) -> None:
        for reader in self.readers:
            reader.notify_complete(number)

    def _deliver(self) -> None:
        batches, self._sent.batches = self._sent.batches, []
        for batch in batches:
            for row in range(batch.num_rows):
                self.readers[self._turn % len(self.readers)].process_batch(batch.slice(row, 1), 0)
                self._turn += 1
        watermarks, self._sent.watermarks = self._sent.watermarks, []
        for watermark in watermarks:
            for reader in self.readers:
                reader.process_watermark(watermark)

    def close(self) -> None:
        self.enumerator.close()
        for reader in self.readers:
            reader.close()


def metadata_of(states: tuple[States, States], directory: str = "file:/savepoint") -> CompletedCheckpoint:
    """A savepoint of the job: source ``orders`` with these states of its enumerator and readers."""
    head, tails = states
    vertices = (
        VertexDescriptor("enumerator", "orders offsets", ("orders",), 1, 128),
        VertexDescriptor("readers", "orders", ("orders.reader", "behind"), len(tails), 128),
    )
    found = {("enumerator", 0): SubtaskState({"orders": OperatorSubtaskState((), tuple(head[0]))})}
    for subtask, lists in enumerate(tails):
        found["readers", subtask] = SubtaskState({"orders.reader": OperatorSubtaskState((), tuple(lists))})
    edges = (EdgeDescriptor("enumerator", "readers", Partitioning.REBALANCE),)
    properties = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.NATIVE)
    return CompletedCheckpoint(7, JOB, 1, 2, directory, properties, vertices, found, edges=edges)


def moved(states: tuple[States, States], to: str, now_ms: int = 1 << 50) -> tuple[States, States]:
    """The same states when a user has set the source to a position."""
    found = repositioned(metadata_of(states), {"orders": start_position(to, now_ms)}).states
    tails = [list(found["readers", subtask].operators["orders.reader"].lists) for subtask in range(len(states[1]))]
    return [list(found["enumerator", 0].operators["orders"].lists)], tails
