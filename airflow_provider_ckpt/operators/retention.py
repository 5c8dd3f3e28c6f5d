"""Deletes savepoints that are too many or too old."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptOperationFailed
from airflow_provider_ckpt.operators.base import CkptOperator
from airflow_provider_ckpt.retention import Decision, decide, savepoints_of, spared
from airflow_provider_ckpt.snapshot_process import SnapshotProcess
from ckpt_runtime.client import requests, waiting
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import Conflict, OperationFailed

if TYPE_CHECKING:
    from airflow.sdk import Context


class CleanUpSavepointsOperator(CkptOperator):
    """Keeps the newest savepoints of a directory and the young ones, and has the session delete the others.

    The newest savepoint that is intact is never deleted; that is read and proven before anything is. Checkpoints are
    left to their jobs, and what cannot be read is left to people. What a living job needs is refused by the session
    and stays. Repeating it is harmless.

    The directory is read by ``ckpt snapshot list`` on the worker, which needs the extra ``runtime``. Give each job a
    directory of its own: all savepoints below it are counted together.

    Returns ``{"directory", "kept", "deleted", "refused", "unreadable", "dry_run"}``: lists of paths, and for ``kept``
    and ``refused`` the reasons by path.

    :param directory: where the savepoints lie, up to four levels below. (templated)
    :param keep: so many of the newest. (templated)
    :param keep_for: all that are younger than that: seconds, a text such as ``"7 d"`` or a timedelta. (templated)
    :param preview: a dry run: only say what would be deleted. (templated)
    :raises CkptOperationFailed: no savepoint is intact: nothing is deleted then; or a deletion failed
    """

    template_fields: Collection[str] = (*CkptOperator.template_fields, "directory", "keep", "keep_for", "preview")

    def __init__(
        self,
        *,
        directory: Templated[str],
        keep: Templated[int | str] | None = None,
        keep_for: Templated[Duration] | None = None,
        preview: Templated[bool | str] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.directory = directory
        self.keep = keep
        self.keep_for = keep_for
        self.preview = preview
        self._process: SnapshotProcess | None = None
        self._deleting = ""

    def execute(self, context: Context) -> Any:
        directory, keep, keep_for_ms = self.limits()
        preview = arguments.boolean("preview", self.preview)
        self._process = SnapshotProcess(self.log)
        documents = self._process.run("list", directory)
        unreadable = [str(item["location"]) for item in documents if "error" in item]
        for path in unreadable:
            self.log.warning("%s cannot be read; it stays", path)
        found = savepoints_of(documents)
        decision = decide(found, keep=keep, keep_for_ms=keep_for_ms, now_ms=round(time.time() * 1000))
        if decision.deleted:
            decision = self._spare_the_last_good(self._process, decision, [item.path for item in found])
        for path, reason in decision.kept.items():
            self.log.info("Kept: %s, %s", path, reason)
        result: Json = {"directory": directory, "kept": dict(decision.kept), "unreadable": unreadable}
        deleted, refused = self._delete(decision, preview=preview)
        self.tell_lineage(deletes=() if preview else deleted)
        return result | {"deleted": deleted, "refused": refused, "dry_run": preview}

    def limits(self) -> tuple[str, int | None, int | None]:
        """The directory, how many and for how long, checked.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        keep = None if self.keep in (None, "", "None") else arguments.integer("keep", self.keep, minimum=1)
        given = arguments.optional_seconds("keep_for", self.keep_for)
        if keep is None and given is None:
            raise CkptArgumentInvalid("keep", self.keep, "give keep, keep_for or both")
        return arguments.text("directory", self.directory), keep, None if given is None else round(given * 1000)

    def _spare_the_last_good(self, process: SnapshotProcess, decision: Decision, newest_first: list[str]) -> Decision:
        """Whatever the limits say, one savepoint stays that is known to be intact."""
        for path in newest_first:
            if process.run("verify", path, accepted=(0, 1))["intact"]:
                return spared(decision, path, "the newest that is intact")
            self.log.warning("%s is damaged: it does not count as the last good one", path)
        raise CkptOperationFailed("no savepoint is intact, so nothing is deleted; take another one first")

    def _delete(self, decision: Decision, *, preview: bool) -> tuple[list[str], dict[str, str]]:
        deleted: list[str] = []
        refused: dict[str, str] = {}
        deadline = self.deadline()
        with self.connected(deadline) as client:
            for path in decision.deleted:
                if preview:
                    self.log.info("Would delete: %s", path)
                    deleted.append(path)
                    continue
                reason = self._dispose(client, path, deadline)
                if reason is None:
                    self.log.info("Deleted: %s", path)
                    deleted.append(path)
                else:
                    self.log.warning("Not deleted: %s", reason)
                    refused[path] = reason
        self._deleting = ""
        return deleted, refused

    def _dispose(self, client: CkptClient, path: str, deadline: float | None) -> str | None:
        """Why it was not deleted."""
        self._deleting = path
        limit = None if deadline is None else max(deadline - time.time(), 0.0)
        try:
            trigger_id = self.ask(client, requests.dispose_savepoint(path))
            client.run(
                waiting.wait_for_operation(
                    "savepoint-disposal", trigger_id, timeout_s=limit, poll_interval_s=max(self.pause(), 0.01)
                )
            )
        except (Conflict, OperationFailed) as error:
            return str(error)
        return None

    def on_kill(self) -> None:
        """Say what becomes of the savepoints."""
        if self._process is not None:
            self._process.end()
        doing = f"the disposal of {self._deleting} goes on" if self._deleting else "nothing is being deleted"
        self.log.warning("The task was killed; %s, and no other savepoint is touched.", doing)
