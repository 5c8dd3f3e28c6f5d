"""Format ``kafka`` on logs with gaps: aborted and open transactions, compaction; times of the log; new partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import pytest

from ckpt_runtime.connectors.kafka_source import KafkaSource
from ckpt_runtime.graph.kafka_options import kafka_columns
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.kafka_log import KafkaLogs, Log, kafka_logs
from tests.unit.runtime.connectors.split_jobs import Job, States, moved

pytest.importorskip("confluent_kafka", reason="pip install 'ckpt-runtime[kafka]'")

pytestmark = pytest.mark.row("ends.4")


@pytest.fixture
def logs() -> Iterator[KafkaLogs]:
    with kafka_logs() as served:
        yield served


def job(logs: KafkaLogs, restored: tuple[States, States] | None = None, **more: str) -> Job:
    given = {"kafka.bootstrap.servers": logs.servers, "subscribe": "t", "startingOffsets": "earliest", **more}
    given["kafka.topic.metadata.refresh.interval.ms"] = "20"
    return Job("kafka", given, restored=restored, job_id=uuid4().hex)  # a job that has ended reads no more


def until(running: Job, condition: Callable[[], bool], what: str) -> None:
    def over() -> bool:
        running.discover()
        running.read()
        return condition()

    MiniCluster.wait_until(over, f"{what}; there are {len(running.rows)} rows")


def read_now(logs: KafkaLogs, restored: Any = None, **more: str) -> tuple[list[int], Any]:
    """What a job with ``availableNow`` reads, and its state."""
    with closing(job(logs, restored, availableNow="true", **more)) as running:
        until(running, lambda: running.ended and not any(r.has_work_left for r in running.readers), "the end")
        return [int(row["value"]) for row in running.rows], running.checkpoint(1)


def with_transactions(log: Log) -> None:
    log.add(0, 1, producer=7)
    log.finish(7, commit=True)
    log.add(2, 3, producer=8)
    log.add(4)
    log.finish(8, commit=False)
    log.add(5, producer=7)
    log.finish(7, commit=False)


def test_records_of_aborted_transactions_are_not_read_and_their_offsets_are_passed_once(logs: KafkaLogs) -> None:
    """The log ends with an aborted transaction: no record tells that its end was reached."""
    [log] = logs.topic("t")
    with_transactions(log)
    rows, state = read_now(logs)
    assert rows == [0, 1, 4]
    log.add(6)
    rows, state = read_now(logs, state)
    assert rows == [6]
    assert read_now(logs, state)[0] == []
    assert read_now(logs, **{"kafka.isolation.level": "read_uncommitted"})[0] == [0, 1, 2, 3, 4, 5, 6]


def test_job_reads_on_over_aborted_transactions_and_through_a_restore_between_them(logs: KafkaLogs) -> None:
    [log] = logs.topic("t")
    with_transactions(log)
    with closing(job(logs)) as running:
        until(running, lambda: len(running.rows) == 3, "the committed records")
        state = running.checkpoint(1)
    log.add(6, producer=8)
    log.finish(8, commit=False)
    log.add(7, 8)
    with closing(job(logs, state)) as running:
        until(running, lambda: len(running.rows) == 2, "the records behind them")
        assert [int(row["value"]) for row in running.rows] == [7, 8]


def test_available_records_end_in_front_of_an_open_transaction_and_are_continued_there(logs: KafkaLogs) -> None:
    [log] = logs.topic("t")
    log.add(0)
    log.add(1, producer=7)
    log.add(2)
    rows, state = read_now(logs)
    assert rows == [0]
    log.finish(7, commit=True)
    rows, state = read_now(logs, state)
    assert rows == [1, 2]
    assert read_now(logs, state)[0] == []


def test_records_that_compaction_has_left_are_read_once_whatever_gaps_are_around_them(logs: KafkaLogs) -> None:
    logs.topic("t", 3)
    for log in logs.logs["t"][:2]:
        log.compact(5)
        log.add(1)
        log.compact(100)
        log.add(2, 3)
    logs.logs["t"][1].compact(7, is_last=True)
    logs.logs["t"][2].compact(9, is_last=True)
    rows, state = read_now(logs, maxOffsetsPerTrigger="10")
    assert sorted(rows) == [1, 1, 2, 2, 3, 3]
    logs.logs["t"][2].add(4)
    assert read_now(logs, state)[0] == [4]


def test_available_records_are_read_in_batches_of_a_number_of_offsets_that_spark_would_read(logs: KafkaLogs) -> None:
    """Dealt out by what is left of each partition, also behind a restore, up to the ends that were there at first."""
    *logs_with_records, empty = logs.topic("t", 4)
    for log, records in zip(logs_with_records, (50, 7, 1), strict=True):
        log.add(*range(records))
    given = {"kafka.bootstrap.servers": logs.servers, "subscribe": "t", "startingOffsets": "earliest"}
    source = KafkaSource("kafka", {**given, "maxOffsetsPerTrigger": "10", "availableNow": "true"})
    state, batches = None, []
    for most in (3, 9):
        with closing(source.open_enumerator(kafka_columns(headers=False), state, bounded=True)) as enumerator:
            while len(batches) < most and (found := enumerator.discover()):
                assert len({split.id for split in found}) == len(found)
                ranges = [(each.description["begin"], each.description["end"]) for each in found]
                batches.append(ranges)
                if len(batches) == 5:
                    empty.add(1)
            state = enumerator.snapshot()
    first = [[(0, 8), (0, 1), (0, 1)], [(8, 16), (1, 2)], [(16, 24), (2, 3)]]
    assert batches == [*first, [(24, 32), (3, 4)], [(32, 40), (4, 5)], [(40, 48), (5, 6)], [(48, 50), (6, 7)]]


def test_times_are_those_of_the_log_if_it_sets_them_and_lead_to_the_first_record(logs: KafkaLogs) -> None:
    [log] = logs.topic("t")
    for number in range(4):
        log.add(number, at_ms=1_000 * number, log_time=number > 1)
    with closing(job(logs, startingTimestamp="1000", availableNow="true")) as running:
        until(running, lambda: len(running.rows) == 3, "records from a time on")
        found = [(int(row["value"]), row["timestamp"].timestamp(), row["timestampType"]) for row in running.rows]
    assert found == [(1, 1.0, 0), (2, 2.0, 1), (3, 3.0, 1)]
    assert read_now(logs, startingTimestamp="9000", startingOffsetsByTimestampStrategy="latest")[0] == []
    with pytest.raises(ValueError, match="t-0 has no record of time 9000 ms or later"):
        read_now(logs, startingTimestamp="9000")


@pytest.mark.row("ends.7")
def test_savepoint_is_continued_at_the_first_record_of_a_time(logs: KafkaLogs) -> None:
    for number, log in enumerate(logs.topic("t", 2)):
        for second in range(4):
            log.add(10 * number + second, at_ms=1_000 * second + 500)
    with closing(job(logs)) as running:
        until(running, lambda: len(running.rows) == 8, "all records")
        state = running.checkpoint(1)
    for time, expected in (("1970-01-01T00:00:02", [2, 3, 12, 13]), ("1970-01-01T00:01:00", [])):
        with closing(job(logs, moved(state, time))) as running:
            until(running, lambda: any(reader.reads for reader in running.readers), "the partitions")
            for log in logs.logs["t"]:
                log.add(-1)
            until(running, lambda: [row["value"] for row in running.rows].count(b"-1") >= 2, "new records")
            assert sorted(int(row["value"]) for row in running.rows if row["value"] != b"-1") == expected


@pytest.mark.parametrize("is_known", [True, False])
def test_partition_that_appears_around_a_savepoint_is_read_once_from_its_beginning(
    logs: KafkaLogs, is_known: bool
) -> None:
    """``is_known``: the savepoint has it, perhaps before any reader has read of it."""
    [first] = logs.topic("t")
    first.add(0)
    with closing(job(logs, startingOffsets="latest")) as running:
        until(running, lambda: any(reader.reads for reader in running.readers), "the partition")
        logs.topic("t")
        logs.logs["t"][1].add(1)
        if is_known:
            MiniCluster.wait_until(running.discover, "the second partition")
        state = running.checkpoint(1)
    first.add(2)
    with closing(job(logs, state, startingOffsets="latest")) as running:
        until(running, lambda: len(running.rows) == 2, "the new records")
        assert sorted(int(row["value"]) for row in running.rows) == [1, 2]
