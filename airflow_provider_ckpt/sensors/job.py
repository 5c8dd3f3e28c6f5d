"""Waits for a state of a job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.job import STATES, JobStatusCondition
from airflow_provider_ckpt.sensors.base import CkptSensor

if TYPE_CHECKING:
    from airflow.sdk import Context


class JobStatusSensor(CkptSensor):
    """Succeeds when the job is in one of the expected states; fails when it ended in another.

    Returns ``{"job_id", "name", "status", "start_time_ms", "end_time_ms", "duration_ms"}``.

    :param job: the job, by id or unique name. (templated)
    :param expected: Flink's names of states, one or several. (templated)
    :param all_tasks: RUNNING counts only when every task runs, or has finished.
    :raises CkptJobFailed: the job has ended in another state
    """

    template_fields: Collection[str] = (*CkptSensor.template_fields, "expected")
    finds_ended: ClassVar[bool] = True

    def __init__(
        self,
        *,
        job: Templated[str],
        expected: Templated[str | Sequence[str]] = "FINISHED",
        all_tasks: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.expected = expected
        self.all_tasks = arguments.flag("all_tasks", all_tasks)

    def condition(self, context: Context, deadline: float | None) -> JobStatusCondition:
        expected = arguments.choices("expected", self.expected, STATES)
        return JobStatusCondition(self.found_job, expected, all_tasks=self.all_tasks)
