"""PySpark's own client, in a process of its own, connected to a session of the engine."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.connect.proto import ConfigRequest, ConfigResponse, ExecutePlanRequest, ExecutePlanResponse

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.connect.server import ConnectServer
from ckpt_runtime.frontend.spark_connect import spark_service
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES
from tests.support.patience import patient
from tests.support.pipelines import connect_restarts
from tests.unit.runtime.frontend.test_protobuf_functions import DESCRIPTORS, Order

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

SERVICE = "/spark.connect.SparkConnectService/"
TOKEN = "a token of the session"
COUNTRIES = ["AT", "DE", None, "FR"]


@contextmanager
def endpoint(cluster: MiniCluster, **options: str) -> Iterator[int]:
    """A Spark Connect endpoint in front of a session, with options of it; gives its port."""
    configuration = Configuration({"connect.port": "0", **options})

    async def start() -> tuple[ConnectServer, int]:
        server = ConnectServer(cluster.dispatcher, configuration, TOKEN, spark_service)
        return server, await server.start("127.0.0.1")

    server, port = cluster.call(start())
    yield port
    cluster.call(server.stop())


@contextmanager
def rest_in_front_of(cluster: MiniCluster, connect_port: int) -> Iterator[str]:
    """The REST API of a session that serves Spark Connect at a port; gives its address."""

    async def start() -> tuple[Any, int]:
        cluster.dispatcher.connect_port = connect_port
        return await rest_server.start(create_app(cluster.dispatcher, token=TOKEN), "127.0.0.1", 0)

    server, port = cluster.call(start())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        cluster.call(rest_server.stop(server))


def run_as_client(url: str, script: Path, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command that runs a script as a client of a session."""
    ckpt = [sys.executable, "-m", "ckpt_runtime.cli", "--url", url, "--token", TOKEN, "run", "--client"]
    return [*ckpt, *options, str(script), *arguments]


def in_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, script: Path, arguments: Sequence[str]) -> None:
    """Runs a script in Spark, as Python does, and stops what it leaves running."""
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    session.conf.set("spark.sql.shuffle.partitions", "1")
    monkeypatch.setattr(SparkSession, "_instantiatedSession", session)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        for query in session.streams.active:
            query.stop()


@pytest.fixture(scope="module")
def port(spark: SparkSession, cluster: MiniCluster) -> Iterator[int]:
    """That of the folder's session and Spark."""
    with endpoint(cluster) as listening:
        yield listening


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("orders")
    rows = {
        "country": [COUNTRIES[at % 4] for at in range(1_000)],
        "amount": [at / 7 for at in range(1_000)],
        "quantity": pa.array([at % 5 for at in range(1_000)], pa.int32()),
    }
    pq.write_table(pa.table(rows), directory / "orders.parquet")
    return directory


def client(
    port: int, token: str, *arguments: str, program: str = "connect_client.py"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(PIPELINES / program)]
    url = f"sc://localhost:{port}/;token={token}"
    return subprocess.run(
        [*command, url, *arguments], capture_output=True, text=True, timeout=patient(120), check=False
    )


@pytest.mark.row("ps.7")
def test_unchanged_client_runs_batches_in_spark_and_streaming_queries_as_jobs(
    spark: SparkSession, cluster: MiniCluster, port: int, orders: Path, tmp_path: Path
) -> None:
    ended = client(port, TOKEN, str(orders), str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    seen: dict[str, Any] = json.loads(ended.stdout)
    assert seen["batch"] == [2]
    assert seen["compression"] == "-1"
    assert seen["columns"] == [True, ["country", "amount", "quantity"], False]
    last = {row["country"]: list(row.values()) for row in pq.read_table(tmp_path / "totals").to_pylist()}
    assert sorted(last.values(), key=str) == seen["wanted"]
    assert seen["option"] == "250 ms"
    job_id = uuid.UUID(seen["started"][0]).hex
    assert seen["started"][1] == "totals"
    assert cluster.call(cluster.dispatcher.job_details(job_id)).overview.name == "totals"
    assert seen["ended"] == [False, True, f"Job {job_id} is FINISHED"]
    assert seen["progress"] in (None, ["totals", True])
    assert seen["active"] == ["running"]
    assert seen["in time"] is False
    assert seen["found"] == "running"
    assert seen["stopped"] == [False, [], None]
    started, running, stopped = seen["listened"]
    assert started == ["running"]
    assert stopped == [[running, None]]
    batches = [batch for batch, _, _ in seen["reports"]]
    assert batches == sorted(set(batches))
    assert len(batches) >= 2
    assert all(report[1:] == [True, "running"] for report in seen["reports"])
    assert_form_of_spark(spark, seen["report"])
    assert "aggregate, no uid" in seen["plan of a frame"]
    assert "query 'running'" in seen["plan of a query"]
    assert "sink parquet" in seen["plan of a query"]
    assert "DIVIDE_BY_ZERO" in seen["listened to a failure"]
    assert seen["raised"].startswith("StreamingQueryException")
    assert "FailureCause" not in seen["failure"]
    assert "DIVIDE_BY_ZERO" in seen["failure"]
    assert seen["unknown column"].startswith("AnalysisException")
    assert "`nope`" in seen["unknown column"]
    assert_refusals_of_spark(spark, seen, orders, tmp_path)
    assert "ckpt run" in seen["code"]
    assert "execution.checkpointing.interval" in seen["option of nothing"]
    assert seen["batch error"].startswith("AnalysisException")
    assert "`nope`" in seen["batch error"]
    assert not (tmp_path / "refused").exists()


def assert_form_of_spark(spark: SparkSession, report: dict[str, Any]) -> None:
    """A report of progress has the keys of one of Spark's, for sources and sinks, too."""
    query = spark.readStream.format("rate").load().writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()
    wanted = json.loads(query.lastProgress.json)
    assert set(report) == set(wanted)
    assert set(report["sources"][0]) == {*wanted["sources"][0], "metrics"}  # those of Spark's sources that have some
    assert set(report["sink"]) == set(wanted["sink"])


def assert_refusals_of_spark(spark: SparkSession, seen: dict[str, Any], orders: Path, output: Path) -> None:
    """What the client has seen refused is refused by Spark, too, with the same exception, condition and text."""
    rate, files = spark.readStream.format("rate").load(), spark.readStream.schema("country STRING")
    writer = rate.writeStream.format("noop").queryName("running")
    first = writer.start()
    for name, action in {
        "second of a name": writer.start,
        "action": rate.collect,
        "path": lambda: files.parquet(f"{output}/away"),
        "two paths": lambda: files.option("path", str(orders)).parquet(str(output)),
    }.items():
        with pytest.raises(PySparkException) as refused:
            action()
        text = str(refused.value).splitlines()[0].partition(" To ignore")[0].rstrip(";")
        assert text in seen[name]
        condition = str(refused.value.getCondition())
        kind = f"{type(refused.value).__name__}, {None if condition.startswith('_LEGACY') else condition}:"
        assert seen[name].startswith(kind)
    first.stop()


@pytest.mark.row("ps.7")
def test_client_without_the_token_is_refused(port: int) -> None:
    for method in ("Config", "AnalyzePlan", "AddArtifacts", "ExecutePlan", "ReattachExecute"):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(f"{SERVICE}{method}")
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([b""]), timeout=patient(20)))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method  # type: ignore[attr-defined]
        assert "session's token is missing or wrong" in refused.value.details()  # type: ignore[attr-defined]


def execute(port: int, request: ExecutePlanRequest) -> ExecutePlanResponse:
    """Sends a request as PySpark's client does, and returns its first response."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(
            f"{SERVICE}ExecutePlan", ExecutePlanRequest.SerializeToString, ExecutePlanResponse.FromString
        )
        responses = list(call(request, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=patient(60)))
    assert [response.HasField("result_complete") for response in responses] == [False, True]
    return responses[0]


def start_request(output: Path, format_: str, **options: str) -> ExecutePlanRequest:
    request = ExecutePlanRequest(session_id=str(uuid.uuid4()), operation_id=str(uuid.uuid4()))
    start = request.plan.command.write_stream_operation_start
    start.format, start.path = "parquet", str(output)
    start.input.common.plan_id = 1
    start.input.read.is_streaming = True
    source = start.input.read.data_source
    source.format = format_
    for name, value in options.items():
        if name == "schema":
            source.schema = value
        else:
            source.options[name] = value
    return request


@pytest.mark.row("ps.7")
def test_start_that_is_sent_again_after_a_lost_answer_starts_no_second_job(
    cluster: MiniCluster, port: int, orders: Path, tmp_path: Path
) -> None:
    request = start_request(tmp_path / "out", "replay", schema="country STRING", path=str(orders))
    answers = [execute(port, request) for _ in range(2)]
    ids = {answer.write_stream_operation_start_result.query_id.id for answer in answers}
    assert ids == {request.operation_id}
    cluster.wait_for_status(uuid.UUID(request.operation_id).hex, JobStatus.FINISHED)
    assert pq.read_table(tmp_path / "out").num_rows == 1_000


@pytest.mark.row("ps.7")
def test_stop_takes_a_savepoint_if_the_session_is_configured_so_and_else_the_query_runs_on(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    with endpoint(cluster, **{"connect.query.stop": "SAVEPOINT"}) as port:

        def start(**settings: str) -> ExecutePlanRequest:
            request = start_request(tmp_path / "out", "numbers", rowsPerSecond="100")
            config = ConfigRequest(session_id=request.session_id)
            for key, value in settings.items():
                config.operation.set.pairs.add(key=key.replace("__", "."), value=value)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_unary(
                    f"{SERVICE}Config", ConfigRequest.SerializeToString, ConfigResponse.FromString
                )
                call(config, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=patient(60))
            execute(port, request)
            cluster.wait_for_status(uuid.UUID(request.operation_id).hex, JobStatus.RUNNING)
            return request

        def stop(started: ExecutePlanRequest) -> None:
            request = ExecutePlanRequest(session_id=started.session_id, operation_id=str(uuid.uuid4()))
            command = request.plan.command.streaming_query_command
            command.query_id.id = command.query_id.run_id = started.operation_id
            command.stop = True
            execute(port, request)

        without = start(execution__checkpointing__interval="1 s")
        with pytest.raises(grpc.RpcError, match=r"set execution\.checkpointing\.savepoint-dir"):
            stop(without)
        job_id = uuid.UUID(without.operation_id).hex
        assert cluster.of_job(job_id, lambda job: job.status) is JobStatus.RUNNING
        cluster.call(cluster.dispatcher.cancel_job(job_id))
        directory = {"execution__checkpointing__savepoint-dir": str(tmp_path / "savepoints")}
        started = start(execution__checkpointing__interval="250 ms", **directory)
        job_id = uuid.UUID(started.operation_id).hex
        cluster.wait_for_checkpoints(job_id, 1)
        stop(started)
        assert cluster.of_job(job_id, lambda job: job.status) is JobStatus.FINISHED
        [savepoint] = (tmp_path / "savepoints").iterdir()
        assert (savepoint / "_metadata").is_file()


@pytest.mark.row("ps.7")
def test_client_reads_the_memory_tables_of_its_queries_and_finds_the_rows_of_spark(port: int, orders: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(PIPELINES / "memory_client.py")]
    url = f"sc://localhost:{port}/;token={TOKEN}"
    ended = subprocess.run(
        [*command, url, str(orders)], capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert "format memory needs it as the name of the table" in seen["unnamed"]
    assert seen["before"] == "not refused"
    assert seen["columns"] == ["country", "n", "a total"]
    assert [row[:2] for row in seen["processed"]] == [row[:2] for row in seen["wanted totals"]]
    assert seen["rows"] == seen["wanted rows"]
    assert len(seen["rows"]) == 200
    assert [row[:2] for row in seen["totals"]] == [row[:2] for row in seen["wanted totals"]] != []


@pytest.mark.row("ps.7")
def test_query_that_is_started_again_in_its_checkpoint_location_continues_as_in_spark(
    spark: SparkSession, port: int, tmp_path: Path
) -> None:
    """Behind a stop, a failure and another start, with any trigger; also views and options that change meanwhile."""
    ended = client(port, TOKEN, str(tmp_path / "engine"), program="connect_restarts.py")
    assert ended.returncode == 0, ended.stderr
    wanted = connect_restarts.seen(spark.newSession(), tmp_path / "spark")
    assert json.loads(ended.stdout) == wanted
    assert wanted["ids"] == [True, False]
    assert wanted["firsts again"] == [[0], [2], [4], [7], [9]]


@pytest.mark.long
@pytest.mark.row("ps.7")
@pytest.mark.row("ends.4")
def test_client_decodes_and_encodes_avro_and_protobuf_in_its_queries(port: int, tmp_path: Path) -> None:
    """Messages of Google's classes are what the query reads, and read what it writes."""
    import fastavro

    good = [Order(id=at, kind=at % 2 * 2, lines=[{"sku": "a", "counts": [-at]}]) for at in range(1, 21)]
    values = [*(each.SerializeToString() for each in good), b"\xff", None]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"value": pa.array(values, pa.binary())}), tmp_path / "in" / "a.parquet")
    (tmp_path / "descriptors").write_bytes(DESCRIPTORS)
    arguments = [str(tmp_path / name) for name in ("in", "descriptors", "out")]
    ended = client(port, TOKEN, *arguments, program="connect_messages.py")
    assert ended.returncode == 0, ended.stderr
    rows = pq.read_table(tmp_path / "out").sort_by("id").to_pylist()
    assert [row["id"] for row in rows] == [*range(1, 21), None, None]
    assert [Order.FromString(row["protobuf"]) for row in rows] == [*good, Order(), Order()]
    schema = {"type": "record", "name": "Id", "fields": [{"name": "id", "type": ["null", "long"]}]}
    ids = [fastavro.schemaless_reader(io.BytesIO(row["avro"]), schema)["id"] for row in rows]
    assert ids == [row["id"] for row in rows]


PROGRAMS = Path(__file__).parents[1] / "support" / "programs"
LIVE = PROGRAMS / "live.py"


@pytest.mark.row("ps.9")
def test_unchanged_script_that_reads_what_its_queries_write_runs_as_a_client_and_prints_what_it_prints_in_spark(
    spark: SparkSession,
    cluster: MiniCluster,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = tmp_path / "given"
    for name, text in {
        "words/a.txt": "apache spark\napache flink\nspark",
        "orders/a.csv": "id,city,at\n1,Wien,2026-11-01T09:00:00Z\n" + 2 * "2,Graz,2026-11-01T20:00:00Z\n",
    }.items():
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).write_text(text)
    mine, theirs = (shutil.copytree(given, tmp_path / name) for name in ("engine", "spark"))
    capfd.readouterr()
    with pytest.raises(SystemExit, match="3"):
        in_spark(spark, monkeypatch, LIVE, ["--directory", str(theirs)])
    wanted = capfd.readouterr().out
    assert "2026-11-02 05:00:00" in wanted
    assert "WARNING the query is started again: True" in wanted
    options = ["-p", "1", "-D", "execution.checkpointing.interval=200 ms"]
    with rest_in_front_of(cluster, port) as url:
        command = run_as_client(url, LIVE, "--directory", str(mine), options=options)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout == wanted
    assert "query left is stopped, because the script ends" in ended.stderr
    [left] = [job for job in cluster.call(cluster.dispatcher.list_jobs()) if job.name == "left"]
    assert left.status is JobStatus.CANCELED
    configuration = cluster.of_job(left.job_id, lambda job: job.configuration)
    assert configuration.get_text("execution.checkpointing.interval") == "200 ms"
    assert {vertex.parallelism for vertex in cluster.call(cluster.dispatcher.job_details(left.job_id)).vertices} == {1}


@pytest.mark.row("ps.9")
@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.long)])
def test_script_with_python_functions_runs_as_a_client_and_prints_what_it_prints_in_spark(
    spark: SparkSession,
    cluster: MiniCluster,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    beside: bool,
) -> None:
    """With ``beside``, all functions are those of a module that the script imports."""
    mine, theirs = tmp_path / "engine", tmp_path / "spark"
    for directory in (mine, theirs):
        (directory / "words").mkdir(parents=True)
        (directory / "words" / "a.txt").write_text("a b a\nc a b\n")
    script = PROGRAMS / "live_functions.py"
    capfd.readouterr()
    in_spark(spark, monkeypatch, script, [str(theirs)])
    wanted = capfd.readouterr().out
    assert "PATH_NOT_FOUND" in wanted
    assert "['A', 'A', 'A']" in wanted
    if beside:
        shutil.copy(script, tmp_path)
        script = tmp_path / "start-functions.py"
        script.write_text("import sys\nfrom live_functions import main\nmain(sys.argv[1])\n")
    with rest_in_front_of(cluster, port) as url:
        command = run_as_client(url, script, str(mine), options=["-p", "1"])
        ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == wanted
