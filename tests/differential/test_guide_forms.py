"""Scripts in the forms of Spark's streaming guide: the engine runs them as they are, or says why it does not."""

from __future__ import annotations

import json
import os
import runpy
import socketserver
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql import SparkSession

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.differential.test_spark_connect import TOKEN, endpoint
from tests.support.jobs import fast
from tests.support.kafka_broker import KafkaBroker, kafka_broker
from tests.support.parity import shown
from tests.support.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

GUIDE = Path(__file__).parents[1] / "support" / "programs" / "guide.py"
RUN = (
    *("files", "rate", "rate_per_batch", "own_source", "view", "counts", "windows", "late_windows", "sessions"),
    *("sessions_with_a_gap_of_the_row", "join_with_a_table", "inner_join", "left_join", "semi_join", "duplicates"),
    *("duplicates_with_time", "duplicates_within_watermark", "parquet", "batches", "rows", "rows_of_an_object"),
    *("processing_time", "continuous", "available_now", "once"),
    *("words", "headers", "copied", "at_once", "timers", "timeouts", "windows_of_windows", "real_time"),
    *("file_of_each_row", "inferred_schema", "settings", "right_join", "full_join", "nothing"),
    *("join_of_windows", "latest_watermark", "stopped", "stopped_at_end", "stopped_when_processed", "action"),
)
ENDS = ("available_now", "once", "stopped_when_processed")
STOPPED = ("stopped", "stopped_at_end")
REFUSED = {
    "real_time_files": "realTime needs the sink kafka",
    "rate_to_its_end": r"has no end.*processingTime",
    "memory": "clients of Spark Connect read",
    "listener": "a program ends before its queries have events",
    "earlier_column": "df.column of the frame before withWatermark is no event time",
    "state_of_a_query": "STDS_COMMITTED_BATCH_UNAVAILABLE",
    "batch_of_kafka": "a program writes csv, json",
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker with two topics and two messages."""
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as started:
        for topic in ("orders", "bills"):
            started.create_topic(topic, 2)
        started.produce("orders", [b"one", b"two"], key=b"k")
        yield started


@pytest.fixture(scope="module")
def words() -> Iterator[int]:
    """The port of a server that sends a line of words to each client."""

    class Lines(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"apache spark\napache hadoop\n")
            self.request.recv(1)  # until the client closes the connection

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Lines) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


COMPARED = {
    **dict.fromkeys(("files", "named_files", "inferred_schema", "file_of_each_row", "rate", "own_source"), "append"),
    **dict.fromkeys(("view", "counts", "windows"), "complete"),
    **dict.fromkeys(("sessions", "sessions_with_a_gap_of_the_row", "join_with_a_table"), "append"),
    **dict.fromkeys(("inner_join", "left_join", "right_join", "full_join", "semi_join"), "append"),
    **dict.fromkeys(("duplicates", "duplicates_with_time", "duplicates_within_watermark"), "append"),
    **dict.fromkeys(("late_windows", "settings"), "update"),
    "windows_of_windows": "append",
}
"""The forms whose results do not depend on the clock, and the output modes by which their rows are compared."""


def in_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Runs a form as Spark runs a script."""
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    session.conf.set("spark.sql.shuffle.partitions", "1")
    monkeypatch.setattr(SparkSession, "_instantiatedSession", session)
    monkeypatch.setattr(sys, "argv", [str(GUIDE), *arguments])
    runpy.run_path(str(GUIDE), run_name="__main__")


def rows_of(directory: Path, mode: str) -> Counter[str]:
    """All rows of a query; in mode complete those of its last batch, in mode update the last one of each key."""
    files = sorted(directory.glob("*.parquet"))
    assert files
    rows = [list(row.values()) for file in files[-(mode == "complete") :] for row in pq.read_table(file).to_pylist()]
    if mode == "update":
        rows = list({str(row[:-1]): row for row in rows}.values())
    return Counter(str(shown(row)) for row in rows)


@pytest.mark.row("ps.1")
@pytest.mark.parametrize("form", COMPARED)
def test_form_of_the_guide_gives_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    table = tmp_path / "in"
    (table / "rate").mkdir(parents=True)
    (table / "rows.csv").write_text('{"a": 1}\n{"a": 2}\n' if form != "files" else "ann;12\nbob;9\n")
    # Three values in rounds of four minutes, the first of them twice; late rows would depend on batches.
    times = [datetime(2026, 11, 1, 9, tzinfo=UTC) + timedelta(minutes=4 * at) for at in range(40)]
    lines = [{"timestamp": time.isoformat(), "value": at % 3} for at, time in enumerate(times)]
    (table / "rate" / "rows.json").write_text("".join(json.dumps(line) + "\n" for line in [lines[0], *lines]))
    in_spark(spark, monkeypatch, [form, str(table), "0", "", str(tmp_path / "spark")])
    configuration = fast(restart_strategy__type="none")
    arguments = [form, str(table), "0", "", str(tmp_path / "engine")]
    job = cluster.submit(GUIDE, arguments=arguments, configuration=configuration, parallelism=1)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    mode = COMPARED[form]
    assert rows_of(tmp_path / "engine", mode) == rows_of(tmp_path / "spark", mode)


def submit(cluster: MiniCluster, directory: Path, form: str, words: int, broker: KafkaBroker) -> str:
    (directory / "rows.csv").write_text('{"a": 1}\n')
    (directory / "table").mkdir()
    (directory / "table" / "rows.json").write_text('{"key": "k", "name": "one"}\n')
    configuration = fast(restart_strategy__type="none")
    arguments = [form, str(directory), str(words), broker.servers]
    return cluster.submit(GUIDE, arguments=arguments, configuration=configuration, parallelism=1)


@pytest.mark.row("ps.1")
@pytest.mark.parametrize("form", RUN)
def test_script_in_a_form_of_the_guide_runs_unchanged(
    cluster: MiniCluster, tmp_path: Path, form: str, words: int, broker: KafkaBroker
) -> None:
    job = submit(cluster, tmp_path, form, words, broker)
    if form in (*ENDS, *STOPPED):
        cluster.wait_for_status(job, JobStatus.FINISHED)
        written = pq.read_table(tmp_path / "rows").to_pylist() if (tmp_path / "rows").exists() else []
        if form in STOPPED:
            # The program gives its query two seconds, with 50 rows each; a job begins to read a little later.
            assert [row["value"] for row in sorted(written, key=lambda row: row["value"])] == [*range(len(written))]
            assert written
            taken = cluster.of_job(job, lambda job: job.checkpoint_statistics()).latest_savepoint
            assert taken is not None
            assert taken.external_path is not None
            assert (Path(taken.external_path.removeprefix("file://")) / "_metadata").is_file()
        elif form == "stopped_when_processed":
            assert written == [{"a": 1, "file": f"file://{tmp_path}/rows.csv"}]
        return
    cluster.wait_for_checkpoints(job, 2)
    cluster.call(cluster.dispatcher.cancel_job(job))
    cluster.wait_for_status(job, JobStatus.CANCELED)


@pytest.mark.row("ps.1")
@pytest.mark.parametrize("form", REFUSED)
def test_script_in_a_form_of_the_guide_that_cannot_run_is_refused_with_the_reason(
    cluster: MiniCluster, tmp_path: Path, form: str, words: int, broker: KafkaBroker
) -> None:
    with pytest.raises(SubmissionFailed, match=REFUSED[form]):
        submit(cluster, tmp_path, form, words, broker)


EXAMPLES = Path(pyspark.__file__).parent / "examples" / "src" / "main" / "python" / "sql" / "streaming"
PROGRAMS = {
    "structured_network_wordcount": ["127.0.0.1", "{words}"],
    "structured_network_wordcount_session_window": ["127.0.0.1", "{words}"],
    "structured_network_wordcount_windowed": ["127.0.0.1", "{words}", "10", "5"],
    "structured_kafka_wordcount": ["{servers}", "subscribe", "orders"],
    "structured_blockchain_admission_control": [],
}
"""Spark's examples that run, by their arguments; structured_sessionization has a mode that Spark refuses, too."""


def arguments_of(example: str, words: int, broker: KafkaBroker) -> list[str]:
    return [text.format(words=words, servers=broker.servers) for text in PROGRAMS[example]]


def end(cluster: MiniCluster, job: str) -> None:
    """Cancels a job that has completed checkpoints."""
    cluster.wait_for_checkpoints(job, 2)
    cluster.call(cluster.dispatcher.cancel_job(job))
    cluster.wait_for_status(job, JobStatus.CANCELED)


@pytest.mark.row("ps.1")
@pytest.mark.parametrize("example", PROGRAMS)
def test_example_of_spark_runs_unchanged(cluster: MiniCluster, broker: KafkaBroker, words: int, example: str) -> None:
    file = EXAMPLES / f"{example}.py"
    configuration = fast(restart_strategy__type="none")
    arguments = arguments_of(example, words, broker)
    end(cluster, cluster.submit(file, arguments=arguments, configuration=configuration, parallelism=1))


CLIENTS = [name for name in PROGRAMS if "wordcount" in name and "session" not in name]
"""The examples without a function or a data source in Python."""


@pytest.mark.row("ps.7")
@pytest.mark.parametrize("example", CLIENTS)
def test_example_of_spark_runs_as_a_client_of_spark_connect(
    cluster: MiniCluster, spark: SparkSession, broker: KafkaBroker, words: int, example: str
) -> None:
    del spark  # is what serves the client
    known = {job.job_id for job in cluster.call(cluster.dispatcher.list_jobs())}
    with endpoint(cluster) as port:
        environment = {**os.environ, "SPARK_REMOTE": f"sc://localhost:{port}/;token={TOKEN}"}
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(EXAMPLES / f"{example}.py"),
            *arguments_of(example, words, broker),
        ]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as client:

            def started() -> bool:
                assert client.poll() is None, client.stderr.read() if client.stderr else ""
                return bool({job.job_id for job in cluster.call(cluster.dispatcher.list_jobs())} - known)

            try:
                cluster.wait_until(started, "a job of the client")
                [job] = {job.job_id for job in cluster.call(cluster.dispatcher.list_jobs())} - known
                often = CheckpointOverrides(interval_ms=200)
                cluster.wait_for_status(job, JobStatus.RUNNING)
                cluster.call(cluster.dispatcher.jobs[job].living().patch_checkpoint_config(often))
                end(cluster, job)
                assert client.wait(timeout=patient(60)) == 0
            finally:
                client.kill()
