"""Copies and verifies savepoints by their files, without a session: by processes on the worker."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, XComArg

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.exceptions import CkptNotFound, CkptSnapshotDamaged, CkptTargetExists
from airflow_provider_ckpt.lineage import LineageReport, ReportsLineage, Written
from airflow_provider_ckpt.processes import SnapshotProcess

if TYPE_CHECKING:
    from airflow.sdk import Context

_SAME = ("job_id", "checkpoint_id", "completion_timestamp", "bytes")


class CkptSnapshotOperator(ReportsLineage, BaseOperator):
    """Base of the operators that run ``ckpt snapshot`` on the worker; not for use in DAGs.

    :param savepoint_path: the savepoint, or a task's result that has one. (templated)
    """

    template_fields: Collection[str] = ("savepoint_path",)
    ui_color = "#e3f0ec"

    def __init__(self, *, savepoint_path: Templated[str], **kwargs: Any) -> None:
        kwargs.setdefault("multiple_outputs", True)
        super().__init__(**kwargs)
        self.savepoint_path = savepoint_path
        self._process: SnapshotProcess | None = None

    @property
    def process(self) -> SnapshotProcess:
        """The runner of this task's commands."""
        if self._process is None:
            self._process = SnapshotProcess(self.log)
        return self._process

    def path(self) -> str:
        """Return the savepoint's path.

        :raises CkptArgumentInvalid: when it is none.
        """
        given = arguments.or_field("savepoint_path", self.savepoint_path, "savepoint_path", "external_path")
        return arguments.text("savepoint_path", given)

    def on_kill(self) -> None:
        """End the process, and log which files stay."""
        if self._process is not None and self._process.end():
            self.log.warning("The task was killed, and %s with it. %s", self.path(), self.left_over())

    def left_over(self) -> str:
        """Log which files an ended process has left."""
        return "The task only reads: nothing has changed"


class VerifySavepointOperator(CkptSnapshotOperator):
    """Reads everything that a restore from a savepoint could read, and fails without a retry if that is not intact.

    Returns ``{"savepoint_path", "intact"}``.

    :param savepoint_path: the savepoint or checkpoint, or a task's result that has one. (templated)
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used
    :raises CkptSnapshotDamaged: it is not complete and intact; the message names operators and files
    """

    def execute(self, context: Context) -> Any:
        path = self.path()
        self.lineage_report = LineageReport(reads=[path])
        found = self.process.run("verify", path, accepted=(0, 1))
        if not found["intact"]:
            reasons = "; ".join(f"{item['state']}: {item['reason']}" for item in found["problems"])
            raise CkptSnapshotDamaged(f"{path} is damaged and cannot be relied on: {reasons}")
        self.log.info("%s is complete and intact", path)
        return {"savepoint_path": path, "intact": True}


class RepositionSavepointOperator(CkptSnapshotOperator):
    """Makes a savepoint in which a source has another position; all other state is as it was.

    A job that starts from it reads from there on. Rows that sinks have already written stay, see
    ``docs/snapshot-tools.md``. Repeating it is harmless: a target that it has made before, of the same savepoint, is
    returned.

    Returns ``{"savepoint_path", "made_of", "uid", "position", "bytes"}``; the first is the new savepoint.

    :param savepoint_path: the savepoint, or a task's result that has one. (templated)
    :param uid: the uid of the source. (templated)
    :param position: ``earliest``, ``latest``, a time such as ``2026-11-01T09:00`` (UTC unless it has a zone), or
        offsets, for Kafka ``{"orders": {"0": 23}}``. (templated)
    :param target: the directory of the new savepoint, which must not exist. (templated)
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used
    :raises CkptRequestRejected: the savepoint has no such source, or the source has no such positions
    :raises CkptTargetExists: something else lies at the target
    :raises CkptSnapshotDamaged: the savepoint is not complete and intact
    """

    template_fields: Collection[str] = (*CkptSnapshotOperator.template_fields, "uid", "position", "target")

    def __init__(
        self,
        *,
        savepoint_path: Templated[str],
        uid: Templated[str],
        position: Templated[str | Mapping[str, Any]],
        target: Templated[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(savepoint_path=savepoint_path, **kwargs)
        self.uid = uid
        self.position = position
        self.target = target

    @property
    def new_path(self) -> XComArg:
        """The path of the new savepoint, for arguments of other tasks."""
        return XComArg(self, "savepoint_path")

    def execute(self, context: Context) -> Any:
        source, target = self.path(), arguments.text("target", self.target)
        given = json.dumps(self.position) if isinstance(self.position, Mapping) else self.position
        uid, position = arguments.text("uid", self.uid), arguments.text("position", given)
        made = self.process.run("reposition", source, target, "--uid", uid, "--to", position)
        self.log.info("%s is %s with source %r at %s", made["location"], source, uid, made["position"])
        self.lineage_report = LineageReport(reads=[source], writes=[Written(made["location"], made["bytes"])])
        facts = {"made_of": source, "uid": uid, "position": made["position"], "bytes": made["bytes"]}
        return {"savepoint_path": made["location"], **facts}

    def left_over(self) -> str:
        return "There is no snapshot at the target; files written so far are deleted"


class CopySavepointOperator(CkptSnapshotOperator):
    """Copies a savepoint to a new directory, also in another file system, and verifies it on the way.

    Repeating it is harmless: a target that holds a whole copy of the same savepoint is verified and returned.

    Returns ``{"savepoint_path", "copied_from", "bytes"}``; the first is the copy.

    :param savepoint_path: the savepoint, or a task's result that has one. (templated)
    :param target: the directory to copy to, which must not exist. (templated)
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used
    :raises CkptTargetExists: something else lies at the target
    :raises CkptSnapshotDamaged: the savepoint to copy is not complete and intact
    """

    template_fields: Collection[str] = (*CkptSnapshotOperator.template_fields, "target")

    def __init__(self, *, savepoint_path: Templated[str], target: Templated[str], **kwargs: Any) -> None:
        super().__init__(savepoint_path=savepoint_path, **kwargs)
        self.target = target

    @property
    def copy_path(self) -> XComArg:
        """The path of the copy, for arguments of other tasks."""
        return XComArg(self, "savepoint_path")

    def execute(self, context: Context) -> Any:
        source, target = self.path(), arguments.text("target", self.target)
        try:
            copied = self.process.run("copy", source, target)
        except CkptTargetExists as error:
            try:
                copied = self.process.run("show", "--no-count", target)
            except (CkptNotFound, CkptSnapshotDamaged) as absent:
                advice = "Delete the remains of an interrupted copy, or set another target"
                raise CkptTargetExists(f"{error}; it holds no snapshot. {advice}") from absent
            given = self.process.run("show", "--no-count", source)
            if any(copied[name] != given[name] for name in _SAME):
                raise CkptTargetExists(
                    f"{error}; it contains another snapshot than {source}. Set another target"
                ) from error
            if not self.process.run("verify", target, accepted=(0, 1))["intact"]:
                raise CkptTargetExists(
                    f"{error}; it contains a damaged copy. Delete it, or set another target"
                ) from error
            self.log.info("%s already holds a complete copy of it", target)
        self.log.info("%s is a copy of %s", copied["location"], source)
        self.lineage_report = LineageReport(reads=[source], writes=[Written(copied["location"], copied["bytes"])])
        return {"savepoint_path": copied["location"], "copied_from": source, "bytes": copied["bytes"]}

    def left_over(self) -> str:
        return "There is no snapshot at the target; files copied so far are deleted"
