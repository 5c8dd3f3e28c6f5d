"""Waits for changes that were asked for: a configuration that is to run, a rescale, a disposal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_ckpt.conditions.changes import ConfigurationCondition, DisposalCondition, RescaleCondition
from airflow_provider_ckpt.triggers.base import CkptTrigger
from ckpt_runtime.client.models import Bounds


class CkptConfigurationTrigger(CkptTrigger):
    """Polls a job until it runs with a version of its configuration.

    :param job_id: the job, 32 hex digits.
    :param version: the version.
    """

    def __init__(self, *, job_id: str, version: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.version = version

    def condition(self) -> ConfigurationCondition:
        return ConfigurationCondition(self.job_id, self.version)

    def arguments(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "version": self.version}

    async def on_kill(self) -> None:
        """Say what becomes of the change."""
        text = "The task was killed; version %s of the configuration of job %s is stored and takes effect."
        self.log.warning(text, self.version, self.job_id)


class CkptRescaleTrigger(CkptTrigger):
    """Asks for a parallelism until the job runs with it.

    :param job_id: the job, 32 hex digits.
    :param parallelism: of every vertex, by its id: a number, or a lower and an upper bound.
    """

    def __init__(self, *, job_id: str, parallelism: Mapping[str, int | Bounds], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.parallelism = dict(parallelism)

    def condition(self) -> RescaleCondition:
        return RescaleCondition(self.job_id, self.parallelism)

    def arguments(self) -> dict[str, Any]:
        # A row of the database has no tuples.
        plain = {
            vertex: wanted if isinstance(wanted, int) else list(wanted) for vertex, wanted in self.parallelism.items()
        }
        return {"job_id": self.job_id, "parallelism": plain}

    async def on_kill(self) -> None:
        """Say what becomes of the rescale: there is no way to take one back."""
        text = "The task was killed; a rescale of job %s that was begun is not taken back, and goes on."
        self.log.warning(text, self.job_id)


class CkptDisposalTrigger(CkptTrigger):
    """Polls a disposal.

    :param savepoint_path: what is deleted.
    :param trigger_id: the operation, 32 hex digits.
    """

    def __init__(self, *, savepoint_path: str, trigger_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.savepoint_path = savepoint_path
        self.operation_id = trigger_id

    def condition(self) -> DisposalCondition:
        return DisposalCondition(self.savepoint_path, self.operation_id)

    def arguments(self) -> dict[str, Any]:
        # ``trigger_id`` is an attribute of Airflow's base class, hence the other name on this one.
        return {"savepoint_path": self.savepoint_path, "trigger_id": self.operation_id}

    async def on_kill(self) -> None:
        """Say what becomes of the savepoint."""
        text = "The task was killed; the disposal of %s goes on, and cannot be taken back."
        self.log.warning(text, self.savepoint_path)
