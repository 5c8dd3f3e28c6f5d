"""Waiting for an asynchronous operation: a triggered checkpoint, a savepoint, a stop with savepoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from ckpt_runtime.client import CkptNotFound

from airflow_provider_ckpt import calls
from airflow_provider_ckpt.conditions.base import Condition, Json, Poll, Status, Verdict


class Operation(StrEnum):
    """Kinds of operations. A stop is polled under the path of savepoints, as in Flink."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    STOP = "stop"

    @property
    def noun(self) -> str:
        """The operation's name in a sentence."""
        return "stop with savepoint" if self is Operation.STOP else self.value


class OperationCondition(Condition):
    """Done when the operation ended well; a failed operation is FAILED, an unknown trigger id is MISSING."""

    def __init__(self, operation: Operation, job_id: str, trigger_id: str) -> None:
        self._operation = operation
        self._job_id = job_id
        self._trigger_id = trigger_id

    @property
    def subject(self) -> str:
        return f"{self._operation.noun} {self._trigger_id} of job {self._job_id}"

    def poll(self) -> Poll:
        status = calls.checkpoint_operation if self._operation is Operation.CHECKPOINT else calls.savepoint_operation
        try:
            answer: Json = yield status(self._job_id, self._trigger_id)
        except CkptNotFound as error:
            return Verdict(Status.MISSING, str(error))
        if answer["status"]["id"] != "COMPLETED":
            return None
        return self._judge(answer.get("operation") or {})

    def _judge(self, outcome: Json) -> Verdict:
        cause = outcome.get("failure-cause") or outcome.get("failureCause")
        if cause is not None:
            return Verdict(Status.FAILED, failure_text(cause))
        result: Json = {"job_id": self._job_id, "trigger_id": self._trigger_id}
        if self._operation is Operation.CHECKPOINT:
            return Verdict(Status.DONE, result=result | {"checkpoint_id": outcome["checkpointId"]})
        return Verdict(Status.DONE, result=result | {"savepoint_path": outcome["location"]})


def failure_text(cause: Any) -> str:
    """The causes of a failure, outermost first, without the frames of the stack trace."""
    if not isinstance(cause, dict):
        return str(cause)
    trace = str(cause.get("stack-trace") or "")
    lines = [line.strip() for line in trace.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("at ", "..."))]
    return "; ".join(kept[:8]) or str(cause.get("class") or "unknown cause")
