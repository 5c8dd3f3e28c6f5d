"""Takes a savepoint and waits for it."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.sdk import Asset, XComArg

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.conditions.job import Operation
from airflow_provider_ckpt.operators.base import CkptOperationOperator
from ckpt_runtime.client import requests
from ckpt_runtime.client.requests import Call, Format

if TYPE_CHECKING:
    from airflow.sdk import Context

SAVEPOINT_FORMATS = ("NATIVE", "CANONICAL")
_MOST_NAME_CHARS = 239
"""Maximum length of a job's name in a partition key, which Airflow limits to 250 characters."""


class CkptSavepointOperator(CkptOperationOperator):
    """Base of the operators whose result is a savepoint; not for use in DAGs."""

    template_fields: Collection[str] = (*CkptOperationOperator.template_fields, "target_directory", "savepoint_format")

    def __init__(
        self,
        *,
        job: Templated[str],
        target_directory: Templated[str] | None = None,
        savepoint_format: Templated[str] = "NATIVE",
        partition_outlets: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.target_directory = target_directory
        self.savepoint_format = savepoint_format
        self.partition_outlets = arguments.flag("partition_outlets", partition_outlets)

    @property
    def savepoint_path(self) -> XComArg:
        """The savepoint that this task takes, for arguments of other tasks."""
        return XComArg(self, "savepoint_path")

    def checked_directory(self) -> str | None:
        """Return the target directory of the savepoint; ``None`` for the job's default directory."""
        return arguments.optional_text("target_directory", self.target_directory)

    def checked_format(self) -> Format:
        """Return ``NATIVE`` or ``CANONICAL``, given in any case.

        :raises CkptArgumentInvalid: for anything else.
        """
        return cast("Format", arguments.choice("savepoint_format", self.savepoint_format, SAVEPOINT_FORMATS))

    def _succeed(self, context: Context, result: Json) -> Json:
        found = super()._succeed(context, result)
        if self.partition_outlets:
            # The events of the outlets get their partition key, and the savepoint as ``payload``, as from a watcher.
            with self.connected() as client:
                name = self.ask(client, requests.job_details(found["job_id"])).name
            facts = {"job": name, "job_id": found["job_id"], "path": found["savepoint_path"]}
            for outlet in self.outlets:
                if isinstance(outlet, Asset):
                    event = context["outlet_events"][outlet]
                    event.add_partitions(partition_key(name, datetime.now(UTC)))
                    event.extra["payload"] = facts
        return found


def partition_key(job: str, at: datetime) -> str:
    """The key of a job's savepoints of a day, such as ``totals|2026-11-26``: the day is that of UTC."""
    return f"{job[:_MOST_NAME_CHARS]}|{at.astimezone(UTC):%Y-%m-%d}"


class TakeSavepointOperator(CkptSavepointOperator):
    """Takes a savepoint of a running job, which keeps running.

    Returns ``{"job_id", "trigger_id", "savepoint_path"}``.

    :param job: the job, by id or unique name. (templated)
    :param target_directory: where to put it; without one the job's default directory. (templated)
    :param savepoint_format: ``NATIVE`` (the state backend's own files) or ``CANONICAL`` (any backend). (templated)
    :param partition_outlets: give the events of the assets in ``outlets`` the partition ``<job>|<day>``. Airflow starts
        only DAGs with a schedule of partitions for such an event.
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
