"""Hundreds of checkpoints on Spark: nothing of the driver, its workers or its files grows with their number."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness import PIPELINES
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.processes.handles import WORKER
from ckpt_runtime.spark.launch import start_session, stop_session
from tests.support.driver_processes import high_availability
from tests.support.jobs import fast
from tests.support.patience import patient
from tests.support.processes import command_line, command_name, members
from tests.support.spark_sessions import wait_until

PROCESSES = 5
"""The driver, two workers and two spares."""
MORE_MEMORY_MB = 7
"""What a process may have grown by, allocators and caches included: 20 kB a checkpoint; 10 kB in the long run."""


@dataclass(frozen=True)
class Usage:
    """Of one process."""

    threads: int
    descriptors: int
    resident_mb: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        proc = Path("/proc", str(pid))
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        resident_kb = int(status["VmRSS"].split()[0])
        return cls(int(status["Threads"]), len(list((proc / "fd").iterdir())), resident_kb / 1024)


@dataclass
class Watched:
    """One job that takes checkpoints as fast as it can, and its session."""

    client: CkptClient
    session_pid: int
    directory: Path
    job_id: str

    def python_processes(self) -> dict[int, str]:
        """Driver and workers: those that have a part in every checkpoint, without the JVM."""
        found = {pid: command_line(pid) for pid in members(self.session_pid)}
        return {pid: line for pid, line in found.items() if _has_part(pid, line)}

    def pause_after(self, completed: int) -> tuple[dict[int, Usage], Counter[str]]:
        """Usage and files once so many checkpoints are complete and none is under way."""
        counts = self.client.checkpoint_statistics(self.job_id).counts
        wait_until(lambda: self._completed() >= completed, f"{completed - counts.completed} checkpoints", 300)
        self.client.patch_checkpoint_config(self.job_id, CheckpointConfigPatch(interval_ms=3_600_000))
        wait_until(lambda: self.client.checkpoint_statistics(self.job_id).counts.in_progress == 0, "a quiet moment")
        wait_until(lambda: len(self._checkpoints()) == 1, "subsumed checkpoints to be deleted")
        wait_until(lambda: len(self.python_processes()) == PROCESSES, "driver, workers and spares")
        usage = {pid: Usage.of(pid) for pid in self.python_processes()}
        files = self._files()
        while (again := self._files()) != files:  # a document that is just being replaced is there twice
            files = again
        self.client.reset_checkpoint_config(self.job_id)
        return usage, files

    def _files(self) -> Counter[str]:
        """How many there are."""
        return Counter(
            "checkpoints" if "snapshots" in Path(place).parts else "others"
            for place, _, names in os.walk(self.directory / "ha")
            for _ in names
        )

    def _completed(self) -> int:
        return self.client.checkpoint_statistics(self.job_id).counts.completed

    def _checkpoints(self) -> list[Path]:
        return list((self.directory / "ha" / "default" / "snapshots" / self.job_id).glob("chk-*"))


def _has_part(pid: int, line: str) -> bool:
    is_driver = "runtime/main.py" in line and "java" not in line.split(" ", maxsplit=1)[0]
    return is_driver or command_name(pid) == WORKER


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.row("571.7")
@pytest.mark.timeout(1500)
def test_many_checkpoints_leave_nothing_behind(tmp_path: Path) -> None:
    conf = {**high_availability(tmp_path), "heartbeat.timeout": "2 min"}  # nothing is lost on a busy machine
    session = start_session("local", 2, log_file=tmp_path / "session.log", conf=conf)
    try:
        with CkptClient(session.rest_url, token=session.token) as client:
            options = RunOptions(
                arguments=(str(tmp_path / "report"), "200", "2000"),
                parallelism=2,
                configuration=fast(
                    execution__checkpointing__interval="10 ms", state__storage__fs__memory_threshold="0"
                ),
            )
            job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(PIPELINES / "recovery.py")), options)
            client.wait_for_state(job_id, ["RUNNING"], timeout_s=patient(180))
            watched = Watched(client, session.pid, tmp_path, job_id)
            first, first_files = watched.pause_after(300)
            last, last_files = watched.pause_after(1_000)
            assert client.checkpoint_statistics(job_id).counts.failed == 0, client.job_exceptions(job_id).entries
    finally:
        stop_session(session)
    print(*(f"{pid}: {first.get(pid)} -> {last[pid]}" for pid in last), first_files, last_files, sep="\n")
    assert last_files == first_files
    assert last.keys() == first.keys()
    for pid, after in last.items():
        before = first[pid]
        assert after.threads <= before.threads + 1, pid
        assert after.descriptors <= before.descriptors + 3, pid
        assert after.resident_mb <= before.resident_mb + MORE_MEMORY_MB, pid
