"""Stops a job with a savepoint and waits for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.conditions.job import Operation
from airflow_provider_ckpt.operators.base import RECORD
from airflow_provider_ckpt.operators.savepoint import CkptSavepointOperator
from airflow_provider_ckpt.tasks import Journal
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.waiting import until_final
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from airflow.sdk import Context


class StopWithSavepointOperator(CkptSavepointOperator):
    """Ends a job gracefully: its last act is a savepoint, after which no further record is processed.

    Returns ``{"job_id", "trigger_id", "savepoint_path"}``; ``trigger_id`` is ``None`` when the result was recovered
    from the ended job because the job manager had forgotten the operation.

    :param job: the job, by id or unique name. (templated)
    :param target_directory: where to put the savepoint; without one the job's default directory. (templated)
    :param savepoint_format: ``NATIVE`` or ``CANONICAL``. (templated)
    :param partition_outlets: give the events of the assets in ``outlets`` the partition ``<job>|<day>``. Airflow starts
        only DAGs with a schedule of partitions for such an event.
    :param drain: let the end of all data flow through first: windows fire, the job cannot be resumed as it was.
        (templated)
    """

    template_fields: Collection[str] = (*CkptSavepointOperator.template_fields, "drain")
    operation: ClassVar[Operation] = Operation.STOP

    def __init__(
        self,
        *,
        job: Templated[str],
        target_directory: Templated[str] | None = None,
        savepoint_format: Templated[str] = "NATIVE",
        drain: Templated[bool | str] = False,
        **kwargs: Any,
    ) -> None:
        # Spelt out for DAG authors: editors and type checkers see no further than this.
        super().__init__(job=job, target_directory=target_directory, savepoint_format=savepoint_format, **kwargs)
        self.drain = drain

    def request(self, job_id: str, trigger_id: str) -> Call[str]:
        return requests.stop_with_savepoint(
            job_id,
            self.checked_directory(),
            savepoint_format=self.checked_format(),
            drain=arguments.boolean("drain", self.drain),
            trigger_id=trigger_id,
            requester=self.requester,
        )

    def keep(self, context: Context, record: Json, result: Json) -> None:
        """Keep the result: a job is stopped once, and a cleared task returns the savepoint that it took."""
        Journal(context, RECORD).write(**record | {"job_id": result["job_id"], "result": result})

    def still_holds(self, client: CkptClient, job_id: str) -> bool:
        """A stop that succeeded is this task's result, unless the job was started again under the same id."""
        try:
            return self.ask(client, requests.job_details(job_id)).state in TERMINAL_STATES
        except NotFound:
            return True

    def finished_earlier(self, client: CkptClient, job_id: str) -> Json | None:
        """A stopped job names its savepoint, also when the operation's record has expired or another has stopped it."""
        try:
            if self.ask(client, requests.job_details(job_id)).state != "FINISHED":
                return None
            client.run(until_final(client.calls, job_id))
            statistics = self.ask(client, requests.checkpoint_statistics(job_id))
        except NotFound:
            return None
        savepoint = statistics.latest_savepoint
        if savepoint is None or savepoint.status != "COMPLETED" or savepoint.kind != "SYNC_SAVEPOINT":
            return None
        self.log.info("Job %s has been stopped with the savepoint %s", job_id, savepoint.external_path)
        return {"job_id": job_id, "trigger_id": None, "savepoint_path": savepoint.external_path}
