"""Scripts in the forms of Spark's streaming guide: the engine runs them as they are, or says why it does not."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast
from tests.support.kafka_broker import KafkaBroker, kafka_broker

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

GUIDE = Path(__file__).parents[1] / "support" / "programs" / "guide.py"
RUN = (
    *("files", "rate", "rate_per_batch", "view", "counts", "windows", "late_windows", "sessions"),
    *("sessions_with_a_gap_of_the_row", "join_with_a_table", "inner_join", "left_join", "semi_join", "duplicates"),
    *("duplicates_with_time", "duplicates_within_watermark", "parquet", "batches", "rows", "rows_of_an_object"),
    *("processing_time", "continuous", "available_now", "once"),
    *("words", "headers", "copied", "at_once", "timers", "timeouts", "windows_of_windows", "real_time"),
    *("file_of_each_row", "inferred_schema", "settings", "right_join", "full_join", "nothing"),
)
ENDS = ("available_now", "once")
REFUSED = {
    "real_time_files": "realTime needs the sink kafka",
    "join_of_windows": "two columns are named 'count'; give them aliases",
    "rate_to_its_end": r"has no end.*processingTime",
    "memory": "clients of Spark Connect read",
    "listener": "a program ends before its queries have events",
    "latest_watermark": "'max' is not supported",
    "action": "needs a running Spark",
    "earlier_column": "df.column of the frame before withWatermark is no event time",
    "state_of_a_query": "needs a running Spark",
    "batch_of_kafka": "write_operation needs a running Spark",
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
    if form in ENDS:
        cluster.wait_for_status(job, JobStatus.FINISHED)
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
