"""Disposing of snapshots: not of those that a living job refers to, by whatever path or tool; of all others."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_runtime.cli.framework import ExitCode
from ckpt_runtime.cli.main import main
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import Conflict
from ckpt_runtime.jobmaster.gateway_values import CheckpointKind
from ckpt_runtime.storage.filesystem import resolve
from tests.support.golden import DIRECTORY
from tests.support.jobs import SequenceJob, fast
from tests.support.patience import patient

HOURLY = fast(
    execution__checkpointing__interval="1h",
    execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
)


def _checkpoint(job: SequenceJob) -> Path:
    """The latest, after one more."""
    before = job.cluster.completed_checkpoints(job.job_id)
    job.cluster.call(job.cluster.dispatcher.trigger_checkpoint(job.job_id, CheckpointKind.CONFIGURED, None))
    job.cluster.wait_until(lambda: job.cluster.completed_checkpoints(job.job_id) > before, "the checkpoint")

    def is_quiet() -> bool:
        counts = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).counts
        return not counts.in_progress and len(job.left_behind()) == 1

    job.cluster.wait_until(is_quiet, "another one, which a restart begins with, and the deletion of the older")
    return job.checkpoints / job.job_id / job.left_behind()[0]


def _dispose(client: CkptClient, path: Path | str) -> None:
    trigger_id = client.dispose_savepoint(str(path))
    client.wait_for_operation("savepoint-disposal", trigger_id, timeout_s=patient(180))


@pytest.fixture
def dead_address() -> Iterator[str]:
    """Takes connections and answers nothing; in the end it closes them, so that no client waits any longer."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def take() -> None:
            with suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        accepting = threading.Thread(target=take)
        accepting.start()
        yield f"webhdfs://127.0.0.1:{server.getsockname()[1]}/snapshots"
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for connection in taken:
            connection.close()


def test_20_disposals_at_an_address_that_never_answers_block_nothing_at_other_addresses(
    client: CkptClient, job: SequenceJob, dead_address: str, tmp_path: Path
) -> None:
    job.start()
    job.running()
    cluster = job.cluster
    dispatcher = cluster.dispatcher
    disposals: list[asyncio.Task[str]] = []

    async def dispose_of_all() -> None:
        disposals.extend(
            asyncio.ensure_future(dispatcher.dispose_savepoint(f"{dead_address}/savepoint-{number}", None))
            for number in range(20)
        )

    cluster.call(dispose_of_all())
    savepoint = cluster.savepoint(job.job_id, tmp_path / "savepoints")
    before = cluster.completed_checkpoints(job.job_id)
    cluster.wait_until(lambda: cluster.completed_checkpoints(job.job_id) > before + 2, "more checkpoints")
    assert [found.location for found in client.list_savepoints(str(tmp_path / "savepoints"))] == [savepoint]
    _dispose(client, savepoint)
    assert not any(disposal.done() for disposal in disposals)
    job.stopped()


def test_the_latest_checkpoint_of_a_living_job_stays(client: CkptClient, job: SequenceJob, tmp_path: Path) -> None:
    job.start(configuration=HOURLY)
    job.running()
    latest = _checkpoint(job)
    link = tmp_path / "link"
    link.symlink_to(latest)
    for path in (latest, f"{latest}/_metadata", latest.as_uri(), link):
        with pytest.raises(Conflict, match=f"while job {job.job_id} is RUNNING: it is a checkpoint of that job"):
            _dispose(client, path)
    assert main(["--url", job.cluster.rest_url, "savepoint", "--dispose", str(link)]) == ExitCode.CONFLICT
    job.inject("map-raise")
    job.restarted(1)
    job.stopped()


def test_snapshot_of_a_restored_job_stays_until_the_job_has_its_own_checkpoint(
    client: CkptClient, job: SequenceJob
) -> None:
    job.start(configuration=HOURLY)
    job.running()
    savepoint = job.cluster.savepoint(job.job_id, job.directory / "run%3A1, 100%", stop=True)
    assert Path(resolve(savepoint).path).parent == job.directory / "run%3A1, 100%"
    job.start(savepoint=savepoint, configuration=HOURLY)
    job.running()
    with pytest.raises(Conflict, match="that job would start from it after a failure"):
        _dispose(client, savepoint)
    job.inject("map-raise")
    job.restarted(1)
    latest = _checkpoint(job)
    _dispose(client, savepoint)
    assert not Path(resolve(savepoint).path).exists()
    job.canceled()
    _dispose(client, latest)
    assert job.left_behind() == []


CLAIMS = """
import sys
from ckpt_runtime.snapshots.job_claims import claim_snapshot
from ckpt_runtime.processes.process_mark import own_mark
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.claims import Claimant

snapshot, checkpoints, mark = sys.argv[1:]
owner = Claimant("1" * 32, "session a", checkpoints, mark or own_mark())
claim_snapshot(open_snapshot(snapshot).metadata, owner)
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.row("203.12")
@pytest.mark.parametrize("is_here", [True, False])
def test_snapshot_claimed_by_a_dead_owner_can_be_disposed_of(client: CkptClient, tmp_path: Path, is_here: bool) -> None:
    """By itself where it can be seen that the owner's session is gone, elsewhere when a user has said it."""
    savepoint = tmp_path / "savepoints" / "savepoint-1"
    shutil.copytree(DIRECTORY / "format-2" / "savepoint", savepoint)
    before = sorted(savepoint.iterdir())
    mark = "" if is_here else "another-boot/pid:[1]/7/7"
    order = [sys.executable, "-c", CLAIMS, savepoint.as_uri(), (tmp_path / ("1" * 32)).as_uri(), mark]
    session = subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert session.stdout is not None
        assert session.stdout.readline() == b"claimed\n"
        with pytest.raises(Conflict, match="a job of session a, .*it has claimed .*ckpt snapshot release"):
            _dispose(client, savepoint)
    finally:
        session.kill()
        session.communicate()
    if not is_here:
        with pytest.raises(Conflict, match="it has claimed the snapshot"):
            _dispose(client, savepoint)
        assert sorted(path for path in savepoint.iterdir() if path.name != "claim") == before
        assert main(["snapshot", "release", str(savepoint), "--owner-is-dead", "1" * 32]) == 0
    _dispose(client, savepoint)
    assert list((tmp_path / "savepoints").iterdir()) == []
