"""Sinks of PySpark programs: content exact through kills, read by something else than the engine."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import os
import random
import shutil
import signal
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql.connect.proto import ConfigRequest, ConfigResponse, ReleaseSessionRequest, ReleaseSessionResponse

from ckpt_runtime.frontend import live_session, spark_connect
from ckpt_runtime.frontend.live_session import RealChannel
from ckpt_runtime.frontend.spark_connect import spark_url
from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.differential.test_file_options import discoveries
from tests.docs.markdown import blocks
from tests.support.jobs import PIPELINES, fast, wait_for_restarts
from tests.support.object_store import ObjectStore, keys, unfinished_uploads
from tests.support.pipelines import batch_functions, partitioned_sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 20_000
[EXAMPLE] = [block for block in blocks("python") if "class SqliteSink" in block.text]


def numbers(directory: Path, rows: int = ROWS) -> str:
    source = directory / "numbers.parquet"
    pq.write_table(pa.table({"n": pa.array(range(rows), pa.int64())}), source)
    return str(source)


def in_database(database: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute("SELECT * FROM rows ORDER BY 1").fetchall()


@pytest.mark.row("ends.5")
def test_sink_of_the_documentation_writes_the_rows_of_a_program(cluster: MiniCluster, tmp_path: Path) -> None:
    program, database = tmp_path / "documented.py", tmp_path / "orders.db"
    program.write_text(EXAMPLE.text.replace(".writeStream", ".writeStream.trigger(availableNow=True)"))
    source = tmp_path / "orders"
    source.mkdir()
    pq.write_table(pa.table({"customer": ["a", None, "b"], "amount": [1.0, 2.5, None]}), source / "orders.parquet")
    job = cluster.submit(program, arguments=[str(source), str(database)], configuration=fast())
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert in_database(database) == [(None, 2.5), ("a", 1.0), ("b", None)]
    with pytest.raises(SubmissionFailed, match=r"SqliteSink: option 'path' is the absolute path of a database"):
        cluster.submit(program, arguments=[str(source), "orders.db"])


@pytest.mark.row("ends.5")
def test_sink_whose_process_is_killed_at_each_step_has_every_row_once(cluster: MiniCluster, tmp_path: Path) -> None:
    """Then the job stops with a savepoint, from which two jobs start: what the savepoint covers is there once."""
    directory, faults, database = tmp_path / "program", tmp_path / "faults", tmp_path / "rows.db"
    directory.mkdir()
    faults.mkdir()
    (directory / "documented.py").write_text(EXAMPLE.text)
    shutil.copy(PIPELINES / "killed_sink.py", directory)
    source = numbers(tmp_path)

    def start(rate: int, target: Path, savepoint: str | None = None) -> str:
        arguments = [source, str(rate), str(target), str(faults)]
        return cluster.submit(
            directory,
            entry="killed_sink:pipeline",
            arguments=arguments,
            configuration=fast(),
            parallelism=2,
            savepoint=savepoint,
        )

    job = start(50, database)  # which lasts for minutes, however long the kills take
    cluster.wait_for_checkpoints(job, 2)
    for step in ("write", "notified", "committed"):
        before = cluster.restarts(job)
        (faults / step).touch()
        cluster.wait_until(lambda step=step: not (faults / step).exists(), f"a kill at {step}")  # type: ignore[misc]
        wait_for_restarts(cluster, job, before + 1)
    cluster.wait_for_checkpoints(job, 1)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    written = in_database(database)
    assert 0 < len(written) < ROWS
    assert len(set(written)) == len(written)
    copy = tmp_path / "copy.db"
    shutil.copy(database, copy)
    for target in (database, copy):
        cluster.wait_for_status(start(0, target, savepoint), JobStatus.FINISHED)
        assert [n for (n,) in in_database(target)] == list(range(ROWS))


@pytest.mark.row("ends.5")
def test_partitioned_directory_is_read_by_spark_as_its_own(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """Texts that need escaping, nulls, and more values than files may be open."""
    days = [date(2026, 1, 1), None, date(1969, 12, 31)]
    countries = ["AT", "a/b=c:d", "100%", "", None, "é", *(f"c{at}" for at in range(23))]
    rows = [{"n": at, "country": countries[at % len(countries)], "day": days[at % 3]} for at in range(600)]
    schema = pa.schema([("n", pa.int64()), ("country", pa.string()), ("day", pa.date32())])
    source, ours, theirs = tmp_path / "rows.parquet", tmp_path / "ours", tmp_path / "theirs"
    pq.write_table(pa.Table.from_pylist(rows, schema), source)
    program = PIPELINES / "partitioned_sink.py"
    job = cluster.submit(program, arguments=[str(source), str(ours)], configuration=fast(), parallelism=2)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    frame = spark.read.parquet(str(source)).selectExpr(*partitioned_sink.WRITTEN)
    frame.write.partitionBy("country", "day").parquet(str(theirs))

    def directories(root: Path) -> set[str]:
        return {str(path.parent.relative_to(root)) for path in root.rglob("*.parquet")}

    def read(root: Path) -> Counter[str]:
        found = spark.read.parquet(str(root))
        return Counter([found.schema.simpleString(), *map(str, found.collect())])

    assert directories(ours) == directories(theirs)
    assert read(ours) == read(theirs)
    assert not list(ours.rglob(".part-*"))


@pytest.mark.row("ends.5")
@pytest.mark.parametrize(
    ("format_", "columns", "problem"),
    [
        ("parquet", "missing", "no column 'missing'"),
        ("parquet", "n,country,day", "all columns are named"),
        ("noop", "country", "'noop' has no directories"),
    ],
)
def test_partitions_that_a_sink_cannot_write_are_refused_when_the_program_is_planned(
    cluster: MiniCluster, tmp_path: Path, format_: str, columns: str, problem: str
) -> None:
    arguments = [str(tmp_path / "rows.parquet"), str(tmp_path / "out"), format_, columns]
    with pytest.raises(SubmissionFailed, match=problem):
        cluster.submit(PIPELINES / "partitioned_sink.py", arguments=arguments)


TYPED = pa.schema(
    [
        ("n", pa.int64()),
        ("name", pa.string()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
    ]
)


def typed(directory: Path, count: int) -> str:
    """Rows with a null in every column but the first."""
    rows = [
        {
            "n": at,
            "name": [None, "a", "é"][at % 3],
            "price": [None, Decimal("-1.50")][at % 2],
            "at": [None, datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)][at % 2],
            "tags": [None, [], ["x", None]][at % 3],
        }
        for at in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows, TYPED), directory / "typed.parquet")
    return str(directory / "typed.parquet")


def names_of_blocks(spark: SparkSession) -> set[str]:
    """The blocks that Spark stores in memory or on disk. Fields are read one by one: the methods have shaded types."""

    def value(of: Any, class_name: str, field_name: str) -> Any:
        field = spark._jvm.java.lang.Class.forName(f"org.apache.spark.{class_name}").getDeclaredField(field_name)
        field.setAccessible(True)
        return field.get(of)

    manager = value(spark._jsc.sc().env(), "SparkEnv", "blockManager")
    entries = value(manager, "storage.BlockManager", "blockInfoManager").entries()
    names = set()
    while entries.hasNext():
        names.add(entries.next()._1().name())
    return names


def views_of_frames(spark: SparkSession) -> DataFrame:
    """The views in which large frames are during a call; they have the id of a sink in their names."""
    return spark.sql("SHOW VIEWS IN global_temp").where("viewName RLIKE '^ckpt_[0-9a-f]{16}_'")


def answer_of_server(url: str, method: str, request: Any, kind: type) -> Any:
    """Sends a request to Spark's server with the token of the URL; returns its answer, which is of this kind."""
    channel = RealChannel(url)
    codecs = (type(request).SerializeToString, kind.FromString)  # type: ignore[attr-defined]
    try:
        path = f"/spark.connect.SparkConnectService/{method}"
        return channel.method("unary_unary", path, codecs, {})(request)
    finally:
        channel.close()


def end_session(url: str, identity: str) -> None:
    """Ends a session of the server, as it does itself with one that gets no request for an hour."""
    request = ReleaseSessionRequest(session_id=str(uuid.uuid5(live_session._SESSIONS, identity)))
    if user := os.environ.get("SPARK_USER", os.environ.get("USER")):
        request.user_context.user_id = user
    answer_of_server(url, "ReleaseSession", request, ReleaseSessionResponse)


def all_options() -> ConfigRequest:
    """A request in a session of its own."""
    request = ConfigRequest(session_id=str(uuid.uuid4()))
    request.operation.get_all.SetInParent()
    return request


def sessions_that_end(spark: SparkSession, timeout_ms: int) -> set[str]:
    """Has the server end the sessions that were without requests for so long, as it does now and then by itself."""
    service = getattr(getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    service.sessionManager().periodicMaintenance(timeout_ms)
    ended, found = service.sessionManager().listClosedSessions().iterator(), set()
    while ended.hasNext():
        found.add(ended.next().sessionId())
    return found


def is_empty(directory: Path) -> bool:
    return not directory.exists() or not any(directory.iterdir())


def staged_checkpoints(staging: Path) -> set[str]:
    """The checkpoints whose rows wait for the function of the query ``batches``."""
    return {path.name.split("-c")[-1] for path in staging.glob(".part-*-batches_sink-*.pending")}


@pytest.mark.row("ends.1")
def test_functions_get_the_rows_of_each_checkpoint_once_through_kills_at_each_step(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """Function and object are called again with the same id and rows; the rows have the values that Spark reads."""
    output, faults, checkpoints = tmp_path / "out", tmp_path / "faults", tmp_path / "checkpoints"
    for directory in (faults, output / "epochs"):
        directory.mkdir(parents=True)
    source = typed(tmp_path, 4_000)
    options = fast(execution__checkpointing__interval="500ms", execution__checkpointing__dir=str(checkpoints))

    def start(rate: int, savepoint: str | None = None) -> str:
        arguments = [source, str(rate), str(output), str(faults)]
        program = PIPELINES / "batch_functions.py"
        return cluster.submit(program, arguments=arguments, configuration=options, parallelism=2, savepoint=savepoint)

    def calls() -> int:
        return len(list((output / "batches").iterdir()))

    job = start(10)
    cluster.wait_until((output / "batches").exists, "a call")
    (faults / "called-held").touch()
    # The function has the rows of one checkpoint, and two more have completed and wait.
    cluster.wait_until(lambda: len(staged_checkpoints(checkpoints / "staged")) >= 3, "checkpoints that wait")
    (faults / "called").touch()
    (faults / "called-held").unlink()
    for step in ("called", "returned", "process", "closed"):
        before = cluster.restarts(job)
        (faults / step).touch()
        cluster.wait_until(lambda step=step: not (faults / step).exists(), f"a kill at {step}")  # type: ignore[misc]
        wait_for_restarts(cluster, job, before + 1)
    made = calls()
    cluster.wait_until(lambda: calls() > made, "a call of this attempt, which connects it with the session")
    before, called = cluster.restarts(job), calls()
    end_session(spark_url(encrypted=True), f"{job}/batches-sink.committer")
    cluster.wait_until(lambda: cluster.restarts(job) > before, "a call in a session that has ended")
    cluster.wait_until(lambda: calls() > called + 1, "calls in another session")
    cluster.wait_for_checkpoints(job, 2)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(start(0, savepoint), JobStatus.FINISHED)
    ids = sorted(int(directory.name) for directory in (output / "batches").iterdir())
    assert len(ids) > 3
    assert ids == list(range(len(ids)))
    wanted = spark.read.schema(batch_functions.SCHEMA).parquet(source)
    wanted = wanted.selectExpr("*", "n * 2 AS twice", "upper(name) AS shout")
    found = spark.read.parquet(*(str(output / "batches" / str(id_)) for id_ in ids))
    assert {row.batch_id for row in found.select("batch_id").distinct().collect()} == set(ids)
    assert Counter(map(str, found.drop("batch_id").collect())) == Counter(map(str, wanted.collect()))
    numbers_ = [row["n"] for file in (output / "epochs").iterdir() for row in json.loads(file.read_text())]
    assert sorted(numbers_) == list(range(4_000))
    assert is_empty(checkpoints / "staged")


def of_both(
    spark: SparkSession, cluster: MiniCluster, directory: Path, name: str, faults: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Runs a program of ``batch_functions`` with the files in ``in``; returns the output of Spark and of the engine.

    The engine's process is killed at each step that ``faults`` names.
    """
    theirs, ours = directory / "spark", directory / "engine"
    for output in (theirs, ours):
        output.mkdir()
    getattr(batch_functions, name)(spark, str(directory / "in"), str(theirs)).awaitTermination()
    (directory / "faults").mkdir()
    for step in faults:
        (directory / "faults" / step).touch()
    job = cluster.submit(
        PIPELINES / "batch_functions.py",
        entry=f"batch_functions:{name}",
        arguments=[str(directory / "in"), str(ours), *([str(directory / "faults")] if faults else ())],
        configuration=fast() if faults else fast(restart_strategy__type="none"),
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert is_empty(directory / "faults")
    assert cluster.restarts(job) == len(faults)
    return theirs, ours


@pytest.mark.row("ends.1")
def test_frames_and_views_of_the_program_meet_those_of_a_function_as_in_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.json").write_text("".join(f'{{"n": {n}}}\n' for n in range(5)))
    theirs, ours = of_both(spark, cluster, tmp_path, "combined")
    assert (ours / "0.json").read_text() == (theirs / "0.json").read_text()


@pytest.mark.row("ends.1")
def test_large_frames_are_those_of_spark_which_keeps_none_of_them_when_workers_are_killed_while_they_hand_one_over(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        texts = [f"the text of number {n % 300}" for n in range(100_000)]
        rows = {"n": range(7 * number, 7 * number + 100_000), "text": texts}
        file = tmp_path / "in" / f"{number}.parquet"
        pq.write_table(pa.table(rows), file)
        os.utime(file, (1_000 + number, 1_000 + number))
    before = names_of_blocks(spark)
    theirs, ours = of_both(spark, cluster, tmp_path, "stored", ("sending", "sent", "called"))
    for batch in range(3):
        assert (ours / f"{batch}.json").read_text() == (theirs / f"{batch}.json").read_text()
        for name in ("whole", "even"):
            found, wanted = (spark.read.parquet(str(place / name / str(batch))) for place in (ours, theirs))
            assert found.exceptAll(wanted).isEmpty()
            assert wanted.exceptAll(found).isEmpty()
    assert views_of_frames(spark).isEmpty()
    new = names_of_blocks(spark) - before
    assert [name for name in new if name.startswith(("cache_", "rdd_"))] == []


@pytest.mark.long
@pytest.mark.row("ends.1")
def test_view_of_a_function_stays_when_the_next_call_comes_after_the_time_for_which_spark_keeps_unused_sessions(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    source, output, timeout_s = tmp_path / "in", tmp_path / "out", 16
    source.mkdir()
    output.mkdir()
    (source / "a").write_text("a\n")
    option = "spark.connect.session.manager.defaultSessionTimeout"
    conf = spark._jsparkSession.sharedState().conf()  # of the sessions that begin from now on
    conf.set(option, f"{timeout_s}s")
    try:
        program, arguments = PIPELINES / "batch_functions.py", [str(source), str(output)]
        options = fast(restart_strategy__type="none")
        job = cluster.submit(program, entry="batch_functions:remembered", arguments=arguments, configuration=options)
        cluster.wait_until((output / "0").exists, "a call")
        unused = all_options()
        answer_of_server(spark_url(encrypted=True), "Config", unused, ConfigResponse)
        cluster.wait_until(
            lambda: unused.session_id in sessions_that_end(spark, 1_000 * timeout_s), "the end of a session"
        )
        (source / "b").write_text("b\n")
        cluster.wait_until(lambda: (output / "1").exists() or cluster.status(job) is JobStatus.FAILED, "another call")
    finally:
        conf.remove(option)
    assert [(output / batch).read_text() for batch in ("0", "1")] == ["a a", "a b"]
    cluster.call(cluster.dispatcher.cancel_job(job))


VALUES = pa.schema(
    [
        ("n", pa.int32()),
        ("s", pa.string()),
        ("d", pa.float64()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("yes", pa.bool_()),
        ("part", pa.string()),
    ]
)
NESTED = VALUES.append(pa.field("tags", pa.list_(pa.string()))).append(pa.field("raw", pa.binary()))
STRINGS = ["a", None, "", 'x "y"', "a,b", "a\nb", " blank ", "#c", "\\", "é\u2028", "a\rb", "'"]
WRITTEN: list[Any] = [
    ("csv", {"header": "true", "compression": "gzip"}, "part", VALUES),
    ("xml", {"rowTag": "order", "nullValue": "-"}, "part", VALUES),
    *(
        pytest.param(*further, marks=pytest.mark.long)
        for further in (
            ("json", {"lineSep": "\r\n", "timeZone": "Asia/Kathmandu"}, "d,price,at", NESTED),
            (
                "csv",
                {"sep": "|", "quoteAll": "true", "nullValue": "-", "timestampFormat": "yyyy-MM-dd HH:mm"},
                "",
                VALUES,
            ),
            (
                "json",
                {"ignoreNullFields": "false", "dateFormat": "dd/MM/yyyy", "compression": "bzip2"},
                "part",
                NESTED,
            ),
            ("text", {}, "part", pa.schema([VALUES.field("s"), VALUES.field("part")])),
            ("orc", {"compression": "snappy"}, "part", NESTED),
        )
    ),
]


@pytest.mark.row("ends.5")
@pytest.mark.parametrize(("format_", "options", "key", "schema"), WRITTEN)
def test_files_in_an_object_store_are_those_that_the_batch_writer_of_spark_writes(
    spark: SparkSession,
    cluster: MiniCluster,
    store: ObjectStore,
    tmp_path: Path,
    format_: str,
    options: dict[str, str],
    key: str,
    schema: pa.Schema,
) -> None:
    rows = [
        {
            "n": at - 3,
            "s": text,
            "d": [1.0, float("nan"), -1e20, None][at % 4],
            "price": [Decimal("-1.50"), None][at % 2],
            "at": [datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), None][at % 2],
            "day": [date(1582, 10, 4), None][at % 2],
            "yes": at % 2 == 0,
            "part": ["a/b", None, "100% é"][at % 3],
            "tags": [None, [], ["x", None]][at % 3],
            "raw": [None, b"\x00\xff"][at % 2],
        }
        for at, text in enumerate(STRINGS)
    ]
    source, theirs = tmp_path / "rows.parquet", tmp_path / "theirs"
    pq.write_table(pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema), source)
    frame = spark.read.parquet(str(source))
    ours = resolve(store.bucket() + "/ours")
    job = cluster.submit(
        PIPELINES / "text_sink.py",
        arguments=[str(source), frame._jdf.schema().toDDL(), format_, ours.url, json.dumps(options), key],
        # Its only checkpoint is the last one: each directory has one file.
        configuration=fast(execution__checkpointing__interval="1h"),
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    writer = frame.coalesce(1).write.format(format_).options(**options)
    (writer.partitionBy(*key.split(",")) if key else writer).save(str(theirs))
    if format_ in ("orc", "xml"):  # Spark itself wrote them, in any number of files
        ours.filesystem.get(ours.path, str(tmp_path / "ours"), recursive=True)
        reader = spark.read.schema(frame.schema).format(format_).options(**options)
        counted = [Counter(map(str, reader.load(str(tmp_path / side)).collect())) for side in ("ours", "theirs")]
        assert counted[0] == counted[1]
        assert counted[0].total() == len(rows)
        if format_ == "orc":
            [found] = discoveries("orc", "n INT, s STRING, part STRING", {"path": ours.url})
            assert Counter(found.column("n").to_pylist()) == Counter(row["n"] for row in rows)
        return
    wanted = {
        (str(path.parent.relative_to(theirs)).strip("."), unpacked(path.name, path.read_bytes()))
        for path in theirs.rglob("part-*")
    }
    written = {
        (name.rpartition("/")[0], unpacked(name, ours.filesystem.cat_file(f"{ours.path}/{name}")))
        for name in keys(ours.url)
    }
    assert written == wanted
    assert unfinished_uploads(ours) == []


def unpacked(name: str, data: bytes) -> bytes:
    return gzip.decompress(data) if name.endswith(".gz") else bz2.decompress(data) if name.endswith(".bz2") else data


@pytest.mark.row("ends.1")
def test_batch_writer_of_spark_and_console_write_the_rows_of_a_query(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """Without a directory for checkpoints the rows are staged in that of the session."""
    source, output = typed(tmp_path, 30), tmp_path / "orc"
    job = cluster.submit(
        PIPELINES / "batch_functions.py",
        entry="batch_functions:printed",
        arguments=[source, str(output)],
        configuration=fast(),
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    frame = spark.read.schema(batch_functions.SCHEMA).parquet(source)
    frame.write.partitionBy("name").orc(str(tmp_path / "theirs"))
    found, wanted = (
        Counter(map(str, spark.read.schema(batch_functions.SCHEMA).orc(str(path)).collect()))
        for path in (output, tmp_path / "theirs")
    )
    assert found == wanted
    assert {path.name for path in output.iterdir() if path.is_dir()} == {
        "name=a",
        "name=é",
        "name=__HIVE_DEFAULT_PARTITION__",
    }
    assert is_empty(cluster._settings.work_directory / "checkpoints" / "staged")


@pytest.mark.long
@pytest.mark.row("ends.1", "ends.5")
def test_directories_have_every_row_once_when_workers_are_killed_at_random_moments(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    output, checkpoints, source = tmp_path / "out", tmp_path / "checkpoints", numbers(tmp_path, 3_000)
    options = fast(execution__checkpointing__interval="200ms", execution__checkpointing__dir=str(checkpoints))

    def start(rate: int, savepoint: str | None = None) -> str:
        return cluster.submit(
            PIPELINES / "batch_functions.py",
            entry="batch_functions:files",
            arguments=[source, str(rate), str(output)],
            configuration=options,
            savepoint=savepoint,
        )

    job = start(10)
    moments = random.Random(7)
    for _ in range(8):
        cluster.wait_for_checkpoints(job, 1)
        before = cluster.restarts(job)
        pause = time.monotonic() + moments.uniform(0, 0.4)
        cluster.wait_until(lambda pause=pause: time.monotonic() > pause, "the moment of a kill")  # type: ignore[misc]
        os.kill(moments.choice(cluster.worker_pids(job)), signal.SIGKILL)
        wait_for_restarts(cluster, job, before + 1)
    cluster.wait_for_checkpoints(job, 2)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(start(0, savepoint), JobStatus.FINISHED)
    rows = [json.loads(line) for file in (output / "json").glob("*.json") for line in file.read_text().splitlines()]
    assert sorted(row["n"] for row in rows) == list(range(3_000))
    assert all(row["text"] == f'a "{row["n"]}\n,' for row in rows)
    found = []
    for part in range(2):
        for file in (output / "csv" / f"part={part}").glob("*.csv"):
            with file.open(newline="") as stream:
                found += [(int(row["n"]), row["text"], part) for row in csv.DictReader(stream)]
    assert sorted(found) == [(n, f'a "{n}\n,', n % 2) for n in range(3_000)]
    table = ds.dataset(output / "parquet", format="parquet", partitioning="hive").to_table(columns=["n", "part"])
    assert sorted((row["n"], row["part"]) for row in table.to_pylist()) == [(n, n % 2) for n in range(3_000)]
    left = [path.name for path in output.rglob("*") if path.name.startswith(("_ckpt", "."))]
    assert [name for name in left if not name.endswith(".crc")] == []
    assert is_empty(checkpoints / "staged")


def test_server_of_spark_takes_no_client_without_its_token_and_shows_the_token_to_none(spark: SparkSession) -> None:
    url = spark_url(encrypted=True)
    assert spark_url(encrypted=False) == url
    pairs = answer_of_server(url, "Config", all_options(), ConfigResponse).pairs
    assert pairs
    token = url.partition("token=")[2]
    assert all(token not in pair.value for pair in pairs)
    with pytest.raises(grpc.RpcError) as refused:
        answer_of_server(url[:-1], "Config", all_options(), ConfigResponse)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_secrets_of_the_driver_are_not_in_the_environment_that_code_in_spark_sees(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_seen(name: str) -> bool:
        value = spark.sql(f"SELECT java_method('java.lang.System', 'getenv', '{name}')").collect()[0][0]
        return value not in (None, "null")

    secret = next(name for name in ("PWD", "LANG", "LOGNAME", "USER", "SHLVL") if is_seen(name))
    monkeypatch.setattr(spark_connect, "HIDDEN", frozenset({secret}))
    spark_connect._hide_secrets(spark._jvm)
    assert not is_seen(secret)
    assert is_seen("PATH")
