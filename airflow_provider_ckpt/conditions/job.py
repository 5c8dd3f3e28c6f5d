"""Conditions on a job and on operations that were requested of it: a savepoint or stop, a configuration, a rescale, a
disposal.

It also has the lines about a job in a task's log: its last checkpoint, and why it failed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from airflow_provider_ckpt.advice import on_failure
from airflow_provider_ckpt.conditions.base import POLL, Condition, Json, KilledTask, Status, Verdict, moment
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import CkptClientError, Conflict, NotFound, is_outcome_unknown
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.contract.checkpoints import CheckpointStatistics
from ckpt_runtime.contract.configuration import Bounds
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobDetails, root_cause_line

STATES: Final = (
    *("INITIALIZING", "CREATED", "RUNNING", "RESTARTING", "RECONCILING", "FAILING", "CANCELLING", "SUSPENDED"),
    *sorted(TERMINAL_STATES),
)
_STATE_EVENTS: Final = ("job-status", "deployment", "tasks-running")
_STARTING_STATES: Final = ("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RECONCILING")
_AFTER_FAILURES = ("RESTARTING", "FAILING")
MAX_TRACE_CHARS = 16_000
"""A trace travels in a trigger's event, which lies in Airflow's database."""


@dataclass(eq=False)
class JobCondition(Condition):
    """Base of the conditions on one job. ``look`` may get "not found" from any request; ``_state`` is the last known
    state."""

    job_id: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._state = ""

    @property
    def job(self) -> str:
        return self.job_id

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        try:
            verdict = await self.look(client)
        except NotFound as error:
            return self.absence.missing(str(error))
        self.absence.seen()
        return verdict

    @abstractmethod
    async def look(self, client: AsyncCalls) -> Verdict | None:
        """Poll the job once."""

    async def detail(self, client: AsyncCalls) -> str:
        return await progress_of(client, self.job_id, self._state)

    async def details(self, client: AsyncCalls) -> JobDetails:
        """The job's details; a job that has answered exists, whatever the following requests return."""
        job = await client.job_details(self.job_id)
        self.absence.seen()
        return job

    async def ended(self, client: AsyncCalls, job: JobDetails, text: str, result: Json | None = None) -> Verdict:
        """The verdict FAILED for a job that has ended, with the cause if it has failed."""
        cause = await failure_of(client, job)
        return Verdict(Status.FAILED, text + cause.clause, result or {}, cause.trace)


@dataclass(eq=False)
class JobStatusCondition(JobCondition):
    """Done when the job is in one of ``expected``; FAILED when it ended in another state, MISSING when it is unknown.

    With ``all_tasks``, RUNNING counts only when no task is still starting: a job is RUNNING in name before its tasks
    are, and a checkpoint that is triggered then fails. With ``cancel_on_kill`` the job is cancelled when a person marks
    the waiting task failed.
    """

    expected: Sequence[str]
    all_tasks: bool = False
    cancel_on_kill: bool = False

    @property
    def _names(self) -> str:
        return " or ".join(sorted(self.expected))

    @property
    def subject(self) -> str:
        return f"job {self.job_id} to be {self._names}"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type in _STATE_EVENTS

    async def look(self, client: AsyncCalls) -> Verdict | None:
        job = await self.details(client)
        if job.state in self.expected and not (job.state == "RUNNING" and self.all_tasks and is_starting(job)):
            return Verdict(Status.DONE, result=job_facts(job))
        if job.state not in TERMINAL_STATES:
            self.standing, self._state = _standing(job), job.state
            return None
        return await self.ended(client, job, f"job {self.job_id} is {job.state}, not {self._names}", job_facts(job))

    async def on_kill(self, task: KilledTask) -> None:
        """Cancel the job, if this is configured and no other try continues with it."""
        if self.cancel_on_kill and await task.is_given_up():
            await task.cancel(self.job_id, "job")
        else:
            task.log.warning("The task was killed; job %s was not cancelled and keeps running.", self.job_id)


@dataclass(eq=False)
class ReadyForSnapshotCondition(JobCondition):
    """Done when a savepoint or stop can succeed, or the job has ended; the result has the job's facts, and under
    ``running_since_ms`` the start of its present attempt. The message of a job that has FAILED ends a sentence.

    Not before: the job starts, is restarting or being recovered by a new driver, or another stop is in progress.
    """

    @property
    def subject(self) -> str:
        return f"job {self.job_id} to run without another stop in progress"

    def concerns(self, event: StreamedEvent) -> bool:
        return event.type in (*_STATE_EVENTS, "savepoint-triggered", "savepoint-failed", POLL)

    async def look(self, client: AsyncCalls) -> Verdict | None:
        job = await self.details(client)
        running = job.state == "RUNNING" and not is_starting(job)
        if job.state not in TERMINAL_STATES and (not running or await self._is_stopping(client)):
            self.standing = "another stop is in progress" if running else _standing(job)
            self._state = job.state
            return None
        cause = await failure_of(client, job)
        running_since = {"running_since_ms": job.timestamps_ms.get("RUNNING", 0)}
        return Verdict(Status.DONE, cause.clause, job_facts(job) | running_since, cause.trace)

    async def _is_stopping(self, client: AsyncCalls) -> bool:
        statistics = await statistics_of(client, self.job_id)
        history = () if statistics is None else statistics.history
        return any(item.kind == "SYNC_SAVEPOINT" and item.status == "IN_PROGRESS" for item in history)


async def statistics_of(client: AsyncCalls, job_id: str) -> CheckpointStatistics | None:
    """The job's checkpoint statistics; None for a Flink job without checkpoints, which has none."""
    try:
        return await client.checkpoint_statistics(job_id)
    except NotFound:
        return None


def is_starting(job: JobDetails) -> bool:
    """Whether a task is still starting, although the job may already be shown as RUNNING."""
    return any(vertex.tasks.get(state, 0) for vertex in job.vertices for state in _STARTING_STATES)


def _standing(job: JobDetails) -> str:
    return f"it is {job.state}, tasks are starting" if is_starting(job) else f"it is {job.state}"


def job_facts(job: JobDetails) -> Json:
    """The result of tasks about a job."""
    return {
        "job_id": job.job_id,
        "name": job.name,
        "status": job.state,
        "start_time_ms": job.start_time_ms,
        "end_time_ms": job.end_time_ms,
        "duration_ms": job.duration_ms,
    }


# --- for the log


@dataclass(frozen=True, slots=True)
class RootCause:
    """The newest failure of a job. ``line`` is empty when the job manager reports none."""

    line: str = ""
    trace: str = ""

    @property
    def clause(self) -> str:
        """The end of a sentence."""
        return f": {self.line}" if self.line else ""


async def root_cause(client: AsyncCalls, job_id: str) -> RootCause:
    """The reason why the job has failed or is restarting."""
    try:
        history = await client.job_exceptions(job_id, 1)
    except NotFound:
        return RootCause()
    if not history.entries:
        return RootCause()
    newest = history.entries[0]
    task = f"task {newest.task_name}" if newest.task_name else "the job"
    where = f" on {newest.endpoint}" if newest.endpoint else ""
    trace = f"Failure of {task}{where} at {moment(newest.timestamp_ms)}\n{shortened(newest.stack_trace)}"
    return RootCause(root_cause_line(newest.stack_trace) or newest.exception, trace)


async def failure_of(client: AsyncCalls, job: JobDetails) -> RootCause:
    """As :func:`root_cause` for a job that is FAILED; nothing for others."""
    return await root_cause(client, job.job_id) if job.state == "FAILED" else RootCause()


async def job_line(client: AsyncCalls, job_id: str) -> str:
    """State, last failure and last checkpoint of a job."""
    job = await client.job_details(job_id)
    return f"the job is {job.state}; {await progress_of(client, job_id, job.state)}"


async def progress_of(client: AsyncCalls, job_id: str, state: str) -> str:
    """The last checkpoint and, for a restarting job, the last failure."""
    cause = await root_cause(client, job_id) if state in _AFTER_FAILURES else RootCause()
    statistics = await statistics_of(client, job_id)
    checkpoint = "it takes no checkpoints" if statistics is None else checkpoint_line(statistics)
    return f"last failure{cause.clause}; {checkpoint}" if cause.line else checkpoint


def checkpoint_line(statistics: CheckpointStatistics) -> str:
    """The newest completed checkpoint or savepoint, and how many are pending or have failed."""
    found = [item for item in (statistics.latest_completed, statistics.latest_savepoint) if item is not None]
    newest = max(found, key=lambda item: item.id, default=None)
    counts = statistics.counts
    last = "no checkpoint yet"
    if newest is not None:
        noun = "savepoint" if newest.is_savepoint else "checkpoint"
        last = f"last {noun} {newest.id} of {moment(newest.triggered_at_ms)}, which took {newest.duration_ms} ms"
    return f"{last} ({counts.completed} completed, {counts.in_progress} in progress, {counts.failed} failed)"


def shortened(trace: str) -> str:
    """Both ends of a long trace: this engine prints the cause first, Java prints the innermost cause last."""
    if len(trace) <= MAX_TRACE_CHARS:
        return trace
    half = MAX_TRACE_CHARS // 2
    return f"{trace[:half]}\n... {len(trace) - 2 * half} characters left out ...\n{trace[-half:]}"


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
        # A stop is polled as a savepoint, as in Flink.
        status = await client.operation_status(
            "checkpoint" if self.operation is Operation.CHECKPOINT else "savepoint", self.trigger_id, self.job_id
        )
        self.standing = "it is in progress"
        if not status.done:
            return None
        if status.failure is not None:
            cause = root_cause_line(status.failure.stack_trace) or status.failure.exception
            return Verdict(Status.FAILED, on_failure(cause), trace=shortened(status.failure.stack_trace))
        result: Json = {"job_id": self.job_id, "trigger_id": self.trigger_id}
        if self.operation is Operation.CHECKPOINT:
            return Verdict(Status.DONE, result=result | {"checkpoint_id": status.checkpoint_id})
        return Verdict(Status.DONE, result=result | {"savepoint_path": status.location})

    async def detail(self, client: AsyncCalls) -> str:
        return await job_line(client, self.job_id)

    def left_over(self) -> str:
        return (
            f"{self.subject} was not cancelled and runs to its end in the job manager. The next try of this task "
            "attaches to it"
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
            text = f"job {self.job_id} is {job.state} and does not run with a version of its configuration"
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
        return f"a rescale of job {self.job_id} that has begun cannot be undone, and continues"


def _fits(parallelism: int, wanted: int | Bounds) -> bool:
    lower, upper = (wanted, wanted) if isinstance(wanted, int) else wanted
    return lower <= parallelism <= upper


def in_words(wanted: int | Bounds) -> str:
    """A parallelism, or its bounds."""
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
            cause = root_cause_line(status.failure.stack_trace) or status.failure.exception
            trace = shortened(status.failure.stack_trace)
            return Verdict(Status.FAILED, f"{self.savepoint_path}: {cause}", trace=trace)
        self.standing = "it is in progress"
        return Verdict(Status.DONE, result={"savepoint_path": self.savepoint_path}) if status.done else None

    def left_over(self) -> str:
        return f"the disposal of {self.savepoint_path} continues, and cannot be undone"
