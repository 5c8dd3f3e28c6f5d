"""Rows of Parquet files: which text stays a dictionary, and what it holds. Lines of text at any size of a block."""

from __future__ import annotations

import gzip
import random
import struct
from contextlib import nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

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


TIMES = [datetime(1583, 1, 1, 0, 0, 1, 123456, UTC), None, datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)]


@pytest.mark.row("ends.4")
def test_times_that_spark_stores_as_int96_are_read_to_the_microsecond(tmp_path: Path) -> None:
    times = pa.array(TIMES, pa.timestamp("us", "UTC"))
    nested = pa.array([[{"at": time}] for time in TIMES], pa.list_(pa.struct([("at", times.type)])))
    span = pa.array([-1, None, 1 << 60], pa.duration("us"))  # which Spark stores as a number
    table = pa.table({"at": times, "nested": nested, "span": span.cast(pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    table = table.set_column(2, "span", span)
    assert pa.Table.from_batches(read(tmp_path / "a.parquet", table.schema)).equals(table)
    with pytest.raises(FileFormatError, match="column 'at' .* was declared as int64"):
        read(tmp_path / "a.parquet", pa.schema([("at", pa.int64())]))


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    ("facts", "old"),
    [
        ({"org.apache.spark.version": "4.1.0"}, False),
        ({"org.apache.spark.version": "2.4.8"}, True),
        ({"org.apache.spark.version": "4.1.0", "org.apache.spark.legacyDateTime": ""}, True),
    ],
)
def test_values_before_the_gregorian_calendar_are_refused_where_their_writer_may_have_used_another(
    tmp_path: Path, facts: dict[str, str], old: bool
) -> None:
    later = {"d": [date(1582, 10, 15), None], "at": [datetime(1900, 1, 1), None]}
    for name, value in (("d", date(1582, 10, 4)), ("at", datetime(1899, 12, 31))):
        for column in ([value, None], pa.array([{"inside": [value]}, None])):
            table = pa.table({**later, name: column}).replace_schema_metadata(facts)
            pq.write_table(table, tmp_path / "a.parquet")
            if old:
                with pytest.raises(FileFormatError, match=f"a.parquet: column {name!r} has a value before 1"):
                    read(tmp_path / "a.parquet", table.schema)
            else:
                assert read(tmp_path / "a.parquet", table.schema)[0].to_pylist() == table.to_pylist()
    pq.write_table(pa.table(later).replace_schema_metadata(facts), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", pa.table(later).schema)[0].num_rows == 2


def test_dates_of_orc_files_before_the_gregorian_calendar_are_refused(tmp_path: Path) -> None:
    """Spark writes them in the Julian calendar, others do not."""
    for first, problem in ((date(1582, 10, 15), None), (date(1500, 1, 1), "column 'd' has a value before 1582-10-15")):
        table = pa.table({"d": [first]})
        orc.write_table(table, str(tmp_path / "a.orc"))
        with pytest.raises(FileFormatError, match=problem) if problem else nullcontext():
            batches = list(open_rows("orc", resolve(str(tmp_path / "a.orc")), table.schema, {}))
            assert batches[0].to_pylist() == [{"d": first}]


def _hadoop(codec: str, *blocks: list[bytes]) -> bytes:
    """Blocks of pieces, as Hadoop's ``BlockCompressorStream`` stores them."""
    stored = b""
    for pieces in blocks:
        stored += struct.pack(">i", sum(map(len, pieces)))
        for piece in pieces:
            packed = pa.compress(piece, codec, asbytes=True)
            stored += struct.pack(">i", len(packed)) + packed
    return stored


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(("ending", "codec"), [(".lz4", "lz4_raw"), (".snappy", "snappy")])
def test_files_that_hadoop_compresses_in_blocks_of_several_pieces_are_read(
    tmp_path: Path, ending: str, codec: str
) -> None:
    generator = random.Random(5)
    text = [
        b"a" * 5_000 + b"\n",
        generator.randbytes(3_000).replace(b"\n", b"").replace(b"\r", b""),
        b"b\n",
        b"c\n" * 9,
    ]
    packed = _hadoop(codec, text[:3], text[3:], text[:1])
    file = tmp_path / f"a.txt{ending}"
    file.write_bytes(packed)
    lines = [line for some in lines_of(resolve(str(file)), None) for line in some]
    assert lines == b"".join([*text, text[0]]).splitlines()
    file.write_bytes(packed[:-3])
    with pytest.raises(EOFError, match="in the middle of a block"):
        list(lines_of(resolve(str(file)), None))


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
