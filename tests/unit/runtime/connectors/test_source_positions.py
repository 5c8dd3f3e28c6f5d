"""Sources whose position a user has set in a snapshot, run by hand."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.storage.errors import InvalidLocationError
from tests.unit.runtime.connectors.split_jobs import Job, moved

LINES = pa.schema([("value", pa.string())])
HOUR = 3_600


def write(directory: Path, name: str, lines: int, hour: int) -> None:
    """A file that was last changed at an hour of 1970."""
    file = directory / name
    file.write_text("".join(f"{name}:{line}\n" for line in range(lines)))
    os.utime(file, (hour * HOUR, hour * HOUR))


def read_from(directory: Path, state: Any) -> Counter[str]:
    with closing(Job("text", {"path": str(directory)}, LINES, restored=state)) as job:
        return Counter(str(row["value"]).partition(":")[0] for row in job.run())


@pytest.mark.row("ends.7")
def test_files_are_read_from_the_position_that_was_set(tmp_path: Path) -> None:
    for hour, name in enumerate("abc"):
        write(tmp_path, name, 5, hour)
    with closing(Job("text", {"path": str(tmp_path)}, LINES, most_rows=3)) as job:
        assert job.discover()
        job.read()
        state = job.checkpoint(1)
        assert len(job.rows) == 3
    write(tmp_path, "d", 5, 3)
    assert read_from(tmp_path, state) == Counter(a=2, b=5, c=5, d=5)
    assert read_from(tmp_path, moved(state, "earliest")) == Counter(a=5, b=5, c=5, d=5)
    assert read_from(tmp_path, moved(state, "1970-01-01T02:00")) == Counter(c=5, d=5)
    assert read_from(tmp_path, moved(state, "1970-01-01T03:00:00+01:00")) == Counter(c=5, d=5)
    assert read_from(tmp_path, moved(state, "1970-01-01T04:00")) == Counter()
    with closing(Job("text", {"path": str(tmp_path)}, LINES, restored=moved(state, "latest"))) as job:
        assert job.run() == []
        write(tmp_path, "e", 5, 4)
        assert Counter(str(row["value"])[0] for row in job.run()) == Counter(e=5)
        state = job.checkpoint(2)
    write(tmp_path, "f", 5, 5)
    assert read_from(tmp_path, state) == Counter(f=5)


@pytest.mark.row("ends.7")
def test_files_that_are_read_again_are_not_cleaned_up_before(tmp_path: Path) -> None:
    write(tmp_path, "a", 5, 1)
    options = {"path": str(tmp_path), "cleanSource": "delete"}
    with closing(Job("text", options, LINES)) as job:
        assert len(job.run()) == 5
        state = job.checkpoint(1)
    with closing(Job("text", options, LINES, restored=moved(state, "earliest"))) as job:
        assert len(job.run()) == 5
        job.checkpoint(2)
        assert (tmp_path / "a").exists()
        job.complete(2)
        assert not (tmp_path / "a").exists()


@pytest.mark.row("ends.7")
def test_rate_starts_with_its_first_row_again_whose_time_it_keeps() -> None:
    with closing(Job("rate", {"rowsPerSecond": "100000", "numPartitions": "2"}, parallelism=2)) as job:
        job.discover()
        while len(job.rows) < 100:
            job.read()
        before = {row["value"]: row["timestamp"] for row in job.rows}
        state = job.checkpoint(1)
    with closing(
        Job("rate", {"rowsPerSecond": "100000", "numPartitions": "2"}, restored=moved(state, "earliest"))
    ) as job:
        job.discover()
        while len(job.rows) < 100:
            job.read()
        after = {row["value"]: row["timestamp"] for row in job.rows}
    shared = before.keys() & after.keys()
    assert 0 in shared
    assert {value: before[value] for value in shared} == {value: after[value] for value in shared}


@pytest.mark.row("ends.7")
def test_a_bounded_source_that_had_ended_reads_again_from_the_position(tmp_path: Path) -> None:
    write(tmp_path, "a", 5, 1)
    options = {"path": str(tmp_path), "availableNow": "true"}
    with closing(Job("text", options, LINES)) as job:
        assert len(job.run()) == 5
        assert job.ended
        state = job.checkpoint(1)
    with closing(Job("text", options, LINES, restored=moved(state, "earliest"))) as job:
        assert len(job.run()) == 5
        assert job.ended


@pytest.mark.row("ends.7")
@pytest.mark.parametrize(
    ("format_", "to", "problem"),
    [
        ("text", '{"a": 3}', "its format takes earliest, latest, timestamp"),
        ("rate", "latest", "cannot be set to latest: its format takes earliest"),
        ("socket", "earliest", "its format has no positions"),
    ],
)
def test_a_position_that_a_source_cannot_take_is_refused(format_: str, to: str, problem: str, tmp_path: Path) -> None:
    given = {"text": {"path": str(tmp_path)}, "rate": {}, "socket": {"host": "127.0.0.1", "port": "1"}}[format_]
    with closing(Job(format_, given, LINES if format_ == "text" else None)) as job:
        state = job.checkpoint(1)
    with pytest.raises(InvalidLocationError, match=problem):
        moved(state, to)


@pytest.mark.row("ends.7")
def test_delta_table_is_read_from_the_position_that_was_set(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")

    def append(*numbers: int) -> None:
        deltalake.write_deltalake(tmp_path, pa.table({"n": pa.array(numbers, pa.int64())}), mode="append")

    def rows(state: Any) -> list[int]:
        with closing(Job("delta", {"path": str(tmp_path), "availableNow": "true"}, restored=state)) as job:
            return [row["n"] for row in job.run()]

    for version in range(3):
        append(10 * version, 10 * version + 1)
        log = tmp_path / "_delta_log" / f"{version:020}.json"
        os.utime(log, ((version + 1) * HOUR, (version + 1) * HOUR))
    with closing(Job("delta", {"path": str(tmp_path)}, most_rows=1)) as job:
        assert job.discover()
        job.read()
        state = job.checkpoint(1)
    append(30)
    assert sorted(rows(moved(state, "earliest"))) == [0, 1, 10, 11, 20, 21, 30]
    assert rows(moved(state, "latest")) == []
    assert rows(moved(state, '{"version": 2}')) == [20, 21, 30]
    assert rows(moved(state, "1970-01-01T02:30")) == [20, 21, 30]
    for to, problem in (('{"version": 9}', "9 is greater than 3"), ('{"n": 1}', "are not of the form")):
        with pytest.raises(ValueError, match=rf"cannot continue from the given position: .*{problem}"):
            rows(moved(state, to))
