"""Format ``kafka`` as a sink, exactly once: what a broker's log holds after crashes at each step of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import httpx
import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.connectors import kafka_sink
from ckpt_runtime.connectors.kafka_protocol import TransactionClient
from ckpt_runtime.connectors.kafka_sink import KafkaSink
from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.integration.test_kafka_source import read_until
from tests.support.jobs import fast, program_of
from tests.support.kafka_broker import KafkaBroker, Log, committed
from tests.support.patience import patient
from tests.unit.runtime.connectors.harness import JOB, context, opened, redistributed, snapshot_of
from tests.unit.runtime.connectors.split_jobs import Job

pytest.importorskip("confluent_kafka", reason="pip install 'ckpt-runtime[kafka]'")

_ATTEMPTS: list[Attempt] = []

State = Sequence[OperatorListState]


class Attempt:
    """The sink's subtask in one attempt of a job. A test makes it crash by calling it no more."""

    def __init__(
        self,
        broker: KafkaBroker,
        topic: str,
        *,
        ended_jobs: tuple[str, ...] = (),
        options: Mapping[str, str] | None = None,
        **place: object,
    ) -> None:
        given = {"kafka.bootstrap.servers": broker.servers, "topic": topic, "kafka.log_level": "2"}
        self.sink = KafkaSink({**given, **(options or {})})
        self.operator = CommittingSinkOperator(self.sink)
        _ATTEMPTS.append(self)
        lineage = SinkLineage(sha256(topic.encode()).hexdigest()[:16], ended_jobs)
        opened(self.operator, context(uid="out", sink=lineage, **place))  # type: ignore[arg-type]

    def write(self, *values: str) -> None:
        self.operator.process_batch(pa.record_batch({"value": list(values)}), 0)

    def checkpoint(self, checkpoint_id: int, *, completes: bool = True) -> State:
        state = snapshot_of(self.operator, checkpoint_id)
        if completes:
            self.operator.notify_complete(checkpoint_id)
        return state


@pytest.fixture
def topic(broker: KafkaBroker) -> Iterator[str]:
    name = f"out-{uuid4().hex[:8]}"
    broker.create_topic(name, 1)
    yield name
    while _ATTEMPTS:
        pool = _ATTEMPTS.pop().sink.pool
        assert pool is not None
        pool.close()


def values(log: Log) -> list[str]:
    return [value.decode() for _, value in log.committed if value is not None]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.02)


@pytest.mark.row("ends.5")
def test_messages_are_committed_when_their_checkpoint_has_completed(broker: KafkaBroker, topic: str) -> None:
    attempt = Attempt(broker, topic)
    attempt.write("a", "b")
    attempt.checkpoint(1, completes=False)
    assert values(committed(broker, topic)) == []
    attempt.write("c")
    attempt.operator.notify_complete(1)
    assert values(committed(broker, topic)) == ["a", "b"]
    until(lambda: len(committed(broker, topic).open) == 1, "the message of the next transaction")
    attempt.checkpoint(2)
    attempt.checkpoint(3)
    attempt.write("d")
    attempt.operator.close()
    log = committed(broker, topic)
    assert (values(log), log.open) == (["a", "b", "c"], {})


@pytest.mark.row("ends.5")
def test_transaction_that_is_aborted_while_messages_are_on_their_way_does_not_stay_open(
    broker: KafkaBroker, topic: str
) -> None:
    """A message that arrives behind the abort would begin a transaction that nothing ends."""
    many = {"kafka.linger.ms": "0", "kafka.batch.num.messages": "1"}  # many requests, one message in each
    for number in range(20):
        attempt = Attempt(broker, topic, attempt=number, options=many)
        attempt.write(*(f"{number} {at}" for at in range(200)))
        over = time.monotonic() + number / 500
        while time.monotonic() < over:
            attempt.operator.on_processing_time(0)
        attempt.operator.close()
    log = committed(broker, topic)
    assert (values(log), log.open) == ([], {})


@pytest.mark.row("ends.4", "ends.5")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_messages_of_the_sink_are_the_rows_of_the_source_with_any_compression(
    broker: KafkaBroker, topic: str, codec: str
) -> None:
    """Null keys, values and headers, empty ones, and a message that is just below the client's limit."""
    attempt = Attempt(broker, topic, options={"kafka.compression.type": codec})
    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("headers", header)])
    rows = [
        {"key": None, "value": b"x" * 999_000, "headers": None},
        {"key": b"k", "value": None, "headers": [{"key": "a", "value": None}, {"key": "a", "value": b""}]},
        {"key": b"", "value": b"", "headers": [{"key": "", "value": b"\0\xff"}]},
        *({"key": b"%d" % n, "value": b"row %d" % n, "headers": None} for n in range(200)),
    ]
    attempt.operator.process_batch(pa.RecordBatch.from_pylist(rows, schema), 0)
    attempt.checkpoint(1)
    given = {"kafka.bootstrap.servers": broker.servers, "subscribe": topic, "startingOffsets": "earliest"}
    with closing(Job("kafka", {**given, "includeHeaders": "true"})) as job:
        assert [{name: row[name] for name in schema.names} for row in read_until(job, len(rows))] == rows


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("step", ["write", "prepare", "publish", "commit"])
def test_crash_at_any_step_leaves_each_row_once_and_no_open_transaction(
    broker: KafkaBroker, topic: str, step: str
) -> None:
    """``publish``: the checkpoint has completed, and the sink did not hear of it."""
    first = Attempt(broker, topic)
    first.write("1")
    before = first.checkpoint(1)
    first.write("2")
    state, restored = before, 1
    if step != "write":
        taken = first.checkpoint(2, completes=step == "commit")
        if step != "prepare":
            state, restored = taken, 2
        first.write("3")
    second = Attempt(broker, topic, attempt=1, restored=restored, state=redistributed([state], 1)[0])
    second.write(*("2", "3")[restored - 1 :])
    second.checkpoint(3)
    until(lambda: committed(broker, topic).open == {}, "the end of transactions that the crash has left")
    assert values(committed(broker, topic)) == ["1", "2", "3"]


@pytest.mark.row("ends.5")
def test_savepoint_that_is_restored_twice_is_committed_once_also_after_its_id_was_used_again(
    broker: KafkaBroker, topic: str
) -> None:
    job = Attempt(broker, topic)
    job.write("1")
    savepoint = job.checkpoint(1, completes=False)
    one = Attempt(broker, topic, job_id="1" * 32, restored=1, state=redistributed([savepoint], 1)[0])
    one.write("one")
    one.checkpoint(2)
    job.operator.notify_complete(1)
    for number in range(2, 5):
        job.write(str(number))
        job.checkpoint(number)
    other = Attempt(broker, topic, job_id="2" * 32, restored=1, state=redistributed([savepoint], 1)[0])
    other.write("other")
    other.checkpoint(2)
    log = committed(broker, topic)
    assert (sorted(values(log)), log.open) == (["1", "2", "3", "4", "one", "other"], {})


@pytest.mark.row("ends.5")
def test_subtasks_of_another_parallelism_commit_all_that_was_prepared(broker: KafkaBroker, topic: str) -> None:
    states = []
    for subtask in range(3):
        attempt = Attempt(broker, topic, subtask=subtask, parallelism=3)
        attempt.write(f"covered {subtask}")
        states.append(attempt.checkpoint(1, completes=False))
        attempt.write(f"uncovered {subtask}")
    dealt = redistributed(states, 2)
    after = [
        Attempt(broker, topic, subtask=subtask, parallelism=2, attempt=1, restored=1, state=dealt[subtask])
        for subtask in range(2)
    ]
    for attempt in after:
        attempt.checkpoint(2)
    until(lambda: committed(broker, topic).open == {}, "the end of transactions that the crash has left")
    assert sorted(values(committed(broker, topic))) == ["covered 0", "covered 1", "covered 2"]


@pytest.mark.row("ends.5", "147.8")
def test_job_that_resumes_aborts_what_an_ended_job_has_left_open(broker: KafkaBroker, topic: str) -> None:
    """The ended job has restarted, and was cancelled before it could clean up behind the attempts before."""
    attempt = Attempt(broker, topic)
    attempt.write("1")
    attempt.checkpoint(1)
    attempt.write("2")
    state = attempt.checkpoint(2, completes=False)
    attempt.write("uncovered")
    attempt = Attempt(broker, topic, attempt=2, restored=2, state=redistributed([state], 1)[0])
    attempt.write("3")
    state = attempt.checkpoint(3, completes=False)
    attempt.write("uncovered")
    resumed = Attempt(broker, topic, job_id="1" * 32, restored=3, state=redistributed([state], 1)[0], ended_jobs=(JOB,))
    resumed.write("4")
    resumed.checkpoint(4)
    until(lambda: committed(broker, topic).open == {}, "the end of transactions that the ended job has left")
    assert values(committed(broker, topic)) == ["1", "2", "3", "4"]


@pytest.mark.row("ends.5")
def test_transactions_that_a_crash_has_left_are_aborted_when_silent_brokers_answer_again(
    broker: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_sink, "TransactionClient", partial(TransactionClient, timeout_s=0.05))
    caplog.set_level("INFO", "ckpt_runtime.connectors.kafka_sink")
    crashed = Attempt(broker, topic)
    crashed.write("uncovered")
    crashed.checkpoint(1, completes=False)
    after = Attempt(broker, topic, attempt=1)
    assert after.sink.pool is not None
    assert after.sink.pool._next is not None
    after.sink.pool._next.result(patient(60))
    with broker.silent():
        after.checkpoint(2)
        until(lambda: "is not taken over yet" in caplog.text, "a request that gets no answer")
    until(lambda: committed(broker, topic).open == {}, "the end of transactions that the crash has left")
    until(lambda: not after.operator.has_commits_left, "the end of the clean-up")
    assert values(committed(broker, topic)) == []


@pytest.mark.row("ends.5")
def test_commit_is_repeated_at_once_although_a_dead_subtask_has_left_a_transaction_open(
    broker: KafkaBroker, topic: str
) -> None:
    """The open transaction hides later messages of the partition from readers: they cannot tell what was committed."""
    dead = Attempt(broker, topic, subtask=1, parallelism=2)
    dead.write("uncovered")
    dead.checkpoint(2, completes=False)
    first = Attempt(broker, topic, parallelism=2)
    first.write("1")
    state = first.checkpoint(1)
    first.write("2")
    pool = first.sink.pool
    assert pool is not None
    assert pool._next is not None
    pool._next.result(patient(60))  # which must not have the transactional id of the committed transaction
    started = time.monotonic()
    after = [
        Attempt(
            broker,
            topic,
            subtask=subtask,
            parallelism=2,
            attempt=1,
            restored=1,
            state=redistributed([state], 2)[subtask],
        )
        for subtask in range(2)
    ]
    assert time.monotonic() - started < patient(30)
    after[0].write("2")
    for attempt in after:
        attempt.checkpoint(3)
    until(lambda: committed(broker, topic).open == {}, "the end of transactions that the crash has left")
    assert values(committed(broker, topic)) == ["1", "2"]


@pytest.mark.row("ends.5")
def test_transactional_ids_are_reused_after_later_checkpoints(broker: KafkaBroker, topic: str) -> None:
    attempt = Attempt(broker, topic)
    for number in range(1, 9):
        attempt.write(str(number))
        attempt.checkpoint(number)
    pool = attempt.sink.pool
    assert pool is not None
    assert len(pool._used) <= 5
    assert values(committed(broker, topic)) == [str(number) for number in range(1, 9)]


@pytest.mark.row("ends.5")
def test_aborted_checkpoint_leaves_its_rows_to_the_next_one(broker: KafkaBroker, topic: str) -> None:
    attempt = Attempt(broker, topic)
    attempt.write("1")
    attempt.checkpoint(1, completes=False)
    attempt.operator.notify_aborted(1)
    attempt.write("2")
    attempt.checkpoint(2)
    assert values(committed(broker, topic)) == ["1", "2"]
    attempt.write("3")
    attempt.checkpoint(3, completes=False)
    attempt.operator.notify_aborted(3)
    attempt.operator.close()
    log = committed(broker, topic)
    assert (values(log), log.open) == (["1", "2"], {})


@pytest.mark.row("571.1")
@pytest.mark.row("ends.5")
def test_live_settings_under_which_brokers_would_abort_transactions_are_refused_with_their_values(
    client: CkptClient, cluster: MiniCluster, broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Over REST, while the job runs; the settings stay as they are, and later ones that fit are taken."""
    source = f"{topic}-in"
    broker.create_topic(source, 1)
    broker.produce(source, [b"1", b"2"])
    directory = {"execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    job = cluster.submit(
        program_of("kafka_copy"),
        entry="kafka_copy:pipeline",
        arguments=[broker.servers, source, topic],
        configuration={**fast(), **directory, "execution.checkpointing.timeout": "30 s"},
    )
    try:
        cluster.wait_for_status(job, JobStatus.RUNNING)
        url = f"{client.url}/jobs/{job}/checkpoints/configuration"
        before = httpx.get(url, timeout=60).json()
        for given, named in (
            (
                {"checkpointInterval": 30_000},
                ("30000 ms after", "take 30000 ms", "60000 ms after which Kafka's brokers"),
            ),
            ({"checkpointTimeout": 60_000}, ("take 60000 ms", "60000 ms after which Kafka's brokers")),
        ):
            answer = httpx.patch(url, json=given, timeout=60)
            assert answer.status_code == 400
            assert all(part in answer.text for part in named), answer.text
        assert httpx.get(url, timeout=60).json() == before
        options = {"configuration": {"execution.checkpointing.timeout": "60 s"}}
        refused = httpx.patch(f"{client.url}/jobs/{job}/config", json=options, timeout=60)
        assert (refused.status_code, "60000 ms" in refused.text) == (400, True), refused.text
        assert httpx.patch(url, json={"checkpointTimeout": 20_000}, timeout=60).status_code == 200
        cluster.wait_until(lambda: values(committed(broker, topic)) == ["1", "2"], "the messages to be copied")
    finally:
        cluster.call(cluster.dispatcher.cancel_job(job))
        cluster.wait_for_status(job, JobStatus.CANCELED)
