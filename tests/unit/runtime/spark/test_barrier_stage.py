"""Messages of failed barrier stages, as PySpark hands them on."""

from __future__ import annotations

import pytest

from ckpt_runtime.jobmaster.slots import hint_of
from ckpt_runtime.spark.barrier_stage import stage_failure

CALL = "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n: "
BARRIER = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed barrier "
    "ResultStage. Most recent failure reason: Stage failed because barrier task ResultTask(0, 1) finished "
    "unsuccessfully.\n"
)
LOST = "ExecutorLostFailure (executor {} exited {} the running tasks) Reason: {}"
TRACE = "\n\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2844)\n" * 20


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (
            CALL + BARRIER + LOST.format(1, "caused by one of", "Command exited with code 137") + TRACE,
            f"executor 1 was lost: Command exited with code 137 ({hint_of(137)})",
        ),
        (
            CALL + BARRIER + LOST.format(12, "unrelated to", "Executor decommission.") + TRACE,
            "executor 12 was lost: Executor decommission.",
        ),
        (
            CALL + BARRIER + "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)" + TRACE,
            "Python worker exited unexpectedly (crashed)",
        ),
        (
            CALL + "org.apache.spark.SparkException: Job 3 cancelled part of cancelled job group ckpt-stage-0" + TRACE,
            "Job 3 cancelled part of cancelled job group ckpt-stage-0",
        ),
        ("not from Spark at all\nsecond line", "not from Spark at all"),
        ("", "Spark gave no reason"),
        (CALL, "Spark gave no reason"),
    ],
)
def test_failure_is_described_in_one_line(message: str, reported: str) -> None:
    assert stage_failure(message) == reported


def test_description_of_a_failure_is_bounded() -> None:
    assert len(stage_failure(CALL + "x" * 10_000)) == 500
