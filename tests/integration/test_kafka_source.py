"""Format ``kafka`` against a broker: Spark's columns and options, exact positions, whole jobs under kills."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.connectors.kafka_source import KafkaEnumerator
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import source_schema
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.integration.test_source_splits import Copy, ended
from tests.support.kafka_broker import KafkaBroker
from tests.support.outputs import hidden, visible
from tests.support.patience import patient
from tests.unit.runtime.connectors.split_jobs import Job, moved

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture
def topic(broker: KafkaBroker) -> str:
    """A topic of two partitions."""
    name = f"orders-{uuid4().hex[:8]}"
    broker.create_topic(name, 2)
    return name


def options(broker: KafkaBroker, topic: str, **more: str) -> dict[str, str]:
    given = {"kafka.bootstrap.servers": broker.servers, "subscribe": topic, "startingOffsets": "earliest"}
    return {**given, "kafka.topic.metadata.refresh.interval.ms": "100", **more}


def values(first: int, count: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, first + count)]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.01)


def read_until(job: Job, rows: int) -> list[dict[str, Any]]:
    def there() -> bool:
        job.discover()
        job.read()
        return len(job.rows) >= rows

    until(there, f"{rows} rows; there are {len(job.rows)}")
    return job.rows


def read_while(job: Job, condition: Callable[[], bool]) -> None:
    def over() -> bool:
        job.read()
        return not condition()

    until(over, f"the end of reading; there are {len(job.rows)} rows")


def numbers(rows: list[dict[str, Any]]) -> Counter[int]:
    return Counter(int(row["value"]) for row in rows)


@pytest.mark.row("ends.4")
def test_records_have_the_columns_of_spark(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, [b"one", None], key=b"k", partition=1, headers=[("trace", b"7"), ("trace", None)])
    broker.produce(topic, [b"bare"], partition=0)
    without_effect = {"minOffsetsPerTrigger": "1000", "maxTriggerDelay": "1h", "maxRecordsPerPartition": "1"}
    given = options(broker, topic, includeHeaders="true", availableNow="true", **without_effect)
    with closing(Job("kafka", given)) as job:
        job.discover()
        read_while(job, lambda: any(reader.has_work_left for reader in job.readers))
        rows = sorted(job.rows, key=lambda row: (row["partition"], row["offset"]))
        assert job.readers[0].measured().reached == {topic: {"0": 1, "1": 2}}
    assert [row["value"] for row in rows] == [b"bare", b"one", None]
    assert [(row["partition"], row["offset"], row["topic"], row["key"]) for row in rows] == [
        (0, 0, topic, None),
        (1, 0, topic, b"k"),
        (1, 1, topic, b"k"),
    ]
    assert [row["timestampType"] for row in rows] == [0, 0, 0]
    assert abs(rows[0]["timestamp"].timestamp() - time.time()) < patient(60)
    assert rows[0]["headers"] is None
    assert rows[1]["headers"] == [{"key": "trace", "value": b"7"}, {"key": "trace", "value": None}]


@pytest.mark.row("ends.4")
def test_positions_are_exact_through_restores_at_other_parallelisms(broker: KafkaBroker, topic: str) -> None:
    kept: list[dict[str, Any]] = []
    state = None
    for number, parallelism in enumerate((1, 2, 3, 1)):
        for partition in (0, 1):
            broker.produce(topic, values(200 * number + 100 * partition, 100), partition=partition)
        job = Job("kafka", options(broker, topic), parallelism=parallelism, restored=state, most_rows=7)
        with closing(job):
            read_until(job, 60)
            state = job.checkpoint(number + 1, (2, 3, 1, 1)[number])
            kept += job.rows
            read_until(job, len(job.rows) + 20)  # rows behind the checkpoint are lost with the attempt
    with closing(Job("kafka", options(broker, topic), restored=state)) as job:
        rows = read_until(job, 800 - len(kept))
    assert numbers(kept + rows) == Counter(range(800))


@pytest.mark.row("ends.3")
def test_paused_partition_gives_no_rows_and_does_not_hold_the_range_of_the_others(
    broker: KafkaBroker, topic: str
) -> None:
    for partition in (0, 1):
        broker.produce(topic, values(1_000 * partition, 100), partition=partition)
    with closing(Job("kafka", options(broker, topic), most_rows=10)) as job:
        read_until(job, 1)
        reader = job.readers[0]._reader
        assert reader is not None
        ahead = next(split_id for split_id in job.readers[0]._open if split_id.startswith(f"{topic}-1#"))
        before = sum(row["partition"] for row in job.rows)
        reader.pause({ahead})
        read_until(job, before + 100)
        broker.produce(topic, values(100, 50), partition=0)
        read_until(job, before + 150)  # of a later range, although the paused partition has rows of the first one
        assert sum(row["partition"] for row in job.rows) == before
        [measures] = [each.measured() for each in job.readers]
        assert measures.reached == {topic: {"0": 150, "1": before}}
        assert measures.latest == {topic: {"0": 150, "1": 100}}
        reader.pause(frozenset())
        rows = read_until(job, 250)
    assert numbers(rows) == Counter([*range(150), *range(1_000, 1_100)])


@pytest.mark.row("ends.4")
def test_a_bounded_source_ends_and_the_next_job_continues_there(broker: KafkaBroker, topic: str) -> None:
    bounded = options(broker, topic, availableNow="true")
    state = None
    for number in range(3):
        if number != 1:  # nothing has come for the second job
            broker.produce(topic, values(10 * number, 10), partition=0, transaction=f"{topic}-{number}")
        job = Job("kafka", bounded, restored=state, job_id=str(number))
        with closing(job):
            while job.discover():
                pass
            read_while(job, lambda job=job: any(reader.has_work_left for reader in job.readers))  # type: ignore[misc]
            assert numbers(job.rows) == Counter(range(10 * number, 10 * number + 10) if number != 1 else ())
            assert job.ended
            state = job.checkpoint(1)
    broker.produce(topic, values(50, 5), partition=1)
    with closing(Job("kafka", options(broker, topic), restored=state)) as job:
        assert numbers(read_until(job, 5)) == Counter(range(50, 55))


@pytest.mark.row("ends.4")
def test_starting_offsets_say_where_known_partitions_start(broker: KafkaBroker, topic: str) -> None:
    for partition in (0, 1):
        broker.produce(topic, values(10 * partition, 5), partition=partition)

    def rows_from(given: str, more: int) -> Counter[int]:
        with closing(Job("kafka", options(broker, topic, startingOffsets=given))) as job:
            until(lambda: job.discover() or any(reader.reads for reader in job.readers), "the partitions")
            broker.produce(topic, values(more, 1), partition=0)
            read_while(job, lambda: more not in numbers(job.rows))
            return numbers(job.rows)

    assert rows_from("latest", 100) == Counter([100])
    start = json.dumps({topic: {"0": 3, "1": -1}})
    assert rows_from(start, 101) == Counter([3, 4, 100, 101])
    assert rows_from(json.dumps({topic: {"0": -1, "1": -2}}), 102) - Counter(range(10, 15)) == Counter([102])


@pytest.mark.row("ends.4")
@pytest.mark.parametrize("bounded", ["true", "false"])
def test_assigned_partition_that_does_not_exist_is_named(broker: KafkaBroker, topic: str, bounded: str) -> None:
    for asked, there in (
        ({topic: [1, 2]}, f"{topic}-2 .*there is {topic}-0, {topic}-1"),
        ({"no": [0]}, "no such topic"),
    ):
        given = {**options(broker, "", availableNow=bounded), "assign": json.dumps(asked)}
        del given["subscribe"]
        with closing(Job("kafka", given)) as job, pytest.raises(ValueError, match=f"option 'assign': .*{there}"):
            until(lambda job=job: job.discover(), "the partitions")  # type: ignore[misc]


@pytest.mark.row("ends.4")
def test_topics_that_appear_and_match_the_pattern_are_read_from_their_beginnings(broker: KafkaBroker) -> None:
    name = f"late-{uuid4().hex[:8]}"
    broker.create_topic(f"{name}-a")
    given = {**options(broker, "", startingOffsets="latest"), "subscribePattern": f"{name}-.*"}
    del given["subscribe"]
    with closing(Job("kafka", given)) as job:
        until(lambda: job.discover() or any(reader.reads for reader in job.readers), "the partition")
        broker.produce(f"{name}-a", values(0, 3))
        broker.create_topic(f"{name}-b", 2)
        broker.create_topic(f"not-{name}-b")
        broker.produce(f"{name}-b", values(3, 3), partition=1)
        broker.produce(f"not-{name}-b", values(100, 3))
        assert numbers(read_until(job, 6)) == Counter(range(6))


@pytest.mark.row("ends.4")
def test_records_of_a_transaction_are_read_when_it_is_committed(broker: KafkaBroker, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.servers, "transactional.id": topic})
    producer.init_transactions(patient(30))
    producer.begin_transaction()
    producer.produce(topic, b"1", partition=0)
    producer.flush(patient(30))
    broker.produce(topic, [b"2"], partition=1)
    with closing(Job("kafka", options(broker, topic))) as job:
        assert numbers(read_until(job, 1)) == Counter([2])
        producer.commit_transaction(patient(30))
        assert numbers(read_until(job, 2)) == Counter([1, 2])


@pytest.mark.row("ends.4")
def test_a_broker_that_does_not_answer_is_waited_for(
    broker: KafkaBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker.produce(topic, values(0, 5), partition=0)
    with closing(Job("kafka", options(broker, topic))) as job:
        read_until(job, 5)
        with broker.silent():

            def is_noticed() -> bool:
                job.discover()
                job.read()
                return "cannot be listed now" in caplog.text

            until(is_noticed, "the warning")
        broker.produce(topic, values(5, 5), partition=1)
        assert numbers(read_until(job, 10)) == Counter(range(10))


@pytest.mark.row("ends.4")
def test_event_time_advances_when_the_records_of_a_range_were_read(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, values(0, 40), partition=0)
    broker.produce(topic, values(40, 4), partition=1)
    given = options(broker, topic, maxOffsetsPerTrigger="11")
    with closing(Job("kafka", given, most_rows=3)) as job:
        ends: list[Counter[int]] = []
        output = job.outputs[0]
        output.emit_end_of_range = lambda: ends.append(numbers(job.rows))  # type: ignore[method-assign]
        read_until(job, 44)
        read_while(job, lambda: not ends or ends[-1].total() < 44)
    shares = [(end.total(), sum(number >= 40 for number in end)) for end in ends]
    assert shares[-1] == (44, 4)
    # Behind the first, in which each partition had half, a range has 11 records, dealt out by what waits.
    assert all(after[0] - before[0] <= 12 for before, after in pairwise(shares)), shares


@pytest.mark.row("ends.4")
def test_offsets_are_committed_to_the_configured_group_after_a_checkpoint(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, values(0, 7), partition=1)
    group = f"group-{topic}"
    consumer = confluent_kafka.Consumer({"bootstrap.servers": broker.servers, "group.id": group})
    place = confluent_kafka.TopicPartition(topic, 1)

    def committed() -> int:
        return int(consumer.committed([place], timeout=patient(10))[0].offset)

    with closing(consumer), closing(Job("kafka", options(broker, topic, **{"kafka.group.id": group}))) as job:
        read_until(job, 7)
        job.checkpoint(1)
        assert committed() < 0
        job.complete(1)
        until(lambda: committed() == 7, "the commit")
        assert job.readers[0]._reader is not None
        assert job.readers[0]._reader.backlog() == 0


@pytest.mark.row("ends.4")
def test_a_topic_that_is_deleted_fails_the_job_unless_loss_is_allowed(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, values(0, 2), partition=0)

    def is_read(job: Job) -> bool:
        job.discover()
        job.read()
        return False

    with (
        closing(Job("kafka", options(broker, topic))) as job,
        closing(Job("kafka", options(broker, topic, failOnDataLoss="false"))) as other,
    ):
        read_until(job, 2)
        read_until(other, 2)
        broker.delete_topic(topic)
        with pytest.raises(ValueError, match="failOnDataLoss=false"):
            until(lambda: is_read(job), "the failure")
        broker.create_topic(topic, 1)
        for _ in range(20):
            is_read(other)


@pytest.mark.row("ends.4")
def test_source_that_is_closed_while_it_looks_for_partitions_leaves_no_thread(broker: KafkaBroker, topic: str) -> None:
    with closing(Job("kafka", options(broker, topic))) as job:
        enumerator = job.enumerator._enumerator
    assert isinstance(enumerator, KafkaEnumerator)
    assert enumerator._thread is not None
    assert not enumerator._thread.is_alive()


@pytest.mark.row("ends.4")
@pytest.mark.parametrize("bounded", [False, True], ids=["a stream", "what is there"])
def test_a_topic_that_is_created_again_with_more_records_fails_the_job_unless_loss_is_allowed(
    broker: KafkaBroker, topic: str, bounded: bool
) -> None:
    """The offset that was reached in the deleted topic exists in the new one."""
    given = options(broker, topic, **({"availableNow": "true"} if bounded else {}))
    broker.produce(topic, values(0, 2), partition=0)
    with closing(Job("kafka", given)) as job:
        read_until(job, 2)
        read_while(job, lambda: any(reader.has_work_left for reader in job.readers))
        state = job.checkpoint(1)
    broker.delete_topic(topic)
    broker.create_topic(topic, 2)
    broker.produce(topic, values(10, 5), partition=0)
    with (
        closing(Job("kafka", given, restored=state, job_id="1")) as job,
        pytest.raises(ValueError, match=f"topic '{topic}' was deleted and created again.*failOnDataLoss=false"),
    ):
        until(lambda: job.discover() and False, "the failure")
    with closing(Job("kafka", {**given, "failOnDataLoss": "false"}, restored=state, job_id="2")) as job:
        assert numbers(read_until(job, 5 if bounded else 3)) == Counter(range(10 if bounded else 12, 15))
        before = state[0][0][0].items
        until(lambda: job.discover() or job.checkpoint(2)[0][0][0].items != before, "the id of the new topic")
        read_while(job, lambda: any(reader.has_work_left for reader in job.readers))
        state = job.checkpoint(3)
    broker.produce(topic, values(15, 1), partition=1)
    with closing(Job("kafka", given, restored=state, job_id="3")) as job:  # the loss is allowed once and for all
        assert numbers(read_until(job, 1)) == Counter([15])


@pytest.mark.row("ends.4")
def test_a_user_can_set_the_position_in_a_topic_that_was_created_again(broker: KafkaBroker, topic: str) -> None:
    broker.produce(topic, values(0, 2), partition=0)
    with closing(Job("kafka", options(broker, topic))) as job:
        read_until(job, 2)
        state = job.checkpoint(1)
    broker.delete_topic(topic)
    broker.create_topic(topic, 2)
    broker.produce(topic, values(10, 5), partition=0)
    with closing(Job("kafka", options(broker, topic), restored=moved(state, "earliest"))) as job:
        assert numbers(read_until(job, 5)) == Counter(range(10, 15))


@pytest.mark.row("ends.4")
def test_a_job_reads_each_record_once_through_kills_a_rescale_and_a_savepoint(
    client: CkptClient, cluster: MiniCluster, broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    with ended(Copy(cluster, tmp_path, "kafka", options(broker, topic))) as job:
        job.start()
        for number in range(4):
            broker.produce(topic, values(200 * number, 100), partition=0)
            os.kill(cluster.worker_pids(job.job_id)[number % 2], signal.SIGKILL)
            broker.produce(topic, values(200 * number + 100, 100), partition=1)
            job.has(200 * (number + 1))
        client.rescale(job.job_id, dict.fromkeys(client.resource_requirements(job.job_id), 1), timeout_s=patient(180))
        broker.produce(topic, values(800, 100), partition=1)
        savepoint = job.stop()
        broker.produce(topic, values(900, 100), partition=0)
        job.start(3, savepoint)
        job.has(1000)
        job.stop()
        found = Counter(int(value) for value in visible(job.out).value)
        assert found == Counter(range(1000))
        assert hidden(job.out) == []


@pytest.mark.long
@pytest.mark.row("ends.4")
def test_job_that_is_killed_while_its_broker_is_frozen_reads_each_record_once(
    cluster: MiniCluster, broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    with ended(Copy(cluster, tmp_path, "kafka", options(broker, topic))) as job:
        job.start()
        for number in range(3):
            broker.produce(topic, values(200 * number, 100), partition=0)
            broker.produce(topic, values(200 * number + 100, 100), partition=1)
            if number:
                job.has(200 * number + 50)
            before = cluster.restarts(job.job_id)
            with broker.silent():
                os.kill(cluster.worker_pids(job.job_id)[number % 2], signal.SIGKILL)
                cluster.wait_until(lambda: cluster.restarts(job.job_id) > before, "a restart")  # noqa: B023
                over = time.monotonic() + 2.0
                cluster.wait_until(lambda: time.monotonic() > over, "several intervals of checkpoints")  # noqa: B023
            job.has(200 * (number + 1))
        job.stop()
        assert Counter(int(value) for value in visible(job.out).value) == Counter(range(600))
        assert hidden(job.out) == []


SUBSCRIBED = {"kafka.bootstrap.servers": "x:1", "subscribe": "a"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"subscribe": "a"}, "kafka.bootstrap.servers"),
        ({"kafka.bootstrap.servers": "x:1"}, "exactly one of"),
        ({"kafka.bootstrap.servers": "x:1", "subscribe": "a", "assign": "{}"}, "exactly one of"),
        ({"kafka.bootstrap.servers": "x:1", "assign": '{"a": 1}'}, "partitions in JSON, such as"),
        ({"kafka.bootstrap.servers": "x:1", "subscribePattern": "("}, "regular expression"),
        ({"kafka.bootstrap.servers": "x:1", "subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'}, "below -2"),
        ({"kafka.bootstrap.servers": "x:1", "subscribe": "a", "startingOffsets": "first"}, "expected JSON"),
        ({"kafka.bootstrap.servers": "x:1", "subscribe": "a", "endingOffsets": "latest"}, "does not know it"),
        (
            {"kafka.bootstrap.servers": "x:1", "subscribe": "a", "kafka.sasl.jaas.config": "x"},
            "expected PlainLoginModule",
        ),
        ({"kafka.bootstrap.servers": "x:1", "subscribe": "a", "kafka.auto.offset.reset": "x"}, "the engine sets it"),
        ({**SUBSCRIBED, "kafka.topic.metadata.refresh.interval.ms": "-1"}, "not a valid time between two lookups"),
        ({"kafka.bootstrap.servers": "x:1", "subscribe": "a", "kafka.nonsense": "x"}, "No such configuration property"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        source_schema("kafka", given, None)
