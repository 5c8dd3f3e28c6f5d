"""Sources of the public protocol, run by their operators: restores, rescales, ranges, completions."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState
from ckpt_runtime.connectors.file_source import FileSource
from ckpt_runtime.connectors.rate_source import Schedule
from ckpt_runtime.connectors.split_source import SplitEnumeratorOperator, SplitReaderOperator
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import SPLIT_SCHEMA, source_schema
from ckpt_runtime.graph.source_formats import with_file_metadata
from ckpt_runtime.graph.specs import EnumeratorSpec, RangeReaderSpec
from ckpt_runtime.operators.operator import SourceStatus, WaitingInput
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from tests.docs.markdown import blocks
from tests.support.object_store import keys
from tests.support.patience import deadline
from tests.unit.runtime.connectors.harness import Clock, Collector, context, opened, snapshot_of
from tests.unit.runtime.connectors.split_jobs import Job

TEXT = pa.schema([("value", pa.string())])
NUMBERS = pa.schema([("n", pa.int64()), ("name", pa.string())])


def table(first: int, rows: int) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table({"n": list(numbers), "name": [f"row {n}" for n in numbers]}, NUMBERS)


def write(directory: Path, format_: str, name: str, first: int, rows: int) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if format_ == "parquet":
        pq.write_table(table(first, rows), path, row_group_size=7)
    elif format_ == "orc":
        orc.write_table(table(first, rows), path)
    else:
        path.write_text("".join(f"{n}\n" for n in range(first, first + rows)))
    return path


def ids(rows: Sequence[dict[str, Any]]) -> Counter[int]:
    return Counter(int(row["n"] if "n" in row else row["value"]) for row in rows)


def test_source_in_step_with_others_waits_until_its_range_has_been_processed(tmp_path: Path) -> None:
    """Behind its data it takes part in one more batch, which has the same number in each attempt."""
    for number in range(2):
        write(tmp_path, "text", str(number), number, 1)
    options = {"path": str(tmp_path), "availableNow": "true", "maxFilesPerTrigger": "1"}

    def enumerator(job_id: str, state: Sequence[OperatorListState] = ()) -> tuple[SplitEnumeratorOperator, Collector]:
        found = SplitEnumeratorOperator(
            EnumeratorSpec("text", options, TEXT, in_step=True), FileSource("text", options), TEXT
        )
        return found, opened(found, context(job_id=job_id, state=state))

    source, output = enumerator("job")
    assert [source.poll(), source.poll()] == [SourceStatus.MORE_AVAILABLE, SourceStatus.NOTHING_AVAILABLE]
    source.align(1)
    assert [source.poll(), source.poll()] == [SourceStatus.MORE_AVAILABLE, SourceStatus.NOTHING_AVAILABLE]
    again, sent = enumerator("job", snapshot_of(source, 1))
    for each in (source, again):
        each.align(1)
        assert each.poll() is SourceStatus.NOTHING_AVAILABLE
        each.align(2)
        assert each.poll() is SourceStatus.NOTHING_AVAILABLE
        each.align(3)
        assert each.poll() is SourceStatus.END_OF_INPUT
    assert (output.ranges, sent.ranges) == ([1, 2, 3], [2, 3])
    third, sent = enumerator("job", snapshot_of(source, 2))
    third.align(2)
    assert third.poll() is SourceStatus.NOTHING_AVAILABLE
    third.align(3)
    assert (third.poll(), sent.ranges) == (SourceStatus.END_OF_INPUT, [2, 3])
    _, later = enumerator("the next run", snapshot_of(source, 3))
    assert later.ranges == [0]


def test_source_whose_batches_are_calls_waits_until_a_checkpoint_covers_its_range(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path, "text", str(number), number, 1)
    options = {"path": str(tmp_path), "availableNow": "true", "maxFilesPerTrigger": "1"}
    asked: list[Progress] = []
    clock = Clock()

    def enumerator(state: Sequence[OperatorListState] = ()) -> SplitEnumeratorOperator:
        found = SplitEnumeratorOperator(
            EnumeratorSpec("text", options, TEXT, in_calls=True), FileSource("text", options), TEXT
        )
        opened(found, replace(context(state=state, monotonic_ms=clock), report_progress=asked.append))
        assert asked.pop() == Progress(None, idle=True)
        return found

    def waits(source: SplitEnumeratorOperator, *, asks: bool) -> None:
        assert source.poll() is SourceStatus.NOTHING_AVAILABLE
        assert asked == [Progress(None, idle=True, wants_checkpoint=True)] * asks
        asked.clear()

    source = enumerator()
    source.snapshot(1)
    assert source.poll() is SourceStatus.MORE_AVAILABLE
    source.notify_complete(1)
    waits(source, asks=False)  # the readers have not read it
    source.align(1)
    waits(source, asks=True)
    waits(source, asks=False)
    clock.ms += 1_000
    waits(source, asks=True)
    source.snapshot(2)  # fails
    source.snapshot(3)
    source.notify_complete(3)
    assert source.poll() is SourceStatus.MORE_AVAILABLE
    again = enumerator(snapshot_of(source, 4))
    for each in (source, again):
        waits(each, asks=False)
        each.align(2)
        waits(each, asks=True)
        each.snapshot(5)
        each.notify_complete(5)
        assert each.poll() is SourceStatus.END_OF_INPUT
        clock.ms += 1_000


def test_reader_whose_batches_are_calls_takes_no_barrier_within_one_and_reports_those_that_it_has_read(
    tmp_path: Path,
) -> None:
    spec = RangeReaderSpec("text", {"path": str(tmp_path)}, TEXT, in_calls=True)
    reader = SplitReaderOperator(spec, FileSource("text", dict(spec.options)), TEXT)
    reported: list[Progress] = []
    clock = Clock()
    where = context(waiting_input=lambda: WaitingInput.BARRIER, monotonic_ms=clock)
    output = opened(reader, replace(where, report_progress=reported.append, set_timer=(due := []).append))
    split = {"id": str(write(tmp_path, "text", "0", 7, 1)), "bounded": True}
    description = {"size": 2, "modified_ms": 0, "partition": {}}
    row = {"sequence": 0, "number": 0, "partition": json.dumps({**split, "description": description}), "rows": None}
    reader.process_batch(pa.RecordBatch.from_pylist([row], SPLIT_SCHEMA), 0)
    reader.process_coming_watermark(1, 1)
    reader.process_coming_watermark(3, 2)  # its splits are those of others
    assert (reader.holds_checkpoints_back, due.pop(), reported) == (True, 0, [])
    for _ in range(2):
        clock.ms += 299_999
        assert reader.holds_checkpoints_back
        clock.ms += 1
        assert not reader.holds_checkpoints_back  # the checkpoint would expire
        reader.snapshot(1)
    while reader.reads:
        reader.on_processing_time(0)
    assert output.column("value") == ["7"]
    assert (reader.holds_checkpoints_back, reported) == (False, [Progress(1), Progress(2)])


@pytest.mark.parametrize("format_", ["parquet", "orc", "text"])
@pytest.mark.parametrize("seed", range(4))
def test_files_with_restores_at_other_parallelisms_give_each_row_once(tmp_path: Path, format_: str, seed: int) -> None:
    source = tmp_path / "in"
    source.mkdir()
    generator = random.Random(seed)
    declared = TEXT if format_ == "text" else NUMBERS
    options = {"path": str(source), "maxFilesPerTrigger": "2"}
    job = Job(format_, options, declared, parallelism=2, most_rows=3)
    kept: list[dict[str, Any]] = []
    written = 0
    for number in range(1, 13):
        rows = generator.randrange(20)
        write(source, format_, f"part-{number}.{format_}", written, rows)
        written += rows
        if generator.random() < 0.7:
            job.discover()
        job.read(generator.randrange(6))
        parallelism = generator.randrange(1, 4)
        state = job.checkpoint(number, parallelism)
        kept += job.rows
        job.read(generator.randrange(4))  # rows behind the checkpoint are lost with the attempt
        job = Job(format_, options, declared, parallelism=parallelism, restored=state, most_rows=3)
    assert ids(kept + job.run()) == Counter(range(written))


def test_batches_of_files_are_counted_through_restores_and_runs(tmp_path: Path) -> None:
    def offsets(job: Job) -> list[tuple[int | None, int | None]]:
        found = [reader.measured() for reader in job.readers]
        return [(each.begun.get("logOffset", {}).get(""), each.reached.get("logOffset", {}).get("")) for each in found]

    options = {"path": str(tmp_path), "availableNow": "true", "maxFilesPerTrigger": "2"}
    for at in range(5):
        write(tmp_path, "text", str(at), at, 1)
    job = Job("text", options, parallelism=2)
    assert offsets(job) == [(None, None)] * 2
    assert job.discover()
    assert job.discover()
    job.read()
    assert offsets(job) == [(-1, 0)] * 2
    again = Job("text", options, parallelism=1, restored=job.checkpoint(1, 1))
    assert offsets(again) == [(-1, None)]
    again.run()
    assert offsets(again) == [(-1, 2)]
    write(tmp_path, "text", "later", 9, 1)
    later = Job("text", options, restored=again.checkpoint(2), job_id="the next run")
    assert offsets(later) == [(None, None)]
    later.run()
    assert offsets(later) == [(2, 3)]


def test_files_come_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    for at, name in enumerate(("c", "a", "b")):
        path = write(tmp_path, "text", name, at, 1)
        os.utime(path, (1_000 + at, 1_000 + at))
    options = {"path": str(tmp_path), "availableNow": "true"}
    assert [row["value"] for row in Job("text", options).run()] == ["0", "1", "2"]
    newest = Job("text", {**options, "latestFirst": "true", "maxFilesPerTrigger": "1"})
    assert [row["value"] for row in newest.run()] == ["2", "1", "0"]
    assert newest.ended


def test_file_that_comes_while_others_wait_is_the_next_one_with_latest_first_and_the_last_one_without(
    tmp_path: Path,
) -> None:
    for latest_first, values in (("true", ["1", "2", "0"]), ("false", ["0", "1", "2"])):
        directory = tmp_path / latest_first
        for at in range(2):
            os.utime(write(directory, "text", str(at), at, 1), (1_000 + at, 1_000 + at))
        options = {"path": str(directory), "latestFirst": latest_first, "maxFilesPerTrigger": "1"}
        job = Job("text", options)
        job.discover()
        os.utime(write(directory, "text", "2", 2, 1), (1_002, 1_002))
        assert [row["value"] for row in job.run()] == values


def test_files_and_directories_are_read_whatever_characters_their_names_have(tmp_path: Path) -> None:
    names = ["a b", "it's", 'q"q', "p%20q", "ha#sh", "qu?est", "nb\u00a0sp", "zero\u200b", "tab\t", "new\nline", "{*}"]
    names.append(os.fsdecode(b"latin-\xe9"))
    for at, name in enumerate(names):
        write(tmp_path / name, "text", f"{name}.txt", at, 1)
    job = Job("text", {"path": str(tmp_path), "recursiveFileLookup": "true"}, parallelism=2, most_rows=1)
    job.discover()
    job.read()
    kept, state = job.rows, job.checkpoint(1, 2)
    job = Job("text", {"path": str(tmp_path), "recursiveFileLookup": "true"}, parallelism=2, restored=state)
    assert ids(kept + job.run()) == Counter(range(len(names)))


def test_source_says_how_many_rows_wait_if_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000.0
    monkeypatch.setattr("ckpt_runtime.connectors.rate_source.time.time", lambda: now_s)
    rate = Job("rate", {"rowsPerSecond": "100", "numPartitions": "4"}, parallelism=2, most_rows=10)
    rate.discover()
    now_s += 3
    rate.read()
    assert sum(reader.pending_rows or 0 for reader in rate.readers) == 280
    for _ in range(100):
        rate.read()
    assert [reader.pending_rows for reader in rate.readers] == [0, 0]


@pytest.mark.parametrize(("call_ms", "row_ms", "least", "most"), [(30, 0.0, 500, 32_768), (0, 1.0, 5, 20)])
def test_batches_shrink_for_slow_rows_but_not_for_a_slow_call_of_later_operators(
    tmp_path: Path, call_ms: float, row_ms: float, least: int, most: int
) -> None:
    """Text files come in batches of 32,768 rows at most, from which the reader takes its share."""
    write(tmp_path, "text", "a", 0, 20_000)
    clock = Clock()
    job = Job("text", {"path": str(tmp_path)})
    [reader] = job.readers
    job.discover()

    def work(batch: pa.RecordBatch) -> None:
        clock.ms += int(call_ms + row_ms * batch.num_rows)

    reader.context = replace(reader.context, monotonic_ms=clock)
    job.outputs[0].forward = work
    while reader.has_work_left:
        job.read()
    sizes = sorted(batch.num_rows for batch in job.outputs[0].batches)
    assert least <= sizes[len(sizes) // 2] <= most
    assert ids(job.rows) == Counter(range(20_000))


@pytest.mark.row("ends.3")
@pytest.mark.parametrize(("rate", "in_ten_seconds"), [("0", 0), ("50", 250), ("50.5", 252)])
def test_rate_of_the_job_limits_the_rows_of_a_source_and_zero_pauses_it(
    tmp_path: Path, rate: str, in_ten_seconds: int
) -> None:
    write(tmp_path, "text", "a", 0, 1_000)
    clock = Clock()
    configuration = {"pipeline.source.rates": f"lines:{rate}"}
    where = context(0, 2, uid="lines.reader", monotonic_ms=clock, configuration=configuration)
    job = Job("text", {"path": str(tmp_path)})
    [reader] = job.readers
    reader.open(where, job.outputs[0])  # the first of two subtasks, which has half of the rate
    job.discover()
    for _ in range(1_000):
        clock.ms += 10
        job.read()
    assert abs(len(job.rows) - in_ten_seconds) <= 1
    assert reader.has_work_left


@pytest.mark.row("ends.4")
def test_rate_of_a_reader_is_changed_while_it_reads(tmp_path: Path) -> None:
    write(tmp_path, "text", "a", 0, 1_000)
    clock = Clock()
    timers: list[int] = []
    configuration = {"pipeline.source.rates": "lines:100"}
    where = context(uid="lines.reader", monotonic_ms=clock, configuration=configuration, set_timer=timers.append)
    job = Job("text", {"path": str(tmp_path)})
    [reader] = job.readers
    reader.open(where, job.outputs[0])
    job.discover()

    def seconds(count: int) -> int:
        for _ in range(count * 100):
            clock.ms += 10
            job.read()
        return len(job.rows)

    assert abs(seconds(1) - 100) <= 1
    reader.limit({"lines": 0.0, "others": 5.0})
    paused = len(job.rows)
    assert seconds(10) == paused
    assert reader.has_work_left
    reader.limit({"lines": 50.0})
    assert abs(seconds(4) - paused - 200) <= 1
    timers.clear()
    reader.limit({"others": 5.0})
    assert timers == [0]  # at once, not when the pause of the old rate ends
    seconds(1)
    assert ids(job.rows) == Counter(range(1_000))


def test_hidden_files_and_other_names_are_left_out(tmp_path: Path) -> None:
    for at, name in enumerate(("a.txt", "_b.txt", ".c.txt", "d.txt._COPYING_", "e.csv", "below/f.txt", "_g/h.txt")):
        write(tmp_path, "text", name, at, 1)
    options = {"path": str(tmp_path), "availableNow": "true"}
    assert ids(Job("text", options).run()) == Counter([0, 4])
    assert ids(Job("text", {**options, "pathGlobFilter": "*.txt"}).run()) == Counter([0])
    assert ids(Job("text", {**options, "recursiveFileLookup": "true"}).run()) == Counter([0, 4, 5])


def test_a_source_of_files_has_found_what_came_later_but_not_what_was_read(tmp_path: Path) -> None:
    write(tmp_path, "text", "a", 0, 5)
    job = Job("text", {"path": str(tmp_path)})
    assert ids(job.run()) == Counter(range(5))
    assert not job.discover()
    write(tmp_path, "text", "b", 5, 5)
    assert ids(job.run()) == Counter(range(10))
    assert not job.ended


def test_file_with_a_known_name_in_another_directory_is_new_unless_names_decide(tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "recursiveFileLookup": "true"}
    jobs = [Job("text", options), Job("text", {**options, "fileNameOnly": "true"})]
    write(tmp_path, "text", "one/a", 0, 1)
    assert [ids(job.run()) for job in jobs] == [Counter([0])] * 2
    write(tmp_path, "text", "two/a", 1, 1)
    assert [ids(job.run()) for job in jobs] == [Counter([0, 1]), Counter([0])]


def test_old_files_are_forgotten_and_not_read_again(tmp_path: Path) -> None:
    now = 2_000_000_000
    for at in range(3):
        os.utime(write(tmp_path, "text", str(at), at, 1), (now - 100 * at, now - 100 * at))
    job = Job("text", {"path": str(tmp_path), "maxFileAge": "150s"})
    assert ids(job.run()) == Counter([0, 1, 2])
    os.utime(write(tmp_path, "text", "late", 9, 1), (now - 500, now - 500))
    assert ids(job.run()) == Counter([0, 1, 2])
    [state] = job.checkpoint(1)[0][0]
    assert len(state.items[0]["state"]["seen"]) == 2


def test_columns_of_directories_have_the_declared_types(tmp_path: Path) -> None:
    write(tmp_path, "text", "country=DE/day=2026-01-02/a", 0, 2)
    write(tmp_path, "text", "country=__HIVE_DEFAULT_PARTITION__/day=2026-01-03/a", 2, 1)
    write(tmp_path, "text", "country=a%2Fb/day=2026-01-03/a", 3, 1)
    declared = pa.schema([("value", pa.string()), ("country", pa.string()), ("day", pa.date32())])
    rows = Job("text", {"path": str(tmp_path), "availableNow": "true"}, declared).run()
    assert {row["value"]: (row["country"], str(row["day"])) for row in rows} == {
        "0": ("DE", "2026-01-02"),
        "1": ("DE", "2026-01-02"),
        "2": (None, "2026-01-03"),
        "3": ("a/b", "2026-01-03"),
    }


def test_columns_of_directories_that_are_not_declared_last_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "text", "country=DE/a", 0, 2)
    with pytest.raises(ValueError, match="partitioned by country: declare these columns as the last ones"):
        Job("text", {"path": str(tmp_path)}).discover()


def test_a_file_that_changes_while_it_is_read_fails_the_job_after_a_restore(tmp_path: Path) -> None:
    write(tmp_path, "text", "a", 0, 20)
    job = Job("text", {"path": str(tmp_path)}, most_rows=3)
    job.discover()
    job.read(2)
    state = job.checkpoint(1)
    write(tmp_path, "text", "a", 100, 30)
    with pytest.raises(ValueError, match="has changed after 6 of its rows were read"):
        Job("text", {"path": str(tmp_path)}, restored=state).run()


def test_a_file_that_grows_while_it_is_read_fails_the_job_at_its_end_and_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "text", "a", 0, 20)
    job = Job("text", {"path": str(tmp_path), "availableNow": "true"}, most_rows=3)
    job.discover()
    state = job.checkpoint(1)
    job.read(2)
    with path.open("a") as file:
        file.write("20\n")
    with pytest.raises(
        ValueError, match="a has changed while it was read: it had 50 bytes, and has 53; files must not"
    ):
        job.read(20)
    again = Job("text", {"path": str(tmp_path), "availableNow": "true"}, restored=state)
    assert [row["value"] for row in again.run()] == [str(number) for number in range(21)]


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path, "text", "a", 0, 20)
    job = Job("text", {"path": str(tmp_path), "availableNow": "true"}, most_rows=3)
    job.discover()
    job.read(2)
    path.unlink()
    assert len(job.run()) == 20


@pytest.mark.parametrize("how", ["delete", "archive"])
def test_a_file_is_cleaned_when_a_checkpoint_that_covers_it_completes(tmp_path: Path, how: str) -> None:
    source, archive = tmp_path / "in", tmp_path / "archive"
    first = write(source, "text", "a", 0, 2)
    options = {"path": str(source), "cleanSource": how, "sourceArchiveDir": str(archive)}
    job = Job("text", options)
    before = job.checkpoint(1)
    assert before
    job.run()
    job.complete(1)
    assert first.exists()
    state = job.checkpoint(2)
    second = write(source, "text", "b", 2, 2)
    job.run()
    job.complete(2)
    assert not first.exists()
    assert second.exists()
    assert (archive / str(first)[1:]).exists() == (how == "archive")
    again = Job("text", options, restored=state)  # the completion may not have been heard of
    assert ids(again.run()) == Counter([2, 3])
    state = again.checkpoint(3)
    again.complete(3)
    assert not second.exists()
    another = write(source, "text", "b", 4, 9)
    Job("text", options, restored=state)  # repeats the completion
    assert another.exists()


def test_lines_end_as_in_spark_and_bad_bytes_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\nfo\xffur")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"five\n"))
    options = {"path": str(tmp_path), "availableNow": "true"}
    wanted = Counter(["one", "two", "three", "", "fo\ufffdur", "five"])
    assert Counter(row["value"] for row in Job("text", options).run()) == wanted
    (tmp_path / "b.gz").unlink()
    halves = [row["value"] for row in Job("text", {**options, "lineSep": "three"}).run()]
    assert halves == ["one\r\ntwo\r", "\n\nfo\ufffdur"]


@pytest.mark.parametrize("ending", ["\n", ""])
def test_small_file_is_one_batch_with_its_last_line_even_if_the_first_one_took_long(
    tmp_path: Path, ending: str
) -> None:
    for at in range(3):
        (tmp_path / f"{at}.json").write_text("\n".join([f'{{"n": {at}}}'] * 5) + ending)
    job = Job("json", {"path": str(tmp_path), "availableNow": "true", "maxFilesPerTrigger": "1"}, NUMBERS)
    [reader], [output], clock = job.readers, job.outputs, Clock()
    reader.context = replace(reader.context, monotonic_ms=clock)

    def process(batch: pa.RecordBatch) -> None:
        clock.ms += 30 * batch.num_rows

    output.forward = process
    job.run()
    assert [batch.column("n").to_pylist() for batch in output.batches] == [[0] * 5, [1] * 5, [2] * 5]


def test_lines_of_json_give_rows_and_bad_ones_give_nulls(tmp_path: Path) -> None:
    lines = ['{"n": 1, "name": "a"}', "", '[{"n": 2}, {"n": 3}]', "[]", '{"n": "x", "name": "b"}', "{bad", "  "]
    (tmp_path / "a").write_text("\n".join(lines))
    rows = Job("json", {"path": str(tmp_path), "availableNow": "true"}, NUMBERS).run()
    found = [(row["n"], row["name"]) for row in rows]
    assert found == [(1, "a"), (2, None), (3, None), (None, "b"), (None, None)]


@pytest.mark.parametrize(
    ("format_", "given", "problem"),
    [
        ("json", {"encoding": "ISO-8859-1"}, "ISO-8859-1 needs option lineSep, or multiLine"),
        ("json", {"mode": "IGNORE"}, "is not one of PERMISSIVE"),
        ("json", {"columnNameOfCorruptRecord": "n"}, "must be a STRING"),
        ("json", {"badRows": "skip"}, "'skip' is not one of fail, drop, deadLetter"),
        ("json", {"allowComments": "true"}, "option .allowComments.: .true. is not one of false"),
        ("csv", {"unescapedQuoteHandling": "RAISE_ERROR"}, "is not one of stop_at_delimiter"),
        ("json", {"badRows": "deadLetter"}, "badRows deadLetter needs it"),
        ("csv", {"badRows": "drop", "badRowsDirectory": "/dead"}, "no other value uses it"),
        ("json", {"badRows": "deadLetter", "badRowsDirectory": "dead"}, "'dead' is relative"),
        ("json", {"badRows": "drop", "mode": "PERMISSIVE"}, "so does mode PERMISSIVE: set only one"),
        ("parquet", {"badRows": "drop"}, "'parquet' does not detect bad rows; use it with csv, json"),
    ],
)
def test_options_for_bad_records_that_cannot_work_are_refused(
    format_: str, given: dict[str, str], problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        source_schema(format_, {"path": "/a", **given}, NUMBERS)


def test_parquet_files_without_a_column_give_null_and_narrow_types_are_widened(tmp_path: Path) -> None:
    pq.write_table(pa.table({"N": pa.array([1, 2], pa.int16())}), tmp_path / "a.parquet")
    rows = Job("parquet", {"path": str(tmp_path), "availableNow": "true"}, NUMBERS).run()
    assert rows == [{"n": 1, "name": None}, {"n": 2, "name": None}]
    pq.write_table(pa.table({"n": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(StorageError, match=r"b\.parquet: column 'n' is string and was declared as int64"):
        Job("parquet", {"path": str(tmp_path), "availableNow": "true"}, NUMBERS).run()


def test_hidden_column_describes_the_file_of_each_row_and_its_place_in_a_parquet_file(tmp_path: Path) -> None:
    file = write(tmp_path / "in %", "parquet", "part=1/a b é\u00a0.parquet", 0, 20)
    os.utime(file, ns=(0, 1_700_000_000_123_000_000))
    schema = with_file_metadata("parquet", NUMBERS.append(pa.field("part", pa.int64())))
    job = Job("parquet", {"path": str(tmp_path / "in %"), "availableNow": "true"}, schema, most_rows=3)
    rows = job.run()
    assert [row["_metadata"].pop("row_index") for row in rows] == [row["n"] for row in rows] == list(range(20))
    [facts] = {str(row["_metadata"]): row["_metadata"] for row in rows}.values()
    assert facts["file_path"] == f"file:{tmp_path}/in%20%25/part=1/a%20b%20é%C2%A0.parquet"
    assert facts["file_name"] == "a%20b%20é%C2%A0.parquet"
    assert facts["file_size"] == facts["file_block_length"] == file.stat().st_size
    assert facts["file_block_start"] == 0
    assert facts["file_modification_time"] == datetime.fromtimestamp(1_700_000_000.123, UTC)
    assert {row["part"] for row in rows} == {1}


@pytest.mark.parametrize(
    ("options", "declared", "problem"),
    [
        ({"path": "relative"}, NUMBERS, "is relative"),
        ({"path": "/a/*", "basePath": "a"}, NUMBERS, "option 'basePath': 'a' is relative"),
        ({"path": "/a/{b"}, NUMBERS, "'{b' has an open brace"),
        ({"path": "/a/*", "pathGlobFilter": "[a"}, NUMBERS, r"'\[a' has an open bracket"),
        ({"path": "/a/b", "basePath": "/a"}, NUMBERS, "is no pattern, and is the base itself"),
        ({"path": "/a", "maxBytesPerTrigger": "9", "maxFilesPerTrigger": "1"}, NUMBERS, "cannot be set together"),
        ({"path": "/a"}, None, "needs its schema"),
        ({"path": "/a", "mergesSchema": "true"}, NUMBERS, "does not know it"),
        ({"path": "/a", "maxFilesPerTrigger": "0"}, NUMBERS, "less than the minimum"),
        ({"path": "/a", "maxFileAge": "soon"}, NUMBERS, "not a duration"),
        ({"path": "/a", "maxFileAge": "100001d"}, NUMBERS, "longer than 100000d"),
        ({"path": "/a", "cleanSource": "archive"}, NUMBERS, "needs it"),
        ({"path": "/a", "cleanSource": "archive", "sourceArchiveDir": "/a/b"}, NUMBERS, "contain each other"),
    ],
)
def test_options_of_files_that_cannot_be_are_refused(
    options: dict[str, str], declared: pa.Schema | None, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        source_schema("parquet", options, declared)


@pytest.mark.parametrize("ramp_s", [0, 3])
def test_rate_has_the_values_and_times_of_spark(ramp_s: int) -> None:
    schedule = Schedule(10, ramp_s)
    due = [schedule.due_after(second * 1000) for second in range(6)]
    # Spark: the speed is a fourth of the rate in the first second, and grows by that.
    assert due == ([0, 10, 20, 30, 40, 50] if ramp_s == 0 else [0, 2, 6, 12, 22, 32])
    times = schedule.times_ms(pa.array(range(due[-1])).to_numpy()).tolist()
    assert times == sorted(times)
    for second in range(5):
        assert [time // 1000 for time in times[due[second] : due[second + 1]]] == [second] * (
            due[second + 1] - due[second]
        )
    assert times[due[4] : due[5]] == [4000 + 100 * at for at in range(10)]


def test_times_of_a_ramp_of_years_are_exact_to_its_end() -> None:
    """No table of its seconds would fit into memory."""
    ramp_s = 10_000 * 86_400
    schedule = Schedule(3 * (ramp_s + 1), ramp_s)
    for second in (1, 2, 1_000_003, 7_777_777, ramp_s - 1, ramp_s):
        first = schedule.due_after(second * 1000)
        assert first == 3 * second * (second + 1) // 2
        times = schedule.times_ms(np.array([first - 1, first, first + 1], dtype=np.int64)).tolist()
        assert times == sorted(times)
        assert times[1] == second * 1000
        assert times[0] // 1000 <= second


def test_rows_of_rate_continue_after_a_restore_at_another_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("ckpt_runtime.connectors.rate_source.time.time", lambda: now)
    options = {"rowsPerSecond": "10", "numPartitions": "3"}
    job = Job("rate", options, parallelism=2)
    job.discover()
    now += 2
    job.read(9)
    kept = job.rows
    state = job.checkpoint(1, 3)
    now += 1
    again = Job("rate", options, parallelism=3, restored=state)
    again.discover()
    again.read(9)
    rows = sorted((row["value"], row["timestamp"].timestamp()) for row in kept + again.rows)
    assert rows == [(at, pytest.approx(1_000 + at / 10)) for at in range(30)]
    assert len(kept) == 20


def test_batches_of_rate_have_one_time_each() -> None:
    options = {"rowsPerBatch": "5", "numPartitions": "2", "startTimestamp": "1000"}
    job = Job("rate-micro-batch", options, most_rows=1)
    job.discover()
    job.discover()
    job.read(50)
    rows = sorted((row["value"], row["timestamp"].timestamp()) for row in job.rows)
    assert rows == [(at, 1.0 + at // 5) for at in range(10)]
    bounded = Job("rate-micro-batch", {**options, "availableNow": "true"})
    assert len(bounded.run()) == 5


def test_rate_and_socket_cannot_end_with_what_is_there() -> None:
    with pytest.raises(PlanError, match="has no end"):
        source_schema("rate", {"availableNow": "true"}, None)


def test_the_source_of_the_documentation_gives_each_row_once_through_restores(tmp_path: Path) -> None:
    [block] = [block for block in blocks("python") if block.page.name == "sources.md" and "(Source)" in block.text]
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    options = {"path": str(tmp_path), "availableNow": "true"}
    for file in range(3):
        with closing(sqlite3.connect(tmp_path / f"{file}.db")) as database:
            database.execute("CREATE TABLE rows (word TEXT)")
            database.executemany("INSERT INTO rows VALUES (?)", [(f"{file}-{at}",) for at in range(10)])
            database.commit()
    job = Job(names["Databases"], options, parallelism=2, most_rows=3)
    job.discover()
    job.read(2)
    state = job.checkpoint(1, 1)
    kept = job.rows
    assert 0 < len(kept) < 30
    again = Job(names["Databases"], options, restored=state)
    again.run()
    assert Counter(row["word"] for row in kept + again.rows) == Counter(
        f"{f}-{at}" for f in range(3) for at in range(10)
    )
    assert again.ended


@pytest.mark.row("ends.4")
def test_files_of_an_object_store_are_found_read_and_deleted(bucket: str) -> None:
    url = f"{bucket}/orders"
    options = {"path": url, "cleanSource": "delete"}
    job = Job("text", options, pa.schema([("value", pa.string()), ("country", pa.string())]))
    for at in range(2):
        location = resolve(f"{url}/country=DE/part-{at}")
        location.filesystem.pipe_file(location.path, f"{at}\n".encode())
        job.discover()
        job.read(4)
    assert sorted((row["value"], row["country"]) for row in job.rows) == [("0", "DE"), ("1", "DE")]
    assert len(keys(url)) == 2
    job.checkpoint(1)
    job.complete(1)
    assert keys(url) == []


def test_last_line_of_a_socket_is_a_row_without_an_end_of_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = {"host": "127.0.0.1", "port": str(server.getsockname()[1])}
        with closing(Job("socket", options)) as job:
            job.discover()
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"one\r\ntwo")
            is_over = deadline(30)
            while len(job.rows) < 2:
                assert not is_over(), job.rows
                job.read()
    assert [row["value"] for row in job.rows] == ["one", "two"]
