"""Waits for the health of a job's checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.health import VERDICTS, HealthCondition
from airflow_provider_ckpt.sensors.base import CkptSensor

if TYPE_CHECKING:
    from airflow.sdk import Context


class CheckpointHealthSensor(CkptSensor):
    """Succeeds when the job is as healthy as expected; fails when the verdict is one of ``failing``, or the job has
    ended.

    The operations guide defines the verdicts: success rate and age of checkpoints, restarts, back-pressure.

    Returns ``{"job_id", "verdict", "reasons", "state", "checkpoints", "restarts", "backpressure"}``.

    :param job: the job, by id or unique name. (templated)
    :param expected: verdicts that are good enough: ``HEALTHY``, ``DEGRADED``, one or both. (templated)
    :param failing: verdicts that fail the sensor at once, such as ``UNHEALTHY``; none by default. (templated)
    :param checkpoints: minimum number of ended checkpoints, because a job counts as healthy before the first one.
        (templated)
    :param times: how many polls in a row must find it. (templated)
    :raises CkptJobFailed: the job has ended
    """

    template_fields: Collection[str] = (*CkptSensor.template_fields, "expected", "failing", "checkpoints", "times")

    def __init__(
        self,
        *,
        job: Templated[str],
        expected: Templated[str | Sequence[str]] = "HEALTHY",
        failing: Templated[str | Sequence[str]] = (),
        checkpoints: Templated[int | str] = 1,
        times: Templated[int | str] = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.expected = expected
        self.failing = failing
        self.checkpoints = checkpoints
        self.times = times

    def condition(self, context: Context, deadline: float | None) -> HealthCondition:
        is_empty = self.failing in ((), [], None, "", "None")
        return HealthCondition(
            self.found_job,
            expected=arguments.choices("expected", self.expected, VERDICTS),
            failing=[] if is_empty else arguments.choices("failing", self.failing, VERDICTS),
            ended_checkpoints=arguments.integer("checkpoints", self.checkpoints, minimum=0),
            times=arguments.integer("times", self.times, minimum=1),
        )
