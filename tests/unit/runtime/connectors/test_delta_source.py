"""Format ``delta`` as a source: the snapshot and the versions behind it, exactly, and what is refused by name."""

from __future__ import annotations

import json
import os
import string
import struct
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.connectors.delta_source import DeltaReader
from ckpt_runtime.graph.delta_options import DeltaTableError
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import source_options, source_schema
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.unit.runtime.connectors.split_jobs import Job

deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")


_ADD = {"partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}
_ROW_1 = struct.pack("<IQIIIHHIH", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 1) + bytes(2)
"""Row 1 as a serialized RoaringBitmapArray of the table format's specification."""
_Z85 = string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#"
_SECOND_ROW_DELETED = {
    "storageType": "i",
    "pathOrInlineDv": "".join(
        _Z85[int.from_bytes(_ROW_1[at : at + 4], "big") // 85**power % 85]
        for at in range(0, len(_ROW_1), 4)
        for power in range(4, -1, -1)
    ),
    "sizeInBytes": len(_ROW_1),
    "cardinality": 1,
}


def append(path: Path, *numbers: int, **more: Any) -> None:
    """Adds one version with these numbers."""
    deltalake.write_deltalake(path, pa.table({"n": pa.array(numbers, pa.int64())}), mode="append", **more)


def options(path: Path, **more: str) -> dict[str, str]:
    return {"path": str(path), **more}


def numbers(job: Job) -> list[int]:
    return [row["n"] for row in job.rows]


def edit_log(path: Path, version: int, change: dict[str, Any]) -> None:
    """Adds an action to a version, as another writer would have written it."""
    file = path / "_delta_log" / f"{version:020}.json"
    file.write_text(file.read_text().rstrip("\n") + "\n" + json.dumps(change) + "\n")


@pytest.mark.row("ends.4")
def test_snapshot_of_a_table_is_followed_by_each_version_once_at_any_parallelism(tmp_path: Path) -> None:
    for number in range(6):
        append(tmp_path, number)
    few = options(tmp_path, maxFilesPerTrigger="4")
    with closing(Job("delta", few, parallelism=2, most_rows=1)) as job:
        job.discover()  # in the middle of the snapshot, which the table leaves behind now
        job.read()
        append(tmp_path, 6, 7)
        append(tmp_path, 8)
        first, state = numbers(job), job.checkpoint(1, 3)
    assert first
    with closing(Job("delta", few, parallelism=3, restored=state)) as job:
        job.run()
        append(tmp_path, 9)
        assert not job.ended
        job.run()
        assert sorted(first + numbers(job)) == list(range(10))
        state = job.checkpoint(2, 1)
    with closing(Job("delta", {**few, "availableNow": "true"}, restored=state)) as job:
        append(tmp_path, 10)  # behind the end that was fixed at the start
        assert (job.run(), job.ended) == ([], True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({"startingVersion": "0"}, [0, 1, 2]), ({"startingVersion": "2"}, [2]), ({"startingVersion": "latest"}, [])],
)
def test_starting_version_names_the_first_change_that_is_read(
    given: dict[str, str], wanted: list[int], tmp_path: Path
) -> None:
    for number in range(3):
        append(tmp_path, number)
    with closing(Job("delta", options(tmp_path, **given))) as job:
        job.run()
        append(tmp_path, 3)
        job.run()
        assert numbers(job) == [*wanted, 3]


def test_starting_timestamp_is_looked_up_among_the_times_of_the_log(tmp_path: Path) -> None:
    start = datetime(2026, 11, 1, 9, tzinfo=UTC)
    for number in range(3):
        append(tmp_path, number)
        moment = start.timestamp() + 60 * number
        os.utime(tmp_path / "_delta_log" / f"{number:020}.json", (moment, moment))
    with closing(Job("delta", options(tmp_path, startingTimestamp="2026-11-01T10:00:01+01:00"))) as job:
        job.run()
        assert numbers(job) == [1, 2]
    with pytest.raises(DeltaTableError, match="no version of that time or later"):
        Job("delta", options(tmp_path, startingTimestamp="2026-11-02T00:00:00Z"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"startingTimestamp": "2026-11-01"}, [1, 2]),
        ({"startingTimestamp": "2026-11-01", "timeZone": "Europe/Berlin"}, [0, 1, 2]),
        ({"startingTimestamp": "2026-11-01 00:30"}, [1, 2]),
        ({"startingTimestamp": "2026-11-01 00:30:00.001", "timeZone": "UTC"}, [2]),
        ({"startingTimestamp": "2026-11-01T02:30:00.001", "timeZone": "Europe/Berlin"}, [2]),
    ],
)
def test_date_or_time_without_an_offset_is_one_of_the_sessions_time_zone(
    given: dict[str, str], wanted: list[int], tmp_path: Path
) -> None:
    midnight = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    for number, seconds in enumerate((-1800, 1800, 7200)):
        append(tmp_path, number)
        os.utime(tmp_path / "_delta_log" / f"{number:020}.json", (midnight + seconds,) * 2)
    with closing(Job("delta", options(tmp_path, **given))) as job:
        job.run()
        assert numbers(job) == wanted


@pytest.mark.row("ends.4")
def test_discovery_ends_with_the_file_that_reaches_the_limit_of_bytes(tmp_path: Path) -> None:
    for number in range(4):
        append(tmp_path, number)
    sizes = {path.stat().st_size for path in tmp_path.glob("*.parquet")}
    limit = str(max(sizes) + 1)
    for more, wanted in (({}, [2, 2]), ({"maxFilesPerTrigger": "1"}, [1, 1, 1, 1]), ({"startingVersion": "0"}, [2, 2])):
        with closing(Job("delta", options(tmp_path, maxBytesPerTrigger=limit, **more))) as job:
            assert [len(job.enumerator._enumerator.discover()) for _ in wanted] == wanted  # type: ignore[union-attr]
    with closing(Job("delta", options(tmp_path, maxBytesPerTrigger="1b"))) as job:
        assert sorted(row["n"] for row in job.run()) == [0, 1, 2, 3]


@pytest.mark.row("ends.4")
def test_excluded_files_are_not_read_and_a_restored_source_continues_behind_them(tmp_path: Path) -> None:
    for at, part in enumerate("abab"):
        rows = pa.table({"n": pa.array([at], pa.int64()), "part": [part]})
        deltalake.write_deltalake(tmp_path, rows, mode="append", partition_by=["part"])
    given = options(tmp_path, excludeRegex="part=a/.*[.]parquet$", maxFilesPerTrigger="1")
    with closing(Job("delta", given)) as job:
        job.discover()
        job.read()
        first, state = numbers(job), job.checkpoint(1, 1)
    with closing(Job("delta", given, restored=state)) as job:
        rows = pa.table({"n": pa.array([4, 5], pa.int64()), "part": ["a", "b"]})
        deltalake.write_deltalake(tmp_path, rows, mode="append", partition_by=["part"])
        job.run()
        assert sorted(first + numbers(job)) == [1, 3, 5]


def test_partitions_types_nulls_and_columns_that_came_later_are_read_exactly(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "n": pa.array([1, None, 3], pa.int32()),
            "at": pa.array([datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), None, None], pa.timestamp("us", "UTC")),
            "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
            "part": ["a/b=c %é", None, "x y"],
            "day": pa.array([date(2026, 2, 3), None, None]),
        }
    )
    deltalake.write_deltalake(tmp_path, rows, partition_by=["part", "day"])
    with closing(Job("delta", options(tmp_path))) as job:
        assert source_schema("delta", options(tmp_path), None) == rows.schema
        assert sorted(job.run(), key=str) == sorted(rows.to_pylist(), key=str)
    more = rows.append_column("later", pa.array([1.5, None, 2.5]))
    deltalake.write_deltalake(tmp_path, more, mode="append", schema_mode="merge", partition_by=["part", "day"])
    wanted = [{**row, "later": None} for row in rows.to_pylist()] + more.to_pylist()
    for given in ({}, {"startingVersion": "0"}):
        with closing(Job("delta", options(tmp_path, **given))) as job:
            assert sorted(job.run(), key=str) == sorted(wanted, key=str)


def test_version_with_a_new_column_stops_the_job_before_its_rows(tmp_path: Path) -> None:
    append(tmp_path, 1)
    with closing(Job("delta", options(tmp_path))) as job:
        job.run()
        state = job.checkpoint(1)
        deltalake.write_deltalake(tmp_path, pa.table({"n": [2], "m": ["x"]}), mode="append", schema_mode="merge")
        with pytest.raises(DeltaTableError, match="column 'm' string in version 1, .* submit the program again"):
            job.discover()
    with closing(Job("delta", options(tmp_path), restored=state)) as job:  # planned with the new column
        assert job.run() == [{"n": 2, "m": "x"}]


@pytest.mark.row("ends.4")
def test_change_of_rows_fails_unless_an_option_says_what_to_do(tmp_path: Path) -> None:
    append(tmp_path, 1, 2)
    append(tmp_path, 3)
    table = deltalake.DeltaTable(tmp_path)
    table.delete("n = 3")  # a whole file: version 2
    table.update(updates={"n": "n + 10"}, predicate="n = 1")  # version 3
    append(tmp_path, 4)

    def read(**given: str) -> list[int]:
        with closing(Job("delta", options(tmp_path, startingVersion="0", **given))) as job:
            job.run()
            return sorted(numbers(job))

    with pytest.raises(DeltaTableError, match="version 2 .* deletes rows .* ignoreDeletes"):
        read()
    with pytest.raises(DeltaTableError, match="version 3 .* changes rows .* skipChangeCommits"):
        read(ignoreDeletes="true")
    assert read(skipChangeCommits="true") == [1, 2, 3, 4]
    assert read(ignoreChanges="true") == [1, 2, 2, 3, 4, 11]


def test_compaction_brings_no_rows(tmp_path: Path) -> None:
    for number in range(3):
        append(tmp_path, number)
    with closing(Job("delta", options(tmp_path))) as job:
        job.run()
        deltalake.DeltaTable(tmp_path).optimize.compact()
        append(tmp_path, 3)
        job.run()
        assert numbers(job) == [0, 1, 2, 3]


@pytest.mark.row("ends.4")
def test_versions_and_files_that_were_removed_before_they_were_read_are_named(tmp_path: Path) -> None:
    for number in range(3):
        append(tmp_path, number)
    with closing(Job("delta", options(tmp_path, startingVersion="1"))) as job:
        state = job.checkpoint(1)
        deltalake.DeltaTable(tmp_path).create_checkpoint()
        (tmp_path / "_delta_log" / f"{1:020}.json").unlink()
        with pytest.raises(DeltaTableError, match="version 1 .* was removed from its log"):
            job.discover()
    with (
        closing(Job("delta", options(tmp_path), restored=state)) as job,
        pytest.raises(DeltaTableError, match="version 1 .* was removed from its log"),
    ):
        job.discover()
    for file in tmp_path.glob("*.parquet"):
        file.unlink()
    with (
        closing(Job("delta", options(tmp_path))) as job,
        pytest.raises(DeltaTableError, match=r"a file of version 2 .* was removed .*\.parquet, as VACUUM does"),
    ):
        job.run()


def test_restore_names_a_removed_version_of_the_table(tmp_path: Path) -> None:
    for number in range(3):
        append(tmp_path, number)
    with closing(Job("delta", options(tmp_path, maxFilesPerTrigger="1"))) as job:
        job.discover()
        state = job.checkpoint(1)
    append(tmp_path, 3)
    deltalake.DeltaTable(tmp_path).create_checkpoint()
    for version in range(3):
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    with pytest.raises(DeltaTableError, match="version 2 of the Delta table .* can no longer be read"):
        Job("delta", options(tmp_path), restored=state)


def test_another_table_in_the_place_of_the_restored_one_is_named(tmp_path: Path) -> None:
    append(tmp_path / "one", 1)
    append(tmp_path / "two", 1)
    with closing(Job("delta", options(tmp_path / "one"))) as job:
        state = job.checkpoint(1)
    with pytest.raises(DeltaTableError, match="holds another Delta table"):
        Job("delta", options(tmp_path / "two"), restored=state)


def test_path_of_the_log_that_leads_out_of_the_table_is_refused(tmp_path: Path) -> None:
    append(tmp_path / "table", 1)
    edit_log(tmp_path / "table", 0, {"add": {**_ADD, "path": "/etc/passwd"}})
    given = options(tmp_path / "table", startingVersion="0")
    with closing(Job("delta", given)) as job, pytest.raises(DeltaTableError, match="outside of its directory"):
        job.discover()
    append(tmp_path / "other", 1)
    edit_log(tmp_path / "other", 0, {"add": {**_ADD, "path": "..%2Fsecret.parquet"}})
    given = options(tmp_path / "other", startingVersion="0")
    with closing(Job("delta", given)) as job, pytest.raises(ValueError, match="not a plain file name"):
        job.run()


def test_tables_that_cannot_be_read_exactly_are_refused_by_name(tmp_path: Path) -> None:
    append(tmp_path, 1)
    edit_log(tmp_path, 0, {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["x-y"]}})
    with closing(Job("delta", options(tmp_path, startingVersion="latest"))) as job:
        append(tmp_path, 2)
        protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["typeWidening"]}
        edit_log(tmp_path, 1, {"protocol": {**protocol, "writerFeatures": ["typeWidening"]}})
        with pytest.raises(DeltaTableError, match="features typeWidening"):
            job.discover()
    append(tmp_path / "mapped", 1)
    file = tmp_path / "mapped" / "_delta_log" / f"{0:020}.json"
    mapped = '"configuration":{"delta.columnMapping.mode":"name"}'
    file.write_text(file.read_text().replace('"configuration":{}', mapped))
    with pytest.raises(PlanError, match=r"delta.columnMapping.mode 'name'"):
        source_schema("delta", options(tmp_path / "mapped"), None)
    deltalake.write_deltalake(
        tmp_path / "times",
        pa.table({"n": [1], "at": pa.array([datetime(2026, 1, 1, tzinfo=UTC)])}),
        partition_by=["at"],
    )
    with pytest.raises(PlanError, match="partitioned by 'at', which is timestamp"):
        source_schema("delta", options(tmp_path / "times"), None)


def test_files_with_deletion_vectors_are_refused_by_name_in_a_snapshot_and_in_a_version(tmp_path: Path) -> None:
    append(tmp_path, 1, 2, 3)
    (added,) = deltalake.DeltaTable(tmp_path).file_uris()
    log = tmp_path / "_delta_log" / f"{0:020}.json"
    features = '"readerFeatures":["deletionVectors"],"writerFeatures":["deletionVectors"]'
    version_3 = f'"minReaderVersion":3,"minWriterVersion":7,{features}'
    log.write_text(log.read_text().replace('"minReaderVersion":1,"minWriterVersion":2', version_3))
    with closing(Job("delta", options(tmp_path))) as job:
        assert [row["n"] for row in job.run()] == [1, 2, 3]  # the feature alone takes no row away
    deleted = {**_ADD, "path": Path(added).name, "deletionVector": _SECOND_ROW_DELETED, "stats": '{"numRecords":3}'}
    actions = [action for action in map(json.loads, log.read_text().splitlines()) if "add" not in action]
    log.write_text("\n".join(map(json.dumps, actions)))
    edit_log(tmp_path, 0, {"add": {**deleted, "size": Path(added).stat().st_size}})
    with pytest.raises(DeltaTableError, match=r"version 0 .* deletion vector for file .*\.parquet"):
        Job("delta", options(tmp_path))
    given = options(tmp_path, startingVersion="0")
    with closing(Job("delta", given)) as job, pytest.raises(DeltaTableError, match="version 0 .* deletion vector"):
        job.discover()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"startingVersion": "first"}, "neither the number of a version nor 'latest'"),
        ({"startingTimestamp": "yesterday"}, "'yesterday' is not a date or a time"),
        ({"maxBytesPerTrigger": "0"}, "option 'maxBytesPerTrigger': '0' is not .*, at least 1"),
        ({"maxBytesPerTrigger": "much"}, "option 'maxBytesPerTrigger': 'much' is not"),
        ({"excludeRegex": "("}, r"option 'excludeRegex': the regular expression '\('"),
        ({"startingTimestamp": "2026-11-01T00:00:00Z", "startingVersion": "1"}, "set only one of them"),
        ({"readChangeFeed": "true"}, "does not know it"),
        ({"maxFilesPerTrigger": "0"}, "maxFilesPerTrigger"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, str], problem: str, tmp_path: Path) -> None:
    append(tmp_path, 1)
    with pytest.raises(PlanError, match=problem):
        source_schema("delta", options(tmp_path, **given), None)


def test_a_place_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no Delta table at"):
        source_schema("delta", options(tmp_path), None)
    append(tmp_path, 1)
    with pytest.raises(PlanError, match="columns of a Delta table are its own"):
        source_schema("delta", options(tmp_path), pa.schema([("n", pa.int64())]))
    with pytest.raises(DeltaTableError, match="'startingVersion': 7 is greater than 0"):
        Job("delta", options(tmp_path, startingVersion="7"))


def test_backlog_counts_the_rows_that_the_log_says_of_files(tmp_path: Path) -> None:
    append(tmp_path, 1, 2, 3)
    with closing(Job("delta", options(tmp_path), most_rows=1)) as job:
        job.discover()
        job.read()
        reader = job.readers[0]._reader
        assert reader is not None
        assert (len(job.rows), reader.backlog()) == (1, 2)


def test_backlog_of_files_of_which_the_log_says_no_number_comes_from_their_footers(tmp_path: Path) -> None:
    append(tmp_path, 1, 2, 3)
    with closing(Job("delta", options(tmp_path), most_rows=1)) as job:
        job.discover()
        [opened] = job.readers[0]._open.values()
        split = replace(opened.split, description={**opened.split.description, "rows": None})
        reader = DeltaReader(source_options("delta", options(tmp_path)), pa.schema([("n", pa.int64())]))
        reader.add(split, 1)
        MiniCluster.wait_until(lambda: reader.backlog() == 2, "the footer to be read")
        reader.close()
