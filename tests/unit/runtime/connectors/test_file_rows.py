"""Rows of Parquet files: which text stays a dictionary, and what it holds. Lines of text at any size of a block."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.connectors import file_rows
from ckpt_runtime.connectors.file_rows import BATCH_ROWS, FileFormatError, lines_of, open_rows
from ckpt_runtime.graph.formats import source_options
from ckpt_runtime.storage.filesystem import resolve

SCHEMA = pa.schema([("n", pa.int64()), ("few", pa.string()), ("many", pa.string())])
ROWS = 3 * BATCH_ROWS


def written(path: Path, **options: Any) -> pa.Table:
    columns = {
        "n": range(ROWS),
        "few": [None if n % 7 == 0 else f"value {n % 5}" for n in range(ROWS)],
        "many": [f"value {n}" for n in range(ROWS)],
    }
    table = pa.table(columns, SCHEMA)
    pq.write_table(table, path, row_group_size=2 * BATCH_ROWS, **options)
    return table


def read(path: Path, schema: pa.Schema = SCHEMA) -> list[pa.RecordBatch]:
    return list(open_rows("parquet", resolve(str(path)), schema, {}))


def test_text_of_few_values_comes_as_one_dictionary_and_text_of_many_as_plain(tmp_path: Path) -> None:
    table = written(tmp_path / "a.parquet")
    batches = read(tmp_path / "a.parquet")
    assert {str(batch.schema.field("many").type) for batch in batches} == {"string"}
    dictionaries = [batch.column("few").dictionary for batch in batches]
    assert len(dictionaries) == 3
    assert len({dictionary.buffers()[2].address for dictionary in dictionaries[:2]}) == 1, "of one row group"
    decoded = [batch.set_column(1, SCHEMA.field(1), batch.column("few").dictionary_decode()) for batch in batches]
    assert pa.Table.from_batches(decoded).equals(table)


def test_text_that_the_file_holds_plain_comes_plain(tmp_path: Path) -> None:
    table = written(tmp_path / "a.parquet", use_dictionary=False)
    assert pa.Table.from_batches(read(tmp_path / "a.parquet")).equals(table)


def test_column_whose_dictionary_ends_within_a_row_group_has_the_same_rows(tmp_path: Path) -> None:
    texts = [f"value {n % 3}" if n < BATCH_ROWS else f"long value number {n}" for n in range(ROWS)]
    schema = pa.schema([("few", pa.string())])
    table = pa.table({"few": texts}, schema)
    pq.write_table(table, tmp_path / "a.parquet", dictionary_pagesize_limit=1_000, data_page_size=1_000)
    batches = read(tmp_path / "a.parquet", schema)
    assert [text for batch in batches for text in batch.column(0).to_pylist()] == texts


def test_text_that_is_declared_in_another_case_or_wider_is_found(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet")
    schema = pa.schema([("FEW", pa.string()), ("missing", pa.string()), ("N", pa.int64())])
    batch = read(tmp_path / "a.parquet", schema)[0]
    assert batch.schema.names == schema.names
    assert batch.slice(6, 3).to_pylist() == [
        {"FEW": "value 1", "missing": None, "N": 6},
        {"FEW": None, "missing": None, "N": 7},
        {"FEW": "value 3", "missing": None, "N": 8},
    ]


@pytest.mark.parametrize("declared", [pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.string()])
def test_nanoseconds_that_a_declared_type_cannot_hold_are_refused_with_a_way_out(
    tmp_path: Path, declared: pa.DataType
) -> None:
    pq.write_table(pa.table({"at": pa.array([1_999], pa.timestamp("ns", "UTC"))}), tmp_path / "a.parquet")
    with pytest.raises(FileFormatError, match=r"a.parquet: column 'at' .* timestamp_micros\(at DIV 1000\)"):
        read(tmp_path / "a.parquet", pa.schema([("at", declared)]))


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("text", ["", "a", "a\n", "\ufeffone\r\ntwo\rthree\n\nfour", "\r\n\r", "a\n\n"])
def test_lines_are_the_same_whatever_part_of_a_file_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, block: int
) -> None:
    monkeypatch.setattr(file_rows, "_BLOCK_BYTES", block)
    (tmp_path / "a").write_bytes(text.encode())
    pieces = list(lines_of(resolve(str(tmp_path / "a")), None))
    wanted = text.removeprefix("\ufeff").encode().splitlines()
    assert [line for piece in pieces for line in piece] == wanted
    if block == 100 and wanted:
        assert pieces == [wanted]
    separated = [line for piece in lines_of(resolve(str(tmp_path / "a")), b"\n") for line in piece]
    parts = text.removeprefix("\ufeff").encode().split(b"\n")
    assert separated == (parts if parts[-1] else parts[:-1])


@pytest.mark.parametrize(
    ("format_", "option", "text"),
    [("json", "multiLine", '{"line": "a"}'), ("csv", "multiLine", '"a\nb"'), ("text", "wholetext", "a\nb")],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_file_that_is_read_as_a_whole_fails_above_the_limit_by_its_name_and_size_without_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str, option: str, text: str, suffix: str
) -> None:
    schema = pa.schema([("line", pa.string())])
    options = source_options(format_, {"path": str(tmp_path), option: "true"})
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
    monkeypatch.setattr(file_rows, "MOST_WHOLE_BYTES", len(text))
    [batch] = open_rows(format_, resolve(str(path)), schema, options)
    assert batch.num_rows == 1
    monkeypatch.setattr(file_rows, "MOST_WHOLE_BYTES", len(text) - 1)
    with pytest.raises(
        FileFormatError, match=f"{path}: it has more than 0 MiB .* option {option} reads a file as a whole"
    ):
        list(open_rows(format_, resolve(str(path)), schema, options))
