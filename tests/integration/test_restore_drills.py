"""A restore drill runs what a real restore would, and nothing outside it is touched, however it ends."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest, Conflict
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import TERMINAL_STATES, RunOptions
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import all_run, fast, program_of
from tests.support.patience import patient

BEFORE, ALL = 400, 1_000


def tree(directory: Path) -> dict[str, object]:
    """All that can be seen of a directory: contents, and when what was modified. A file that came and went shows."""
    seen: dict[str, object] = {}
    for path in (directory, *sorted(directory.rglob("*"))):
        found = path.stat()
        content = path.read_bytes() if path.is_file() else None
        seen[str(path.relative_to(directory))] = (found.st_mtime_ns, found.st_ino, found.st_mode, content)
    return seen


@dataclass
class Drilled:
    """A job that was cancelled after a savepoint, whose transactions are not committed yet."""

    cluster: MiniCluster
    client: CkptClient
    directory: Path
    pipeline: str
    savepoint: str = ""

    @property
    def outside(self) -> Path:
        return self.directory / "outside"

    @property
    def steering(self) -> Path:
        return self.directory / "steering"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def options(self, ending: str = "none", interval: str = "200 ms") -> RunOptions:
        configuration = {
            **fast(
                execution__checkpointing__interval=interval,
                execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
            ),
            "execution.checkpointing.dir": str(self.checkpoints),
        }
        arguments = (str(self.outside), str(self.steering), ending)
        return RunOptions("drilled:pipeline", arguments, 1, configuration, self.savepoint or None)

    def rows_in(self, job_id: str) -> int:
        return max(vertex.io.read_records for vertex in self.client.job_details(job_id).vertices)

    def completed(self, job_id: str) -> int:
        return self.client.checkpoint_statistics(job_id).counts.completed

    def cancel(self, job_id: str) -> None:
        self.client.cancel_job(job_id)
        self.ended(job_id, "CANCELED")

    def ended(self, job_id: str, state: str) -> None:
        self.cluster.wait_until(lambda: self.client.job_status(job_id) in TERMINAL_STATES, "the end")
        assert self.client.job_status(job_id) == state


@pytest.fixture(scope="module")
def drilled(cluster: MiniCluster, client: CkptClient, tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    directory = tmp_path_factory.mktemp("drilled")
    found = Drilled(cluster, client, directory, client.upload_pipeline(*pack_pipeline(program_of("drilled"))))
    (found.outside / "batches").mkdir(parents=True)
    found.steering.mkdir()
    (found.steering / "limit").write_text(str(BEFORE))
    job_id = client.run_pipeline(found.pipeline, found.options(interval="1h"))
    cluster.wait_until(lambda: found.rows_in(job_id) >= BEFORE and all_run(cluster, job_id), "all rows")
    trigger = client.trigger_savepoint(job_id, str(directory / "savepoints"))
    found.savepoint = client.wait_for_operation("savepoint", trigger, job_id, timeout_s=patient(60)).location or ""
    found.cancel(job_id)
    cluster.wait_until(lambda: not (found.checkpoints / job_id).exists(), "the clean-up")
    (found.steering / "limit").write_text(str(ALL))
    return found


def pending(outside: Path) -> tuple[list[str], list[str]]:
    """What sink and writer have prepared and not committed."""
    hidden = [path.name for path in outside.rglob(".*") if path.is_file()]
    return hidden, [path.name for path in (outside / "batches").glob("staged-*")]


def published(outside: Path) -> list[int]:
    """What the writer has committed."""
    lines = [line for file in (outside / "batches").glob("batch-*") for line in file.read_text().splitlines()]
    return [json.loads(line)["n"] for line in lines]


@pytest.mark.slow
@pytest.mark.row("air.9")
def test_a_drill_touches_nothing_outside(drilled: Drilled, client: CkptClient) -> None:
    """Cancelled, failed, finished; afterwards the real job resumes from the savepoint, exactly."""
    assert all(pending(drilled.outside)), "nothing is pending that a drill could commit or abort"
    before, savepoint = tree(drilled.outside), tree(drilled.directory / "savepoints")
    for ending in ("cancelled", "failed", "finished"):
        job_id = client.run_drill(drilled.pipeline, drilled.options(ending))
        if ending == "finished":
            drilled.ended(job_id, "FINISHED")
        else:
            drilled.cluster.wait_until(
                lambda job_id=job_id: drilled.completed(job_id) >= 3 and drilled.rows_in(job_id) > 0,  # type: ignore[misc]
                "checkpoints of the drill",
            )
        if ending == "cancelled":
            drilled.cancel(job_id)
        elif ending == "failed":
            (drilled.steering / "fails").touch()
            (drilled.steering / "limit").write_text(str(ALL + 1))
            drilled.ended(job_id, "FAILED")
            (drilled.steering / "fails").unlink()
        drilled.cluster.wait_until(
            lambda job_id=job_id: not (drilled.checkpoints / job_id).exists(),  # type: ignore[misc]
            "the drill's own directory to go",
        )
        assert tree(drilled.outside) == before, ending
        assert tree(drilled.directory / "savepoints") == savepoint, ending
    job_id = client.run_pipeline(drilled.pipeline, drilled.options())
    drilled.cluster.wait_until(lambda: len(published(drilled.outside)) > ALL, "all rows")
    trigger = client.stop_with_savepoint(job_id, str(drilled.directory / "more"))
    client.wait_for_operation("savepoint", trigger, job_id, timeout_s=patient(60))
    assert sorted(published(drilled.outside)) == list(range(ALL + 1))
    rows = [
        (row["n"], row["times"])
        for file in (drilled.outside / "table").glob("[!.]*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    assert sorted(rows) == [(n, 1) for n in range(ALL + 1)]
    assert json.loads((drilled.outside / "acknowledgements").read_text().splitlines()[-1]) == {"n": ALL + 1}
    assert not (drilled.outside / "batches" / "aborted-1").exists()


@pytest.mark.row("air.9")
def test_drill_is_listed_and_refuses_savepoints_stops_and_changes(
    drilled: Drilled, client: CkptClient, tmp_path: Path
) -> None:
    job_id = client.run_drill(drilled.pipeline, drilled.options())
    try:
        drilled.cluster.wait_until(lambda: drilled.completed(job_id) >= 1, "a checkpoint of the drill")
        details = client.job_details(job_id)
        assert (details.drill, details.name) == (True, "restore drill of drilled")
        assert [line.drill for line in client.list_jobs() if line.job_id == job_id] == [True]
        for refused in (
            lambda: client.trigger_savepoint(job_id, str(tmp_path)),
            lambda: client.trigger_savepoint(job_id, str(tmp_path), cancel_job=True),
            lambda: client.stop_with_savepoint(job_id, str(tmp_path)),
            lambda: client.patch_job_config(job_id, {"execution.checkpointing.interval": "1 s"}),
        ):
            with pytest.raises(Conflict, match=f"job {job_id} is a restore drill: "):
                refused()
        copy = _copied_checkpoint(drilled, job_id, tmp_path)
        with pytest.raises(BadRequest, match="it is a checkpoint of a restore drill"):
            client.run_pipeline(drilled.pipeline, replace(drilled.options(), savepoint_path=str(copy)))
        with pytest.raises(BadRequest, match="it is a checkpoint of a restore drill"):
            client.run_drill(drilled.pipeline, replace(drilled.options(), savepoint_path=str(copy)))
    finally:
        drilled.cancel(job_id)
    assert list(tmp_path.glob("savepoint-*")) == []


def _copied_checkpoint(drilled: Drilled, job_id: str, target: Path) -> Path:
    """During the drill: what was subsumed in the meantime is not there any more."""

    def copied() -> bool:
        shutil.rmtree(target / "copy", ignore_errors=True)
        latest = max((drilled.checkpoints / job_id).glob("chk-*/_metadata"), default=None)
        if latest is None:
            return False
        try:
            shutil.copytree(latest.parent, target / "copy")
        except (OSError, shutil.Error):
            return False
        return (target / "copy" / "_metadata").exists()

    drilled.cluster.wait_until(copied, "a copy of a checkpoint")
    return target / "copy"


def test_drill_without_a_usable_snapshot_is_refused(drilled: Drilled, client: CkptClient) -> None:
    with pytest.raises(BadRequest, match="a restore drill must name the snapshot"):
        client.run_drill(drilled.pipeline, replace(drilled.options(), savepoint_path=None))
    with pytest.raises(BadRequest, match="claimMode: 'CLAIM' is not acceptable, a restore drill restores"):
        client.run_drill(drilled.pipeline, replace(drilled.options(), claim_mode="CLAIM"))
    claims = {**drilled.options().configuration, "execution.state-recovery.claim-mode": "CLAIM"}
    with pytest.raises(BadRequest, match="claimMode: 'CLAIM' is not acceptable"):
        client.run_drill(drilled.pipeline, replace(drilled.options(), configuration=claims))
    for key in ("execution.drill", "$internal.restore-drill"):
        with pytest.raises(BadRequest, match="drill"):
            client.run_pipeline(drilled.pipeline, replace(drilled.options(), configuration={key: "true"}))
