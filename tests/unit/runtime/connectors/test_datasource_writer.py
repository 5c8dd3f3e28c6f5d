"""PySpark stream writers without Spark: one write per subtask and checkpoint, commits with the completion."""

from __future__ import annotations

import datetime as dt
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import convert, to_builtins
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState, OperatorStateMode
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.connectors.datasource_writer import DataSourceSink
from ckpt_runtime.connectors.sink_operators import CommitterOperator, PreparingSinkOperator
from ckpt_runtime.connectors.tagged_values import ValueNotCarriedError
from ckpt_runtime.state.errors import StateSchemaError
from ckpt_runtime.structured_log import JsonLines, about
from tests.unit.runtime.connectors.harness import SINK, Collector, context, opened, snapshot_of
from tests.unit.runtime.connectors.user_data_sources import ARROW_SCHEMA, ArrowFiles, Files, Seen, Tasks


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"n": n, "label": f"l{n}"} for n in numbers], schema=ARROW_SCHEMA)


class Sink:
    """Two writers in front of one committer, wired by hand."""

    def __init__(
        self,
        world: Path,
        source: type = Files,
        state: Any = (),
        restored: int | None = None,
        attempt: int = 0,
        sink: SinkLineage = SINK,
        **options: Any,
    ) -> None:
        given = {"directory": str(world), **{key: str(value) for key, value in options.items()}}
        self.committer = CommitterOperator(DataSourceSink(source, given), ARROW_SCHEMA)
        opened(self.committer, context(uid="out.committer", state=state, restored=restored, sink=sink))
        self.writers = [PreparingSinkOperator(DataSourceSink(source, given)) for _ in range(2)]
        for subtask, writer in enumerate(self.writers):
            output = Collector(lambda batch: self.committer.process_batch(batch, 0))
            writer.open(context(subtask, 2, uid="out", restored=restored, attempt=attempt), output)

    def checkpoint(self, checkpoint_id: int) -> Any:
        for writer in self.writers:
            writer.prepare_snapshot(checkpoint_id)
            writer.snapshot(checkpoint_id)
        return snapshot_of(self.committer, checkpoint_id)


def batch(world: Path, checkpoint_id: int) -> list[int]:
    return sorted(json.loads(line)["n"] for line in (world / f"batch-{checkpoint_id}").read_text().splitlines())


def batches(world: Path) -> list[str]:
    return sorted(file.name for file in world.iterdir() if file.name.startswith("batch-"))


@pytest.mark.row("io.2")
def test_a_checkpoint_is_one_batch(tmp_path: Path) -> None:
    sink = Sink(tmp_path)
    sink.writers[0].process_batch(rows(1, 2), 0)
    sink.writers[0].process_batch(rows(3), 0)
    sink.writers[1].process_batch(rows(4), 0)
    sink.checkpoint(5)
    sink.writers[1].process_batch(rows(5), 0)
    assert batches(tmp_path) == []
    sink.committer.notify_complete(5)
    assert (batches(tmp_path), batch(tmp_path, 0)) == (["batch-0"], [1, 2, 3, 4])
    sink.checkpoint(6)
    sink.committer.notify_complete(6)
    assert batch(tmp_path, 1) == [5]
    sink.checkpoint(7)
    sink.committer.notify_complete(7)
    assert batches(tmp_path) == ["batch-0", "batch-1"]


def test_a_completion_commits_earlier_batches_first_and_an_abort_nothing(tmp_path: Path) -> None:
    sink = Sink(tmp_path)
    for checkpoint_id in (1, 2, 3):
        sink.writers[0].process_batch(rows(checkpoint_id), 0)
        sink.checkpoint(checkpoint_id)
    sink.committer.notify_aborted(1)
    sink.committer.notify_complete(2)
    assert batches(tmp_path) == ["batch-0", "batch-1"]


def test_a_restore_commits_what_it_covers_and_may_be_repeated(tmp_path: Path) -> None:
    sink = Sink(tmp_path)
    sink.writers[0].process_batch(rows(1), 0)
    sink.writers[1].process_batch(rows(2), 0)
    state = json_round_trip(sink.checkpoint(4))
    for _ in range(2):
        Sink(tmp_path, state=state, restored=4)
        assert (batches(tmp_path), batch(tmp_path, 0)) == (["batch-0"], [1, 2])


@pytest.mark.row("io.2")
def test_batch_ids_begin_with_0_and_continue_after_a_restore_without_gaps(tmp_path: Path) -> None:
    """A restored job repeats the id of what is pending in the snapshot, and does not skip those of later ones."""
    sink = Sink(tmp_path)
    for checkpoint_id in (3, 7):
        sink.writers[0].process_batch(rows(checkpoint_id), 0)
        state = json_round_trip(sink.checkpoint(checkpoint_id))
        sink.committer.notify_complete(checkpoint_id)
    sink.checkpoint(8)
    sink.writers[0].process_batch(rows(9), 0)
    sink.checkpoint(9)
    (tmp_path / "batch-1").unlink()
    again = Sink(tmp_path, state=state, restored=7, sink=replace(SINK, continues=True))
    assert batch(tmp_path, 1) == [7]
    again.checkpoint(8)
    again.committer.notify_complete(8)
    again.writers[1].process_batch(rows(10), 0)
    again.checkpoint(9)
    again.committer.notify_complete(9)
    assert [batch(tmp_path, number) for number in range(3)] == [[3], [7], [10]]


@pytest.mark.row("io.2")
@pytest.mark.parametrize("continues", [False, True])
def test_batch_ids_continue_above_those_of_a_snapshot_that_has_none(tmp_path: Path, continues: bool) -> None:
    """Earlier versions used the ids of checkpoints; a sink that was added to the program begins with 0."""
    sink = Sink(tmp_path)
    sink.writers[0].process_batch(rows(1), 0)
    sink.checkpoint(4)
    sink.writers[0].process_batch(rows(2), 0)
    [messages] = [state for state in json_round_trip(sink.checkpoint(6)) if state.name == "messages"]
    old = replace(messages, items=tuple({k: v for k, v in item.items() if k != "batch"} for item in messages.items))
    again = Sink(tmp_path, state=[old] if continues else [], restored=6, sink=replace(SINK, continues=continues))
    again.writers[0].process_batch(rows(3), 0)
    again.checkpoint(7)
    again.committer.notify_complete(7)
    assert batches(tmp_path) == (["batch-4", "batch-6", "batch-7"] if continues else ["batch-0"])


def staged(world: Path) -> list[str]:
    return sorted(file.name for file in world.iterdir() if file.name.startswith("staged-"))


def aborted(world: Path) -> list[str]:
    return (world / "aborted").read_text().split() if (world / "aborted").exists() else []


def test_output_that_no_snapshot_covers_is_aborted_when_the_job_ends(tmp_path: Path) -> None:
    """Messages in front of a barrier that the committer never saw, and those of a checkpoint that was aborted."""
    sink = Sink(tmp_path)
    sink.writers[0].process_batch(rows(1), 0)
    sink.checkpoint(4)
    sink.committer.notify_complete(4)
    committed = staged(tmp_path)
    sink.writers[0].process_batch(rows(2), 0)
    sink.checkpoint(5)
    sink.committer.notify_aborted(5)
    sink.writers[1].process_batch(rows(3), 0)
    sink.writers[1].prepare_snapshot(6)
    assert len(staged(tmp_path)) == 3
    sink.committer.close()
    assert aborted(tmp_path) == ["1", "2"]
    assert (staged(tmp_path), batches(tmp_path)) == (committed, ["batch-0"])


def test_output_that_a_snapshot_may_cover_is_never_aborted(tmp_path: Path) -> None:
    """A savepoint notifies no task of its completion, and a checkpoint that is being stored has not done so yet."""
    sink = Sink(tmp_path)
    sink.writers[0].process_batch(rows(1), 0)
    sink.checkpoint(4)
    sink.writers[0].process_batch(rows(2), 0)
    state = json_round_trip(sink.checkpoint(5))
    sink.committer.notify_aborted(4)
    sink.committer.close()
    assert aborted(tmp_path) == []
    Sink(tmp_path, state=state, restored=5)
    assert (batch(tmp_path, 0), batch(tmp_path, 1)) == ([1], [2])


def test_a_failed_commit_of_what_was_restored_is_not_aborted(tmp_path: Path) -> None:
    sink = Sink(tmp_path)
    sink.writers[0].process_batch(rows(1), 0)
    state = json_round_trip(sink.checkpoint(4))
    [file] = [tmp_path / name for name in staged(tmp_path)]
    file.rename(tmp_path / "away")
    given = {"directory": str(tmp_path)}
    committer = CommitterOperator(DataSourceSink(Files, given), ARROW_SCHEMA)
    with pytest.raises(FileNotFoundError):
        opened(committer, context(uid="out.committer", state=state, restored=4))
    committer.close()
    assert aborted(tmp_path) == []


@pytest.mark.parametrize("restored", [None, 7])
def test_messages_of_a_write_before_the_barrier_are_aborted_when_the_job_ends(
    tmp_path: Path, restored: int | None
) -> None:
    """As a batch that cannot complete, with an id above all committed ones. What went in front of a barrier is left."""
    sink = Sink(tmp_path, restored=restored, rows=1)
    for writer in sink.writers:
        writer.process_batch(rows(1, 2), 0)
    sink.writers[0].prepare_snapshot(8)
    [sent] = [message for entries in sink.committer._messages.values() for _, message in entries]
    assert sent is not None
    for writer in sink.writers:
        writer.close()
    [left] = staged(tmp_path)
    assert left in sent
    assert aborted(tmp_path) == [str((restored or 0) + 1)]


def test_a_write_in_progress_at_the_end_of_the_job_is_aborted_without_a_message(tmp_path: Path) -> None:
    sink = Sink(tmp_path, restored=4)
    sink.writers[0].process_batch(rows(1, 2), 0)
    sink.writers[1].close()
    assert aborted(tmp_path) == []
    sink.writers[0].close()
    assert aborted(tmp_path) == ["5"]


def json_round_trip(states: Any) -> Any:
    return [convert(json.loads(json.dumps(to_builtins(state))), type(state)) for state in states]


def test_an_error_in_write_fails_the_subtask_with_the_authors_exception(tmp_path: Path) -> None:
    sink = Sink(tmp_path, failAt=3)
    sink.writers[0].process_batch(rows(1, 3), 0)
    with pytest.raises(ValueError, match="cannot write 3"):
        sink.checkpoint(1)
    sink.writers[0].close()
    assert aborted(tmp_path) == ["1"]


def test_an_error_in_write_ends_a_waiting_feeder(tmp_path: Path) -> None:
    sink = Sink(tmp_path, failAt=0)
    with pytest.raises(ValueError, match="cannot write 0"):
        for _ in range(50):
            sink.writers[0].process_batch(rows(0), 0)


def test_an_error_in_write_shows_without_further_rows_and_barriers(tmp_path: Path) -> None:
    asked: list[int] = []
    writer = PreparingSinkOperator(DataSourceSink(Files, {"directory": str(tmp_path), "failAt": "3"}))
    opened(writer, context(uid="out", now_ms=lambda: 7, set_timer=asked.append))
    writer.process_batch(rows(3), 0)
    failing = next(thread for thread in threading.enumerate() if thread.name == "write out")
    failing.join(60)
    [at] = asked
    with pytest.raises(ValueError, match="cannot write 3"):
        writer.on_processing_time(at)


def test_a_write_is_observed_until_it_ends(tmp_path: Path) -> None:
    asked: list[int] = []
    writer = PreparingSinkOperator(DataSourceSink(Files, {"directory": str(tmp_path)}))
    opened(writer, context(uid="out", set_timer=asked.append))
    for n in range(3):
        writer.process_batch(rows(n), 0)
    assert len(asked) == 1
    writer.on_processing_time(asked[-1])
    assert len(asked) == 2
    writer.prepare_snapshot(1)
    writer.on_processing_time(asked[-1])
    assert len(asked) == 2


def test_closing_in_the_middle_leaves_no_thread(tmp_path: Path) -> None:
    sink = Sink(tmp_path)
    sink.writers[0].process_batch(rows(1), 0)
    sink.writers[0].close()
    sink.writers[1].close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write ")]
    assert batches(tmp_path) == []


def test_an_arrow_writer_gets_batches(tmp_path: Path) -> None:
    sink = Sink(tmp_path, ArrowFiles)
    sink.writers[0].process_batch(rows(1, 2), 0)
    sink.writers[1].process_batch(rows(3), 0)
    sink.checkpoint(1)
    sink.committer.notify_complete(1)
    assert (tmp_path / "arrow-0").read_text() == "2"


def test_rows_after_write_has_returned_are_dropped_as_in_spark(tmp_path: Path) -> None:
    sink = Sink(tmp_path, ArrowFiles)
    for n in (-1, *range(20)):
        sink.writers[0].process_batch(rows(n), 0)
    sink.checkpoint(1)
    sink.committer.notify_complete(1)
    assert (tmp_path / "arrow-0").read_text() == "1"


OF_FILES: dict[str, pa.Array] = {
    "s": pa.array(["a"], pa.large_string()),
    "c": pa.array(["b"]).dictionary_encode(),
    "t": pa.array([1_700_000_000_000_001_999], pa.timestamp("ns", "Europe/Berlin")),
    "n": pa.array([1], pa.timestamp("ms")),
    "st": pa.array([{"x": 1}], pa.struct([("x", pa.timestamp("ns", "UTC"))])),
    "l": pa.array([[1, 2]], pa.list_(pa.int16(), 2)),
    "d": pa.array([1], pa.duration("ns")),
}
"""Types that files have and a schema of Spark's has one other for."""


def test_rows_and_batches_have_the_types_that_spark_has_for_the_schema(tmp_path: Path) -> None:
    """Other Arrow types of the same values come from files; PySpark cannot make rows of nanoseconds in a zone."""
    sink = Sink(tmp_path, Seen, form="row")
    sink.writers[0].process_batch(pa.record_batch(OF_FILES), 0)
    sink.checkpoint(1)
    at = dt.datetime.fromtimestamp(1_700_000_000).replace(microsecond=1)
    assert (tmp_path / "seen").read_text() == (
        f"Row(s='a', c='b', t={at!r}, n=datetime.datetime(1970, 1, 1, 0, 0, 0, 1000), "
        f"st=Row(x={dt.datetime.fromtimestamp(0)!r}), l=[1, 2], d=datetime.timedelta(0))"
    )
    sink = Sink(tmp_path, Seen, form="arrow")
    sink.writers[0].process_batch(pa.record_batch(OF_FILES), 0)
    sink.checkpoint(1)
    schema = to_arrow_schema(from_arrow_schema(pa.record_batch(OF_FILES).schema), timezone="UTC")
    assert (tmp_path / "seen").read_text().startswith(repr(f"{schema} [{{'s': 'a', 'c': 'b', 't': ")[:-1])


def test_commits_run_in_no_task_as_on_sparks_driver(tmp_path: Path) -> None:
    sink = Sink(tmp_path, Seen, form="row")
    sink.writers[0].process_batch(rows(1), 0)
    sink.checkpoint(1)
    sink.committer.notify_complete(1)


def test_log_lines_of_a_writer_have_the_ids_of_its_subtask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(JsonLines())
    sink = Sink(tmp_path, Seen, form="row")
    with caplog.at_level("WARNING"), about(vertex_id="v", subtask=0):
        sink.writers[0].process_batch(rows(1), 0)
        sink.writers[0].prepare_snapshot(1)
    assert '"message": "1 seen"' in caplog.text
    assert '"vertex_id": "v", "subtask": 0' in caplog.text


def test_object_that_is_not_a_writer_is_refused_by_its_type(tmp_path: Path) -> None:
    sink = Sink(tmp_path, Seen, form="none")
    with pytest.raises(TypeError, match=r"Seen.streamWriter\(\) returned NoneType, expected a DataSourceStreamWriter"):
        sink.writers[0].process_batch(rows(1), 0)


def test_a_task_attempt_id_is_unique_over_subtasks_checkpoints_and_attempts(tmp_path: Path) -> None:
    reported: list[list[int]] = []
    state = ()
    for attempt in range(2):
        sink = Sink(tmp_path, Tasks, attempt=attempt, state=state)
        for checkpoint_id in (2 * attempt + 1, 2 * attempt + 2):
            for subtask, writer in enumerate(sink.writers):
                writer.process_batch(rows(*range(subtask + 1)), 0)
            state = sink.checkpoint(checkpoint_id)
            sink.committer.notify_complete(checkpoint_id)
            reported += json.loads((tmp_path / f"reported-{checkpoint_id - 1}").read_text())
    assert [entry[:2] for entry in reported] == [[0, 0], [1, 0]] * 2 + [[0, 1], [1, 1]] * 2
    ids = [task_attempt for _, _, task_attempt, _, _ in reported]
    assert len(set(ids)) == 8
    assert all(0 <= task_attempt < 1 << 63 for task_attempt in ids)
    assert len(list(tmp_path.glob("part-*"))) == 8


def test_messages_carry_what_json_lacks_and_a_restore_reads_them(tmp_path: Path) -> None:
    sink = Sink(tmp_path, Tasks)
    sink.writers[1].process_batch(rows(1, 2), 0)
    Sink(tmp_path, Tasks, state=json_round_trip(sink.checkpoint(4)), restored=4)
    [[partition, attempt, _, count, odd]] = json.loads((tmp_path / "reported-0").read_text())
    assert (partition, attempt, count, odd) == (1, 0, 2, 2)


def test_a_message_that_cannot_travel_is_refused_with_its_place(tmp_path: Path) -> None:
    sink = Sink(tmp_path, Tasks, odd="lock")
    sink.writers[0].process_batch(rows(1), 0)
    with pytest.raises(
        ValueNotCarriedError, match=r"^commit message\.odd\['of'\]\.value is of type _thread.lock, which"
    ):
        sink.checkpoint(1)


def test_state_of_another_version_is_refused(tmp_path: Path) -> None:
    old = OperatorListState("messages", OperatorStateMode.SPLIT, ({"checkpoint": 1, "messages": [[0, None]]},))
    with pytest.raises(StateSchemaError, match="operator 'out.committer': the snapshot holds state of version 1"):
        Sink(tmp_path, state=[old], restored=1)
