"""Records that a source cannot read: they fail the job, are counted, or are kept with their place and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.sources import BadRow, SplitReader, SplitRows
from ckpt_runtime.storage.errors import StorageError
from tests.unit.runtime.connectors.split_jobs import Job

NUMBERS = pa.schema([("n", pa.int64()), ("name", pa.string())])
LINES = {
    "json": ['{"n": 1}', "{bad", "", '{"n": "x"}', '[{"n": 2}, {"n": 3}]', '[{"n": 4}, {"n": "y"}]', '{"n": 5}'],
    "csv": ["1,a", "x,b", "", "2,b,c", "2,a", "3,b", "5,c"],
}
BAD = {"json": {1, 3, 5}, "csv": {1, 3}}


def dead_letters(directory: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(directory.glob("*.parquet")) for row in pq.ParquetFile(file).read().to_pylist()]


def written(directory: Path, format_: str) -> Path:
    source = directory / "in"
    source.mkdir()
    (source / f"a.{format_}").write_text("\n".join(LINES[format_]))
    return source


@pytest.mark.row("ends.6")
@pytest.mark.parametrize("format_", ["json", "csv"])
def test_bad_records_are_dropped_and_counted(tmp_path: Path, format_: str) -> None:
    source = written(tmp_path, format_)
    job = Job(format_, {"path": str(source), "badRows": "drop", "availableNow": "true"}, NUMBERS, most_rows=2)
    assert [row["n"] for row in job.run()] == [1, 2, 3, 5]
    assert job.readers[0].bad_rows_dropped == len(BAD[format_])


@pytest.mark.row("ends.6")
@pytest.mark.parametrize("format_", ["json", "csv"])
def test_bad_records_are_kept_once_with_their_place_and_bytes_through_a_restart(tmp_path: Path, format_: str) -> None:
    source, dead = written(tmp_path, format_), tmp_path / "dead"
    options = {"path": str(source), "badRows": "deadLetter", "badRowsDirectory": str(dead), "availableNow": "true"}
    job = Job(format_, options, NUMBERS, most_rows=1)
    job.discover()
    job.read(2)
    [reader] = job.readers
    reader.prepare_snapshot(1)
    state, rows = job.checkpoint(1), job.rows
    job.read(2)  # behind the checkpoint: what comes here comes again
    reader.prepare_snapshot(2)
    again = Job(format_, options, NUMBERS, restored=state, most_rows=1, attempt=1)
    rows += again.run()
    again.readers[0].finish()
    assert [row["n"] for row in rows] == [1, 2, 3, 5]
    found = dead_letters(dead)
    file = (source / f"a.{format_}").as_uri()
    expected = {(f"{file}, line {at + 1}", LINES[format_][at].encode()) for at in BAD[format_]}
    assert {(letter["position"], letter["raw"]) for letter in found} == expected
    assert len(found) == len(expected)
    assert {letter["condition"] for letter in found} == {"MALFORMED_RECORD_IN_PARSING"}
    assert all(letter["reason"] and letter["row"] is None and letter["operator"] == "op" for letter in found)


@pytest.mark.parametrize("options", [{"badRows": "fail"}, {"mode": "FAILFAST", "columnPruning": "false"}], ids=str)
def test_first_bad_record_fails_the_job_with_its_place(tmp_path: Path, options: dict[str, str]) -> None:
    source = written(tmp_path, "csv")
    with pytest.raises(StorageError, match=r"a\.csv: line 2: 'x' in column 'n' is not of type int64"):
        Job("csv", {"path": str(source), **options}, NUMBERS).run()


def test_option_of_the_job_holds_for_records_that_would_fail_it_and_for_no_others(tmp_path: Path) -> None:
    source = written(tmp_path, "csv")
    configuration = {"execution.bad-rows.mode": "DROP"}
    for mode, numbers in (("FAILFAST", [1, 2, 3, 5]), ("PERMISSIVE", [1, None, 2, 2, 3, 5])):
        options = {"path": str(source), "mode": mode, "columnPruning": "false"}
        job = Job("csv", options, NUMBERS, configuration=configuration)
        job.discover()
        while job.readers[0].has_work_left:
            job.read()
        assert [row["n"] for row in job.rows] == numbers


def test_row_that_a_source_of_the_program_reports_fails_the_job_unless_an_option_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path, "csv")
    read = SplitRows(str((source / "a.csv").as_uri()), 1, bad=[BadRow("it is odd", "row 7", b"7")])
    for options, dropped in (({"badRows": "drop"}, 1), ({}, 0)):
        job = Job("csv", {"path": str(source), **options}, NUMBERS)
        job.discover()
        [reader] = job.readers
        assert isinstance(reader._reader, SplitReader)
        monkeypatch.setattr(reader._reader, "read", lambda most_rows: read)
        if dropped:
            job.read()
            assert reader.bad_rows_dropped == dropped
        else:
            with pytest.raises(ValueError, match="source 'op': bad row at row 7: it is odd"):
                job.read()
