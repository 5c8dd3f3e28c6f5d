"""Deletes savepoints that are too many or too old; the session's catalogue lists them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptOperationFailed, CkptSnapshotDamaged
from airflow_provider_ckpt.lineage import LineageReport
from airflow_provider_ckpt.operators.base import CkptOperator
from airflow_provider_ckpt.processes import SnapshotProcess
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError, Conflict, NotServed, OperationFailed
from ckpt_runtime.contract.checkpoints import Savepoint

if TYPE_CHECKING:
    from airflow.sdk import Context


SAVEPOINT_KINDS = ("SAVEPOINT", "SYNC_SAVEPOINT")


@dataclass(frozen=True, slots=True)
class _Limits:
    """The arguments, checked."""

    directory: str | None
    job: str | None
    keep: int | None
    keep_for_ms: int | None


class CleanUpSavepointsOperator(CkptOperator):
    """Keeps the newest savepoints of a job or a directory and the young ones, and has the session delete the others.

    Of each lineage, which is all jobs that started from each other's snapshots, the newest intact savepoint is never
    deleted, so that a suspended job keeps the savepoint that it starts from. That savepoint is read and verified before
    anything is deleted, and the result is recorded in the catalogue. Checkpoints are left to their jobs, and unreadable
    savepoints are left to people. The session refuses to delete a snapshot from which a living job, an upgrade in
    progress or a suspended job would resume; such a savepoint stays. Repeating the task is harmless.

    The session's savepoint catalogue lists the savepoints. A worker that cannot read a savepoint itself, because the
    extra ``runtime`` or access to the storage is missing, relies on a verification or a drill in the catalogue. If the
    server has no catalogue, ``ckpt snapshot list`` on the worker does all of this, and needs both.

    Returns ``{"directory", "kept", "deleted", "refused", "unreadable", "dry_run"}``: lists of paths, and for ``kept``
    and ``refused`` the reasons by path.

    :param directory: where the savepoints are stored, up to four levels below; without it, the session's default
        directory, and ``job`` is required. (templated)
    :param job: only savepoints of this job, by id or name; without one all savepoints below the directory are counted
        together. (templated)
    :param keep: how many of the newest to keep. (templated)
    :param keep_for: keep all that are younger: seconds, a text such as ``"7 d"`` or a timedelta. (templated)
    :param preview: a dry run: only report what would be deleted. (templated)
    :raises CkptOperationFailed: no savepoint is intact, and nothing is deleted; or a deletion failed
    """

    template_fields: Collection[str] = (
        *CkptOperator.template_fields,
        "directory",
        "job",
        "keep",
        "keep_for",
        "preview",
    )

    def __init__(
        self,
        *,
        directory: Templated[str] | None = None,
        job: Templated[str] | None = None,
        keep: Templated[int | str] | None = None,
        keep_for: Templated[Duration] | None = None,
        preview: Templated[bool | str] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.directory = directory
        self.job = job
        self.keep = keep
        self.keep_for = keep_for
        self.preview = preview
        self._process: SnapshotProcess | None = None
        self._deleting = ""

    def execute(self, context: Context) -> Any:
        limits = self.limits()
        preview = arguments.boolean("preview", self.preview)
        deadline = self.deadline()
        with self.connected(deadline) as client:
            found, unreadable = self._found(client, limits)
            for path in unreadable:
                self.log.warning("%s cannot be read and is kept", path)
            now_ms = round(time.time() * 1000)
            decision = decide(found, keep=limits.keep, keep_for_ms=limits.keep_for_ms, now_ms=now_ms)
            if decision.deleted:
                decision = self._spare_the_last_good(client, decision, found, notes=not preview)
            for path, reason in decision.kept.items():
                self.log.info("Kept: %s, %s", path, reason)
            deleted, refused = self._delete(client, decision, deadline, preview=preview)
        self.lineage_report = LineageReport(deletes=() if preview else deleted)
        result: Json = {"directory": limits.directory, "kept": dict(decision.kept), "unreadable": unreadable}
        return result | {"deleted": deleted, "refused": refused, "dry_run": preview}

    def limits(self) -> _Limits:
        """Check and return the directory, the job, how many to keep and for how long.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        keep = None if self.keep in (None, "", "None") else arguments.integer("keep", self.keep, minimum=1)
        given = arguments.optional_seconds("keep_for", self.keep_for)
        if keep is None and given is None:
            raise CkptArgumentInvalid("keep", self.keep, "set keep, keep_for or both")
        # Empty is a mistake, such as a template without a value: it must not extend the deletion.
        job = None if self.job is None else arguments.job(self.job)
        directory = None if self.directory is None else arguments.text("directory", self.directory)
        if directory is None and job is None:
            raise CkptArgumentInvalid("directory", self.directory, "set directory, job or both")
        return _Limits(directory, job, keep, None if given is None else round(given * 1000))

    @property
    def process(self) -> SnapshotProcess:
        """The process that reads savepoints on the worker."""
        if self._process is None:
            self._process = SnapshotProcess(self.log)
        return self._process

    def _found(self, client: CkptClient, limits: _Limits) -> tuple[list[StoredSavepoint], list[str]]:
        """The savepoints, the newest first, and the unreadable ones."""
        try:
            savepoints = self.ask(client, requests.list_savepoints(limits.directory, job=limits.job))
        except NotServed:
            self.log.info("The job manager has no savepoint catalogue: this task lists the directory")
        else:
            found = catalogued(savepoints)
            readable = {item.path for item in found}
            return found, [item.location for item in savepoints if item.location not in readable]
        if limits.directory is None:
            raise CkptArgumentInvalid("directory", None, "a job manager without a catalogue needs one")
        if limits.job is not None and not arguments.is_job_id(limits.job):
            raise CkptArgumentInvalid("job", limits.job, "a job manager without a catalogue needs its id")
        documents = self.process.run("list", limits.directory)
        unreadable = [str(item["location"]) for item in documents if "error" in item]
        return savepoints_of(documents, limits.job), unreadable

    def _spare_the_last_good(
        self, client: CkptClient, decision: Decision, newest_first: list[StoredSavepoint], *, notes: bool
    ) -> Decision:
        """Keep one savepoint of each lineage that is known to be intact, regardless of the limits, or else all of them.

        A job that is suspended, or whose upgrade waits for an approval, has nothing else to start from.
        """
        going, any_good = set(decision.deleted), False
        for items in by_lineage(newest_first):
            candidates = [item for item in items if item.path in going]
            if not candidates:
                continue
            good = next((item for item in items if self._is_good(client, item, notes=notes)), None)
            if good is not None:
                any_good = True
                decision = spared(decision, good.path, "the newest of its lineage that is intact")
                continue
            for item in candidates:
                decision = spared(decision, item.path, "no savepoint of its lineage is intact")
        if not any_good:
            raise CkptOperationFailed("no savepoint is intact, so nothing is deleted; take another one first")
        return decision

    def _is_good(self, client: CkptClient, item: StoredSavepoint, *, notes: bool) -> bool:
        if item.problem is not None:
            self.log.warning("%s does not count as the last good one: %s", item.path, item.problem)
            return False
        intact = self._is_intact(client, item, notes=notes)
        if not intact:
            self.log.warning("%s is damaged: it does not count as the last good one", item.path)
        return intact

    def _is_intact(self, client: CkptClient, item: StoredSavepoint, *, notes: bool) -> bool:
        try:
            found = self.process.run("verify", item.path, accepted=(0, 1))
        except CkptSnapshotDamaged:
            found = {"intact": False}
        except AirflowException as error:
            if item.proof is None:
                raise
            self.log.warning("This worker cannot read %s (%s), but %s", item.path, error, item.proof)
            return True
        intact = bool(found["intact"])
        if notes:
            # Recorded in the catalogue, if there is one; a note that fails changes nothing.
            by = f"airflow: {self.dag_id}/{self.task_id}"
            detail = "complete and intact" if intact else "damaged"
            try:
                client.mark_savepoint(item.path, "VERIFICATION", passed=intact, by=by, detail=detail)
            except CkptClientError as error:
                self.log.info("The verification of %s is not recorded in the catalogue: %s", item.path, error)
        return intact

    def _delete(
        self, client: CkptClient, decision: Decision, deadline: float | None, *, preview: bool
    ) -> tuple[list[str], dict[str, str]]:
        deleted: list[str] = []
        refused: dict[str, str] = {}
        for path in decision.deleted:
            reason = None if preview else self._dispose(client, path, deadline)
            if reason is None:
                self.log.info("Would delete: %s" if preview else "Deleted: %s", path)
                deleted.append(path)
            else:
                self.log.warning("Not deleted: %s", reason)
                refused[path] = reason
        self._deleting = ""
        return deleted, refused

    def _dispose(self, client: CkptClient, path: str, deadline: float | None) -> str | None:
        """Delete a savepoint; return the reason if it was not deleted."""
        self._deleting = path
        limit = None if deadline is None else max(deadline - time.time(), 0.0)
        try:
            trigger_id = self.ask(client, requests.dispose_savepoint(path))
            client.wait_for_operation(
                "savepoint-disposal", trigger_id, timeout_s=limit, poll_interval_s=max(self.pause(), 0.01)
            )
        except (Conflict, OperationFailed) as error:
            return str(error)
        return None

    def on_kill(self) -> None:
        """Log what becomes of the savepoints."""
        if self._process is not None:
            self._process.end()
        doing = f"the disposal of {self._deleting} continues" if self._deleting else "nothing is being deleted"
        self.log.warning("The task was killed; %s, and no other savepoint is deleted.", doing)


# --- which savepoints are kept


@dataclass(frozen=True, slots=True)
class StoredSavepoint:
    """A savepoint that can be read; ``completed_ms`` is when it was completed.

    ``problem`` is a reason in the catalogue not to use it, ``proof`` the record that it is intact. ``lineage`` is the
    same for all jobs that started from each other's snapshots.
    """

    path: str
    completed_ms: int
    lineage: str | None = None
    problem: str | None = None
    proof: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """``kept`` has the reason for each; ``deleted`` is in the order to delete in, the oldest first."""

    kept: Mapping[str, str]
    deleted: Sequence[str]


def savepoints_of(documents: Sequence[Mapping[str, Any]], job_id: str | None = None) -> list[StoredSavepoint]:
    """The readable savepoints of ``ckpt snapshot list``, the newest first. Checkpoints belong to their job."""
    found = [
        StoredSavepoint(
            str(item["location"]),
            int(item["completion_timestamp"]),
            (item.get("catalogue") or {}).get("lineage") or item.get("job_id"),
        )
        for item in documents
        if item.get("kind") in SAVEPOINT_KINDS and job_id in (None, item.get("job_id"))
    ]
    return _newest_first(found)


def catalogued(savepoints: Sequence[Savepoint]) -> list[StoredSavepoint]:
    """The readable savepoints of the catalogue, the newest first."""
    found = [
        StoredSavepoint(
            item.location, item.completion_timestamp, item.lineage or item.job_id, item.problem, _proof_of(item)
        )
        for item in savepoints
        if item.completion_timestamp is not None
    ]
    return _newest_first(found)


def by_lineage(newest_first: Sequence[StoredSavepoint]) -> list[list[StoredSavepoint]]:
    """The savepoints of each lineage, in the same order."""
    found: dict[str | None, list[StoredSavepoint]] = {}
    for item in newest_first:
        found.setdefault(item.lineage, []).append(item)
    return list(found.values())


def _proof_of(item: Savepoint) -> str | None:
    for what, mark in (("drilled", item.drilled), ("verified", item.verified)):
        if mark is not None and mark.passed and item.good:
            return f"it was {what} by {mark.by}" if mark.by else f"it was {what}"
    return None


def _newest_first(found: list[StoredSavepoint]) -> list[StoredSavepoint]:
    return sorted(found, key=lambda item: (-item.completed_ms, item.path))


def decide(found: Sequence[StoredSavepoint], *, keep: int | None, keep_for_ms: int | None, now_ms: int) -> Decision:
    """Keeps the ``keep`` newest ones, and all that are younger than ``keep_for_ms``; one of the two is given."""
    kept: dict[str, str] = {}
    deleted: list[str] = []
    for number, item in enumerate(found):
        age = now_ms - item.completed_ms
        if number < (keep or 0):
            kept[item.path] = f"one of the newest {keep}"
        elif keep_for_ms is not None and age < keep_for_ms:
            kept[item.path] = f"{max(age, 0) // 1000} s old"
        else:
            deleted.insert(0, item.path)
    return Decision(kept, deleted)


def spared(decision: Decision, path: str, reason: str) -> Decision:
    """The decision, changed so that this savepoint is kept."""
    return Decision({**decision.kept, path: reason}, [other for other in decision.deleted if other != path])
