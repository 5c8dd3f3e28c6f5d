"""The log of a session as JSON lines: one search by a checkpoint's id finds what driver and workers say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.processes.handles import WORKER
from ckpt_runtime.spark.launch import start_session, stop_session
from tests.support.driver_processes import Sessions
from tests.support.flights import write_slice
from tests.support.jobs import fast, program_of
from tests.support.processes import agent_of, children, command_name, cut_connections
from tests.support.spark_sessions import FlightsJob, standalone_cluster, wait_until


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    sessions = Sessions(tmp_path, options={"env.log.format": "json"})
    yield sessions
    sessions.end()


def lines(log: Path) -> list[dict[str, Any]]:
    """The lines of the engine. Spark's Java machine, and libraries that a template imports, write there as well.

    Only the last line may be incomplete.
    """
    *complete, _ = log.read_text().split("\n")
    return [json.loads(line) for line in complete if line.startswith("{")]


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
    job_id = client.run_pipeline(client.upload_pipeline(*pack_pipeline(program_of("sequence"))), options)
    wait_until(lambda: client.checkpoint_statistics(job_id).counts.completed > 1, "checkpoints")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    log = tmp_path / f"session-{sessions.number}.log"

    def told_by(process: str, reason: str) -> dict[int, dict[str, Any]]:
        """By checkpoint. When one subtask has said why, the others may fail for the end of their checkpoint."""
        found = [line for line in lines(log) if line.get("process") == process and "checkpoint_id" in line]
        return {line["checkpoint_id"]: line for line in found if reason in line["message"]}

    def logged_checkpoints() -> set[int]:
        return told_by("worker", "No space left").keys() & told_by("driver", "failed").keys()

    wait_until(lambda: bool(logged_checkpoints()), "both to log the same checkpoint")
    number = min(logged_checkpoints())
    worker, driver = told_by("worker", "No space left"), told_by("driver", "failed")
    client.cancel_job(job_id)
    name = client.job_details(job_id).name
    both = {"job_id": job_id, "job_name": name, "session": "mini-cluster", "level": "WARNING"}
    assert both.items() <= driver[number].items()
    assert both.items() <= worker[number].items()
    assert worker[number]["attempt"] >= 0
    assert f"checkpoint {number}" in worker[number]["message"]
    assert worker[number]["subtask"] in (0, 1)
    assert worker[number]["vertex_id"] in {vertex.id for vertex in client.job_details(job_id).vertices}
    assert worker[number]["pid"] != driver[number]["pid"]
    assert {"time", "logger", "slot", "worker"} <= worker[number].keys()


SPARK_SETTINGS = {
    "spark.executor.cores": "2",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}
OF_PYTHON = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} |Traceback |  File |[\w.]+(Error|Exception): ")
"""How a line of the logging module begins without the option, and what a traceback consists of."""


def of_engine(log: Path) -> list[dict[str, Any]]:
    """Its lines, beside which the JVM says what it says; none that any Python process has said is not an object."""
    found = []
    # When an executor is to end it ends its Python processes as they are, PySpark's own daemon among them.
    said, _, _ = log.read_text().partition("Driver commanded a shutdown")
    for line in said.splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
        else:
            assert not OF_PYTHON.match(line), line
    return found


def said_by(said: list[dict[str, Any]], process: str, **known: Any) -> list[dict[str, Any]]:
    return [line for line in said if line["process"] == process and known.items() <= line.items()]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_driver_and_executors_of_a_spark_cluster_say_json_with_ids(tmp_path: Path) -> None:
    """User code fails, and an agent loses the driver: each kind of process has something to say."""
    with standalone_cluster(tmp_path, workers=1, cores=2) as cluster:
        log = tmp_path / "session.log"
        settings = SPARK_SETTINGS | cluster.settings
        session = start_session(cluster.url, 2, conf={"env.log.format": "json"}, spark_conf=settings, log_file=log)
        try:
            with CkptClient(session.rest_url, token=session.token) as client:
                job = FlightsJob(session, client, write_slice(tmp_path / "flights.parquet", 100_000), tmp_path)
                job.start(1000)
                job.wait_for_checkpoint()
                (job.faults / "map-raise").touch()
                job.restarted(1)
                known = job.restarts()
                job.wait_for_checkpoint()
                [daemon] = cluster.workers
                worker = next(pid for pid in children(daemon.pid) if command_name(pid) == WORKER)
                assert cut_connections(agent_of(worker), session.driver.pid) > 0
                job.restarted(known + 1)
                job.wait_for_checkpoint()
                job.stopped()
                details = client.job_details(job.job_id)
        finally:
            stop_session(session)
        driver = of_engine(log)
        executor = [line for stderr in (tmp_path / "work-0").glob("app-*/*/stderr") for line in of_engine(stderr)]
    assert {line["process"] for line in driver} == {"driver"}
    # A template has only warnings of libraries to say, when it imports them.
    assert {line["process"] for line in executor} - {"template"} == {"agent", "worker"}
    [application] = {line["session"] for line in driver if "session" in line}
    assert application.startswith("app-")
    assert all(line.get("session") == application for line in executor)
    assert all({"time", "level", "logger", "message", "pid"} <= line.keys() for line in driver + executor)
    about = {"job_id": job.job_id, "job_name": details.name}
    vertices = {vertex.id for vertex in details.vertices}
    for said in (said_by(driver, "driver", **about), said_by(executor, "worker", **about)):
        [failure, *_] = [line for line in said if "injected in map" in line["message"]]
        assert (failure["attempt"], failure["vertex_id"] in vertices, failure["subtask"] in (0, 1)) == (0, True, True)
    assert all({"slot", "worker"} <= line.keys() for line in said_by(executor, "worker"))
    [lost, *_] = [line for line in said_by(executor, "agent") if "the driver is gone" in line["message"]]
    assert lost["slot"] in lost["message"]
