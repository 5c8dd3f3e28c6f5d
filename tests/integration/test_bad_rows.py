"""Rows that cannot be read are kept beside the others, each once, through kills."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.metric_table import TASK, values
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, all_run, fast
from tests.support.kafka_broker import KafkaBroker
from tests.support.outputs import hidden, visible
from tests.support.patience import patient

BAD = ('{"order_id": "x"}', "{", "no JSON", '{"order_id": 1, "amount": "much"}')


def write_file(directory: Path, number: int) -> list[str]:
    """A file of which every fifth line is bad; returns these."""
    lines = [f'{{"order_id": {number * 100 + at}, "amount": 1.5}}' for at in range(100)]
    for at in range(0, 100, 5):
        lines[at] = f"{BAD[at % len(BAD)]}  "[: len(BAD[at % len(BAD)]) + at % 3]
    hidden_file = directory / f".{number}"
    hidden_file.write_text("\n".join(lines))
    hidden_file.rename(directory / str(number))
    return lines[::5]


@pytest.mark.long
@pytest.mark.row("ends.6")
def test_bad_rows_are_kept_once_in_a_directory_of_their_own_through_kills(cluster: MiniCluster, tmp_path: Path) -> None:
    source, orders, dead = tmp_path / "in", tmp_path / "orders", tmp_path / "dead"
    source.mkdir()
    job = cluster.submit(
        PIPELINES / "bad_rows.py",
        arguments=[str(source), str(orders), str(dead)],
        configuration={**fast(), "execution.checkpointing.dir": str(tmp_path / "checkpoints")},
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.RUNNING)
    bad: Counter[str] = Counter()

    def there(rows: int) -> bool:
        return len(visible(dead)) >= bad.total() and len(visible(orders)) >= rows

    for number in range(3):
        bad.update(write_file(source, number))
        cluster.wait_until(lambda: all_run(cluster, job), "all subtasks to run")
        os.kill(cluster.worker_pids(job)[number % 2], signal.SIGKILL)
        cluster.wait_until(partial(there, 80 * (number + 1)), "the rows of the file", patient(120))
    cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert Counter(visible(dead).value) == bad
    good = sorted(visible(orders).order_id)
    assert good == [number for number in range(300) if number % 5]
    assert hidden(orders) == hidden(dead) == []


@pytest.mark.row("ends.6")
def test_rows_that_an_expression_fails_for_are_kept_once_with_the_reason_through_a_kill(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    source, good, dead = tmp_path / "in", tmp_path / "good", tmp_path / "dead"
    source.mkdir()
    job = cluster.submit(
        PIPELINES / "bad_rows.py",
        entry="bad_rows:ratios",
        arguments=[str(source), str(good)],
        configuration={
            **fast(),
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "execution.bad-rows.mode": "DEAD_LETTER",
            "execution.bad-rows.directory": str(dead),
        },
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.RUNNING)
    for number in range(2):
        lines = ["x", "0", *(str(100 * number + at) for at in range(1, 100))]
        (source / f".{number}").write_text("\n".join(lines))
        (source / f".{number}").rename(source / str(number))
        cluster.wait_until(lambda: all_run(cluster, job), "all subtasks to run")
        os.kill(cluster.worker_pids(job)[number], signal.SIGKILL)
        wanted = 99 * (number + 1) - 1
        cluster.wait_until(lambda wanted=wanted: len(visible(good)) >= wanted, "the rows of the file", patient(120))  # type: ignore[misc]
    cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    wanted_rows = [100 * number + at for number in range(2) for at in range(1, 100) if (number, at) != (0, 13)]
    assert sorted(zip(visible(good).n, visible(good).twice, strict=True)) == [(n, 2 * n) for n in wanted_rows]
    bad = visible(dead)
    of_function = bad[bad.condition == "ValueError"]
    assert [reason.count("13 has no double") > 0 for reason in of_function.reason] == [True]
    bad = bad[bad.condition != "ValueError"]
    conditions = {"CAST_INVALID_INPUT": '{"value": "x"}', "DIVIDE_BY_ZERO": '{"n": 0}'}
    assert Counter(zip(bad.condition, bad.row, strict=True)) == Counter(dict.fromkeys(conditions.items(), 2))
    assert hidden(good) == hidden(dead) == []


@pytest.mark.row("ends.6")
def test_dead_letters_behind_kafka_name_the_message_though_the_query_reads_its_value_only(
    cluster: MiniCluster, broker: KafkaBroker, tmp_path: Path
) -> None:
    topic = "with-bad-parts"
    broker.create_topic(topic, 2)
    broker.produce(topic, [b"", b"1,2", b"-,x"], partition=0)
    broker.produce(topic, [b"3,-,y,4"], partition=1)
    job = cluster.submit(
        PIPELINES / "bad_rows.py",
        entry="bad_rows:messages",
        arguments=[broker.servers, topic, str(tmp_path / "good")],
        configuration={
            **fast(),
            "execution.bad-rows.mode": "DEAD_LETTER",
            "execution.bad-rows.directory": str(tmp_path / "dead"),
        },
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert sorted(visible(tmp_path / "good").n) == [1, 2, 3, 4]
    bad = visible(tmp_path / "dead")
    assert sorted(zip(bad.row, bad.position, bad.raw, strict=True)) == [
        ('{"part": "x"}', f"topic '{topic}', partition 0, offset 2", b"-,x"),
        ('{"part": "y"}', f"topic '{topic}', partition 1, offset 0", b"3,-,y,4"),
    ]


@pytest.mark.row("ends.6")
def test_records_that_a_source_cannot_read_are_kept_once_by_its_option_through_kills(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    """The source keeps what is no JSON of its types, the job what is no number in an expression."""
    source, orders, unread, failed = (tmp_path / name for name in ("in", "orders", "unread", "failed"))
    source.mkdir()
    job = cluster.submit(
        PIPELINES / "bad_rows.py",
        entry="bad_rows:options",
        arguments=[str(source), str(orders), str(unread)],
        configuration={
            **fast(),
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "execution.bad-rows.mode": "DEAD_LETTER",
            "execution.bad-rows.directory": str(failed),
        },
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.RUNNING)
    bad: Counter[str] = Counter()
    for number in range(3):
        bad.update(write_file(source, number))
        cluster.wait_until(lambda: all_run(cluster, job), "all subtasks to run")
        if number < 2:
            os.kill(cluster.worker_pids(job)[number % 2], signal.SIGKILL)
        wanted = 80 * (number + 1)
        cluster.wait_until(lambda wanted=wanted: len(visible(orders)) >= wanted, "the rows of the file", patient(120))  # type: ignore[misc]
    cluster.wait_until(lambda: counted(cluster, job) >= len(BAD) * 5, "the metric of the last file's bad rows")
    cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    lines, rows = visible(unread), visible(failed)
    no_numbers = Counter({line: times for line, times in bad.items() if "much" in line})
    assert Counter(raw.decode() for raw in lines.raw) == bad - no_numbers
    assert {position.rsplit("/", 1)[-1] for position in lines.position} == {
        f"{number}, line {at + 1}" for number in range(3) for at in range(0, 100, 5) if at % 20 != 15
    }
    assert set(lines.operator) == {"lines.reader"}
    expected = {("CAST_INVALID_INPUT", '{"order_id": 1, "amount": "much"}'): no_numbers.total()}
    assert Counter(zip(rows.condition, rows.row, strict=True)) == Counter(expected)
    assert sorted(visible(orders).order_id) == [number for number in range(300) if number % 5]
    assert hidden(orders) == hidden(unread) == hidden(failed) == []


def counted(cluster: MiniCluster, job: str) -> int:
    """The metric of bad rows, of all subtasks since they were deployed."""
    details = cluster.call(cluster.dispatcher.job_details(job))
    measures = [subtask.measures for vertex in details.vertices for subtask in vertex.subtasks]
    return sum(int(values(TASK, measure)["numBadRecordsDropped"]) for measure in measures if measure is not None)
