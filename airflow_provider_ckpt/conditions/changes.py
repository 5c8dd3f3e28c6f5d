"""Waiting for requested changes: a configuration, a rescale, a disposal."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_provider_ckpt.conditions.base import Condition, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition, job_facts
from airflow_provider_ckpt.conditions.job_log import failure_of, shortened
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import CkptClientError, Conflict, NotFound, is_outcome_unknown
from ckpt_runtime.client.models import TERMINAL_STATES, Bounds, JobConfig, OperationStatus
from ckpt_runtime.client.stack_traces import telling_line

_ANOTHER_RESCALE = "Another rescale"


class ConfigurationCondition(JobCondition):
    """Done when the job runs with that version of its configuration, or a later one; FAILED when it has ended."""

    def __init__(self, job_id: str, version: int) -> None:
        super().__init__(job_id)
        self._version = version

    @property
    def subject(self) -> str:
        return f"job {self._job_id} to run with version {self._version} of its configuration"

    def look(self) -> Poll:
        job = yield from self._details()
        if job.state in TERMINAL_STATES:
            cause = yield from failure_of(job)
            text = f"job {self._job_id} is {job.state} and runs no version of its configuration{cause.clause}"
            return Verdict(Status.FAILED, text, job_facts(job), cause.trace)
        config: JobConfig = yield requests.job_config(self._job_id)
        running = config.running_version or 0
        if job.state == "RUNNING" and running >= self._version:
            return Verdict(Status.DONE, result=job_facts(job))
        self.standing, self._state = f"it is {job.state} with version {running}", job.state
        return None


class RescaleCondition(JobCondition):
    """Requests the parallelism repeatedly: the same request joins the rescale that is in progress.

    Done when the job runs with it; FAILED when it was refused and the job keeps running as before.
    """

    def __init__(self, job_id: str, parallelism: Mapping[str, int | Bounds]) -> None:
        """``parallelism`` has each vertex by its id."""
        super().__init__(job_id)
        self._parallelism = dict(parallelism)
        self._accepted = False

    @property
    def subject(self) -> str:
        wanted = ", ".join(in_words(number) for number in self._parallelism.values())
        return f"job {self._job_id} to run with the parallelism {wanted}"

    def look(self) -> Poll:
        if not self._accepted:
            refusal = yield from self._ask()
            if refusal is not None or not self._accepted:
                return refusal
        job = yield from self._details()
        if job.state in TERMINAL_STATES:
            cause = yield from failure_of(job)
            text = f"job {self._job_id} is {job.state}, not rescaled{cause.clause}"
            return Verdict(Status.FAILED, text, job_facts(job), cause.trace)
        now = {vertex.id: vertex.parallelism for vertex in job.vertices}
        # Flink answers before it begins: the job still runs as it was then.
        if job.state == "RUNNING" and all(
            _lies_in(now[vertex], wanted) for vertex, wanted in self._parallelism.items()
        ):
            return Verdict(Status.DONE, result=job_facts(job) | {"parallelism": now})
        self.standing, self._state = f"it is being deployed anew, the job is {job.state}", job.state
        return None

    def _ask(self) -> Poll:
        """Return None unless the rescale was refused."""
        try:
            yield requests.update_resource_requirements(self._job_id, self._parallelism)
        except Conflict as error:
            if _ANOTHER_RESCALE not in str(error):
                return Verdict(Status.FAILED, f"job {self._job_id} goes on as it was: {error}")
            self.standing = "another rescale is in progress"
        except CkptClientError as error:
            if isinstance(error, NotFound) or not is_outcome_unknown(error):
                raise
            self.standing = "it gets its slots and takes a checkpoint"
        else:
            self._accepted = True
        return None


def _lies_in(parallelism: int, wanted: int | Bounds) -> bool:
    lower, upper = (wanted, wanted) if isinstance(wanted, int) else wanted
    return lower <= parallelism <= upper


def in_words(wanted: int | Bounds) -> str:
    """A parallelism, or the bounds that it has to lie between."""
    if isinstance(wanted, int):
        return str(wanted)
    lower, upper = wanted
    return str(lower) if lower == upper else f"{lower} to {upper}"


class DisposalCondition(Condition):
    """Done when a savepoint is deleted; FAILED when that failed, MISSING when the job manager knows no such request."""

    def __init__(self, path: str, trigger_id: str) -> None:
        super().__init__()
        self._path = path
        self._trigger_id = trigger_id

    @property
    def subject(self) -> str:
        return f"the disposal of {self._path}"

    def poll(self) -> Poll:
        try:
            status: OperationStatus = yield requests.operation_status("savepoint-disposal", self._trigger_id)
        except NotFound as error:
            return self.absence.missing(str(error))
        self.absence.seen()
        if status.failure is not None:
            cause = telling_line(status.failure.stack_trace) or status.failure.exception
            return Verdict(Status.FAILED, f"{self._path}: {cause}", trace=shortened(status.failure.stack_trace))
        self.standing = "it is in progress"
        return Verdict(Status.DONE, result={"savepoint_path": self._path}) if status.done else None
