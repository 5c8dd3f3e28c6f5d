"""What a job's savepoints look like in the catalogue, over REST, and what becomes of an entry."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ckpt_runtime.cli.main import main
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest, NotFound
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.patience import patient


@pytest.mark.row("air.10")
def test_savepoints_are_catalogued_when_they_are_taken(
    cluster: MiniCluster, client: CkptClient, job: SequenceJob, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = job.directory / "savepoints"
    job.start(configuration=fast(execution__checkpointing__savepoint_dir=str(directory)))
    job.has_rows()
    with pytest.raises(BadRequest, match=r"name one, or set execution.checkpointing.savepoint-dir"):
        client.list_savepoints()
    with pytest.raises(NotFound, match="there is no directory"):
        client.latest_savepoint(job=job.job_id)
    trigger = client.trigger_savepoint(job.job_id, requester="a test")
    first = client.wait_for_operation("savepoint", trigger, job.job_id, timeout_s=patient(60)).location
    trigger = client.stop_with_savepoint(job.job_id, savepoint_format="CANONICAL")
    second = client.wait_for_operation("savepoint", trigger, job.job_id, timeout_s=patient(60)).location
    assert first is not None
    assert second is not None
    name = client.job_details(job.job_id).name
    stopped, taken = client.list_savepoints(job=name)
    assert (taken.location, stopped.location) == (first, second)
    assert (taken.taken_by, stopped.taken_by) == ("a test", None)
    assert (taken.format, stopped.format) == ("NATIVE", "CANONICAL")
    for found in (taken, stopped):
        assert (found.good, found.job_id, found.job_name, found.configuration_version) == (True, job.job_id, name, 1)
        assert (found.program or "").endswith(".zip")
        assert (found.cluster or "").startswith("session ")
        assert found.size is not None
        assert found.duration_ms is not None
        assert found.size > 0 <= found.duration_ms
    assert client.latest_savepoint(str(directory)).location == second
    marked = client.mark_savepoint(second, "DRILL", passed=False, by="a test", detail="no checkpoint came")
    assert (marked.good, marked.problem) == (False, "its newest drill failed: no checkpoint came")
    assert client.latest_savepoint(str(directory), job=job.job_id).location == first
    assert main(["snapshot", "verify", first]) == 0
    assert main(["snapshot", "list", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "drill failed" in shown
    assert "verified" in shown
    for location in (first, second):
        client.wait_for_operation("savepoint-disposal", client.dispose_savepoint(location), timeout_s=patient(60))
        assert not Path(location.removeprefix("file://")).exists()
    assert client.list_savepoints(str(directory)) == ()


def test_known_savepoints_are_listed_from_every_directory_that_was_used(
    cluster: MiniCluster, client: CkptClient, job: SequenceJob
) -> None:
    configured, *others = [job.directory / name for name in ("configured", "first", "second", "third")]
    job.start(configuration=fast(execution__checkpointing__savepoint_dir=str(configured)))
    job.running()
    taken = [cluster.savepoint(job.job_id, directory) for directory in (configured, *others)]
    known = httpx.get(f"{cluster.rest_url}/savepoints/known", params={"job": job.job_id}, timeout=60).json()
    assert [item["location"] for item in known["savepoints"]] == taken[::-1]
    mine = {directory.as_uri() for directory in (configured, *others)}
    assert mine <= set(known["directories"])
    assert mine.isdisjoint(item["directory"] for item in known["unread"])
