"""Flink's own command line against a session: list, checkpoint, savepoint, dispose, stop and cancel.

Needs a Flink distribution and Java, see ``tests/support/flink_cluster.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.flink_cluster import HOME, absent
from tests.support.jobs import SequenceJob, fast
from tests.support.outputs import assert_sequence

pytestmark = [
    pytest.mark.flink,
    pytest.mark.slow,
    pytest.mark.row("io.1"),
    pytest.mark.skipif(bool(absent("java")), reason=absent("java")),
]

COMMAND_TIMEOUT_S = 100
SAVEPOINT = re.compile(r"(file:\S*/savepoint-[0-9a-f]{6}-[0-9a-f]{12})")


class FlinkCommandLine:
    """Runs ``flink`` with a configuration of its own, so that the distribution's is neither read nor needed."""

    def __init__(self, home: Path, configuration: Path, rest_url: str) -> None:
        self._script = home / "bin" / "flink"
        self._environment = {**os.environ, "FLINK_HOME": str(home), "FLINK_CONF_DIR": str(configuration)}
        self._address = rest_url.removeprefix("http://")

    def run(self, *arguments: str, fails: bool = False) -> str:
        """What it prints. ``-m`` goes behind the verb."""
        verb, *rest = arguments
        command = ["bash", str(self._script), verb, "-m", self._address, *rest]
        done = subprocess.run(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert (done.returncode != 0) == fails, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def flink(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> FlinkCommandLine:
    configuration = tmp_path_factory.mktemp("flink-conf")
    for name in ("config.yaml", "log4j-cli.properties"):
        original = HOME / "conf" / name
        if original.is_file():
            shutil.copy(original, configuration / name)
    return FlinkCommandLine(HOME, configuration, cluster.rest_url)


@pytest.fixture
def running(job: SequenceJob) -> Iterator[SequenceJob]:
    job.start(parallelism=1, configuration=fast(execution__checkpointing__interval="1h"))
    job.running()
    yield job
    if not job.cluster.status(job.job_id).is_globally_terminal:
        job.canceled()


@pytest.mark.timeout(600)
def test_list_checkpoint_savepoint_and_dispose(flink: FlinkCommandLine, running: SequenceJob) -> None:
    job_id = running.job_id
    listed = flink.run("list", "--running")
    assert re.search(rf"{job_id} : .+ \(RUNNING\)", listed)

    before = running.cluster.completed_checkpoints(job_id)
    for options in ((), ("--full",)):
        assert "Checkpoint" in flink.run("checkpoint", *options, job_id)
    assert running.cluster.completed_checkpoints(job_id) == before + 2

    directory = running.directory / "savepoints"
    printed = flink.run("savepoint", job_id, f"file://{directory}")
    location = SAVEPOINT.search(printed)
    assert location is not None, printed
    (taken,) = directory.iterdir()
    assert list(taken.glob("*.parquet")), "it asks for the canonical form"
    assert location[1].endswith(taken.name)

    assert "disposed" in flink.run("savepoint", "--dispose", location[1])
    assert list(directory.iterdir()) == []
    assert running.cluster.status(job_id) is JobStatus.RUNNING


@pytest.mark.timeout(600)
def test_failures_reach_the_user_as_messages(flink: FlinkCommandLine, running: SequenceJob) -> None:
    """A refused request and a failed operation: the command line prints our message and no exception of its own."""
    refused = flink.run("savepoint", "--type", "native", "0" * 32, "file:///nowhere", fails=True)
    assert f"Job {'0' * 32} not found" in refused
    blocked = running.directory / "a-file"
    blocked.touch()
    failed = flink.run("savepoint", "--type", "native", running.job_id, f"file://{blocked}", fails=True)
    assert "a-file" in failed
    for printed in (refused, failed):
        assert "NullPointerException" not in printed
        assert "EOFException" not in printed
    assert running.cluster.status(running.job_id) is JobStatus.RUNNING


@pytest.mark.timeout(600)
@pytest.mark.parametrize("drain", [False, True])
def test_stop(flink: FlinkCommandLine, running: SequenceJob, drain: bool) -> None:
    directory = running.directory / "savepoints"
    options = ["--type", "native", "--savepointPath", f"file://{directory}", *(["--drain"] if drain else [])]
    printed = flink.run("stop", *options, running.job_id)
    location = SAVEPOINT.search(printed)
    assert location is not None, printed
    running.finished()
    assert [entry.name for entry in directory.iterdir()] == [location[1].rsplit("/", 1)[1]]
    assert_sequence(running.out)
    assert running.job_id not in flink.run("list", "--running")
    assert "(FINISHED)" in flink.run("list", "--all")


@pytest.mark.timeout(600)
def test_cancel(flink: FlinkCommandLine, running: SequenceJob) -> None:
    assert "Cancelled" in flink.run("cancel", running.job_id)
    running.cluster.wait_for_status(running.job_id, JobStatus.CANCELED)
    refused = flink.run("cancel", "0" * 32, fails=True)
    assert "could not be found" in refused or "not found" in refused
