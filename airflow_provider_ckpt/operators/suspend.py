"""Ends a job so that it can be resumed, and resumes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration, Templated, refuse_secrets
from airflow_provider_ckpt.operators.upgrade_steps import CkptStepsOperator, age_of, format_of, mode_of
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Upgrade
from ckpt_runtime.client.clients import CkptClient

if TYPE_CHECKING:
    pass

MODES = (Mode.SAVEPOINT.value, Mode.LAST_STATE.value)


class SuspendJobOperator(CkptStepsOperator):
    """Ends a job with a savepoint, or with its latest checkpoint retained, and keeps its program until it is resumed.

    Returns ``{"outcome", "job_id", "old_job_id", "name", "savepoint_path", "mode", "fell_back",
    "pipeline_id", "old_pipeline_id", "diff", "why", "approved_by"}``;
    ``savepoint_path`` is the snapshot that the job will resume from.

    :param job: the job, by id or unique name. (templated)
    :param mode: ``savepoint`` or ``last-state``. (templated)
    :param last_state_max_age: when no savepoint can be taken, fall back to the latest checkpoint if it is no older than
        this. (templated)
    :param target_directory: where to put the savepoint; without one the job's default directory. (templated)
    :param savepoint_format: ``NATIVE`` or ``CANONICAL``. (templated)
    :param savepoint_timeout: how long the job may take to be ready for a savepoint. (templated)
    :raises CkptUpgradeRefused: it was not begun, or it failed; the old job keeps running, or is unchanged
    :raises CkptUpgradeStranded: nothing runs, and a person has to act; the message names the snapshot to start from
    """

    template_fields: Collection[str] = (
        *CkptStepsOperator.template_fields,
        "mode",
        "last_state_max_age",
        "target_directory",
        "savepoint_format",
    )

    def __init__(
        self,
        *,
        job: Templated[str],
        mode: Templated[str] = "savepoint",
        last_state_max_age: Templated[Duration] | None = None,
        target_directory: Templated[str] | None = None,
        savepoint_format: Templated[str] = "NATIVE",
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.mode = mode
        self.last_state_max_age = last_state_max_age
        self.target_directory = target_directory
        self.savepoint_format = savepoint_format

    def still_holds(self, client: CkptClient, record: Upgrade) -> bool:
        """A job is suspended once; its name may belong to another living job now."""
        given = arguments.job(self.job)
        return record.outcome is Outcome.SUSPENDED and given == record.old_job

    def desired(self, job: str, client: CkptClient | None) -> DesiredUpgrade:
        return DesiredUpgrade(
            goal=Goal.SUSPEND,
            job=job,
            mode=Mode(mode_of(self.mode, MODES)),
            directory=arguments.optional_text("target_directory", self.target_directory),
            format=format_of(self.savepoint_format),
            fallback_age=age_of(self.last_state_max_age),
            **self.limits(),
        )


class ResumeJobOperator(CkptStepsOperator):
    """Starts a suspended job from its snapshot, with its program and options; waits until it is healthy.

    A job that was cancelled or has failed is resumed too, if its latest checkpoint was retained.

    Returns ``{"outcome", "job_id", "old_job_id", "name", "savepoint_path", "mode", "fell_back",
    "pipeline_id", "old_pipeline_id", "diff", "why", "approved_by"}``, with
    the new job as ``job_id``.

    :param job: the ended job, by id or by name (of several that have ended the latest), or the result of the task that
        has suspended it. (templated)
    :param configuration: options that override the job's own. (templated)
    :param healthy_timeout: how long it may take to become healthy. (templated)
    :param healthy_checkpoints: how many checkpoints have to complete. (templated)
    :raises CkptUpgradeRefused: it was not begun, or it failed; the old job keeps running, or is unchanged
    :raises CkptUpgradeStranded: nothing runs, and a person has to act; the message names the snapshot to start from
    """

    template_fields: Collection[str] = (*CkptStepsOperator.template_fields, "configuration", "healthy_checkpoints")
    template_fields_renderers: ClassVar[dict[str, str]] = {"configuration": "json"}
    finds_ended: ClassVar[bool] = True

    def __init__(
        self,
        *,
        job: Templated[str],
        configuration: Templated[Mapping[str, Any]] | None = None,
        healthy_checkpoints: Templated[int | str] = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.configuration = configuration
        self.healthy_checkpoints = healthy_checkpoints

    def still_holds(self, client: CkptClient, record: Upgrade) -> bool:
        """A job that was resumed from a snapshot is not resumed from it again: its rows would be written twice."""
        given = arguments.job(self.job)
        return record.outcome in (Outcome.RESUMED, Outcome.STRANDED) and given == record.old_job

    def desired(self, job: str, client: CkptClient | None) -> DesiredUpgrade:
        configuration = arguments.options("configuration", self.configuration)
        refuse_secrets(configuration)
        return DesiredUpgrade(
            goal=Goal.RESUME,
            job=job,
            options={"configuration": configuration},
            checkpoints=arguments.integer("healthy_checkpoints", self.healthy_checkpoints, minimum=1),
            **self.limits(),
        )
