"""Deletes a savepoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json, Status
from airflow_provider_ckpt.conditions.job import DisposalCondition
from airflow_provider_ckpt.lineage import LineageReport
from airflow_provider_ckpt.operators.base import CkptOperator
from airflow_provider_ckpt.tasks import Journal, new_id
from ckpt_runtime.client import requests

if TYPE_CHECKING:
    from airflow.sdk import Context

_RECORD = "ckpt_disposal"


class DisposeSavepointOperator(CkptOperator):
    """Deletes a savepoint, or a retained checkpoint, with all of its files.

    A snapshot that a living job needs or has claimed, and a directory that is not a snapshot, are refused. A
    retry finds the disposal of the try before; a cleared success returns, since a savepoint is deleted once.

    Returns ``{"savepoint_path"}``.

    :param savepoint_path: the savepoint, or a task's result that has one. (templated)
    """

    template_fields: Collection[str] = (*CkptOperator.template_fields, "savepoint_path")

    def __init__(self, *, savepoint_path: Templated[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.savepoint_path = savepoint_path

    def path(self) -> str:
        """Return the savepoint's path.

        :raises CkptArgumentInvalid: when it is none.
        """
        given = arguments.or_field("savepoint_path", self.savepoint_path, "savepoint_path", "external_path")
        return arguments.text("savepoint_path", given)

    def execute(self, context: Context) -> Any:
        path, journal, deadline = self.path(), Journal(context, _RECORD), self.deadline()
        record = journal.read() if journal.read().get("savepoint_path") == path else {}
        if record.get("done"):
            self.log.info("This task has already deleted %s", path)
            self.lineage_report = LineageReport(deletes=[path])
            return {"savepoint_path": path}
        trigger_id = record.get("trigger_id")
        with self.connected(deadline) as client:
            if trigger_id is not None:
                verdict = self.look(client, DisposalCondition(path, trigger_id))
                if verdict is not None and verdict.status is Status.FAILED:
                    trigger_id = None  # that disposal has ended; this try requests another one
            trigger_id = trigger_id or new_id(context, "disposal")
            journal.write(savepoint_path=path, trigger_id=trigger_id)
            answered = self.ask(client, requests.dispose_savepoint(path, trigger_id=trigger_id))
            if answered != trigger_id:  # Flink chooses the id of a disposal itself
                trigger_id = answered
                journal.write(savepoint_path=path, trigger_id=trigger_id)
        return self.wait_for(context, DisposalCondition(path, trigger_id), deadline)

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        if Status(event["status"]) is not Status.DONE:
            raise self.failure(context, event)
        Journal(context, _RECORD).write(**event["result"], done=True)
        self.log.info("Deleted %s", self.path())
        self.lineage_report = LineageReport(deletes=[self.path()])
        return event["result"]

    def after_timeout(self, context: Context, event: Json | None) -> str:
        return "The disposal cannot be undone and continues; the next try of this task attaches to it"

    def on_kill(self) -> None:
        """Say what becomes of the savepoint."""
        text = "The task was killed; a requested disposal of %s continues, and cannot be undone."
        self.log.warning(text, self.path())
