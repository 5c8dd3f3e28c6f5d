"""The log of a session as JSON lines: one search by a checkpoint's id finds what driver and workers say of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.client.models import RunOptions
from ckpt_runtime.client.packaging import pack_pipeline
from tests.support.driver_processes import Sessions
from tests.support.jobs import PIPELINES, fast
from tests.support.spark_sessions import wait_until


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    sessions = Sessions(tmp_path, options={"env.log.format": "json"})
    yield sessions
    sessions.end()


def lines(log: Path) -> list[dict[str, Any]]:
    """Only the last line may be incomplete."""
    *complete, _ = log.read_text().split("\n")
    return [json.loads(line) for line in complete]


@pytest.mark.timeout(300)
def test_a_failed_checkpoint_is_found_by_its_id_on_lines_of_driver_and_workers(
    sessions: Sessions, tmp_path: Path, small_disk: Path
) -> None:
    client = sessions.start()
    configuration = fast(
        execution__checkpointing__dir=str(small_disk),
        execution__checkpointing__tolerable_failed_checkpoints="100000",
        state__storage__fs__memory_threshold="0",
    )
    arguments = ("--output", str(tmp_path / "out"), "--rows", "0", "--rate", "1000", "--batch", "64")
    options = RunOptions(
        entry_point="sequence:pipeline", arguments=arguments, parallelism=2, configuration=configuration
    )
    job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(PIPELINES)), options)
    wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > 1, "checkpoints")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    log = tmp_path / f"session-{sessions.number}.log"

    def told_by(process: str) -> dict[int, dict[str, Any]]:
        found = [line for line in lines(log) if line.get("process") == process and "checkpoint_id" in line]
        return {line["checkpoint_id"]: line for line in found}

    wait_until(lambda: bool(told_by("worker").keys() & told_by("driver").keys()), "both to tell of one checkpoint")
    worker, driver = told_by("worker"), told_by("driver")
    number = min(worker.keys() & driver.keys())
    client.cancel_job(job_id)
    name = client.job_details(job_id).name
    both = {"job_id": job_id, "job_name": name, "session": "mini-cluster", "level": "WARNING"}
    assert both.items() <= driver[number].items()
    assert {**both, "attempt": 0}.items() <= worker[number].items()
    assert f"checkpoint {number}" in worker[number]["message"]
    assert "No space left" in worker[number]["message"]
    assert worker[number]["subtask"] in (0, 1)
    assert worker[number]["vertex_id"] in {vertex.id for vertex in client.job_details(job_id).vertices}
    assert worker[number]["pid"] != driver[number]["pid"]
    assert {"time", "logger", "slot", "worker"} <= worker[number].keys()
