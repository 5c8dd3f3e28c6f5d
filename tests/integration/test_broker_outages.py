"""Whole jobs from Kafka into Kafka and into Delta: a worker is killed, or the broker is away for up to a minute."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.chaos.oracle import running_totals
from tests.support.jobs import fast
from tests.support.kafka_broker import KafkaBroker, committed, kafka_broker, stored_broker
from tests.support.patience import patient

pytest.importorskip("confluent_kafka", reason="pip install 'ckpt-runtime[kafka]'")

_PROGRAM = Path(__file__).parents[1] / "chaos" / "pipeline"
_KEYS = 5
_AT_ONCE = 20
Row = tuple[Any, ...]


class Totals:
    """A job that writes the running totals of orders to ``target``, which is ``kafka`` or ``delta``."""

    def __init__(self, cluster: MiniCluster, broker: KafkaBroker, directory: Path, target: str) -> None:
        self.broker = broker
        self.sent: list[tuple[int, int, int]] = []
        self._table = str(directory / "totals") if target == "delta" else None
        broker.create_topic("orders", 2)
        broker.create_topic("totals", 1)
        options = fast(execution__checkpointing__interval="300ms", restart_strategy__fixed_delay__delay="500 ms")
        self.job = cluster.submit(
            _PROGRAM,
            entry=f"ends_job:kafka_to_{target}",
            arguments=[broker.servers, *([self._table] if self._table else [])],
            configuration={**options, "execution.checkpointing.dir": str(directory / "checkpoints")},
            parallelism=2,
        )
        cluster.wait_for_status(self.job, JobStatus.RUNNING)

    def send(self) -> None:
        first = len(self.sent)
        orders = [(number, number % _KEYS, number % 7) for number in range(first, first + _AT_ONCE)]
        for partition in (0, 1):
            values = [
                json.dumps({"id": number, "key": key, "amount": amount}).encode()
                for number, key, amount in orders
                if key % 2 == partition
            ]
            self.broker.produce("orders", values, partition=partition)
        self.sent.extend(orders)

    def found(self) -> list[Row]:
        return _in_table(self._table) if self._table else _in_topic(committed(self.broker, "totals").committed)

    def is_open(self, rows: int) -> bool:
        """Whether so many rows have reached the topic without being visible."""
        transactions = committed(self.broker, "totals").open.values()
        return sum(len(batch) for batches in transactions for _, batch in batches) == rows

    def assert_exact(self) -> None:
        assert Counter(self.found()) == Counter(running_totals(self.sent))


@pytest.mark.row("ends.5", "ends.8")
@pytest.mark.parametrize("target", ["kafka", "delta"])
def test_every_row_is_there_once_when_a_worker_is_killed(cluster: MiniCluster, tmp_path: Path, target: str) -> None:
    with kafka_broker(tmp_path) as broker:
        totals = Totals(cluster, broker, tmp_path, target)
        totals.send()
        _until(cluster, lambda: len(totals.found()) == len(totals.sent), "all rows")
        totals.send()
        os.kill(cluster.worker_pids(totals.job)[0], signal.SIGKILL)
        cluster.wait_until(lambda: cluster.restarts(totals.job) > 0, "a restart")
        totals.send()
        _until(cluster, lambda: len(totals.found()) >= len(totals.sent), "all rows behind the restart")
        cluster.savepoint(totals.job, tmp_path / "savepoints", stop=True)
        totals.assert_exact()
        assert totals.is_open(0)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.row("ends.4", "ends.5", "ends.8")
@pytest.mark.parametrize("target", ["kafka", "delta"])
def test_every_row_is_there_once_when_the_broker_crashes_and_is_away_for_a_minute(
    cluster: MiniCluster, client: CkptClient, tmp_path: Path, target: str
) -> None:
    """Rows lie in open transactions when it crashes, and checkpoints that cover them complete while it is away.

    No commit is in flight at the crash: a broker of the tests does not finish one that it has noted.
    """
    with stored_broker(tmp_path) as (broker, _):
        totals = Totals(cluster, broker, tmp_path, target)
        job = totals.job
        try:
            for outage_s in (1.0, 65.0):
                totals.send()
                _until(cluster, lambda: len(totals.found()) == len(totals.sent), "all rows")
                client.patch_checkpoint_config(job, CheckpointConfigPatch(interval_ms=600_000, timeout_ms=60_000))
                _until(cluster, lambda: not client.checkpoint_statistics(job).counts.in_progress, "the last checkpoint")
                _until(cluster, lambda: totals.is_open(0), "its commit")
                totals.send()
                if target == "kafka":
                    _until(cluster, lambda: totals.is_open(_AT_ONCE), "rows in open transactions")
                with broker.down():
                    client.patch_checkpoint_config(job, CheckpointConfigPatch(interval_ms=300))
                    over = time.monotonic() + outage_s
                    cluster.wait_until(lambda: time.monotonic() > over, "the end of the outage", 200)  # noqa: B023
                _until(cluster, lambda: len(totals.found()) >= len(totals.sent), "all rows behind the outage")
            totals.assert_exact()
            cluster.savepoint(job, tmp_path / "savepoints", stop=True)
            totals.assert_exact()
            assert totals.is_open(0)
        finally:
            if not cluster.status(job).is_globally_terminal:
                cluster.call(cluster.dispatcher.cancel_job(job))


def _until(cluster: MiniCluster, condition: Callable[[], bool], what: str) -> None:
    cluster.wait_until(condition, what, patient(120))


def _in_topic(messages: list[tuple[bytes | None, bytes | None]]) -> list[Row]:
    rows = [json.loads(value) for _, value in messages if value is not None]
    return [(row["key"], row["orders"], row["amount"], row["id"]) for row in rows]


def _in_table(table: str) -> list[Row]:
    import duckdb
    from deltalake import DeltaTable

    files = sorted(DeltaTable(table).file_uris()) if DeltaTable.is_deltatable(table) else []
    if not files:
        return []
    return duckdb.execute(f"SELECT key, orders, amount, id FROM read_parquet({files!r})").fetchall()
