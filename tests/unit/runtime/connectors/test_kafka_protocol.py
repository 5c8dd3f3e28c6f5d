"""The engine's own requests to Kafka: how answers of a broker are understood, and what is refused when planned."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import pytest

from ckpt_runtime.connectors import kafka_sink, kafka_source
from ckpt_runtime.connectors.kafka_protocol import (
    KafkaProtocolError,
    ProducerIdentity,
    ScramExchange,
    TransactionClient,
)
from ckpt_runtime.connectors.kafka_sink import KafkaSink, OpenTransaction, TransactionCommitter
from ckpt_runtime.connectors.part_directory import CommitError
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import source_options
from ckpt_runtime.graph.kafka_columns import check_transactions
from ckpt_runtime.sinks import CommitOutcome, SinkContext, Transaction
from tests.support.patience import deadline

CONTEXT = SinkContext("0" * 16, "f" * 32, "out", 0, 1, 0)
OPEN = OpenTransaction("ckpt-1", 7, 3, "orders", 0, 41)
COMMIT = Transaction("sink", 1)


def _end_txn_answer(version: int, code: int) -> bytes:
    """As the published schema of EndTxnResponse says: from version 3 on flexible, with an empty list of tagged fields
    behind the head and behind the body."""
    answer = struct.pack(">ih", 0, code)
    return answer if version < 3 else b"\0" + answer + b"\0"


@contextmanager
def scripted_broker(*codes: int, end_txn: tuple[int, int] = (0, 5)) -> Iterator[tuple[str, list[bytes]]]:
    """A broker that is its own coordinator and answers each ``EndTxn`` with the next code; yields the requests too.

    ``end_txn`` are the versions of that request which it knows.
    """
    requests: list[bytes] = []
    answers = list(codes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as stream:
                    while size := stream.read(4):
                        request = stream.read(struct.unpack(">i", size)[0])
                        key, version, number = struct.unpack_from(">hhi", request)
                        answer = struct.pack(">ihhi", 0, 0, -1, 0)
                        answer += struct.pack(">h", 9) + b"127.0.0.1" + struct.pack(">i", port)
                        if key == 18:
                            answer = struct.pack(">hi", 0, 2) + struct.pack(">hhhhhh", 10, 0, 6, 26, *end_txn)
                        if key == 26:
                            requests.append(request)
                            answer = _end_txn_answer(version, answers.pop(0))
                        connection.sendall(struct.pack(">ii", len(answer) + 4, number) + answer)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{port}", requests
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@contextmanager
def committer(servers: str, monkeypatch: pytest.MonkeyPatch, seen: bool | None, **options: str) -> Iterator[Any]:
    pytest.importorskip("confluent_kafka", reason="pip install 'ckpt-runtime[kafka]'")
    monkeypatch.setattr("ckpt_runtime.connectors.kafka_sink._ProducerPool.prepare_next", lambda pool: None)
    monkeypatch.setattr(TransactionCommitter, "_is_visible", lambda *given: seen)
    opened = KafkaSink({"kafka.bootstrap.servers": servers, **options}).open_committer(None, CONTEXT)
    yield opened
    opened.close()


def with_error(call: Callable[[], object], kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        call()


def test_commit_is_asked_again_while_the_coordinator_moves_and_ends_other_transactions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted_broker(16, 14, 51, 0) as (servers, requests), committer(servers, monkeypatch, None) as commits:
        assert commits.commit(COMMIT, [OPEN]) is CommitOutcome.COMMITTED
    key, version = struct.unpack_from(">hh", requests[-1])
    assert (key, version, len(requests)) == (26, 2, 4)
    assert requests[-1].endswith(b"\0\6ckpt-1" + struct.pack(">qh?", 7, 3, True))


@pytest.mark.parametrize("answer", [47, 48, 49, 59, 90])
def test_answer_that_the_producer_is_fenced_means_committed_if_a_reader_sees_the_last_message(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_broker(answer) as (servers, _), committer(servers, monkeypatch, True) as commits:
        assert commits.commit(COMMIT, [OPEN]) is CommitOutcome.ALREADY_COMMITTED


@pytest.mark.parametrize(
    ("seen", "problem"), [(False, "brokers aborted the transaction"), (None, "it is unknown whether")]
)
def test_aborted_transaction_fails_the_job_by_name_unless_the_sink_may_ignore_it(
    seen: bool | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_broker(90) as (servers, _), committer(servers, monkeypatch, seen) as commits:
        expected = f"PRODUCER_FENCED .*ckpt-1.*offset 41.*{problem}.*onMissing=ignore"
        with_error(lambda: commits.commit(COMMIT, [OPEN]), CommitError, expected)
    with scripted_broker(90) as (servers, _), committer(servers, monkeypatch, seen, onMissing="ignore") as commits:
        assert commits.commit(COMMIT, [OPEN]) is CommitOutcome.ALREADY_COMMITTED


def test_refused_commit_fails_the_job_with_the_number_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_broker(53) as (servers, _), committer(servers, monkeypatch, None) as commits:
        with_error(lambda: commits.commit(COMMIT, [OPEN]), CommitError, "EndTxn of ckpt-1 was refused .* error 53")


def test_connection_error_names_each_broker_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with TransactionClient({"bootstrap.servers": f"127.0.0.1:{port}"}) as client:
        end = partial(client.end, "id", ProducerIdentity(1, 0), commit=True)
        with_error(end, ConnectionError, f"127.0.0.1:{port}: .*refused")


def test_scram_gives_the_proof_of_the_example_in_rfc_7677() -> None:
    exchange = ScramExchange("SCRAM-SHA-256", "user", "pencil", "rOprNGfwEbeRWgbNEkqO")
    assert exchange.first == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    proof = exchange.proof(f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode())
    assert proof == f"c=biws,r={nonce},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=".encode()
    exchange.verify(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    with pytest.raises(ConnectionError, match="has not proved"):
        exchange.verify(b"v=AAAATRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize(
    ("options", "interval_ms", "problem"),
    [
        ({}, None, "set execution.checkpointing.interval, or the sink's option deliveryGuarantee=at-least-once"),
        ({}, 300_000, "'kafka.transaction.timeout.ms': brokers abort a transaction after 900000 ms"),
        ({"kafka.transaction.timeout.ms": "600000"}, 1_000, "after 600000 ms, .*1000 ms after .*take 600000 ms"),
    ],
)
def test_transactions_that_brokers_would_abort_before_a_checkpoint_are_refused(
    options: dict[str, str], interval_ms: int | None, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        check_transactions(options, interval_ms, 600_000)
    check_transactions({**options, "deliveryGuarantee": "at-least-once"}, interval_ms, 600_000)
    check_transactions({}, 1_000, 600_000)


@pytest.mark.row("ends.5")
@pytest.mark.parametrize(("end_txn", "sent"), [((0, 2), 2), ((0, 5), 2), ((2, 4), 2), ((3, 5), 3), ((4, 6), 4)])
def test_end_of_a_transaction_is_sent_in_the_least_version_that_keeps_its_epoch_and_that_the_broker_knows(
    end_txn: tuple[int, int], sent: int
) -> None:
    with (
        scripted_broker(51, 0, end_txn=end_txn) as (servers, requests),
        TransactionClient(servers_of(servers)) as client,
    ):
        assert [client.end("ckpt-1", ProducerIdentity(7, 3), commit=True) for _ in range(2)] == [51, 0]
    for request in requests:
        assert struct.unpack_from(">hh", request) == (26, sent)
        text = b"\0\6ckpt-1" if sent == 2 else b"\7ckpt-1"  # the compact form has its length plus one
        assert request.endswith(
            b"\0\4ckpt" + b"\0" * (sent > 2) + text + struct.pack(">qh?", 7, 3, True) + b"\0" * (sent > 2)
        )


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("end_txn", [(0, 1), (5, 6)])
def test_broker_without_a_version_that_keeps_the_epoch_is_named_and_gets_no_request(end_txn: tuple[int, int]) -> None:
    with scripted_broker(end_txn=end_txn) as (servers, requests), TransactionClient(servers_of(servers)) as client:
        refused = (
            f"EndTxn in any of the versions 2 to 4 .* error 35: the broker has versions {end_txn[0]} to {end_txn[1]}"
        )
        with_error(partial(client.end, "ckpt-1", ProducerIdentity(7, 3), commit=True), KafkaProtocolError, refused)
        assert requests == []


def servers_of(servers: str) -> dict[str, str]:
    return {"bootstrap.servers": servers}


@pytest.mark.row("ends.4", "ends.5")
def test_addresses_at_which_no_broker_answers_fail_source_and_sink_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Instead of a source that waits for ever, and a sink that only says that time has passed."""
    monkeypatch.setattr(kafka_source, "_FIRST_ANSWER_S", 0.0)
    monkeypatch.setattr(kafka_source, "_ANSWER_S", 0.5)
    monkeypatch.setattr(kafka_sink, "_PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        servers = f"127.0.0.1:{server.getsockname()[1]}"
    reason = f"no broker answers at {servers}: .*Connection refused"
    options = source_options("kafka", {"kafka.bootstrap.servers": servers, "subscribe": "orders"})
    for bounded in (True, False):
        enumerator = kafka_source.KafkaEnumerator(options, None, bounded=bounded)
        is_over = deadline(30)
        with pytest.raises(kafka_source.BrokersAwayError, match=f"{reason}.*check kafka.bootstrap.servers"):
            while not is_over():
                enumerator.discover()
        enumerator.close()
    settings = {"bootstrap.servers": servers, "message.timeout.ms": "500"}
    producer = kafka_sink._Producer(settings)
    producer.send("orders", b"1", None, {})
    with pytest.raises(kafka_sink.KafkaDeliveryError, match=f"topic 'orders': .*{reason}"):
        producer.flush()
    with pytest.raises(kafka_sink.KafkaDeliveryError, match=f"transactional id one: .*{reason}"):
        kafka_sink._TransactionalProducer(settings, "one", 0).begin()


def test_message_that_is_too_large_is_refused_with_its_size_and_the_option() -> None:
    producer = kafka_sink._Producer({"bootstrap.servers": "127.0.0.1:1", "message.max.bytes": "2000"})
    with pytest.raises(kafka_sink.KafkaDeliveryError, match=r"a message of 3001 bytes is too .*kafka\.message\.max\.b"):
        producer.send("orders", b"1" * 3000, b"k", {})
