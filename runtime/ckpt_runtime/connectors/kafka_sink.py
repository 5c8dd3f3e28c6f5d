"""Format ``kafka``: rows to topics, with the columns and options of Spark's sink; exactly once, or at least once.

Exactly once: a subtask writes in a transaction. At a barrier it flushes the transaction and leaves it open; the
checkpoint holds its transactional id and its producer's id and epoch, which are in librdkafka's statistics. When the
checkpoint has completed, the producer commits, or, after a crash, ``EndTxn`` is sent with the stored ids.

* Each producer writes one transaction. The next producer with the same transactional id gets a higher epoch, so a
  repeated commit can only end that one transaction. An id is used again when no restore of the job repeats its commit.
  A subtask has a small pool of transactional ids; their names have the sink's id, the job, the attempt and the subtask,
  so that no two running producers share one.
* If brokers report that a producer is fenced, its transaction was committed before, or aborted by its timeout. The last
  message shows which: it is visible to a read-committed consumer only after a commit.
* Transactions that earlier attempts left open, and the ended job that took the restored snapshot, are aborted when the
  first checkpoint has completed: by then all subtasks have committed the rows that the restored checkpoint covers.

At least once: a message is visible as soon as the broker has it, and messages sent after the restored checkpoint are
sent again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pyarrow as pa

from ckpt_runtime.connectors.kafka_protocol import (
    CONCURRENT_TRANSACTIONS,
    COORDINATOR_MOVES,
    NOT_THE_PRODUCER,
    KafkaProtocolError,
    ProducerIdentity,
    TransactionClient,
)
from ckpt_runtime.connectors.part_directory import CommitError
from ckpt_runtime.graph.kafka_columns import (
    ignores_lost,
    is_exactly_once,
    producer_settings,
    sink_topic,
    transaction_settings,
)
from ckpt_runtime.graph.kafka_options import connection_settings
from ckpt_runtime.operators.task_context import HelperThread
from ckpt_runtime.sinks import CommitOutcome, Sink, SinkCommitter, SinkContext, SinkWriter, Transaction

_FLUSH_SECONDS = 1.0
_POLL_SECONDS = 0.1
_ABORT_SECONDS = 5.0
_PATIENCE_S = 60.0
"""How long brokers may leave a request about a transaction unanswered before the job fails."""
_NO_ANSWER = ("_TIMED_OUT", "_MSG_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN")
_RETRY_S = 0.1
_STATISTICS_MS = 100
_ATTEMPTS_LOOKED_AT = 20
_UNUSED_IN_A_ROW = 3
"""After so many attempts of an ended job without a transactional id, no later one is looked for. A subtask that was
killed before it had opened used none."""
_ATTEMPTS_THAT_LOOK_BACK = 3
"""How many attempts of a job look for those of the ended job. Each look creates the unused ids that it asks for."""
_LOG = logging.getLogger(__name__)


class KafkaDeliveryError(RuntimeError):
    """The broker did not take a message. The text has the topic and the client's reason."""


class OpenTransaction(msgspec.Struct, frozen=True):
    """A transaction whose messages the brokers have. ``topic``, ``partition`` and ``offset`` are its last message's."""

    transactional_id: str
    producer_id: int
    epoch: int
    topic: str
    partition: int
    offset: int


class KafkaSink(Sink):
    """The sink of format ``kafka``."""

    committable = OpenTransaction
    single_committer = False

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.pool: _ProducerPool | None = None

    @classmethod
    def name(cls) -> str:
        return "kafka"

    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        topic = sink_topic(self.options)
        if not is_exactly_once(self.options):
            identity = f"ckpt-{context.job_id}-{context.uid}-{context.subtask_index}"
            settings = {"enable.idempotence": "true", "client.id": identity, **producer_settings(self.options)}
            return _KafkaWriter(_Producer(settings), topic, schema)
        assert self.pool is not None
        return _TransactionWriter(self.pool, topic, schema)

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        if not is_exactly_once(self.options):
            return _NothingToCommit()
        settings = transaction_settings(self.options)
        self.pool = _ProducerPool(settings, _id_prefix(context, context.job_id, context.attempt, context.subtask_index))
        return TransactionCommitter(self.pool, context, ignore_lost=ignores_lost(self.options))


def _id_prefix(context: SinkContext, job_id: str, attempt: int, subtask: int) -> str:
    return f"ckpt-{context.sink_id}-{job_id}-{attempt}-{subtask}-"


class _NothingToCommit(SinkCommitter):
    def commit(self, transaction: Transaction, committables: Sequence[Any]) -> CommitOutcome:
        return CommitOutcome.ALREADY_COMMITTED


class _Producer:
    """A client that sends messages, with the delivery reports that it has received."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from confluent_kafka import KafkaException, Producer

        self.refused = KafkaException
        self._servers = settings.get("bootstrap.servers")
        self._reason = ""
        """Why no broker could be reached, as far as the client has found out."""
        self.client = Producer({**settings, "on_delivery": self._delivered, "error_cb": self._client_failed})
        self.last: Any = None
        """The last message that a broker has acknowledged."""
        self._failure: KafkaDeliveryError | None = None

    def send(self, topic: str, value: Any, key: Any, more: Mapping[str, Any]) -> None:
        while True:
            try:
                self.client.produce(topic, value, key, **more)
                return
            except BufferError:
                # The client's queue is full: it empties while delivery reports are taken.
                self.client.poll(_POLL_SECONDS)
                self.raise_failure()
            except self.refused as error:
                self.raise_failure()
                size = sum(len(part) for part in (value, key) if part is not None)
                raise KafkaDeliveryError(f"topic {topic!r}: {self.explained(error.args[0], size)}") from None

    def flush(self) -> None:
        """Waits until brokers have acknowledged all messages. Raises KafkaDeliveryError for a refused one."""
        while self.client.flush(_FLUSH_SECONDS):
            self.raise_failure()
        self.raise_failure()

    def poll(self) -> None:
        self.client.poll(0)
        self.raise_failure()

    def close(self) -> None:
        """Ends the client's threads now. (It refers to this object, so the collector would do it at some time.)"""
        del self.client

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def explained(self, error: Any, size: int = 0) -> str:
        """The text of an error of the client, and what can be done. ``size`` is that of the message, in bytes."""
        if error.name() == "MSG_SIZE_TOO_LARGE":
            return (
                f"a message of {size} bytes is too large ({error.str()}); raise option kafka.message.max.bytes of the "
                "sink (1000000 by default), and max.message.bytes of the topic"
            )
        if error.name() in _NO_ANSWER and self._reason:
            return f"{error.str()}; no broker answers at {self._servers}: {self._reason}"
        if error.name() == "INVALID_TRANSACTION_TIMEOUT":
            option = "kafka.transaction.timeout.ms"
            return f"{error}; lower option {option}, or raise transaction.max.timeout.ms of the brokers"
        return str(error)

    def _client_failed(self, error: Any) -> None:
        if error.name() != "_ALL_BROKERS_DOWN":  # which says less than the errors before it
            self._reason = error.str()
        if error.fatal() and self._failure is None:
            self._failure = KafkaDeliveryError(f"the producer cannot continue: {error}")

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self.last = message
        elif self._failure is None:
            size = len(message) + len(message.key() or b"")
            self._failure = KafkaDeliveryError(f"topic {message.topic()!r}: {self.explained(error, size)}")


class _KafkaWriter(SinkWriter):
    """Sends the rows of one subtask in their order; messages are visible at once."""

    def __init__(self, producer: _Producer | None, topic: str | None, schema: pa.Schema) -> None:
        self._producer = producer
        self._topic = topic
        self._columns = [name for name in ("key", "value", "partition", "headers", "topic") if name in schema.names]

    def write(self, batch: pa.RecordBatch) -> None:
        producer = self.producer
        for row in batch.select(self._columns).to_pylist():
            topic = self._topic or row["topic"]
            if topic is None:
                raise KafkaDeliveryError("a row has no topic: column 'topic' is null, and the option topic is not set")
            more: dict[str, Any] = {}
            if row.get("partition") is not None:
                more["partition"] = row["partition"]
            if row.get("headers"):
                more["headers"] = [(header["key"], header["value"]) for header in row["headers"]]
            producer.send(topic, row["value"], row.get("key"), more)
        self.check()

    def prepare_commit(self, checkpoint_id: int) -> Sequence[Any]:
        self.producer.flush()
        return ()

    def check(self) -> None:
        self.producer.poll()

    def close(self) -> None:
        """Drops unsent messages: they are sent again after a restore."""
        self.producer.client.purge()
        self.producer.client.flush(_FLUSH_SECONDS)
        self.producer.close()

    @property
    def producer(self) -> _Producer:
        assert self._producer is not None
        return self._producer


class _TransactionalProducer(_Producer):
    """A producer of one transaction."""

    def __init__(self, settings: Mapping[str, Any], transactional_id: str, slot: int) -> None:
        self.transactional_id = transactional_id
        self.slot = slot
        self.identity: ProducerIdentity | None = None
        own = {"transactional.id": transactional_id, "statistics.interval.ms": _STATISTICS_MS}
        super().__init__({"client.id": transactional_id, **settings, **own, "stats_cb": self._statistics})

    def begin(self) -> None:
        """Takes the transactional id over and begins the transaction. Raises KafkaDeliveryError."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self.client.init_transactions(_PATIENCE_S)
                break
            except self.refused as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    self.client.poll(0)
                    raise KafkaDeliveryError(
                        f"transactional id {self.transactional_id}: {self.explained(error.args[0])}"
                    ) from None
        while self.identity is None:
            self.client.poll(_POLL_SECONDS)
            if time.monotonic() > deadline:
                raise KafkaDeliveryError(f"transactional id {self.transactional_id}: the client reports no producer id")
        self.client.begin_transaction()

    def commit(self) -> bool:
        """Commits the transaction; returns whether it is certainly committed."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self.client.commit_transaction(_PATIENCE_S)
                return True
            except self.refused as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    _LOG.warning("transactional id %s: commit failed: %s", self.transactional_id, error)
                    return False

    def abort(self) -> None:
        """Aborts the transaction if brokers answer soon; otherwise the next attempt does it. Closes the client.

        The client drops the messages that it has not sent, and waits for the answers to the others: one that arrived
        behind the abort would begin a transaction that nothing ends.
        """
        try:
            self.client.abort_transaction(_ABORT_SECONDS)
        except self.refused as error:
            _LOG.warning("transactional id %s: the transaction stays open: %s", self.transactional_id, error)
        self.close()

    def _statistics(self, text: str) -> None:
        if self.identity is None:
            found = json.loads(text).get("eos", {})
            if found.get("idemp_state") == "Assigned" and found.get("producer_id", -1) >= 0:
                self.identity = ProducerIdentity(found["producer_id"], found["producer_epoch"])


class _ProducerPool:
    """The transactional ids and producers of one subtask in one attempt. A thread makes the next producer ready."""

    def __init__(self, settings: Mapping[str, Any], prefix: str) -> None:
        self.settings = settings
        self._prefix = prefix
        self._used: set[int] = set()
        self._committed: dict[int, int | None] = {}
        """The slots of committed transactions, with the first snapshot behind the commit."""
        self._next: Future[_TransactionalProducer] | None = None
        self.prepared: dict[OpenTransaction, _TransactionalProducer] = {}
        """The producers of transactions that wait for their commit."""

    def prepare_next(self) -> None:
        """Has a thread make the next producer ready."""
        slot = next(number for number in range(len(self._used) + 1) if number not in self._used)
        self._used.add(slot)
        self._next = future = Future[_TransactionalProducer]()

        def begin() -> None:
            try:
                producer = _TransactionalProducer(self.settings, f"{self._prefix}{slot}", slot)
                producer.begin()
                future.set_result(producer)
            except BaseException as error:
                future.set_exception(error)

        HelperThread(target=begin, name="kafka transaction", daemon=True).start()

    def take(self) -> _TransactionalProducer:
        """Returns a producer whose transaction has begun, and starts to prepare the next one."""
        if self._next is None:
            self.prepare_next()
        assert self._next is not None
        producer = self._next.result()
        self.prepare_next()
        return producer

    def release(self, producer: _TransactionalProducer) -> None:
        """Closes the producer of a committed transaction, whose transactional id is used again later.

        A job that is restored from a checkpoint commits its transactions again. A repeated commit is only answered as
        long as no other producer has the transactional id. Otherwise it has to be looked for among the messages, where
        open transactions of dead producers may hide it until brokers abort them.
        """
        producer.close()
        self._committed[producer.slot] = None

    def snapshot_taken(self, checkpoint_id: int) -> None:
        """Notes a snapshot, which does not cover the transactions that were committed before."""
        for slot, first in self._committed.items():
            self._committed[slot] = checkpoint_id if first is None else first

    def completed(self, checkpoint_id: int) -> None:
        """Frees the transactional ids that no later restore of the job commits: a checkpoint behind the first snapshot
        without them has completed, so that it does not matter if that one was a savepoint."""
        for slot, first in list(self._committed.items()):
            if first is not None and first < checkpoint_id:
                del self._committed[slot]
                self._used.discard(slot)

    def poll(self) -> None:
        """Polls the producers that are not being written to, so that their statistics and logs do not pile up."""
        for producer in self.prepared.values():
            producer.client.poll(0)
        if self._next is not None and self._next.done() and self._next.exception() is None:
            self._next.result().client.poll(0)

    def close(self) -> None:
        """Closes the clients; prepared transactions stay open."""
        for producer in self.prepared.values():
            producer.close()
        self.prepared.clear()
        following, self._next = self._next, None
        if following is not None:
            following.add_done_callback(lambda ready: None if ready.exception() else ready.result().close())


class _TransactionWriter(_KafkaWriter):
    """Sends the rows of one subtask in transactions."""

    def __init__(self, pool: _ProducerPool, topic: str | None, schema: pa.Schema) -> None:
        super().__init__(None, topic, schema)
        self._pool = pool

    @property
    def producer(self) -> _Producer:
        if self._producer is None:
            self._producer = self._pool.take()
        return self._producer

    def prepare_commit(self, checkpoint_id: int) -> Sequence[OpenTransaction]:
        """Flushes the transaction, which stays open, and returns it if it has messages."""
        self._pool.snapshot_taken(checkpoint_id)
        producer = self._producer
        if producer is None:
            return ()
        producer.flush()
        if producer.last is None:
            return ()
        assert isinstance(producer, _TransactionalProducer)
        assert producer.identity is not None
        last, identity = producer.last, producer.identity
        prepared = OpenTransaction(
            producer.transactional_id,
            identity.producer_id,
            identity.epoch,
            last.topic(),
            last.partition(),
            last.offset(),
        )
        self._pool.prepared[prepared] = producer
        self._producer = None
        return [prepared]

    def check(self) -> None:
        if self._producer is not None:
            self._producer.poll()
        self._pool.poll()

    def close(self) -> None:
        if isinstance(self._producer, _TransactionalProducer):
            self._producer.abort()


class TransactionCommitter(SinkCommitter):
    """Commits transactions by their producers, or by their stored ids."""

    def __init__(self, pool: _ProducerPool, context: SinkContext, *, ignore_lost: bool) -> None:
        self._pool = pool
        self._context = context
        self._ignore_lost = ignore_lost
        self._cleaning: HelperThread | None = None
        pool.prepare_next()

    def commit(self, transaction: Transaction, committables: Sequence[OpenTransaction]) -> CommitOutcome:
        """Raises CommitError for a transaction that the brokers have aborted, and if they do not answer in time."""
        committed = [self._commit(committable) for committable in committables]
        return CommitOutcome.COMMITTED if any(committed) else CommitOutcome.ALREADY_COMMITTED

    def completed(self, checkpoint_id: int) -> None:
        """Aborts what earlier attempts and jobs have left open, once, and frees transactional ids."""
        self._pool.completed(checkpoint_id)
        if self._cleaning is None and (self._context.attempt or self._context.ended_jobs):
            self._cleaning = HelperThread(target=self._abort_leftovers, name="kafka leftovers", daemon=True)
            self._cleaning.start()

    @property
    def is_busy(self) -> bool:
        """Whether transactions of earlier attempts are being aborted: a job that continues from a savepoint of this one
        has other transactional ids, and does not look for them."""
        return self._cleaning is not None and self._cleaning.is_alive()

    def abort(self, transaction: Transaction, committables: Sequence[OpenTransaction]) -> None:
        for committable in committables:
            producer = self._pool.prepared.pop(committable, None)
            if producer is not None:
                producer.abort()

    def close(self) -> None:
        """Leaves prepared transactions open: a checkpoint may cover them."""
        self._pool.close()

    def _commit(self, committable: OpenTransaction) -> bool:
        """Commits a transaction; returns whether this call committed it, as far as brokers report it."""
        producer = self._pool.prepared.pop(committable, None)
        if producer is not None and producer.commit():
            self._pool.release(producer)
            return True
        if producer is not None:
            producer.close()
        return self._commit_by_id(committable)

    def _commit_by_id(self, committable: OpenTransaction) -> bool:
        identity = ProducerIdentity(committable.producer_id, committable.epoch)
        deadline = time.monotonic() + _PATIENCE_S
        problem = ""
        with TransactionClient(self._pool.settings) as client:
            while time.monotonic() < deadline:
                code = None
                try:
                    code = client.end(committable.transactional_id, identity, commit=True)
                except OSError as error:
                    problem = str(error)
                if code == 0:
                    return True
                if code is None or code in NOT_THE_PRODUCER:
                    # When a connection breaks, it is unknown whether the broker has executed the request.
                    seen = self._is_visible(committable, _PATIENCE_S if code else 2.0)
                    if seen:
                        return False
                    if code is not None:
                        self._report_lost(committable, NOT_THE_PRODUCER[code], seen)
                        return False
                elif code not in COORDINATOR_MOVES and code != CONCURRENT_TRANSACTIONS:
                    raise CommitError(str(KafkaProtocolError(f"EndTxn of {committable.transactional_id}", code)))
                problem = problem if code is None else f"Kafka's error {code}"
                time.sleep(_RETRY_S)
        raise CommitError(
            f"transaction {committable.transactional_id} is not committed in {_PATIENCE_S:g} s: {problem}"
        )

    def _report_lost(self, committable: OpenTransaction, answer: str, seen: bool | None) -> None:
        where = f"{committable.topic} [{committable.partition}] at offset {committable.offset}"
        reason = (
            f"and its last message ({where}) is not among the committed ones: the brokers aborted the transaction, "
            "because it was open for longer than kafka.transaction.timeout.ms, or the message was deleted meanwhile"
            if seen is False
            else f"and its last message ({where}) cannot be read, so it is unknown whether it was committed"
        )
        text = f"the brokers answer {answer} to the commit of transaction {committable.transactional_id}, {reason}"
        if not self._ignore_lost:
            raise CommitError(
                f"{text}. Restore an earlier checkpoint, or set option onMissing=ignore to continue without its rows"
            )
        _LOG.warning("%s; it is ignored", text)

    def _is_visible(self, committable: OpenTransaction, retry_timeout_s: float) -> bool | None:
        """Whether a reader of committed messages sees the transaction's last one; None if it cannot be looked for."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                **connection_settings(self._pool.settings),
                "group.id": "ckpt",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
            }
        )
        try:
            consumer.assign([TopicPartition(committable.topic, committable.partition, committable.offset)])
            deadline = time.monotonic() + retry_timeout_s
            while time.monotonic() < deadline:
                message = consumer.poll(_POLL_SECONDS)
                if message is None:
                    continue
                if message.error() is None:
                    return bool(message.offset() == committable.offset)
                if message.error().name() != "_PARTITION_EOF":
                    if not message.error().retriable():
                        return None
                elif message.offset() > committable.offset:
                    return False
                # Otherwise an open transaction would hide the messages after it until it ends.
            return None
        finally:
            consumer.close()

    def _abort_leftovers(self) -> None:
        """Takes over the transactional ids of earlier attempts, and of an ended job, in their order."""
        context = self._context
        try:
            with TransactionClient(self._pool.settings) as client:
                for attempt in range(max(0, context.attempt - _ATTEMPTS_LOOKED_AT), context.attempt):
                    self._abort_attempt(client, context.job_id, attempt)
                for job_id in context.ended_jobs if context.attempt < _ATTEMPTS_THAT_LOOK_BACK else ():
                    attempt = unused = 0  # how often it has restarted is not known here
                    while unused < _UNUSED_IN_A_ROW:
                        unused = 0 if self._abort_attempt(client, job_id, attempt) else unused + 1
                        attempt += 1
        except (OSError, KafkaProtocolError) as error:
            _LOG.warning("transactions of earlier attempts stay open until brokers abort them: %s", error)

    def _abort_attempt(self, client: TransactionClient, job_id: str, attempt: int) -> bool:
        """Aborts the transactions of every n-th subtask of an attempt; returns whether it had used any of the ids."""
        first = subtask = self._context.subtask_index
        while self._abort_subtask(client, _id_prefix(self._context, job_id, attempt, subtask)):
            subtask += self._context.parallelism
        return subtask > first

    def _abort_subtask(self, client: TransactionClient, prefix: str) -> bool:
        """Aborts the transactions of one subtask; returns whether it had used any of the ids."""
        slot = 0
        while self._take_over(client, f"{prefix}{slot}").epoch:
            slot += 1
        return slot > 0

    def _take_over(self, client: TransactionClient, transactional_id: str) -> ProducerIdentity:
        """Asks again while brokers do not answer: no later attempt may come that would abort the transaction."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                found = client.take_over(transactional_id)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise
                _LOG.info("transactional id %s is not taken over yet: %s", transactional_id, error)
            else:
                if isinstance(found, ProducerIdentity):
                    return found
                if found != CONCURRENT_TRANSACTIONS and found not in COORDINATOR_MOVES:
                    raise KafkaProtocolError(f"InitProducerId of {transactional_id}", found)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"InitProducerId of {transactional_id} got no answer in {_PATIENCE_S:g} s")
            time.sleep(_RETRY_S)
