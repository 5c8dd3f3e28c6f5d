"""Conditions on what was requested: a checkpoint, savepoint or stop, a configuration, a rescale, a disposal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from airflow_provider_ckpt.advice import on_failure
from airflow_provider_ckpt.conditions.base import POLL, Condition, Json, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition, job_facts, job_line, shortened
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import CkptClientError, Conflict, NotFound, is_outcome_unknown
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.client.models import TERMINAL_STATES, Bounds
from ckpt_runtime.client.stack_traces import telling_line

_ANOTHER_RESCALE = "Another rescale"


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
        """The kind under which its state is requested: a stop is polled as a savepoint, as in Flink."""
        return "checkpoint" if self is Operation.CHECKPOINT else "savepoint"


@dataclass(eq=False)
class OperationCondition(JobCondition):
    """Done when the operation succeeded; a failed operation is FAILED, an unknown trigger id is MISSING."""

    operation: Operation
    trigger_id: str

    @property
    def subject(self) -> str:
        return f"{self.operation.noun} {self.trigger_id} of job {self.job_id}"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type == POLL or event.data.get("request-id") == self.trigger_id

    async def look(self, client: AsyncCalls) -> Verdict | None:
        status = await client.operation_status(self.operation.polled_as, self.trigger_id, self.job_id)
        self.standing = "it is in progress"
        if not status.done:
            return None
        if status.failure is not None:
            cause = telling_line(status.failure.stack_trace) or status.failure.exception
            return Verdict(Status.FAILED, on_failure(cause), trace=shortened(status.failure.stack_trace))
        result: Json = {"job_id": self.job_id, "trigger_id": self.trigger_id}
        if self.operation is Operation.CHECKPOINT:
            return Verdict(Status.DONE, result=result | {"checkpoint_id": status.checkpoint_id})
        return Verdict(Status.DONE, result=result | {"savepoint_path": status.location})

    async def detail(self, client: AsyncCalls) -> str:
        return await job_line(client, self.job_id)

    def left_over(self) -> str:
        return (
            f"{self.subject} was not cancelled and runs to its end at the job manager. "
            "The next try of this task attaches to it"
        )


@dataclass(eq=False)
class ConfigurationCondition(JobCondition):
    """Done when the job runs with that version of its configuration, or a later one; FAILED when it has ended."""

    version: int

    @property
    def subject(self) -> str:
        return f"job {self.job_id} to run with version {self.version} of its configuration"

    async def look(self, client: AsyncCalls) -> Verdict | None:
        job = await self.details(client)
        if job.state in TERMINAL_STATES:
            text = f"job {self.job_id} is {job.state} and runs no version of its configuration"
            return await self.ended(client, job, text, job_facts(job))
        running = (await client.job_config(self.job_id)).running_version or 0
        if job.state == "RUNNING" and running >= self.version:
            return Verdict(Status.DONE, result=job_facts(job))
        self.standing, self._state = f"it is {job.state} with version {running}", job.state
        return None

    def left_over(self) -> str:
        return f"version {self.version} of the configuration of job {self.job_id} is stored and takes effect"


@dataclass(eq=False)
class RescaleCondition(JobCondition):
    """Requests the parallelism repeatedly: the same request joins the rescale that is in progress.

    Done when the job runs with it; FAILED when it was refused and the job keeps running as before. ``parallelism`` maps
    each vertex id to a number, or to a lower and an upper bound.
    """

    parallelism: Mapping[str, int | Bounds]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._accepted = False

    @property
    def subject(self) -> str:
        wanted = ", ".join(in_words(number) for number in self.parallelism.values())
        return f"job {self.job_id} to run with the parallelism {wanted}"

    async def look(self, client: AsyncCalls) -> Verdict | None:
        if not self._accepted:
            refusal = await self._request(client)
            if refusal is not None or not self._accepted:
                return refusal
        job = await self.details(client)
        if job.state in TERMINAL_STATES:
            return await self.ended(client, job, f"job {self.job_id} is {job.state}, not rescaled", job_facts(job))
        now = {vertex.id: vertex.parallelism for vertex in job.vertices}
        # Flink answers before it begins: the job still runs as it was then.
        if job.state == "RUNNING" and all(_fits(now[vertex], wanted) for vertex, wanted in self.parallelism.items()):
            return Verdict(Status.DONE, result=job_facts(job) | {"parallelism": now})
        self.standing, self._state = f"it is being redeployed, the job is {job.state}", job.state
        return None

    async def _request(self, client: AsyncCalls) -> Verdict | None:
        """Return None unless the rescale was refused."""
        try:
            await client.update_resource_requirements(self.job_id, self.parallelism)
        except Conflict as error:
            if _ANOTHER_RESCALE not in str(error):
                return Verdict(Status.FAILED, f"job {self.job_id} keeps running as it was: {error}")
            self.standing = "another rescale is in progress"
        except CkptClientError as error:
            if isinstance(error, NotFound) or not is_outcome_unknown(error):
                raise
            self.standing = "it gets its slots and takes a checkpoint"
        else:
            self._accepted = True
        return None

    def left_over(self) -> str:
        return f"a rescale of job {self.job_id} that was begun is not taken back, and continues"


def _fits(parallelism: int, wanted: int | Bounds) -> bool:
    lower, upper = (wanted, wanted) if isinstance(wanted, int) else wanted
    return lower <= parallelism <= upper


def in_words(wanted: int | Bounds) -> str:
    """A parallelism, or the bounds that it has to lie between."""
    if isinstance(wanted, int):
        return str(wanted)
    lower, upper = wanted
    return str(lower) if lower == upper else f"{lower} to {upper}"


@dataclass(eq=False)
class DisposalCondition(Condition):
    """Done when a savepoint is deleted; FAILED when that failed, MISSING when the job manager knows no such request."""

    savepoint_path: str
    trigger_id: str

    @property
    def subject(self) -> str:
        return f"the disposal of {self.savepoint_path}"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        try:
            status = await client.operation_status("savepoint-disposal", self.trigger_id)
        except NotFound as error:
            return self.absence.missing(str(error))
        self.absence.seen()
        if status.failure is not None:
            cause = telling_line(status.failure.stack_trace) or status.failure.exception
            trace = shortened(status.failure.stack_trace)
            return Verdict(Status.FAILED, f"{self.savepoint_path}: {cause}", trace=trace)
        self.standing = "it is in progress"
        return Verdict(Status.DONE, result={"savepoint_path": self.savepoint_path}) if status.done else None

    def left_over(self) -> str:
        return f"the disposal of {self.savepoint_path} continues, and cannot be taken back"
