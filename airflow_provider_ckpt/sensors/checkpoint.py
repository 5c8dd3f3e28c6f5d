"""Waits for completed checkpoints or savepoints of a job."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import XComArg

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.checkpoint import CheckpointCondition, CheckpointGoal, newest_id
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.sensors.base import CkptSensor
from airflow_provider_ckpt.tasks import Journal
from ckpt_runtime.client.errors import NotFound

if TYPE_CHECKING:
    from airflow.sdk import Context

_RECORD = "ckpt_since"


class CheckpointCompletedSensor(CkptSensor):
    """Succeeds when wanted checkpoints have completed; fails when the job ends before.

    Without ``checkpoint_id``, ``since_checkpoint_id`` and ``after``, those checkpoints count that complete after the
    sensor's first poll; a retry of the sensor keeps that moment. ``since_checkpoint_id=0`` accepts any checkpoint that
    the job has completed. The job manager shows the newest checkpoints only (10 by default): when more than that are
    awaited, the counting starts again if the triggerer restarts.

    Returns facts of the newest one, and all ids: ``{"job_id", "checkpoint_id", "checkpoint_type", "external_path",
    "triggered_at_ms", "duration_ms", "state_size", "checkpointed_size", "checkpoint_ids"}``.

    :param job: the job, by id or unique name. (templated)
    :param checkpoint_id: exactly this checkpoint. (templated)
    :param count: how many. (templated)
    :param since_checkpoint_id: only checkpoints with a higher id. (templated)
    :param after: only checkpoints triggered at or after this moment: a datetime or ISO text with a time zone, or
        milliseconds since the epoch. (templated)
    :param include_savepoints: savepoints count as well.
    :raises CkptJobFailed: the job has ended before enough checkpoints completed
    """

    checkpoints: ClassVar[bool] = True
    template_fields: Collection[str] = (
        *CkptSensor.template_fields,
        "checkpoint_id",
        "count",
        "since_checkpoint_id",
        "after",
    )

    def __init__(
        self,
        *,
        job: Templated[str],
        checkpoint_id: Templated[int | str] | None = None,
        count: Templated[int | str] = 1,
        since_checkpoint_id: Templated[int | str] | None = None,
        after: Templated[datetime | str | int] | None = None,
        include_savepoints: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.checkpoint_id = checkpoint_id
        self.count = count
        self.since_checkpoint_id = since_checkpoint_id
        self.after = after
        self.include_savepoints = arguments.flag("include_savepoints", include_savepoints)

    @property
    def external_path(self) -> XComArg:
        """The path of the newest checkpoint that counts, for arguments of other tasks."""
        return XComArg(self, "external_path")

    def condition(self, context: Context, deadline: float | None) -> CheckpointCondition:
        return CheckpointCondition(self.found_job, self.goal(context, deadline))

    def goal(self, context: Context, deadline: float | None) -> CheckpointGoal:
        """Check and return the required checkpoints.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        :raises CkptClientError: when the job could not be looked at.
        """
        wanted = self._id("checkpoint_id", self.checkpoint_id, 1)
        since = self._id("since_checkpoint_id", self.since_checkpoint_id, 0)
        after = None if self.after in (None, "", "None") else arguments.epoch_millis("after", self.after)
        count = arguments.integer("count", self.count, minimum=1)
        if wanted is not None and count != 1:
            raise CkptArgumentInvalid("count", self.count, "it must be 1 together with checkpoint_id")
        if wanted is None and since is None and after is None:
            since = self._probe_session(context, deadline)
        savepoints = self.include_savepoints or not self.checkpoints
        return CheckpointGoal(wanted, since, after, count, savepoints, self.checkpoints)

    @staticmethod
    def _id(name: str, given: object, minimum: int) -> int | None:
        value = arguments.or_field(name, given, "checkpoint_id")
        return None if value in (None, "", "None") else arguments.integer(name, value, minimum=minimum)

    def _probe_session(self, context: Context, deadline: float | None) -> int:
        """Return the newest id at the time when the first try looked for the first time."""
        journal, job_id = Journal(context, _RECORD), self.found_job
        record = journal.read()
        if record.get("job_id") != job_id:
            with self.connected(deadline) as client:
                try:
                    since = newest_id(client.checkpoint_statistics(job_id))
                except NotFound:  # the condition finds out whether the job is really unknown
                    return 0
            record = journal.write(job_id=job_id, since_id=since)
        self.log.info("Waiting for checkpoints newer than %s", record["since_id"])
        return int(record["since_id"])

    def succeeded(self, context: Context) -> None:
        Journal(context, _RECORD).forget()


class SavepointCompletedSensor(CheckpointCompletedSensor):
    """As :class:`CheckpointCompletedSensor`, for savepoints only, from any client; the savepoint of a stop counts.

    Returns ``{"job_id", "checkpoint_id", "checkpoint_type", "external_path", "triggered_at_ms", "duration_ms",
    "state_size", "checkpointed_size", "checkpoint_ids"}`` of the newest one; ``external_path`` is its path, and sizes
    are bytes.

    :param job: the job, by id or unique name. (templated)
    :param count: how many. (templated)
    :param since_checkpoint_id: only savepoints with a higher id. (templated)
    :param after: only savepoints triggered at or after this moment. (templated)
    """

    checkpoints: ClassVar[bool] = False

    @property
    def savepoint_path(self) -> XComArg:
        """The path of the newest savepoint that counts, for arguments of other tasks."""
        return XComArg(self, "external_path")
