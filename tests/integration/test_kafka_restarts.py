"""A broker that is killed and started again with its data: the source and the sink that is exactly once continue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from threading import Thread
from uuid import uuid4

import pytest

from tests.integration.test_kafka_source import numbers, read_until
from tests.integration.test_kafka_transactions import _ATTEMPTS, Attempt, until, values
from tests.support.kafka_broker import KafkaBroker, committed, stored_broker
from tests.support.object_store import ObjectStore
from tests.support.patience import patient
from tests.unit.runtime.connectors.harness import redistributed
from tests.unit.runtime.connectors.split_jobs import Job

pytest.importorskip("confluent_kafka", reason="pip install 'ckpt-runtime[kafka]'")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, ObjectStore]]:
    with stored_broker(tmp_path_factory.mktemp("kafka")) as started:
        yield started


@pytest.fixture
def topic(stored: tuple[KafkaBroker, ObjectStore]) -> Iterator[str]:
    name = f"out-{uuid4().hex[:8]}"
    stored[0].create_topic(name, 1)
    yield name
    while _ATTEMPTS:
        pool = _ATTEMPTS.pop().sink.pool
        assert pool is not None
        pool.close()


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("committer", ["its own producer", "the next attempt"])
def test_transaction_that_is_open_at_the_barrier_is_committed_when_the_broker_is_there_again(
    stored: tuple[KafkaBroker, ObjectStore], topic: str, committer: str
) -> None:
    broker, _ = stored
    attempt = Attempt(broker, topic)
    attempt.write("1")
    state = attempt.checkpoint(1, completes=False)
    attempt.write("2")
    # A client whose message has no answer when the broker stops may give up its transaction.
    attempt.operator._writer.producer.flush()  # type: ignore[union-attr]
    with broker.down():
        pass
    assert values(committed(broker, topic)) == []
    if committer == "its own producer":
        attempt.operator.notify_complete(1)
    else:
        attempt = Attempt(broker, topic, attempt=1, restored=1, state=redistributed([state], 1)[0])
        attempt.write("2")
    attempt.write("3")
    attempt.checkpoint(2)
    until(lambda: committed(broker, topic).open == {}, "the end of transactions that the crash has left")
    assert values(committed(broker, topic)) == ["1", "2", "3"]


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("is_stored", [False, True], ids=["lost with the broker", "in the log, without an answer"])
def test_commit_that_is_in_flight_when_the_broker_crashes_is_done_once(
    stored: tuple[KafkaBroker, ObjectStore], topic: str, is_stored: bool
) -> None:
    """It is killed while it writes: before it has noted anything, or with the mark that ends the transaction on its way
    to the store, which takes it."""
    broker, store = stored
    attempt = Attempt(broker, topic)
    attempt.write("1")
    attempt.checkpoint(1, completes=False)
    commit = Thread(target=attempt.operator.notify_complete, args=(1,))

    if is_stored:
        with store.holding(lambda method, path: method == "PUT" and path.endswith(".batch")) as held:
            commit.start()
            assert held.arrived.wait(patient(30))
            broker.crash()
        until(lambda: held.served == held.met, "the store to serve what the broker has sent")
    else:
        with store.failing(lambda method, _: method == "PUT", cut=True) as fault:
            commit.start()
            until(lambda: fault.met > 0, "the broker to write")
            broker.crash()
    broker.start()
    commit.join(patient(60))
    assert not commit.is_alive()
    attempt.write("2")
    attempt.checkpoint(2)
    log = committed(broker, topic)
    assert values(log) == ["1", "2"]
    assert len(log.open) <= 1, "the next transaction at most"
    attempt.operator.close()
    assert committed(broker, topic).open == {}


@pytest.mark.row("ends.4")
def test_source_reads_each_message_once_through_a_restart_of_the_broker(
    stored: tuple[KafkaBroker, ObjectStore], topic: str
) -> None:
    broker, _ = stored
    broker.produce(topic, [b"%d" % number for number in range(5)])
    given = {"kafka.bootstrap.servers": broker.servers, "subscribe": topic, "startingOffsets": "earliest"}
    with closing(Job("kafka", given)) as job:
        read_until(job, 5)
        with broker.down():
            for _ in range(5):
                job.discover()
                job.read()
        broker.produce(topic, [b"%d" % number for number in range(5, 10)])
        assert numbers(read_until(job, 10)) == Counter(range(10))
