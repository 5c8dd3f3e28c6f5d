"""Format ``delta``: what one committer adds to a table's log, once, whatever is repeated or written beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.connectors.part_directory import CommitError
from ckpt_runtime.connectors.sink_operators import CommitterOperator, PreparingSinkOperator
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import check_sink, source_schema
from ckpt_runtime.storage.filesystem import resolve
from tests.support.object_store import keys, object_store, unfinished_uploads
from tests.support.patience import patient
from tests.unit.runtime.connectors.harness import JOB, SINK, Collector, context, opened, redistributed, snapshot_of

deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")

from ckpt_runtime.connectors.delta_sink import DeltaCommitter, DeltaSink  # noqa: E402 needs the library

SCHEMA = pa.schema([("n", pa.int64()), ("part", pa.string())])


class Job:
    """Writers of one attempt in front of their committer, wired by hand."""

    def __init__(
        self,
        table: Path | str,
        *,
        states: Sequence[Any] = ((), ()),
        committer: Any = (),
        restored: int | None = None,
        attempt: int = 0,
        job_id: str = JOB,
        sink: SinkLineage = SINK,
        schema: pa.Schema = SCHEMA,
        **options: str,
    ) -> None:
        given = {"path": str(table), "partitionBy": "part", **options}
        place: dict[str, Any] = {"restored": restored, "attempt": attempt, "job_id": job_id, "sink": sink}
        self.committer = CommitterOperator(DeltaSink(given), schema)
        opened(self.committer, context(uid="out.committer", state=committer, **place))
        self.writers = []
        for at, state in enumerate(states):
            writer = PreparingSinkOperator(DeltaSink(given))
            output = Collector(lambda batch: self.committer.process_batch(batch, 0))
            writer.open(context(at, len(states), uid="out", state=state, **place), output)
            self.writers.append(writer)

    def write(self, *numbers: int) -> None:
        for n in numbers:
            batch = pa.RecordBatch.from_pylist([{"n": n, "part": str(n % 2)}], schema=SCHEMA)
            self.writers[n % len(self.writers)].process_batch(batch, 0)

    def checkpoint(self, checkpoint_id: int) -> tuple[list[Any], Any]:
        states = [snapshot_of(writer, checkpoint_id) for writer in self.writers]
        return states, snapshot_of(self.committer, checkpoint_id)

    def close(self) -> None:
        for operator in (*self.writers, self.committer):
            operator.close()


def numbers(table: Path | str) -> list[int]:
    return sorted(deltalake.DeltaTable(table).to_pyarrow_table().column("n").to_pylist())


def files(table: Path) -> list[str]:
    return sorted(path.name for path in table.iterdir() if path.name != "_delta_log")


def hidden(table: Path) -> list[str]:
    return [name for name in files(table) if name.startswith(".")]


@pytest.mark.row("ends.5")
def test_rows_are_in_the_table_when_their_checkpoint_completes_and_not_before(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(1, 2, 3)
    job.checkpoint(4)
    job.write(4)
    assert not deltalake.DeltaTable.is_deltatable(str(tmp_path))
    job.committer.notify_complete(4)
    assert numbers(tmp_path) == [1, 2, 3]
    job.close()
    assert hidden(tmp_path) == []
    adds = deltalake.DeltaTable(tmp_path).get_add_actions(flatten=True)
    assert sorted(pa.table(adds).column("num_records").to_pylist()) == [1, 2]


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("crash", ["before", "published", "committed"])
def test_commit_that_a_crash_interrupts_is_done_once_by_the_restored_job(tmp_path: Path, crash: str) -> None:
    job = Job(tmp_path)
    job.write(1, 2)
    states, committer = job.checkpoint(4)
    job.write(3)
    job.checkpoint(5)
    if crash == "committed":
        job.committer.notify_complete(4)
    elif crash == "published":
        sink_committer = job.committer._open_committer()
        for known in job.committer._messages:
            if known.checkpoint_id == 4:
                sink_committer.publish(job.committer._decoded(known))  # type: ignore[attr-defined]
    for attempt in (1, 2):
        lineage = SinkLineage(SINK.sink_id)
        restored = Job(
            tmp_path, states=redistributed(states, 3), committer=committer, restored=4, attempt=attempt, sink=lineage
        )
        assert numbers(tmp_path) == [1, 2]
        assert hidden(tmp_path) == []
        restored.close()
    assert len(files(tmp_path)) == 2


@pytest.mark.row("ends.5")
def test_table_in_an_object_store_has_each_row_once_when_jobs_and_repeated_commits_meet() -> None:
    """Two jobs create it at the same time. One of them commits again, and ends the upload that it had left open."""
    with object_store() as store:
        url = f"{store.bucket()}/table"
        jobs = [Job(url, job_id=f"{at}" * 32, sink=SinkLineage(f"{at}" * 16)) for at in range(2)]
        states = []
        for at, job in enumerate(jobs):
            job.write(2 * at, 2 * at + 1)
            states.append(job.checkpoint(1))
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(lambda job: job.committer.notify_complete(1), jobs))
        jobs[1].write(100)
        writers, committer = states[1]
        place: dict[str, Any] = {"job_id": "1" * 32, "sink": SinkLineage("1" * 16), "restored": 1, "attempt": 1}
        Job(url, states=writers, committer=committer, **place).close()
        assert numbers(url) == [0, 1, 2, 3]
        assert [key for key in keys(url) if key.startswith(".")] == []
        assert unfinished_uploads(resolve(url)) == []
        assert len([key for key in keys(url) if key.endswith(".parquet")]) == 4


@pytest.mark.row("ends.5", "147.8")
def test_two_jobs_of_one_savepoint_commit_its_rows_once_and_their_own_each(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(1)
    states, committer = job.checkpoint(4)
    for other in ("d", "e"):
        resumed = Job(tmp_path, states=states, committer=committer, restored=4, job_id=other * 32)
        resumed.write(2)
        resumed.checkpoint(5)
        resumed.committer.notify_complete(5)
    assert numbers(tmp_path) == [1, 2, 2]


def test_rows_appended_by_another_writer_stay(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(1)
    job.checkpoint(1)
    job.committer.notify_complete(1)
    deltalake.write_deltalake(tmp_path, pa.table({"n": [100], "part": ["x"]}), mode="append")
    job.write(2)
    job.checkpoint(2)
    job.committer.notify_complete(2)
    assert numbers(tmp_path) == [1, 2, 100]


@pytest.mark.row("ends.5")
def test_jobs_that_append_to_one_table_at_the_same_time_have_each_row_once(tmp_path: Path) -> None:
    """They create it at the same time, too, and merge small files while the others append."""
    jobs = [Job(tmp_path, job_id=f"{at}" * 32, sink=SinkLineage(f"{at}" * 16), targetFileSize="3kb") for at in range(3)]
    together = Barrier(len(jobs), timeout=patient(30))

    def run(at: int) -> None:
        for checkpoint in range(1, 9):
            jobs[at].write(2 * (10 * at + checkpoint), 2 * (10 * at + checkpoint) + 1)
            jobs[at].checkpoint(checkpoint)
            together.wait()
            jobs[at].committer.notify_complete(checkpoint)
        jobs[at].close()

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(run, range(len(jobs))))
    wanted = (2 * (10 * at + checkpoint) + odd for at in range(3) for checkpoint in range(1, 9) for odd in (0, 1))
    assert numbers(tmp_path) == sorted(wanted)
    assert hidden(tmp_path) == []


def test_commit_that_another_process_has_repeated_is_refused_by_the_log(tmp_path: Path) -> None:
    """Both have looked at the same snapshot: the second one's commit must not be taken."""
    job = Job(tmp_path)
    job.write(1)
    job.checkpoint(1)
    job.committer.notify_complete(1)
    job.write(2)
    job.checkpoint(2)
    [known] = job.committer._messages
    prepared = job.committer._decoded(known)
    committer: Any = job.committer._open_committer()
    stale = committer._table()
    committer.commit(known, prepared)
    with pytest.raises(Exception, match="oncurrent"):
        committer.add(stale, known, prepared)
    assert numbers(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        ({"n": pa.int64()}, {}, "partitioned by"),
        ({"n": pa.int32(), "part": pa.string()}, {}, "column 'n' is"),
        ({"part": pa.string()}, {}, "has no column 'n': set option mergeSchema=true"),
    ],
)
def test_table_that_does_not_fit_the_rows_is_refused_by_name(
    tmp_path: Path, columns: dict[str, pa.DataType], options: dict[str, str], problem: str
) -> None:
    keys = ["part"] if "part" in columns else []
    schema = deltalake.Schema.from_arrow(pa.schema(list(columns.items())))
    deltalake.DeltaTable.create(str(tmp_path), schema, partition_by=keys)
    job = Job(tmp_path, **options)
    job.write(1)
    job.checkpoint(1)
    with pytest.raises(CommitError, match=problem):
        job.committer.notify_complete(1)
    assert deltalake.DeltaTable(tmp_path).version() == 0


def test_column_that_a_table_lacks_is_added_by_option(tmp_path: Path) -> None:
    schema = deltalake.Schema.from_arrow(pa.schema([("part", pa.string())]))
    deltalake.DeltaTable.create(str(tmp_path), schema, partition_by=["part"])
    job = Job(tmp_path, mergeSchema="true")
    job.write(1)
    job.checkpoint(1)
    job.committer.notify_complete(1)
    assert numbers(tmp_path) == [1]


def test_column_that_differs_in_case_from_one_of_the_table_is_refused_and_not_added(tmp_path: Path) -> None:
    schema = deltalake.Schema.from_arrow(pa.schema([("N", pa.int64()), ("part", pa.string())]))
    deltalake.DeltaTable.create(str(tmp_path), schema, partition_by=["part"])
    job = Job(tmp_path, mergeSchema="true")
    job.write(1)
    job.checkpoint(1)
    with pytest.raises(CommitError, match="has column 'N', which differs from 'n' of the query in case alone"):
        job.committer.notify_complete(1)


@pytest.mark.parametrize("name", ["a%20b", "a\\b"])
def test_path_that_the_library_takes_for_another_one_is_refused(tmp_path: Path, name: str) -> None:
    given = {"path": str(tmp_path / name)}
    for check in (lambda: check_sink("delta", given, SCHEMA), lambda: source_schema("delta", given, None)):
        with pytest.raises(PlanError, match="option 'path': .* takes for another character"):
            check()


def test_text_of_the_user_is_in_the_history_of_the_table(tmp_path: Path) -> None:
    job = Job(tmp_path, userMetadata='from "orders"')
    job.write(1)
    job.checkpoint(1)
    job.committer.notify_complete(1)
    lines = map(json.loads, (tmp_path / "_delta_log" / f"{1:020}.json").read_text().splitlines())
    [info] = [line["commitInfo"] for line in lines if "commitInfo" in line]
    assert info["userMetadata"] == 'from "orders"'


def test_table_with_a_feature_that_the_sink_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    table = deltalake.DeltaTable.create(str(tmp_path), deltalake.Schema.from_arrow(SCHEMA), partition_by=["part"])
    table.alter.add_constraint({"positive": "n > 0"})
    job = Job(tmp_path)
    job.write(-1)
    job.checkpoint(1)
    with pytest.raises(CommitError, match=r"checkConstraints|version 3"):
        job.committer.notify_complete(1)
    assert numbers(tmp_path) == []


def test_bounds_of_texts_that_are_long_and_of_floats_are_left_out(tmp_path: Path) -> None:
    sink = DeltaSink({"path": str(tmp_path)})
    schema = pa.schema([("n", pa.int64()), ("x", pa.float64()), ("s", pa.string()), ("l", pa.list_(pa.int64()))])
    operator = PreparingSinkOperator(sink)
    output = opened(operator, context(uid="out"))
    rows = [{"n": 2, "x": float("nan"), "s": "a" * 100, "l": [1]}, {"n": None, "x": 1.0, "s": None, "l": None}]
    operator.process_batch(pa.RecordBatch.from_pylist(rows, schema=schema), 0)
    operator.prepare_snapshot(1)
    [message] = output.column("message")
    stats = json.loads(json.loads(message)["stats"])
    assert stats["minValues"] == stats["maxValues"] == {"n": 2}
    assert (stats["numRecords"], stats["nullCount"]["s"], stats["nullCount"]["n"]) == (2, 1, 1)


@pytest.mark.row("ends.5")
def test_small_files_are_merged_across_checkpoints_and_jobs_and_no_row_changes(tmp_path: Path) -> None:
    options = {"targetFileSize": "4 kb"}
    for attempt in range(2):  # the second one merges what the first one has left
        job = Job(tmp_path, job_id=str(attempt) * 32, **options)
        for number in range(1, 9):
            job.write(*range(100 * attempt + number, 100 * attempt + number + 2))
            job.checkpoint(number)
            job.committer.notify_complete(number)
        job.close()
    table = deltalake.DeltaTable(tmp_path)
    operations = [entry["operation"] for entry in table.history()]
    assert 2 <= operations.count("OPTIMIZE") <= 8
    assert len(table.file_uris()) < 16
    wanted = [n for attempt in range(2) for at in range(1, 9) for n in (100 * attempt + at, 100 * attempt + at + 1)]
    assert numbers(tmp_path) == sorted(wanted)
    adds = pa.table(table.get_add_actions(flatten=True))
    assert sum(adds.column("num_records").to_pylist()) == len(wanted)
    assert all(entry is not None for entry in adds.column("min.n").to_pylist())


@pytest.mark.parametrize(
    "values", [["a b", "50%", "x:y/z", "ü", None], [datetime(2026, 1, 1, 1, 2, 3, 456, UTC)], [math.inf, 1e20]]
)
def test_merged_files_have_the_texts_of_partitions_that_their_parts_had(tmp_path: Path, values: list[Any]) -> None:
    schema = pa.schema([("n", pa.int64()), ("part", pa.array(values).type)])
    job = Job(tmp_path, schema=schema, targetFileSize="2 kb")
    rows = [{"n": n, "part": values[n % len(values)]} for n in range(40)]
    for number in range(8):
        for row in rows[5 * number : 5 * number + 5]:
            job.writers[0].process_batch(pa.RecordBatch.from_pylist([row], schema), 0)
        job.checkpoint(number + 1)
        job.committer.notify_complete(number + 1)
    job.close()
    assert deltalake.DeltaTable(tmp_path).to_pyarrow_table().sort_by("n").to_pylist() == rows
    actions: dict[str, list[Any]] = {"add": [], "remove": []}
    for file in sorted((tmp_path / "_delta_log").glob("*.json")):
        for line in map(json.loads, file.read_text().splitlines()):
            for kind in actions.keys() & line.keys():
                actions[kind].append((line[kind]["path"], line[kind]["partitionValues"]["part"]))
    assert actions["remove"]
    assert set(actions["remove"]) <= set(actions["add"])
    assert {text for _, text in actions["add"]} == {text for _, text in actions["remove"]}


def test_merge_that_another_writer_overtakes_leaves_no_file_and_changes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writer deletes a row while the files are read: it must not be there again."""
    job = Job(tmp_path, targetFileSize="4 kb")
    merged: Any = DeltaCommitter._merged

    def overtaken(self: DeltaCommitter, *given: Any) -> Any:
        monkeypatch.setattr(DeltaCommitter, "_merged", merged)
        deltalake.DeltaTable(tmp_path).delete("n = 1")
        return merged(self, *given)

    monkeypatch.setattr(DeltaCommitter, "_merged", overtaken)
    for number in range(1, 17):
        job.write(2 * number - 1, 2 * number)
        job.checkpoint(number)
        job.committer.notify_complete(number)
    job.close()
    table = deltalake.DeltaTable(tmp_path)
    assert numbers(tmp_path) == list(range(2, 33))
    assert [entry["operation"] for entry in table.history()].count("OPTIMIZE") >= 1
    assert hidden(tmp_path) == []
    logs = (file.read_text().splitlines() for file in sorted((tmp_path / "_delta_log").glob("*.json")))
    added = {line["add"]["path"] for lines in logs for line in map(json.loads, lines) if "add" in line}
    assert set(files(tmp_path)) <= {Path(path).name for path in added} | {"part=0", "part=1"}


def test_invalid_size_is_refused_when_the_program_is_planned() -> None:
    with pytest.raises(PlanError, match="'targetFileSize': 'big' is not a number with a unit"):
        check_sink("delta", {"path": "/table", "targetFileSize": "big"}, SCHEMA)
