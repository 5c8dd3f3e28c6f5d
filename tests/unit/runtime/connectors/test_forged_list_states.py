"""List states of connectors and operators that are well-formed JSON and say something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState, OperatorStateMode
from ckpt_runtime.connectors.datasource_reader import EnumeratorOperator
from ckpt_runtime.connectors.datasource_writer import DataSourceSink
from ckpt_runtime.connectors.delta_sink import DeltaSink
from ckpt_runtime.connectors.file_sink import FileSink
from ckpt_runtime.connectors.numbers import NumbersSource, VerifySink
from ckpt_runtime.connectors.range_reader import RangeReaderOperator
from ckpt_runtime.connectors.replay import ReplaySource
from ckpt_runtime.connectors.sink_operators import CommitterOperator, CommittingSinkOperator, PreparingSinkOperator
from ckpt_runtime.graph.specs import (
    EnumeratorSpec,
    RangeReaderSpec,
    SinkSpec,
    SourceSpec,
    WatermarkSpec,
)
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.operators.watermark import WatermarkOperator
from ckpt_runtime.state.errors import CorruptStateError
from tests.support.forging import unnamed_errors
from tests.unit.runtime.connectors.harness import context, opened, snapshot_of
from tests.unit.runtime.connectors.split_jobs import Job, States
from tests.unit.runtime.connectors.user_data_sources import ARROW_SCHEMA, Counting, Files

SPLIT = {"version": 2, "sequence": 4, "number": 1, "partition": "p", "rows": 3, "digest": "d"}
MESSAGES = {"version": 2, "checkpoint": 3, "messages": [[0, None], [1, None]], "batch": 2}
OFFSET = {"version": 2, "offset": '{"n": 4}', "splits": 7, "ended_in": None, "planned": True}

CONNECTORS: dict[str, tuple[Callable[[Path], Operator], dict[str, list[Any]]]] = {
    "numbers": (
        lambda _: NumbersSource(SourceSpec("numbers", {})),
        {"positions": [{"split": 3, "position": 5}, {"split": 4, "position": 6}], "started": [True]},
    ),
    "replay": (
        lambda path: ReplaySource(SourceSpec("replay", {"path": str(path / "rows.parquet"), "partitionBy": "n"})),
        {"positions": [{"split": 3, "position": 1, "rows": 2, "by": ["n"]}], "started": [True]},
    ),
    "enumerator": (
        lambda path: EnumeratorOperator(EnumeratorSpec(Counting, {"directory": str(path)})),
        {"offset": [OFFSET]},
    ),
    "range reader": (
        lambda path: RangeReaderOperator(RangeReaderSpec(Counting, {"directory": str(path)})),
        {"splits": [SPLIT, SPLIT | {"sequence": 5}]},
    ),
    "committer": (
        lambda path: CommitterOperator(DataSourceSink(Files, {"directory": str(path)}), ARROW_SCHEMA),
        {"messages": [MESSAGES], "next batch": [4]},
    ),
    "verify": (
        lambda path: VerifySink(SinkSpec("verify", {"report": str(path), "row": "row"})),
        {"rows": [5, 6], "digest": ["00ff"]},
    ),
    "watermark": (
        lambda _: WatermarkOperator(WatermarkSpec("t", 1000)),
        {"watermark": [{"ms": 5, "parallelism": 1, "next_ms": 7}]},
    ),
}


def _opened(make: Callable[[Path], Operator], path: Path, states: dict[str, list[Any]]) -> None:
    lists = [OperatorListState(name, OperatorStateMode.SPLIT, tuple(items)) for name, items in states.items()]
    operator = make(path)
    try:
        opened(operator, context(state=lists, restored=3))
    finally:
        operator.close()


@pytest.mark.parametrize("name", CONNECTORS)
def test_forged_list_state_is_opened_or_refused_by_name(name: str, tmp_path: Path) -> None:
    make, states = CONNECTORS[name]
    (tmp_path / "available").write_text("25")
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "rows.parquet")
    for state, items in states.items():

        def opens(document: list[Any], state: str = state) -> None:
            _opened(make, tmp_path, {**states, state: document})

        found, refused = unnamed_errors(json.loads(json.dumps(items)), opens)
        assert found == []
        assert refused > 0


def test_forged_pending_file_of_a_sink_is_refused_by_name(tmp_path: Path) -> None:
    def sink(path: Path) -> Operator:
        return CommittingSinkOperator(FileSink("parquet", {"path": str(path / "out")}))

    writer = sink(tmp_path)
    opened(writer, context())
    writer.process_batch(pa.RecordBatch.from_pydict({"n": [1]}), 0)
    items = next(list(state.items) for state in snapshot_of(writer, 3) if state.name == "pending")
    found, refused = unnamed_errors(items, lambda document: _opened(sink, tmp_path, {"pending": document}))
    assert found == []
    assert refused > 0


def test_error_names_the_state_the_field_the_value_and_what_is_allowed(tmp_path: Path) -> None:
    make, states = CONNECTORS["numbers"]
    forged = json.loads(json.dumps(states)) | {"positions": [{"split": 300, "position": 5}]}
    with pytest.raises(CorruptStateError, match=r"'positions'.*`int` <= 127 - at `\$\.split`.*'split': 300"):
        _opened(make, tmp_path, forged)


def _job(name: str, path: Path) -> tuple[str, dict[str, str]]:
    files = {"path": str(path / "files"), "cleanSource": "archive", "sourceArchiveDir": str(path / "archive")}
    return {
        "files": ("text", files),
        "rate": ("rate", {"rowsPerSecond": "1000", "numPartitions": "2"}),
        "batches": ("rate-micro-batch", {"rowsPerBatch": "1000", "numPartitions": "2"}),
    }[name]


def _state_in_the_middle(job: Job) -> tuple[States, States]:
    """What a checkpoint has while splits are being read and one has ended."""
    job.discover()
    while not job.rows:
        job.read()
    job.read(2)
    return job.checkpoint(3)


@pytest.mark.parametrize("name", ["files", "rate", "batches"])
def test_forged_state_of_a_source_is_continued_or_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("1\n2\n3\n")
    (tmp_path / "files" / "b.txt").write_text("4\n5\n6\n")
    format_, options = _job(name, tmp_path)
    first = Job(format_, options, most_rows=2)
    head, tails = _state_in_the_middle(first)
    first.close()
    for forged_state in (*head[0], *tails[0]):

        def continued(items: list[Any], name: str = forged_state.name) -> None:
            restored = [
                [[replace(state, items=tuple(items)) if state.name == name else state for state in part]]
                for part in (head[0], tails[0])
            ]
            job = Job(format_, options, restored=(restored[0], restored[1]), most_rows=2)
            try:
                job.read(2)
            finally:
                job.close()

        found, refused = unnamed_errors(json.loads(json.dumps(forged_state.items)), continued)
        assert not found, "\n".join(found)
        assert refused > 0 or not forged_state.items


def test_forged_committable_of_a_single_committer_is_refused_by_name(tmp_path: Path) -> None:
    """The committable is a text in the state, so that a PySpark writer's message can be one."""
    sink = DeltaSink({"path": str(tmp_path / "table")})
    writer = PreparingSinkOperator(sink)
    output = opened(writer, context())
    writer.process_batch(pa.RecordBatch.from_pydict({"n": [1]}), 0)
    writer.prepare_snapshot(3)
    [text] = output.column("message")

    def committed(document: Any) -> None:
        item = {"version": 2, "checkpoint": 3, "messages": [[0, json.dumps(document)]]}
        _opened(lambda _: CommitterOperator(sink, pa.schema([("n", pa.int64())])), tmp_path, {"messages": [item]})

    found, refused = unnamed_errors(json.loads(text), committed)
    assert not found, "\n".join(found)
    assert refused > 0
    with pytest.raises(
        CorruptStateError, match=r"operator 'op': the committables of subtask 0 for checkpoint 3 .*`\$.size`"
    ):
        committed({**json.loads(text), "size": "x"})
