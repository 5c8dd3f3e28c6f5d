"""Sources that find their splits while the job runs: exact under kills, rescales and savepoints."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import all_run, fast, program_of
from tests.support.outputs import hidden, visible
from tests.support.patience import patient

ROWS = 500


class Copy:
    """A job that copies a source into a directory."""

    def __init__(
        self, cluster: MiniCluster, directory: Path, source: str, options: dict[str, str], schema: str = ""
    ) -> None:
        self.cluster = cluster
        self.directory = directory
        self.out = directory / "out"
        self._arguments = [source, json.dumps(options), schema, str(self.out)]
        self.job_id = ""

    def start(self, parallelism: int = 2, savepoint: str | None = None) -> None:
        self.job_id = self.cluster.submit(
            program_of("source_copy"),
            entry="source_copy:pipeline",
            arguments=self._arguments,
            configuration={**fast(), "execution.checkpointing.dir": str(self.directory / "checkpoints")},
            parallelism=parallelism,
            savepoint=savepoint,
        )
        self.cluster.wait_for_status(self.job_id, JobStatus.RUNNING)

    def values(self) -> Counter[str]:
        frame = visible(self.out)
        return Counter(frame.value.tolist() if len(frame) else [])

    def has(self, rows: int) -> None:
        self.cluster.wait_until(lambda: self.values().total() >= rows, f"{rows} rows", patient(120))

    def stop(self) -> str:
        self.cluster.wait_until(lambda: all_run(self.cluster, self.job_id), "all subtasks to run")
        location = self.cluster.savepoint(self.job_id, self.directory / "savepoints", stop=True)
        self.cluster.wait_for_status(self.job_id, JobStatus.FINISHED)
        return location

    def end(self) -> None:
        if self.job_id and not self.cluster.status(self.job_id).is_globally_terminal:
            self.cluster.call(self.cluster.dispatcher.cancel_job(self.job_id))
            self.cluster.wait_for_status(self.job_id, JobStatus.CANCELED)


@contextmanager
def ended(job: Copy) -> Iterator[Copy]:
    try:
        yield job
    finally:
        job.end()


def write_lines(directory: Path, file: int) -> None:
    """A file of ROWS lines, which appears when it is complete."""
    partial = directory / f".part-{file}"
    partial.write_text("".join(f"{file}:{line}\n" for line in range(ROWS)))
    partial.rename(directory / f"part-{file}")


def lines(files: int) -> Counter[str]:
    return Counter(f"{file}:{line}" for file in range(files) for line in range(ROWS))


@pytest.mark.row("ends.4")
def test_files_are_read_once_through_kills_a_rescale_and_a_savepoint(
    client: CkptClient, cluster: MiniCluster, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source, 0)
    options = {"path": str(source), "maxFilesPerTrigger": "1", "cleanSource": "delete"}
    with ended(Copy(cluster, tmp_path, "text", options)) as job:
        job.start()
        job.has(ROWS)
        for file in range(1, 4):
            write_lines(source, file)
            os.kill(cluster.worker_pids(job.job_id)[0], signal.SIGKILL)
            job.has(ROWS * (file + 1))
        client.rescale(job.job_id, dict.fromkeys(client.resource_requirements(job.job_id), 1), timeout_s=patient(180))
        write_lines(source, 4)
        write_lines(source, 5)
        savepoint = job.stop()
        write_lines(source, 6)
        job.start(3, savepoint)
        job.has(ROWS * 7)
        cluster.wait_until(lambda: not list(source.iterdir()), "all files to be deleted")
        job.stop()
        assert job.values() == lines(7)
        assert hidden(job.out) == []


@pytest.mark.row("ends.4")
def test_lines_of_a_socket_arrive_while_the_job_runs(cluster: MiniCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(patient(60))
        options = {"host": "127.0.0.1", "port": str(server.getsockname()[1]), "includeTimestamp": "true"}
        with ended(Copy(cluster, tmp_path, "socket", options)) as job:
            job.start(1)
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"eins\nzwei\r\nun")
                job.has(2)
                connection.sendall("fünf\n".encode())
                job.has(3)
            job.stop()
            assert job.values() == Counter(["eins", "zwei", "unfünf"])
            assert visible(job.out).timestamp.notna().all()


@pytest.mark.row("ends.4")
def test_rate_source_continues_after_the_numbers_of_a_savepoint(cluster: MiniCluster, tmp_path: Path) -> None:
    with ended(Copy(cluster, tmp_path, "rate", {"rowsPerSecond": "200", "numPartitions": "3"})) as job:
        job.start(2)
        job.has(100)
        os.kill(cluster.worker_pids(job.job_id)[0], signal.SIGKILL)
        job.has(300)
        job.start(3, job.stop())
        job.has(job.values().total() + 100)
        job.stop()
        values = sorted(visible(job.out).value)
        gaps = set(range(max(values) + 1)) - set(values)
        # The rows that are due come split by split: each split is complete up to its last row.
        assert len(values) == len(set(values))
        for remainder in range(3):
            split = [value for value in values if value % 3 == remainder]
            assert split == list(range(remainder, split[-1] + 1, 3)), sorted(gaps)[:5]
