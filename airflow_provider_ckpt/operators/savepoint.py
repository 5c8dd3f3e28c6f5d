"""Takes a savepoint and waits for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, cast

from airflow.sdk import XComArg

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.job import Operation
from airflow_provider_ckpt.operators.base import CkptOperationOperator
from ckpt_runtime.client import requests
from ckpt_runtime.client.requests import Call, Format

SAVEPOINT_FORMATS = ("NATIVE", "CANONICAL")


class CkptSavepointOperator(CkptOperationOperator):
    """Base of the operators whose result is a savepoint; not for use in DAGs."""

    template_fields: Collection[str] = (
        *CkptOperationOperator.template_fields,
        "target_directory",
        "savepoint_format",
    )

    def __init__(
        self,
        *,
        job: Templated[str],
        target_directory: Templated[str] | None = None,
        savepoint_format: Templated[str] = "NATIVE",
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.target_directory = target_directory
        self.savepoint_format = savepoint_format

    @property
    def savepoint_path(self) -> XComArg:
        """The savepoint that this task takes, for arguments of other tasks."""
        return XComArg(self, "savepoint_path")

    def checked_directory(self) -> str | None:
        """Return where the savepoint is to lie; ``None`` for the job's default directory."""
        return arguments.optional_text("target_directory", self.target_directory)

    def checked_format(self) -> Format:
        """Return ``NATIVE`` or ``CANONICAL``, given in any case.

        :raises CkptArgumentInvalid: for anything else.
        """
        return cast("Format", arguments.choice("savepoint_format", self.savepoint_format, SAVEPOINT_FORMATS))


class TakeSavepointOperator(CkptSavepointOperator):
    """Takes a savepoint of a running job, which keeps running.

    Returns ``{"job_id", "trigger_id", "savepoint_path"}``.

    :param job: the job, by id or unique name. (templated)
    :param target_directory: where to put it; without one the job's default directory. (templated)
    :param savepoint_format: ``NATIVE`` (the state backend's own files) or ``CANONICAL`` (any backend). (templated)
    """

    operation: ClassVar[Operation] = Operation.SAVEPOINT

    def request(self, job_id: str, trigger_id: str) -> Call[str]:
        return requests.trigger_savepoint(
            job_id,
            self.checked_directory(),
            savepoint_format=self.checked_format(),
            trigger_id=trigger_id,
            requester=self.requester,
        )
