"""Submits a job and waits until it runs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowTaskTerminated

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json, Status
from airflow_provider_ckpt.conditions.job import JobStatusCondition, job_facts
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptJobFailed, CkptJobRunning
from airflow_provider_ckpt.jobs import (
    KINDS,
    EarlierJob,
    NameFreeCondition,
    NextStep,
    Plan,
    latest_snapshot_of,
    living,
    plan,
)
from airflow_provider_ckpt.lineage import LineageReport, program_location
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.operators.base import CkptOperator
from airflow_provider_ckpt.operators.program import FIELDS, RENDERERS, RunsProgram
from airflow_provider_ckpt.tasks import Journal, is_over_time, numbered_id, series_of
from airflow_provider_ckpt.triggers.wait import ON_KILL_RETRY_TIMEOUT_SECONDS, is_given_up
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError, Conflict, NotFound
from ckpt_runtime.client.requests import job_details
from ckpt_runtime.client.waiting import until_final
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobLine, RunOptions

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

RECORD = "ckpt_job"
_NAME_OPTION = "pipeline.name"
_UNIQUE_OPTION = "pipeline.unique-name"
CLAIM_MODES = ("NO_CLAIM", "CLAIM")
IF_RUNNING = ("FAIL", "WAIT", "REUSE")
IF_NO_SNAPSHOT = ("FAIL", "START")


class _NameTaken(Exception):
    """Other living jobs already have the name that the new job is to get."""

    def __init__(self, by: list[JobLine]) -> None:
        super().__init__(by[0].name)
        self.by = by


class SubmitJobOperator(RunsProgram, CkptOperator):
    """Uploads a pipeline, starts a job of it and waits until all its tasks run.

    The job id is chosen and recorded before anything is sent, and the start request is idempotent on it, so that no
    crash or retry starts the job twice. A task that is retried or cleared while its job still lives attaches to that
    job. When that job has failed or was cancelled, a new job resumes from its latest retained checkpoint; when it has
    completed checkpoints and none is retained, or the job manager has forgotten it, the task fails with that message,
    without a retry. See :mod:`airflow_provider_ckpt.jobs`.

    Returns ``{"job_id", "name", "status", "pipeline_id", "started_from", "start_time_ms", "end_time_ms",
    "duration_ms"}``; ``started_from`` is the snapshot, if any.

    :param pipeline: a ``.py``, a ``.zip`` or a directory on the worker. (templated)
    :param pipeline_id: instead of ``pipeline``: one that was uploaded already. (templated)
    :param entry: ``module:function``, when the pipeline has more than one entry point. (templated)
    :param args: arguments of the pipeline. (templated)
    :param parallelism: the job's parallelism. (templated)
    :param configuration: options of the job. (templated)
    :param savepoint_path: the savepoint or checkpoint to resume from, or a task's result that has one. (templated)
    :param allow_non_restored_state: resume although the job has no place for some of the state. (templated)
    :param job_name: the job's name (``pipeline.name``), which no other living job may have. (templated)
    :param if_running: what to do when a job called ``job_name`` lives that this task has not started: ``fail``,
        ``wait`` until it has ended, or ``reuse`` it as if this task had started it, but never cancel it. (templated)
    :param from_latest_of: instead of ``savepoint_path``: a job, by id or name, from whose latest snapshot to start;
        among ended jobs, the latest with that name. It is chosen once: a retry starts from the same one. (templated)
    :param latest_kind: the kind of that snapshot: ``ANY``, ``CHECKPOINT`` or ``SAVEPOINT``. (templated)
    :param if_no_snapshot: ``fail``, or ``start`` from nothing, when the session has no job ``from_latest_of``, or that
        job has not completed anything yet. (templated)
    :param claim_mode: ``NO_CLAIM``, or ``CLAIM`` to make the system the owner of the snapshot. (templated)
    :param fork: the job has another output than the job whose snapshot it starts from, and both may run at the same
        time. (templated)
    :param source_positions: where sources continue, not where they were in the snapshot: by uid ``earliest``,
        ``latest``, a time such as ``2026-11-01T09:00``, or offsets. All other state is as it was. (templated)
    :param wait_for_completion: wait until the job is FINISHED instead, without a limit unless ``wait_timeout`` is
        given.
    :param cancel_on_kill: cancel the job when a person marks this task failed while it waits; never when the task is
        cleared, since its next try attaches to the job, or marked successful.
    :param cancel_on_timeout: cancel the job when the deadline, or ``execution_timeout``, passes.
    :param start_over: if the job of an earlier try has ended, start as the other arguments say, although this repeats
        output that the earlier job has committed. (templated)
    :raises CkptJobRunning: a job of ``job_name`` lives, and ``if_running`` is ``fail``; or several, and it is
        ``reuse``
    :raises CkptJobFailed: the job ended before it ran, or, with ``wait_for_completion``, in a state other than FINISHED
    :raises CkptJobNotResumable: the job of an earlier try, or that of ``from_latest_of``, has left nothing to resume
        from
    """

    template_fields: Collection[str] = (
        *CkptOperator.template_fields,
        *FIELDS,
        "savepoint_path",
        "claim_mode",
        "start_over",
        "job_name",
        "if_running",
        "from_latest_of",
        "latest_kind",
        "if_no_snapshot",
        "fork",
        "source_positions",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {**RENDERERS, "source_positions": "json"}
    operator_extra_links: Collection[BaseOperatorLink] = JOB_LINKS

    def __init__(  # noqa: PLR0913 - keyword arguments of a DAG author
        self,
        *,
        pipeline: Templated[str] | None = None,
        pipeline_id: Templated[str] | None = None,
        entry: Templated[str] | None = None,
        args: Templated[Sequence[str]] = (),
        parallelism: Templated[int | str] | None = None,
        configuration: Templated[Mapping[str, Any]] | None = None,
        savepoint_path: Templated[str] | None = None,
        allow_non_restored_state: Templated[bool | str] = False,
        claim_mode: Templated[str] = "NO_CLAIM",
        wait_for_completion: bool = False,
        cancel_on_kill: bool = True,
        cancel_on_timeout: bool = False,
        start_over: Templated[bool | str] = False,
        job_name: Templated[str] | None = None,
        if_running: Templated[str] = "fail",
        from_latest_of: Templated[str] | None = None,
        latest_kind: Templated[str] = "ANY",
        if_no_snapshot: Templated[str] = "fail",
        fork: Templated[bool | str] = False,
        source_positions: Templated[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.pipeline_id = pipeline_id
        self.entry = entry
        self.args = args
        self.parallelism = parallelism
        self.configuration = configuration
        self.savepoint_path = savepoint_path
        self.allow_non_restored_state = allow_non_restored_state
        self.claim_mode = claim_mode
        self.wait_for_completion = arguments.flag("wait_for_completion", wait_for_completion)
        self.cancel_on_kill = arguments.flag("cancel_on_kill", cancel_on_kill)
        self.cancel_on_timeout = arguments.flag("cancel_on_timeout", cancel_on_timeout)
        self.start_over = start_over
        self.job_name = job_name
        self.if_running = if_running
        self.from_latest_of = from_latest_of
        self.latest_kind = latest_kind
        self.if_no_snapshot = if_no_snapshot
        self.fork = fork
        self.source_positions = source_positions
        self._waiting_for: str | None = None
        self._instance: Any = None
        self._reused = False
        self._killed = False

    @property
    def job_id(self) -> XComArg:
        """The id of the job that runs, for arguments of other tasks."""
        return XComArg(self, "job_id")

    # -- starting ----------------------------------------------------------------------------------------------

    def default_wait_timeout(self) -> float | None:
        return None if self.wait_for_completion else super().default_wait_timeout()

    def execute(self, context: Context) -> Any:
        options = self.run_options()
        return self._start_or_attach(context, options, self.deadline())

    def _start_or_attach(self, context: Context, options: RunOptions, deadline: float | None) -> Any:
        """Start a job, or handle the job that an earlier try has started."""
        self._end_if_killed()
        with self.connected(deadline) as client:
            earlier = self._earlier(client, context)
            found = None if earlier is None else plan(earlier, options.savepoint_path, start_over=self._starts_over())
            last = None if earlier is None else earlier.record
            try:
                if found is None or found.step in (NextStep.REPEAT, NextStep.START):
                    self._check_name(client, but_for=None if last is None else last["job_id"])
                if last is None or found is None:
                    options = self._with_snapshot(client, options)
                    record = self._start(client, context, options, self._new_record(context, options))
                else:
                    self.log.info("%s", found.why)
                    record = self._carry_out(client, context, options, last, found)
            except _NameTaken as taken:
                self._waiting_for = None
                return self._follow_other_run(context, options, taken.by, deadline, last)
            if found is not None and found.step is NextStep.REPORT:
                facts = job_facts(self.ask(client, job_details(record["job_id"])))
                return self._succeed(context, record, facts)
        return self._wait_for_operation(
            context, record, deadline, inherited=found is not None and found.step is NextStep.ATTACH
        )

    def _carry_out(self, client: CkptClient, context: Context, options: RunOptions, record: Json, found: Plan) -> Json:
        """Return the record of the job that this try handles from now on."""
        if found.step in (NextStep.REPORT, NextStep.ATTACH):
            return Journal(context, RECORD).write(**record | {"started": True})
        options = replace(options, savepoint_path=found.snapshot)
        if found.resumes and not (found.snapshot == record.get("snapshot") and record.get("repositions")):
            options = replace(options, source_positions={})  # the earlier job has continued from them
        if found.resumes:
            # The job that owned the snapshot has ended, so the new job claims it and deletes it in time.
            options = replace(options, claim_mode="CLAIM")
        options = self._with_snapshot(client, options)
        fresh = self._new_record(context, options, record) | {"resumes": found.resumes}
        if found.step is NextStep.REPEAT:
            fresh |= {name: record[name] for name in ("number", "job_id", "pipeline_id")}
        return self._start(client, context, options, fresh)

    def _check_name(self, client: CkptClient, *, but_for: str | None) -> None:
        """Raises _NameTaken when living jobs other than ``but_for`` have the name that the new job is to get."""
        name = arguments.optional_text("job_name", self.job_name)
        found = [] if name is None else living(name, self.ask(client, requests.list_jobs()))
        others = [line for line in found if line.job_id != but_for]
        if others:
            raise _NameTaken(others)

    def _follow_other_run(
        self, context: Context, options: RunOptions, others: list[JobLine], deadline: float | None, last: Json | None
    ) -> Any:
        """Apply ``if_running`` when living jobs that this task has not started have the name."""
        name, shown = others[0].name, " and ".join(f"{line.job_id} ({line.state})" for line in others)
        what = self._if_running()
        if what == "FAIL" or (what == "REUSE" and len(others) > 1):
            ways = "end it first, or set if_running='wait' or 'reuse'" if what == "FAIL" else "only one can be reused"
            raise CkptJobRunning(f"job_name: {name!r} is already the name of job {shown}; {ways}")
        if what == "REUSE":
            self.log.info("Job %r is active as %s: it is reused, with its own program and state", name, shown)
            record = self._new_record(context, options, last) | {"job_id": others[0].job_id, "reused": True}
            record = Journal(context, RECORD).write(**record | {"started": True})
            return self._wait_for_operation(context, record, deadline, inherited=False)
        self.log.info("Job %r is active as %s: waiting for its end", name, shown)
        return self.wait_for(context, NameFreeCondition(name), deadline)

    def _if_running(self) -> str:
        return arguments.choice("if_running", self.if_running, IF_RUNNING)

    def _with_snapshot(self, client: CkptClient, options: RunOptions) -> RunOptions:
        """Return the options with the latest snapshot of the job ``from_latest_of``, unless they have a snapshot."""
        origin = self._origin()
        if origin is None or options.savepoint_path is not None:
            return options
        path = client.run(
            latest_snapshot_of(
                client.calls, origin, self._latest_kind(), or_nothing=self._starts_without(), pause=self.pause()
            )
        )
        self.log.info("The latest snapshot of job %r is %s", origin, path or "missing: the job starts from nothing")
        return replace(options, savepoint_path=path)

    def _origin(self) -> str | None:
        given = arguments.or_field("from_latest_of", self.from_latest_of, "job_id")
        return None if given in (None, "", "None") else arguments.job(given, "from_latest_of")

    def _latest_kind(self) -> str:
        return arguments.choice("latest_kind", self.latest_kind, KINDS)

    def _starts_without(self) -> bool:
        return arguments.choice("if_no_snapshot", self.if_no_snapshot, IF_NO_SNAPSHOT) == "START"

    def _starts_over(self) -> bool:
        return arguments.boolean("start_over", self.start_over)

    def _earlier(self, client: CkptClient, context: Context) -> EarlierJob | None:
        """The last job that a try of this task instance has started, or was about to start."""
        journal = Journal(context, RECORD)
        if not journal.remembers:
            return self._found_by_id(client, context)
        record = journal.read()
        return None if not record else self._looked_up(client, record)

    def _looked_up(self, client: CkptClient, record: Json) -> EarlierJob:
        job_id = record["job_id"]
        try:
            state = self.ask(client, job_details(job_id)).state
        except NotFound:
            return EarlierJob(record, None)
        # Flink's statistics lag behind the end of the job, and the last checkpoint decides where the next job starts.
        if state in TERMINAL_STATES:
            client.run(until_final(client.calls, job_id))
        try:
            statistics = self.ask(client, requests.checkpoint_statistics(job_id))
        except NotFound:  # a Flink job without checkpoints has none
            statistics = None
        return EarlierJob(record, state, statistics)

    def _found_by_id(self, client: CkptClient, context: Context) -> EarlierJob | None:
        """Without a store: the job ids of a task instance can be computed, and the job manager knows the jobs."""
        series, found = series_of(context), None
        for number in itertools.count():
            job_id = numbered_id(series, number)
            record: Json = {"series": series, "number": number, "job_id": job_id, "started": True}
            try:
                self.ask(client, job_details(job_id))
            except NotFound:
                return None if found is None else self._looked_up(client, found)
            found = record
        return None

    def _new_record(self, context: Context, options: RunOptions, last: Json | None = None) -> Json:
        """The record of a job to start; ``given`` is the argument, ``snapshot`` what the job really starts from."""
        # With a store, a reused run id must not lead to the jobs of the run before it.
        first = context["ti"].id.hex if Journal(context, RECORD).remembers else series_of(context)
        series, number = (first, 0) if last is None else (last["series"], last["number"] + 1)
        return {
            "series": series,
            "number": number,
            "job_id": numbered_id(series, number),
            "pipeline_id": self._uploaded(),
            "given": self._snapshot(),
            "snapshot": options.savepoint_path,
            "repositions": bool(options.source_positions),
        }

    def run_options(self) -> RunOptions:
        """Check and return the request's options.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        options = self.program_options()
        configuration = dict(options.configuration)
        name = arguments.optional_text("job_name", self.job_name)
        if name is not None and configuration.setdefault(_NAME_OPTION, name) != name:
            allowed = f"configuration[{_NAME_OPTION!r}] is {configuration[_NAME_OPTION]!r}: set only one of them"
            raise CkptArgumentInvalid("job_name", name, allowed)
        if name is not None:
            # Runs that start at the same moment do not see each other's jobs; the job manager does. Flink ignores the
            # option.
            configuration.setdefault(_UNIQUE_OPTION, "true")
        if name is None and self._if_running() != "FAIL":
            raise CkptArgumentInvalid("if_running", self.if_running, "it needs job_name, which identifies the job")
        # Arguments that are needed only later, or only by a retry, are checked now.
        self._starts_over()
        self._latest_kind()
        self._starts_without()
        if options.source_positions and self._origin() is None and self._snapshot() is None:
            allowed = "they change a snapshot: set savepoint_path or from_latest_of"
            raise CkptArgumentInvalid("source_positions", dict(options.source_positions), allowed)
        if self._origin() is not None and self._snapshot() is not None:
            raise CkptArgumentInvalid("from_latest_of", self.from_latest_of, "set either it or savepoint_path")
        return replace(
            options,
            configuration=configuration,
            savepoint_path=self._snapshot(),
            claim_mode=arguments.choice("claim_mode", self.claim_mode, CLAIM_MODES),
            fork=arguments.boolean("fork", self.fork),
        )

    def _snapshot(self) -> str | None:
        given = arguments.or_field("savepoint_path", self.savepoint_path, "savepoint_path", "external_path")
        return arguments.optional_text("savepoint_path", given)

    def _start(self, client: CkptClient, context: Context, options: RunOptions, record: Json) -> Json:
        """Request the job of ``record``, which is recorded before anything is sent."""
        journal, job_id = Journal(context, RECORD), record["job_id"]
        journal.write(**record)
        if record["pipeline_id"] is None:
            record = journal.write(**record | {"pipeline_id": self._upload(client)})
            # An upload takes a while, and another run may have started a job with the name in the meantime.
            self._check_name(client, but_for=job_id)
        self.publish_job(context, job_id)
        # Before the request: a kill from here on has something to cancel.
        self._waiting_for, self._instance = job_id, context["ti"]
        self._end_if_killed()
        try:
            self._run(client, options, record)
        except NotFound:
            if self._pipeline() is None:
                raise
            # An earlier try uploaded it, perhaps to a driver that has ended.
            record = journal.write(**record | {"pipeline_id": self._upload(client)})
            self._run(client, options, record)
        self.log.info("Started job %s of pipeline %s", job_id, record["pipeline_id"])
        # Flink has no warnings.
        try:
            details = client.job_details(job_id)
        except CkptClientError as error:  # the wait that follows deals with it
            self.log.info("Job %s cannot be read yet: %s", job_id, error)
        else:
            for warning in details.warnings:
                self.log.warning("Job %s: %s", job_id, warning)
        return journal.write(**record | {"started": True})

    def _run(self, client: CkptClient, options: RunOptions, record: Json) -> None:
        """Raises _NameTaken when several runs started a job with the name at once and another run was first."""
        try:
            self.ask(client, requests.run_pipeline(record["pipeline_id"], options, job_id=record["job_id"]))
        except Conflict:
            self._check_name(client, but_for=record["job_id"])
            raise

    def _end_if_killed(self) -> None:
        """A killed task keeps running for some seconds, and would mistake the end of its job for a failure."""
        if self._killed:
            raise AirflowTaskTerminated("the task was killed and does not start a job")

    # -- waiting -----------------------------------------------------------------------------------------------

    def _wait_for_operation(self, context: Context, record: Json, deadline: float | None, *, inherited: bool) -> Any:
        self._waiting_for, self._instance = record["job_id"], context["ti"]
        self._reused = bool(record.get("reused"))
        self.publish_job(context, record["job_id"])
        condition = JobStatusCondition(
            record["job_id"],
            expected=["FINISHED"] if self.wait_for_completion else ["RUNNING", "FINISHED"],
            all_tasks=True,
            cancel_on_kill=self.cancel_on_kill and not record.get("reused"),
        )
        return self.wait_for(context, condition, deadline, {"record": record, "inherited": inherited})

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        status, memo = Status(event["status"]), event["trigger"]["memo"]
        if "name" in event["trigger"]["condition"]:
            if status is Status.DONE:
                return self._start_or_attach(context, self.run_options(), event["trigger"]["deadline"])
            raise self.failure(context, event, CkptJobFailed)
        self.publish_job(context, memo["record"]["job_id"])
        if status is Status.DONE:
            return self._succeed(context, memo["record"], event["result"])
        if status in (Status.FAILED, Status.MISSING) and memo["inherited"]:
            self.log.warning("The job of an earlier try has ended: %s", event["message"])
            self.log_trace(event)
            return self._start_or_attach(context, self.run_options(), event["trigger"]["deadline"])
        raise self.failure(context, event, CkptJobFailed)

    def _succeed(self, context: Context, record: Json, facts: Json) -> Json:
        # The record stays, so that a cleared task finds the job that still runs; but the job's end was reported
        # already.
        Journal(context, RECORD).write(**record | {"reported": True})
        self._waiting_for = None
        self.publish_job(context, record["job_id"])
        self.log.info("Job %s is %s", record["job_id"], facts["status"])
        program = program_location(self.ckpt_conn_id, self._pipeline(), record.get("pipeline_id"))
        reads = () if record.get("reused") else (program, record.get("snapshot"))
        self.lineage_report = LineageReport(reads=reads, job_id=record["job_id"])
        return facts | {"pipeline_id": record.get("pipeline_id"), "started_from": record.get("snapshot")}

    # -- ends --------------------------------------------------------------------------------------------------

    def after_timeout(self, context: Context, event: Json | None) -> str:
        if event is not None and "name" in event["trigger"]["condition"]:
            return "No job was started"
        record = Journal(context, RECORD).read()
        job_id = record.get("job_id")
        if job_id is None and event is not None:
            job_id = event["trigger"]["condition"]["job_id"]
        if job_id is None or not self.cancel_on_timeout or record.get("reused"):
            return f"Job {job_id} was not cancelled and keeps running; the next try attaches to it"
        return self._cancel(job_id)

    def on_kill(self) -> None:
        """Cancel the job that this task started or waits for, and log the result."""
        self._killed = True
        job_id = self._waiting_for
        if job_id is None:
            return
        if is_over_time():
            what, cancels = "execution_timeout has passed", self.cancel_on_timeout
        else:
            what, cancels = "The task was killed", self.cancel_on_kill and is_given_up(self._instance, self.log)
        if self._reused or not cancels:
            self.log.warning("%s; job %s was not cancelled and keeps running.", what, job_id)
            return
        self.log.warning("%s. %s", what, self._cancel(job_id))

    def _cancel(self, job_id: str) -> str:
        try:
            with self.hook.get_conn(retry_timeout=ON_KILL_RETRY_TIMEOUT_SECONDS) as client:
                client.cancel_job(job_id)
        except CkptClientError as error:
            return f"Cancelling job {job_id} failed, it may keep running: {error}"
        return f"Job {job_id} is being cancelled"
