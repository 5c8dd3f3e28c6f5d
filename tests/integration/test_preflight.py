"""Whether a snapshot fits a program is known before anything is started or stopped: by REST and on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.cli.main import main
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RestorePreview, RunOptions
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of

CHANGED = """
from pyspark.sql import SparkSession, functions as F


def pipeline(spark: SparkSession, output: str, key: str) -> None:
    numbers = spark.readStream.format("numbers").option("sequence", True).load().hint("uid", "numbers")
    keyed = numbers.withColumn("source", F.col("source").cast("string")) if key == "text" else numbers
    counts = keyed.groupBy("source").agg(F.count("*").alias("rows"), F.sum("n").alias("total")).hint("uid", "counts")
    counts.writeStream.format("noop").outputMode("update").queryName("elsewhere").start()
"""


@pytest.fixture(scope="module")
def running(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SequenceJob, str]]:
    """A job of the previous version, which runs all the time, and a savepoint of it."""
    job = SequenceJob(cluster, tmp_path_factory.mktemp("running"))
    job.start(parallelism=1, rate=200, configuration=fast(pipeline__max_parallelism="128"))
    job.running()
    job.has_output()
    known = len(cluster.call(cluster.dispatcher.list_jobs()))
    yield job, cluster.savepoint(job.job_id, job.directory / "savepoints")
    assert cluster.status(job.job_id) is JobStatus.RUNNING
    assert cluster.restarts(job.job_id) == 0
    assert len(cluster.call(cluster.dispatcher.list_jobs())) == known, "nothing was started"
    job.end()


def preview(
    client: CkptClient, pipeline: Path, entry: str, *arguments: str, savepoint: str, **options: str
) -> RestorePreview:
    chosen = RunOptions(entry, arguments, 2, fast(**options), savepoint)
    found = client.plan_pipeline(client.upload_pipeline(*pack_pipeline(pipeline)), chosen).restore
    assert found is not None
    return found


def sequence(client: CkptClient, running: tuple[SequenceJob, str], uids: str, **options: str) -> RestorePreview:
    arguments = ("--output", str(running[0].directory / "other"), f"--uids={uids}")
    return preview(client, program_of("sequence"), "sequence:pipeline", *arguments, savepoint=running[1], **options)


@pytest.mark.row("203.14")
def test_the_same_program_at_another_parallelism_fits(client: CkptClient, running: tuple[SequenceJob, str]) -> None:
    found = sequence(client, running, "")
    assert (found.fits, found.refusals) == (True, ())
    operators = {operator.uid: operator for operator in found.operators}
    order = operators["order"]
    assert (order.verdict, order.restored_parallelism, order.parallelism) == ("matched", 1, 2)
    assert (order.restored_max_parallelism, order.max_parallelism) == (128, 128)
    states = {(state.operator, state.state): state.verdict for state in found.states}
    assert states["counts", "aggregates"] == "matched"
    assert {verdict for (operator, _), verdict in states.items() if operator == "order"} == {"unknown until it runs"}


@pytest.mark.row("203.14")
@pytest.mark.parametrize(
    ("uids", "options", "reason"),
    [
        ("-renamed", {}, "holds state of operators .*'order'"),
        ("", {"pipeline__max_parallelism": "64"}, "has max parallelism 128, the job's is 64"),
        ("", {"state__backend__type": "rocksdb"}, "native form of the state backend 'hashmap'.*is 'rocksdb'"),
    ],
)
def test_plan_refuses_the_snapshots_that_a_submission_refuses(
    client: CkptClient, running: tuple[SequenceJob, str], uids: str, options: dict[str, str], reason: str
) -> None:
    found = sequence(client, running, uids, **options)
    assert not found.fits
    (refusal,) = found.refusals
    assert re.search(reason, refusal), refusal
    if uids:
        verdicts = {operator.uid: operator.verdict for operator in found.operators}
        assert (verdicts["order"], verdicts["order-renamed"]) == ("dropped", "new")


@pytest.mark.row("203.14")
def test_plan_shows_the_schemas_of_the_new_version_and_of_the_snapshot(
    client: CkptClient, running: tuple[SequenceJob, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = tmp_path / "version.py"
    version.write_text(CHANGED)
    common = ["--url", running[0].cluster.rest_url, "--json", "plan", "-s", running[1], "-n", "-p", "1"]
    assert main([*common, str(version), "out", "number"]) == 0
    states = {state["operator"]: state for state in json.loads(capsys.readouterr().out)["restore"]["states"]}
    assert states["counts"]["verdict"] == "changed"
    assert set(states["counts"]["wanted"]) - set(states["counts"]["stored"]) == {"Sum(n): int64"}
    assert states["order"]["verdict"] == "dropped"
    assert main([*common, str(version), "out", "text"]) == 1
    restore = json.loads(capsys.readouterr().out)["restore"]
    (refusal,) = restore["refusals"]
    assert "key changed" in refusal
    assert "int64" in refusal
    assert "string" in refusal


@pytest.mark.row("203.14")
def test_plan_does_not_delete_a_program_that_others_have_uploaded(
    client: CkptClient, running: tuple[SequenceJob, str], tmp_path: Path
) -> None:
    """The same content is the same program: who runs it, or plans it at the same time, finds it still there."""
    file = tmp_path / "mine.py"
    file.write_text(CHANGED)
    uploaded = client.upload_pipeline(*pack_pipeline(file))
    order = ["plan", "-n", "-s", running[1], "-p", "1", str(file), "out", "number"]
    assert main(["--url", running[0].cluster.rest_url, *order]) == 0
    assert client.plan_pipeline(uploaded, RunOptions(None, ("out", "number"), 1, {})).restore is None


@pytest.mark.row("203.14")
def test_plan_of_a_path_without_snapshot_or_pipeline_is_an_error(
    client: CkptClient, running: tuple[SequenceJob, str], tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match="cannot restore from .*nowhere"):
        preview(
            client, program_of("sequence"), "sequence:pipeline", "--output", "/x", savepoint=str(tmp_path / "nowhere")
        )
    with pytest.raises(BadRequest, match="table of ports"):
        preview(client, program_of("broken"), "broken:raises", savepoint=running[1])
