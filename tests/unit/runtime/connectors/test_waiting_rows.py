"""How many rows of files wait to be read: exact where footers were read, estimated behind, unknown in other formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from ckpt_runtime.connectors import waiting_rows
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


def reader_of(format_: str, directory: Path) -> FileReader:
    return FileReader(format_, source_options(format_, {"path": str(directory)}), SCHEMA)


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


def test_files_behind_the_counted_ones_are_estimated_and_no_footer_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []

    def counting(format_: str, location: Location) -> int:
        counted.append(location.name)
        return count_rows(format_, location)

    monkeypatch.setattr(waiting_rows, "count_rows", counting)
    reader = reader_of("parquet", tmp_path)
    ahead = waiting_rows.COUNTED_AHEAD
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


def test_file_that_cannot_be_counted_is_no_backlog_and_fails_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet at all")
    reader = reader_of("parquet", tmp_path)
    reader.add(split_of(tmp_path / "bad.parquet"), None)
    assert reader.backlog() is None
    with pytest.raises(FileFormatError, match=r"bad\.parquet: it cannot be read as format 'parquet'"):
        count_rows("parquet", resolve(str(tmp_path / "bad.parquet")))
    with pytest.raises(FileFormatError, match=r"bad\.parquet: it cannot be read as format 'parquet'"):
        reader.read(10)
    assert reader.backlog() is None
    reader.close()


def test_rows_of_a_file_without_a_footer_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "a.text").write_text("1\n2\n")
    reader = FileReader("text", source_options("text", {"path": str(tmp_path)}), pa.schema([("value", pa.string())]))
    assert reader.backlog() is None
    reader.add(split_of(tmp_path / "a.text"), None)
    assert reader.backlog() is None
    reader.close()
