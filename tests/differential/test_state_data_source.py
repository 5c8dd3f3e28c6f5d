"""``spark.read.format("ckpt-state")``: the state of a snapshot as Spark sees it, beside what the engine reads."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.functions import col, expr

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.copying import copy_snapshot
from ckpt_runtime.snapshots.inspection import verify_snapshot
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.docs.markdown import blocks
from tests.support.golden import DIRECTORY, KINDS, SOURCES, expected, in_order, restored, whole_output
from tests.support.object_store import ObjectStore, keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.row("203.9")]

SAVEPOINT = DIRECTORY / "format-2" / "savepoint"


def read(spark: SparkSession, path: Path | str, operator: str, state: str, **options: Any) -> DataFrame:
    reader = spark.read.format("ckpt-state").option("operator", operator).option("state", state)
    return reader.options(**options).load(str(path))


def rows_of(operator: str, name: str, savepoint: Path | str = SAVEPOINT) -> list[dict[str, Any]]:
    """Stored rows as the engine reads them, with their key groups."""
    snapshot = open_snapshot(str(savepoint))
    (state,) = [state for state in keyed_states(snapshot, operator) if state.name == name]
    found = state.rows(KeyGroupRange(0, 15))
    return [{"key_group": group, **row} for group, batch in found for row in batch.to_pylist()]


def flat(frame: DataFrame) -> list[dict[str, Any]]:
    """Rows of a frame under the names of stored rows. PySpark gives timestamps in local time, without the zone."""

    def with_zone(value: Any) -> Any:
        return value.astimezone(UTC) if isinstance(value, datetime) else value

    found = []
    for row in frame.collect():
        flat: dict[str, Any] = {}
        for name, value in row.asDict(recursive=True).items():
            flat |= (
                {f"{name}.{member}": with_zone(item) for member, item in value.items()}
                if isinstance(value, dict)
                else {name: with_zone(value)}
            )
        found.append(flat)
    return found


def test_states_are_listed(spark: SparkSession) -> None:
    listed = spark.read.format("ckpt-state").load(str(SAVEPOINT)).collect()
    assert {(row.operator, row.state, row.kind) for row in listed} == {
        ("kept", "$timers", "timers"),
        ("kept", "groups", "map"),
        ("kept", "last", "list"),
        ("kept", "seen", "value"),
        ("totals", "aggregates", "aggregate"),
        ("joined", "left", "rows"),
        ("joined", "right", "rows"),
    }
    of_one = spark.read.format("ckpt-state").option("operator", "totals").load(str(SAVEPOINT)).collect()
    assert [(row.state, row.max_parallelism, row.schema) for row in of_one] == [
        ("aggregates", 16, "key.source: int64, Count(1): int64, Max(n): int64, Sum(n): int64")
    ]


@pytest.mark.parametrize(
    ("operator", "state"),
    [
        ("kept", "groups"),
        pytest.param("kept", "last", marks=pytest.mark.long),
        pytest.param("kept", "seen", marks=pytest.mark.long),
        pytest.param("kept", "$timers", marks=pytest.mark.long),
        pytest.param("joined", "left", marks=pytest.mark.long),
    ],
)
def test_rows_are_those_that_the_engine_reads(spark: SparkSession, operator: str, state: str) -> None:
    frame = read(spark, SAVEPOINT, operator, state)
    assert frame.rdd.getNumPartitions() == 2
    assert flat(read(spark, SAVEPOINT, operator, state, numPartitions=5)) == rows_of(operator, state)


def test_state_is_queried_as_any_table(spark: SparkSession) -> None:
    totals = read(spark, SAVEPOINT, "totals", "aggregates")
    stored = rows_of("totals", "aggregates")
    (row,) = totals.selectExpr("count(DISTINCT key.source) AS keys", "sum(value.`Sum(n)`) AS sum").collect()
    assert (row.keys, row.sum) == (SOURCES, sum(entry["Sum(n)"] for entry in stored))
    seen = read(spark, SAVEPOINT, "kept", "seen")
    both = totals.join(seen, totals["key"] == seen["key"]).where(totals["value"]["Count(1)"] != seen["value"]["seen"])
    assert both.count() == 0


@pytest.mark.row("203.5")
def test_files_of_a_canonical_savepoint_are_any_parquet_files(spark: SparkSession) -> None:
    snapshot = open_snapshot(str(DIRECTORY / "format-2" / "canonical"))
    for state in keyed_states(snapshot):
        handles = [
            handle for found in snapshot.states(state.uid) for handle in found.keyed if handle.name == state.name
        ]
        paths = [str(DIRECTORY / "format-2" / "canonical" / handle.file.path) for handle in handles]
        frame = spark.read.parquet(*paths)
        assert frame.columns == ["key_group", *state.schema.names]
        assert frame.count() == sum(batch.num_rows for _, batch in state.rows(state.key_groups)) > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"state": "seen"}, "option 'operator' is missing"),
        pytest.param(
            {"operator": "kept", "state": "none"},
            "has no keyed state 'none' of an operator with the uid 'kept'",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"operater": "kept"},
            "option 'operater' is unknown, allowed are path, operator, state, numPartitions",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"operator": "kept", "state": "seen", "numPartitions": "0"},
            "it must be a number above 0",
            marks=pytest.mark.long,
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(spark: SparkSession, options: dict[str, str], reason: str) -> None:
    with pytest.raises(AnalysisException, match=reason):
        spark.read.format("ckpt-state").options(**options).load(str(SAVEPOINT)).collect()


def test_the_examples_of_the_documentation(spark: SparkSession, tmp_path: Path) -> None:
    """One after the other, in one session."""
    shutil.copytree(SAVEPOINT, tmp_path / "savepoints" / "savepoint-1")
    names: dict[str, Any] = {"spark": spark}
    for block in blocks("python"):
        if block.page.name == "snapshot-tools.md":
            exec(block.text.replace("/data/", f"{tmp_path}/"), names)
    assert names["totals"].count() == SOURCES


# --- writing


def write(frame: DataFrame, target: Path | str, operator: str, state: str, **options: Any) -> None:
    writer = frame.write.format("ckpt-state").mode("append").option("operator", operator).option("state", state)
    writer.options(**options).save(str(target))


def test_a_job_resumes_with_state_that_spark_has_changed(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """A value is corrected and a key dropped; all other state of the savepoint is as it was."""
    target = tmp_path / "changed"
    totals = read(spark, SAVEPOINT, "totals", "aggregates")
    corrected = col("value").withField("`Sum(n)`", expr("value.`Sum(n)` + IF(key.source = 3, 1000, 0)"))
    changed = totals.where("key.source <> 5").withColumn("value", corrected)
    write(changed, target, "totals", "aggregates", base=str(SAVEPOINT))
    assert verify_snapshot(open_snapshot(str(target))) == []
    (dropped,) = [row for row in rows_of("totals", "aggregates") if row["key.source"] == 5]

    def after_the_change(source: int, rows: int, greatest: int, total: int) -> list[int | None]:
        if source == 5:
            return [source, rows - dropped["Count(1)"], greatest, total - dropped["Sum(n)"]]
        return [source, rows, greatest, total + (1000 if source == 3 else 0)]

    wanted = expected(SAVEPOINT)
    wanted["totals"] = in_order(after_the_change(*row) for row in wanted["totals"])  # type: ignore[arg-type]
    (found,) = restored(cluster, target, KINDS["savepoint"], tmp_path / "jobs", (3,))
    assert found == wanted


def test_a_job_begins_with_state_from_a_table(spark: SparkSession, cluster: MiniCluster, tmp_path: Path) -> None:
    target = tmp_path / "bootstrap"
    table = (
        spark.range(SOURCES)
        .repartition(3)
        .selectExpr("struct(id AS source) AS key", "struct(id * 100 AS seen) AS value")
    )
    write(table, target, "kept", "seen", kind="value", maxParallelism=16)
    wanted = whole_output(KINDS["savepoint"].right_rows_per_source)
    for row in wanted["kept"]:
        source, number, seen, _ = row
        if number is not None and number >= 0:
            row[2] = (seen or 0) + (source or 0) * 100
    (found,) = restored(cluster, target, KINDS["savepoint"], tmp_path / "jobs")
    assert {name: in_order(rows) for name, rows in wanted.items()} == found


@pytest.mark.long
def test_writes_that_do_not_fit_are_refused_and_leave_nothing(spark: SparkSession, tmp_path: Path) -> None:
    seen = read(spark, SAVEPOINT, "kept", "seen")
    base = {"base": str(SAVEPOINT)}
    target = tmp_path / "target"
    for frame, state, options, reason in [
        (seen, "seen", {}, "option 'kind' is None; for a state that the base has not it must be one of value, list"),
        (seen, "seen", {**base, "kind": "list"}, "the state is of kind 'value' in the base"),
        (seen, "seen", {**base, "maxParallelism": 32}, "operator 'kept' has 16 in the base"),
        (seen.drop("value"), "seen", base, "the table has"),
        (seen.union(seen), "seen", base, "has one row for each key, but"),
        (seen.withColumn("key", expr("struct(CAST(NULL AS STRING) AS source)")), "groups", base, "the table has"),
    ]:
        with pytest.raises(PySparkException, match=reason):
            write(frame, target, "kept", state, **options)
        assert not target.exists()
    target.mkdir()
    with pytest.raises(PySparkException, match="it already exists"):
        write(seen, target, "kept", "seen", **base)
    with pytest.raises(PySparkException, match="mode 'overwrite' is not possible"):
        seen.write.format("ckpt-state").mode("overwrite").options(operator="kept", state="seen", **base).save(
            str(target)
        )


@pytest.mark.long
def test_a_null_that_the_job_could_not_have_stored_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Inside of a list, a map, a struct: the schema that the state has in the base says what is NOT NULL."""
    first, target = tmp_path / "first", tmp_path / "target"
    values = "struct(array(id) AS tags, map('a', id) AS counts, struct(id AS n) AS at) AS value"
    rows = spark.range(3).selectExpr("struct(id) AS key", values)
    write(rows, first, "op", "state", kind="value")
    null = "IF(key.id = 1, NULL, key.id)"
    for name, value, field in [
        ("tags", f"array({null})", "tags[]"),
        ("counts", f"map('a', {null})", "counts{value}"),
        ("at", f"struct({null} AS n)", "at.n"),
    ]:
        changed = rows.withColumn("value", col("value").withField(name, expr(value)))
        reason = f"state 'state' of operator 'op': column 'value.{field}' is null in 1 place"
        with pytest.raises(PySparkException, match=re.escape(reason)):
            write(changed, target, "op", "state", base=str(first))
        assert not target.exists()


@pytest.mark.long
def test_state_in_an_object_store(spark: SparkSession, store: ObjectStore) -> None:
    """Spark's workers read the files of a database there, and write a savepoint."""
    bucket, database = store.bucket(), DIRECTORY / "format-2" / "rocksdb"
    source, target = f"{bucket}/savepoint", f"{bucket}/changed"
    copy_snapshot(str(database), resolve(source))
    seen = read(spark, source, "kept", "seen")
    write(seen.where("key.source <> 5"), target, "kept", "seen", base=source)
    assert verify_snapshot(open_snapshot(target)) == []
    assert rows_of("kept", "seen", target) == [
        row for row in rows_of("kept", "seen", database) if row["key.source"] != 5
    ]
    lost = f"{bucket}/lost"
    with (
        store.failing(lambda method, path: method == "PUT" and path.endswith("/lost/_metadata")),
        pytest.raises(PySparkException, match="it is unknown whether .* its files are kept: if it exists"),
    ):
        write(seen, lost, "kept", "seen", base=source)
    assert len(keys(lost)) > 1, "Spark aborts, and the savepoint may come yet"


def test_a_damaged_snapshot_gives_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(SAVEPOINT, tmp_path / "copy"))
    for file in copy.iterdir():
        if file.name != "_metadata":
            file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(PySparkException, match="damaged, its checksum is"):
        read(spark, copy, "kept", "seen").collect()
