"""Scripts in the forms of Spark's streaming guide: the engine runs them as they are, or says why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

GUIDE = Path(__file__).parents[1] / "support" / "programs" / "guide.py"
RUN = (
    *("files", "rate", "rate_per_batch", "view", "counts", "windows", "late_windows", "sessions"),
    *("sessions_with_a_gap_of_the_row", "join_with_a_table", "inner_join", "left_join", "semi_join", "duplicates"),
    *("duplicates_with_time", "duplicates_within_watermark", "parquet", "batches", "rows", "rows_of_an_object"),
    *("processing_time", "continuous", "available_now"),
)
REFUSED = {
    "real_time": "realTime needs a sink whose rows are visible at once",
    "memory": "clients of Spark Connect read",
    "listener": "a program ends before its queries have events",
    "inferred_schema": "a stream of files needs its schema",
    "latest_watermark": "'max' is not supported",
    "action": "needs a running Spark",
}


def submit(cluster: MiniCluster, directory: Path, form: str) -> str:
    (directory / "rows.csv").write_text('{"a": 1}\n')
    configuration = fast(restart_strategy__type="none")
    return cluster.submit(GUIDE, arguments=[form, str(directory)], configuration=configuration, parallelism=1)


@pytest.mark.row("ps.1")
@pytest.mark.parametrize("form", RUN)
def test_script_in_a_form_of_the_guide_runs_unchanged(cluster: MiniCluster, tmp_path: Path, form: str) -> None:
    job = submit(cluster, tmp_path, form)
    if form == "available_now":
        cluster.wait_for_status(job, JobStatus.FINISHED)
        return
    cluster.wait_for_checkpoints(job, 2)
    cluster.call(cluster.dispatcher.cancel_job(job))
    cluster.wait_for_status(job, JobStatus.CANCELED)


@pytest.mark.row("ps.1")
@pytest.mark.parametrize("form", REFUSED)
def test_script_in_a_form_of_the_guide_that_cannot_run_is_refused_with_the_reason(
    cluster: MiniCluster, tmp_path: Path, form: str
) -> None:
    with pytest.raises(SubmissionFailed, match=REFUSED[form]):
        submit(cluster, tmp_path, form)
