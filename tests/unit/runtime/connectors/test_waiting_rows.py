"""How many rows of files wait to be read: exact where footers were read, estimated from lines and from sizes."""

from __future__ import annotations

import bz2
import gzip
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from ckpt_runtime.connectors import file_source
from ckpt_runtime.connectors.file_rows import FileFormatError, count_rows
from ckpt_runtime.connectors.file_source import FileReader
from ckpt_runtime.graph.formats import source_options
from ckpt_runtime.sources import Split
from ckpt_runtime.storage.filesystem import Location, file_entry, resolve
from ckpt_runtime.testing.mini_cluster import MiniCluster

SCHEMA = pa.schema([("n", pa.int64())])


def split_of(file: Path) -> Split:
    entry = file_entry(resolve(str(file)))
    assert entry is not None
    return Split(entry.location.url, {"size": entry.size, "modified_ms": entry.modified_ms, "partition": {}})


def write(file: Path, rows: int) -> Split:
    table = pa.table({"n": pa.array(range(rows), pa.int64())})
    if file.suffix == ".orc":
        orc.write_table(table, file)
    elif rows:
        pq.write_table(table, file)
    else:
        file.touch()
    return split_of(file)


def reader_of(format_: str, directory: Path, schema: pa.Schema = SCHEMA) -> FileReader:
    return FileReader(format_, source_options(format_, {"path": str(directory)}), schema)


def wait_for(condition: Callable[[], bool]) -> None:
    MiniCluster.wait_until(condition, "footers to be read")


@pytest.mark.row("571.4")
@pytest.mark.parametrize("format_", ["parquet", "orc"])
def test_rows_of_waiting_files_become_fewer_as_they_are_read_and_are_none_in_the_end(
    tmp_path: Path, format_: str
) -> None:
    """The second file is restored behind its tenth row; the last one is empty in Parquet, without even a footer."""
    reader = reader_of(format_, tmp_path)
    assert reader.backlog() == 0
    for number, (rows, position) in enumerate([(3_000, None), (200, 10), (0, None)]):
        reader.add(write(tmp_path / f"{number}.{format_}", rows), position)
    wait_for(lambda: reader.backlog() == 3_190)
    waiting = 3_190
    while (found := reader.read(700)) is not None:
        waiting -= 0 if found.batch is None else found.batch.num_rows
        assert reader.backlog() == waiting
    assert waiting == 0
    reader.close()


def test_files_after_the_counted_ones_are_estimated_and_footers_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []

    def counting(format_: str, location: Location, size: int, options: dict[str, Any]) -> int:
        counted.append(location.name)
        return count_rows(format_, location, size, options)

    monkeypatch.setattr(file_source, "count_rows", counting)
    reader = reader_of("parquet", tmp_path)
    ahead = file_source.COUNTED_AHEAD
    for number in range(ahead + 8):
        reader.add(write(tmp_path / f"{number:03}.parquet", 100), None)

    def estimates() -> bool:
        found = reader.backlog()
        return found is not None and len(counted) == ahead

    wait_for(estimates)
    assert reader.backlog() == 100 * (ahead + 8)  # all have the same size
    while reader.read(1_000) is not None:
        reader.backlog()
    assert reader.backlog() == 0
    assert len(counted) == len(set(counted))
    reader.close()


def test_file_that_cannot_be_counted_does_not_count_as_backlog_and_fails_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet at all")
    reader = reader_of("parquet", tmp_path)
    reader.add(split_of(tmp_path / "bad.parquet"), None)
    assert reader.backlog() is None
    with pytest.raises(FileFormatError, match=r"bad\.parquet: it cannot be read as format 'parquet'"):
        count_rows("parquet", resolve(str(tmp_path / "bad.parquet")), 1, {})
    with pytest.raises(FileFormatError, match=r"bad\.parquet: it cannot be read as format 'parquet'"):
        reader.read(10)
    assert reader.backlog() is None
    reader.close()


def lines(first: int, rows: int) -> bytes:
    """One row a line, each in as many bytes as the others."""
    return b"".join(b"%08d\n" % number for number in range(first, first + rows))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda text: text,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda text: pa.compress(text, "zstd", asbytes=True),
    ".deflate": zlib.compress,
    ".snappy": lambda text: b"".join(_block(text[at : at + 9_000]) for at in range(0, len(text), 9_000)),
}


def _block(text: bytes) -> bytes:
    """In two pieces, as Hadoop writes a block that is larger than its buffer."""
    pieces = [pa.compress(part, "snappy", asbytes=True) for part in (text[:4_000], text[4_000:]) if part]
    return struct.pack(">I", len(text)) + b"".join(struct.pack(">I", len(piece)) + piece for piece in pieces)


@pytest.mark.row("571.4")
@pytest.mark.parametrize(
    ("format_", "options", "rows"),
    [
        ("text", {}, 500),
        ("text", {"lineSep": "1\n"}, 51),  # which ends each tenth line, and not the last one
        ("text", {"wholetext": "true"}, 1),
        ("csv", {}, 500),
        ("csv", {"header": "true"}, 499),
        ("json", {}, 500),
    ],
)
@pytest.mark.parametrize("suffix", COMPRESS)
def test_rows_of_a_small_file_of_lines_are_known_and_become_fewer_as_they_are_read(
    tmp_path: Path, format_: str, options: dict[str, str], rows: int, suffix: str
) -> None:
    schema = pa.schema([("value", pa.string())])
    file = tmp_path / f"a.{format_}{suffix}"
    text = lines(0, 500)
    if format_ == "json":
        text = b"".join(b'{"value": "%s"}\n' % line for line in text.splitlines())
    file.write_bytes(COMPRESS[suffix](text))
    reader = FileReader(format_, source_options(format_, {"path": str(tmp_path), **options}), schema)
    assert reader.backlog() == 0
    reader.add(split_of(file), None)
    wait_for(lambda: reader.backlog() == rows)
    waiting = rows
    while (found := reader.read(70)) is not None:
        waiting -= 0 if found.batch is None else found.batch.num_rows
        assert reader.backlog() == waiting
    assert waiting == 0
    reader.close()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_rows_of_a_large_file_of_lines_are_estimated_from_its_beginning(tmp_path: Path, suffix: str) -> None:
    """A block of zstd that is cut off is not counted. One of bzip2 is larger than what is looked at: such a file counts
    like the one that was read before.
    """
    generator = Random(0)
    reader = reader_of("text", tmp_path, pa.schema([("value", pa.string())]))
    for name in ("a", "b"):
        text = b"".join(generator.randbytes(4).hex().encode() + b"\n" for _ in range(150_000))
        (tmp_path / f"{name}{suffix}").write_bytes(COMPRESS[suffix](text))
        reader.add(split_of(tmp_path / f"{name}{suffix}"), None)
    if suffix == ".bz2":
        assert reader.backlog() is None
    else:
        wait_for(lambda: reader.backlog() is not None)
        assert reader.backlog() == pytest.approx(300_000, rel=0.25)
    while (found := reader.read(10_000)) is not None and not found.ended:
        pass
    assert reader.backlog() == pytest.approx(150_000, rel=0.25)
    reader.close()
