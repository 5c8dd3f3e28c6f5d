"""The tools on what a real job with RocksDB has written, and jobs that resume from what the tools have made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.cli.main import main
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.authoring import NewState, open_write, publish_savepoint, write_part
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support import golden

pytestmark = pytest.mark.slow

ROCKSDB = {**golden.ROCKSDB, "execution.checkpointing.interval": "300 ms"}


@pytest.fixture(scope="module")
def job(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job that was stopped in the middle: its savepoint, and what it had written."""
    directory = tmp_path_factory.mktemp("job")
    job_id = golden.submit(cluster, replace(golden.KINDS["stop"], configuration=ROCKSDB), directory)
    cluster.wait_for_status(job_id, JobStatus.RUNNING)
    golden.wait_for_rows(cluster, job_id)
    golden.take_checkpoint(cluster, job_id)  # whose files the savepoint duplicates
    savepoint = cluster.savepoint(job_id, directory / "savepoints", stop=True)
    Path(savepoint.removeprefix("file://")).rename(directory / "savepoint")
    return directory


def goes_on_exactly(cluster: MiniCluster, job: Path, savepoint: Path, directory: Path) -> None:
    """The rest of the output comes, in memory and at another parallelism where the form allows it."""
    kind = golden.KINDS["stop"]
    if open_snapshot(str(savepoint)).metadata.state_backend == "rocksdb":
        kind = replace(kind, configuration=ROCKSDB)
    before = golden.written(job / "out")
    (after,) = golden.restored(cluster, savepoint, kind, directory, (3,))
    for table, rows in golden.whole_output(kind.right_rows_per_source).items():
        assert golden.in_order(before[table] + after[table]) == golden.in_order(rows), table


@pytest.mark.row("203.10")
def test_files_of_increments_are_verified_and_shown(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    savepoint = str(job / "savepoint")
    assert main(["snapshot", "verify", savepoint]) == 0
    capsys.readouterr()
    assert main(["snapshot", "show", savepoint, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state_backend"], shown["self_contained"]) == ("rocksdb", True)
    keys = {(state["operator"], state["state"]): state["keys"] for state in shown["states"]}
    assert keys["kept", "seen"] == keys["totals", "aggregates"] == golden.SOURCES


@pytest.mark.row("203.4", "203.10")
def test_a_job_resumes_from_a_copied_savepoint(cluster: MiniCluster, job: Path, tmp_path: Path) -> None:
    assert main(["snapshot", "copy", str(job / "savepoint"), str(tmp_path / "copy")]) == 0
    goes_on_exactly(cluster, job, tmp_path / "copy", tmp_path / "jobs")


@pytest.mark.row("203.9")
def test_a_job_resumes_from_a_savepoint_with_a_rewritten_state(cluster: MiniCluster, job: Path, tmp_path: Path) -> None:
    base = open_snapshot(str(job / "savepoint"))
    (totals,) = keyed_states(base, "totals")
    rows = pa.Table.from_batches([batch for _, batch in totals.rows(totals.key_groups)])
    state = NewState("totals", totals.name, totals.descriptor, totals.schema, 16)
    target = resolve(tmp_path / "written")
    open_write(target, "part-")
    parts = [write_part(target, "part-", state, rows.slice(start, 7)) for start in range(0, rows.num_rows, 7)]
    publish_savepoint(target, "part-", state, [part for part in parts if part], base, 1)
    goes_on_exactly(cluster, job, tmp_path / "written", tmp_path / "jobs")
