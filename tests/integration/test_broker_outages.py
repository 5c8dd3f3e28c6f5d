"""Whole jobs from Kafka into Kafka and into Delta whose broker crashes, and is away for a second and for a minute."""

from __future__ import annotations

import json
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
from tests.support.kafka_broker import committed, stored_broker
from tests.support.patience import patient

pytest.importorskip("confluent_kafka", reason="pip install 'ckpt-runtime[kafka]'")

_PROGRAM = Path(__file__).parents[1] / "chaos" / "pipeline"
_KEYS = 5
_AT_ONCE = 20
Row = tuple[Any, ...]


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
        broker.create_topic("orders", 2)
        broker.create_topic("totals", 1)
        table = str(tmp_path / "totals")
        sent: list[tuple[int, int, int]] = []

        def send() -> None:
            first = len(sent)
            orders = [(number, number % _KEYS, number % 7) for number in range(first, first + _AT_ONCE)]
            for partition in (0, 1):
                values = [
                    json.dumps({"id": number, "key": key, "amount": amount}).encode()
                    for number, key, amount in orders
                    if key % 2 == partition
                ]
                broker.produce("orders", values, partition=partition)
            sent.extend(orders)

        def found() -> list[Row]:
            return _in_topic(committed(broker, "totals").committed) if target == "kafka" else _in_table(table)

        def is_open(rows: int) -> bool:
            """Whether so many rows have reached the target without being visible."""
            return sum(map(len, committed(broker, "totals").open.values())) == rows

        options = fast(execution__checkpointing__interval="300ms", restart_strategy__fixed_delay__delay="500 ms")
        job = cluster.submit(
            _PROGRAM,
            entry=f"ends_job:kafka_to_{target}",
            arguments=[broker.servers, *([table] if target == "delta" else [])],
            configuration={**options, "execution.checkpointing.dir": str(tmp_path / "checkpoints")},
            parallelism=2,
        )
        cluster.wait_for_status(job, JobStatus.RUNNING)
        try:
            for outage_s in (1.0, 65.0):
                send()
                _until(cluster, lambda: len(found()) == len(sent), "all rows")
                client.patch_checkpoint_config(job, CheckpointConfigPatch(interval_ms=600_000, timeout_ms=60_000))
                _until(cluster, lambda: not client.checkpoint_statistics(job).counts.in_progress, "the last checkpoint")
                _until(cluster, lambda: is_open(0), "its commit")
                send()
                if target == "kafka":
                    _until(cluster, lambda: is_open(_AT_ONCE), "rows in open transactions")
                with broker.down():
                    client.patch_checkpoint_config(job, CheckpointConfigPatch(interval_ms=300))
                    over = time.monotonic() + outage_s
                    cluster.wait_until(lambda: time.monotonic() > over, "the end of the outage", 200)  # noqa: B023
                _until(cluster, lambda: len(found()) >= len(sent), "all rows behind the outage")
            assert Counter(found()) == Counter(running_totals(sent))
            cluster.savepoint(job, tmp_path / "savepoints", stop=True)
            assert Counter(found()) == Counter(running_totals(sent))
            assert committed(broker, "totals").open == {}
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
