"""Where a source of format ``kafka`` continues when a user has set its position in a savepoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.integration.test_kafka_source import numbers, options, read_until, until, values
from tests.support.jobs import PIPELINES, all_run, fast
from tests.support.kafka_broker import KafkaBroker
from tests.support.outputs import visible
from tests.support.patience import patient
from tests.unit.runtime.connectors.split_jobs import Job, States, moved

pytest.importorskip("confluent_kafka")


@pytest.fixture
def topic(broker: KafkaBroker) -> str:
    """A topic of two partitions: 0 to 9 in the first one, 100 to 109 in the second."""
    name = f"orders-{uuid4().hex[:8]}"
    broker.create_topic(name, 2)
    for partition in (0, 1):
        for number in range(10):
            value = str(100 * partition + number).encode()
            broker.produce(name, [value], partition=partition, timestamp=1_000_000 + 60_000 * number)
    return name


@pytest.fixture
def state(broker: KafkaBroker, topic: str) -> tuple[States, States]:
    """The state of a job that has read all of it."""
    with closing(Job("kafka", options(broker, topic), parallelism=2)) as job:
        read_until(job, 20)
        return job.checkpoint(1, 1)


def read_from(broker: KafkaBroker, topic: str, state: Any, count: int, **given: str) -> Counter[int]:
    """What a job reads up to a message that comes last in each partition; these are left out."""
    for partition in (0, 1):
        broker.produce(topic, [b"-1"], partition=partition)
    with closing(Job("kafka", options(broker, topic, **given), restored=state)) as job:
        found = numbers(read_until(job, count + 2))
    ends = found.pop(-1)
    assert ends >= 2
    return found


@pytest.mark.row("ends.7")
@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("earliest", [*range(10), *range(100, 110)]),
        ("latest", []),
        ('{"0": 7, "1": 10}', [7, 8, 9]),
        ('{"0": -2}', [*range(10)]),
    ],
)
def test_messages_are_read_from_the_position_that_was_set(
    broker: KafkaBroker, topic: str, state: tuple[States, States], to: str, expected: list[int]
) -> None:
    given = json.dumps({topic: json.loads(to)}) if to.startswith("{") else to
    restored = moved(state, given)
    if to == "latest":
        # The end is that of the moment at which the job starts.
        broker.produce(topic, values(50, 3), partition=0)
        with closing(Job("kafka", options(broker, topic), restored=restored)) as job:
            until(lambda: job.discover() or any(reader.reads for reader in job.readers), "the partitions")
            restored = job.checkpoint(2)
    assert read_from(broker, topic, restored, len(expected)) == Counter(expected)


@pytest.mark.row("ends.7")
@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ({"0": 11}, r"-0 has the offsets 0 to 10, but 11 was requested"),
        ({"5": 0}, r"the offsets name .*-5, which the source does not read or which does not exist"),
        ([1], "expected JSON such as"),
    ],
)
def test_a_position_that_does_not_exist_fails_the_start(
    broker: KafkaBroker, topic: str, state: tuple[States, States], to: Any, problem: str
) -> None:
    restored = moved(state, json.dumps({topic: to}))
    with pytest.raises(ValueError, match=f"source 'op' cannot continue from the given position: .*{problem}"):
        Job("kafka", options(broker, topic), restored=restored)


@dataclass
class Counting:
    """A job that counts messages, and what its directory shows."""

    cluster: MiniCluster
    client: CkptClient
    broker: KafkaBroker
    topic: str
    directory: Path
    job_id: str = ""

    def start(
        self, savepoint: str | None = None, parallelism: int = 2, positions: Mapping[str, str] | None = None
    ) -> None:
        program = self.client.upload_pipeline(*pack_pipeline(PIPELINES / "counted_messages.py"))
        self.job_id = self.client.run_pipeline(
            program,
            RunOptions(
                arguments=(self.broker.servers, self.topic, str(self.directory / "out")),
                parallelism=parallelism,
                configuration={**fast(), "execution.checkpointing.dir": str(self.directory / "checkpoints")},
                savepoint_path=savepoint,
                source_positions=positions or {},
            ),
        )
        self.cluster.wait_for_status(self.job_id, JobStatus.RUNNING)

    def counts(self) -> dict[int, int]:
        frame = visible(self.directory / "out")
        return {} if not len(frame) else {int(key): int(n) for key, n in frame.groupby("value")["count"].max().items()}

    def reaches(self, expected: dict[int, int]) -> None:
        self.cluster.wait_until(lambda: self.counts() == expected, f"the counts {expected}", patient(120))

    def stop(self) -> str:
        self.cluster.wait_until(lambda: all_run(self.cluster, self.job_id), "all subtasks to run")
        location = self.cluster.savepoint(self.job_id, self.directory / "savepoints", stop=True)
        self.cluster.wait_for_status(self.job_id, JobStatus.FINISHED)
        return location


@contextmanager
def ended(job: Counting) -> Iterator[Counting]:
    try:
        yield job
    finally:
        if job.job_id and not job.cluster.status(job.job_id).is_globally_terminal:
            job.cluster.call(job.cluster.dispatcher.cancel_job(job.job_id))
            job.cluster.wait_for_status(job.job_id, JobStatus.CANCELED)


def tool(*arguments: str) -> Any:
    command = [sys.executable, "-m", "ckpt_runtime.cli", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.row("ends.7")
def test_a_job_reads_again_from_the_position_and_keeps_its_other_state(
    client: CkptClient, cluster: MiniCluster, broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """The oracle: a message that is read again raises its count, which only the kept state can know."""
    seen = Counter([*range(10), *range(100, 110)])
    with ended(Counting(cluster, client, broker, topic, tmp_path)) as job:
        job.start()
        job.reaches(seen)
        savepoint = job.stop()
        offsets = tmp_path / "offsets.json"
        offsets.write_text(json.dumps({topic: {"0": 4}}))
        made = tool("snapshot", "reposition", savepoint, "--uid", "orders", "--to", str(offsets))
        assert made["position"] == json.dumps({topic: {"0": 4}})
        job.start(made["location"], parallelism=3)
        seen.update(range(4, 10))
        job.reaches(seen)
        second = job.stop()
        with pytest.raises(BadRequest, match="no source 'payments' whose position can be set"):
            job.start(second, positions={"payments": "earliest"})
        with pytest.raises(BadRequest, match="they change a snapshot, but savepointPath names none"):
            job.start(positions={"orders": "earliest"})
        with pytest.raises(BadRequest, match=r"sourcePositions\.orders: 'soon' is not acceptable"):
            job.start(second, positions={"orders": "soon"})
        job.start(second, parallelism=1, positions={"orders": "earliest"})
        seen.update([*range(10), *range(100, 110)])
        job.reaches(seen)
        broker.produce(topic, values(200, 2), partition=1)
        seen.update([200, 201])
        job.reaches(seen)
        third = job.stop()
        job.start(third, parallelism=2)
        broker.produce(topic, values(300, 1), partition=0)
        seen.update([300])
        job.reaches(seen)
