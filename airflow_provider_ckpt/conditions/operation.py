"""Waiting for an asynchronous operation: a triggered checkpoint, a savepoint, a stop with savepoint."""

from __future__ import annotations

from collections.abc import Generator
from enum import StrEnum
from typing import Any

from airflow_provider_ckpt.advice import on_failure
from airflow_provider_ckpt.conditions.base import POLL, Json, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition
from airflow_provider_ckpt.conditions.job_log import job_line, shortened
from ckpt_runtime.client import requests
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.client.models import OperationStatus
from ckpt_runtime.client.stack_traces import telling_line


class Operation(StrEnum):
    """Kinds of operations."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    STOP = "stop"

    @property
    def noun(self) -> str:
        """The operation's name in a sentence."""
        return "stop with savepoint" if self is Operation.STOP else self.value

    @property
    def polled_as(self) -> requests.OperationKind:
        """The kind under which its state is asked for: a stop is polled as a savepoint, as in Flink."""
        return "checkpoint" if self is Operation.CHECKPOINT else "savepoint"


class OperationCondition(JobCondition):
    """Done when the operation ended well; a failed operation is FAILED, an unknown trigger id is MISSING."""

    def __init__(self, operation: Operation, job_id: str, trigger_id: str) -> None:
        super().__init__(job_id)
        self._operation = operation
        self._trigger_id = trigger_id

    @property
    def subject(self) -> str:
        return f"{self._operation.noun} {self._trigger_id} of job {self._job_id}"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type == POLL or event.data.get("request-id") == self._trigger_id

    def look(self) -> Poll:
        status = yield requests.operation_status(self._operation.polled_as, self._trigger_id, self._job_id)
        self.standing = "it is in progress"
        return self._judge(status) if status.done else None

    def detail(self) -> Generator[requests.Call[Any], Any, str]:
        return (yield from job_line(self._job_id))

    def _judge(self, status: OperationStatus) -> Verdict:
        if status.failure is not None:
            cause = telling_line(status.failure.stack_trace) or status.failure.exception
            return Verdict(Status.FAILED, on_failure(cause), trace=shortened(status.failure.stack_trace))
        result: Json = {"job_id": self._job_id, "trigger_id": self._trigger_id}
        if self._operation is Operation.CHECKPOINT:
            return Verdict(Status.DONE, result=result | {"checkpoint_id": status.checkpoint_id})
        return Verdict(Status.DONE, result=result | {"savepoint_path": status.location})
