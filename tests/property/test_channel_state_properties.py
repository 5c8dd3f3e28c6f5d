"""In-flight data on its whole way: real files, real metadata, restored at another parallelism, again and again."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.channel_state_assignment import assign_channel_state
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    SubtaskState,
)
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.graph.key_groups import key_group_range, owner_of_key_group
from ckpt_runtime.storage.channel_state import (
    CapturedStream,
    ChannelStateReader,
    InFlightElement,
    InFlightWatermark,
    write_channel_state,
)
from ckpt_runtime.storage.filesystem import Location, make_directory, resolve
from ckpt_runtime.storage.metadata import read_metadata, write_metadata
from tests.support.effort import examples
from tests.unit.runtime.checkpoint.checkpoint_driver import checkpoint_of

SCHEMA = pa.schema([("key_group", pa.int64()), ("number", pa.int64())])
MAX_PARALLELISM = 128
Row = tuple[int, int]


def job(parallelism: int) -> JobGraph:
    source = JobVertex("a" * 32, (OperatorNode("a", "A", "source"),), parallelism, MAX_PARALLELISM)
    target = JobVertex("b" * 32, (OperatorNode("b", "B", "aggregate"),), parallelism, MAX_PARALLELISM)
    return JobGraph("job", (source, target), (JobEdge(source.id, target.id, Partitioning.HASH, ("k",)),))


def publish(graph: JobGraph, number: int, job_directory: Location, states: dict[tuple[str, int], SubtaskState]) -> None:
    directory = job_directory.child(f"chk-{number}")
    make_directory(directory)
    write_metadata(directory, checkpoint_of(graph, states, (), number, directory.url).to_json())


class Deployment:
    """A consumer that reads back what it was given, and takes checkpoints meanwhile."""

    def __init__(self, job_directory: Location, graph: JobGraph, number: int) -> None:
        self.graph = graph
        self.shared = job_directory.child("shared")
        self.readers: dict[int, list[ChannelStateReader]] = {}
        if number == 0:
            return
        found = read_metadata(job_directory.child(f"chk-{number}"))
        checkpoint = CompletedCheckpoint.from_json(found.document, found.directory.url)
        for (vertex_id, index), streams in assign_channel_state(checkpoint, graph).items():
            assert vertex_id == graph.vertices[1].id
            self.readers[index] = [ChannelStateReader(found.directory, stream) for stream in streams]

    def read(self, index: int, count: int) -> list[Row]:
        """Rows of the subtask's next ``count`` elements, as far as they are its own."""
        rows: list[Row] = []
        for reader in self.readers.get(index, []):
            while count and (element := reader.read()) is not None:
                count -= 1
                if isinstance(element.content, InFlightWatermark):
                    continue
                batch = pa.ipc.read_record_batch(element.content, reader.schema)
                groups = element.place.key_groups
                rows += [
                    (row["key_group"], row["number"])
                    for row in batch.to_pylist()
                    if groups is None or row["key_group"] in groups
                ]
        return rows

    def unread(self, index: int) -> list[CapturedStream]:
        return [
            CapturedStream(0, 0, reader.schema, elements)
            for reader in self.readers.get(index, [])
            if (elements := reader.unread_elements())
        ]


@pytest.mark.row("76.6")
@pytest.mark.row("76.7")
@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_rows_in_flight_survive_restores_at_any_parallelism(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    job_directory = resolve(tmp_path_factory.mktemp("job"))
    make_directory(job_directory.child("shared"))
    sent: Counter[Row] = Counter()
    processed: list[Row] = []
    deployment = Deployment(job_directory, job(data.draw(st.integers(1, 5))), 0)
    for number in range(1, data.draw(st.integers(2, 4))):
        graph = deployment.graph
        parallelism = graph.vertices[0].parallelism
        states: dict[tuple[str, int], SubtaskState] = {}
        threshold = data.draw(st.sampled_from([0, 20_000]))
        full = data.draw(st.booleans())
        for vertex in graph.vertices:
            for index in range(parallelism):
                live = []
                for peer in data.draw(st.sets(st.integers(0, parallelism - 1), max_size=2)):
                    receiver = index if vertex is graph.vertices[1] else peer
                    own = key_group_range(MAX_PARALLELISM, parallelism, receiver)
                    groups = data.draw(st.lists(st.integers(own.first, own.last), max_size=4))
                    first = sum(sent.values())
                    rows = [(group, first + offset) for offset, group in enumerate(groups)]
                    sent.update(rows)
                    batches: list[InFlightElement] = [
                        pa.record_batch([[row[0]], [row[1]]], schema=SCHEMA) for row in rows
                    ]
                    live.append(CapturedStream(0, peer, SCHEMA, [*batches, InFlightWatermark(number)]))
                inputs = [*deployment.unread(index), *live] if vertex is graph.vertices[1] else []
                outputs = live if vertex is graph.vertices[0] else []
                directory = job_directory.child(f"chk-{number}")
                written = write_channel_state(deployment.shared, directory, inputs, outputs, threshold, full=full)
                states[vertex.id, index] = SubtaskState({}, 0, written.inputs, written.outputs)
        publish(graph, number, job_directory, states)
        deployment = Deployment(job_directory, job(data.draw(st.integers(1, 5))), number)
        after = deployment.graph.vertices[1].parallelism
        for index in range(after):
            rows = deployment.read(index, data.draw(st.integers(0, 8)))
            assert all(owner_of_key_group(group, MAX_PARALLELISM, after) == index for group, _ in rows)
            processed += rows
    for index in range(deployment.graph.vertices[1].parallelism):
        processed += deployment.read(index, 1 << 30)
    assert Counter(processed) == sent
