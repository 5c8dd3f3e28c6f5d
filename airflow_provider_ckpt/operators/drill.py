"""Proves that a savepoint can be restored: into a job without any outside effect, which is then removed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import XComArg

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Json, Status, Wait
from airflow_provider_ckpt.conditions.health import DrillCondition, has_slots, progress_of_restore
from airflow_provider_ckpt.conditions.job import JobStatusCondition
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptDrillFailed, CkptOperationFailed
from airflow_provider_ckpt.lineage import LineageReport, program_location
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.operators.base import CkptOperator
from airflow_provider_ckpt.operators.program import FIELDS, RENDERERS, RunsProgram
from airflow_provider_ckpt.tasks import Journal, new_id
from airflow_provider_ckpt.triggers.wait import ON_KILL_RETRY_TIMEOUT_SECONDS
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError, Conflict, NotFound
from ckpt_runtime.contract.jobs import TERMINAL_STATES, RunOptions

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

_RECORD = "ckpt_drill"
_INTERVAL_OPTION = "execution.checkpointing.interval"
_REMOVAL_SECONDS = 120.0


class RestoreDrillOperator(RunsProgram, CkptOperator):
    """Restores a savepoint into a job without any outside effect, waits until that job has its state and completes
    checkpoints, records the result in the savepoint catalogue, and removes the job after any result.

    A drill that failed fails the task, without a retry. A drill that could not begin (refused, no slots), or that an
    outside cause ended (cancelled, its driver), proves nothing about the savepoint and is not noted. A later try
    removes the drill that an earlier one has left, and starts again from the beginning.

    Returns ``{"job_id", "name", "status", "savepoint_path", "passed", "checkpoints", "restored_after_ms",
    "healthy_after_ms"}``; times are measured from the submission.

    :param pipeline: a ``.py``, a ``.zip`` or a directory on the worker. (templated)
    :param pipeline_id: instead of ``pipeline``: one that was uploaded already. (templated)
    :param savepoint_path: what to restore, or a task's result that has it. (templated)
    :param latest_of: instead of that: a job, by id or name, of which to take the latest good savepoint. (templated)
    :param directory: where to look for it; default: the directory that is configured for that job. (templated)
    :param entry: ``module:function``, when the pipeline has more than one entry point. (templated)
    :param args: arguments of the pipeline. (templated)
    :param parallelism: the drill's parallelism. (templated)
    :param configuration: options of the job. (templated)
    :param allow_non_restored_state: restore although the job has no place for some of the state. (templated)
    :param checkpoints: how many checkpoints have to complete. (templated)
    :param checkpoint_interval: the drill's, instead of the job's; ``None`` keeps the job's. (templated)
    :param mark: whether to note the result in the savepoint catalogue. (templated)
    :raises CkptDrillFailed: the savepoint could not be restored, or took no checkpoint in time
    """

    template_fields: Collection[str] = (
        *CkptOperator.template_fields,
        *FIELDS,
        "savepoint_path",
        "latest_of",
        "directory",
        "checkpoints",
        "checkpoint_interval",
        "mark",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = RENDERERS
    operator_extra_links: Collection[BaseOperatorLink] = JOB_LINKS

    def __init__(  # noqa: PLR0913 - keyword arguments of a DAG author
        self,
        *,
        pipeline: Templated[str] | None = None,
        pipeline_id: Templated[str] | None = None,
        savepoint_path: Templated[str] | None = None,
        latest_of: Templated[str] | None = None,
        directory: Templated[str] | None = None,
        entry: Templated[str] | None = None,
        args: Templated[Sequence[str]] = (),
        parallelism: Templated[int | str] | None = None,
        configuration: Templated[Mapping[str, Any]] | None = None,
        allow_non_restored_state: Templated[bool | str] = False,
        checkpoints: Templated[int | str] = 2,
        checkpoint_interval: Templated[Duration] | None = "5 s",
        mark: Templated[bool | str] = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.pipeline_id = pipeline_id
        self.savepoint_path = savepoint_path
        self.latest_of = latest_of
        self.directory = directory
        self.entry = entry
        self.args = args
        self.parallelism = parallelism
        self.configuration = configuration
        self.allow_non_restored_state = allow_non_restored_state
        self.checkpoints = checkpoints
        self.checkpoint_interval = checkpoint_interval
        self.mark = mark
        self._drilling: str | None = None

    @property
    def drilled_savepoint(self) -> XComArg:
        """The savepoint that was restored, for arguments of other tasks."""
        return XComArg(self, "savepoint_path")

    # -- starting ----------------------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        options, wanted = self.run_options(), arguments.integer("checkpoints", self.checkpoints, minimum=1)
        origin, marks = self._origin(), arguments.boolean("mark", self.mark)
        deadline = self.deadline()
        with self.connected(deadline) as client:
            # The drill of an earlier try that died may still exist.
            earlier = Journal(context, _RECORD).read().get("job_id")
            if earlier is not None:
                self.log.info("Removing the drill %s of an earlier try", earlier)
                self._remove(client, earlier)
            path = options.savepoint_path or self._latest(client, origin)
            try:
                record = self._start(client, context, options, path)
            except CkptClientError:
                if self._drilling is not None:
                    self.log.warning("The drill could not be started. %s", self._cancel(self._drilling))
                raise
        memo = {"savepoint_path": path, "marks": marks}
        return self.wait_for(context, DrillCondition(record["job_id"], wanted), deadline, memo)

    def _latest(self, client: CkptClient, origin: str) -> str:
        directory = arguments.optional_text("directory", self.directory)
        found = client.latest_savepoint(directory, job=origin)
        self.log.info("The latest good savepoint of job %r is %s", origin, found.location)
        return found.location

    def _start(self, client: CkptClient, context: Context, options: RunOptions, path: str) -> Json:
        """The job is recorded before anything is sent, so that a later try can remove it."""
        record = Journal(context, _RECORD).write(job_id=new_id(context, "drill"), savepoint_path=path)
        job_id = self._drilling = record["job_id"]
        options = replace(options, savepoint_path=path)
        self.publish_job(context, job_id)
        self.ask(client, requests.run_drill(self._uploaded() or self._upload(client), options, job_id=job_id))
        self.log.info("Started the restore drill %s of %s", job_id, path)
        return record

    def run_options(self) -> RunOptions:
        """Check and return the request's options.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        options = self.program_options()
        if (self._given_path() is None) == (not self._origin()):
            allowed = "set either it or latest_of, the job whose latest good savepoint is restored"
            raise CkptArgumentInvalid("savepoint_path", self.savepoint_path, allowed)
        configuration = dict(options.configuration)
        if self.checkpoint_interval not in (None, "", "None"):
            configuration[_INTERVAL_OPTION] = f"{arguments.millis('checkpoint_interval', self.checkpoint_interval)} ms"
        return replace(options, configuration=configuration, savepoint_path=self._given_path())

    def _origin(self) -> str:
        given = arguments.or_field("latest_of", self.latest_of, "job_id")
        return "" if given in (None, "", "None") else arguments.job(given, "latest_of")

    def _given_path(self) -> str | None:
        given = arguments.or_field("savepoint_path", self.savepoint_path, "savepoint_path", "external_path", "location")
        return arguments.optional_text("savepoint_path", given)

    # -- ends --------------------------------------------------------------------------------------------------

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        trigger, status = event["trigger"], Status(event["status"])
        job_id, path = trigger["condition"]["job_id"], trigger["memo"]["savepoint_path"]
        self._drilling = job_id
        with self.connected() as client:
            try:
                why = self._judged(client, event)
                if trigger["memo"]["marks"] and (status is Status.DONE or why):
                    self._note(client, path, event, why)
            finally:
                self._remove(client, job_id)
        Journal(context, _RECORD).forget()
        if status is Status.MISSING:
            raise CkptOperationFailed(f"{event['message']}. A drill ends with its driver; the next try begins another")
        if status is not Status.DONE:
            raise self.failure(context, event, CkptDrillFailed if why else CkptOperationFailed)
        program = program_location(self.ckpt_conn_id, self._pipeline(), self._uploaded())
        self.lineage_report = LineageReport(reads=[program, path], job_id=job_id)
        result = {**event["result"], "savepoint_path": path, "passed": True}
        self.log.info("The restore drill of %s passed: %s", path, _words(result))
        return result

    def _judged(self, client: CkptClient, event: Json) -> str | None:
        """Return what a drill that did not pass proves against its savepoint; None: nothing."""
        job_id = event["trigger"]["condition"]["job_id"]
        match Status(event["status"]):
            case Status.FAILED if event["result"].get("status") == "FAILED":
                return str(event["message"])
            case Status.TIMEOUT:
                job = self.ask(client, requests.job_details(job_id))
                if has_slots(job):
                    return f"{event['message']}: {progress_of_restore(job)}"
                self.log.warning("Drill %s did not start: %s", job_id, progress_of_restore(job))
        return None

    def _note(self, client: CkptClient, path: str, event: Json, why: str | None) -> None:
        result = event["result"]
        client.mark_savepoint(
            path,
            "DRILL",
            passed=why is None,
            by=f"airflow: {self.dag_id}/{self.task_id}",
            detail=_words(result) if why is None else why,
            duration_ms=result.get("healthy_after_ms") if why is None else None,
        )
        self.log.info("Recorded in the savepoint catalogue: %s %s", path, "passed" if why is None else "failed")

    def _remove(self, client: CkptClient, job_id: str) -> None:
        """Cancel the drill and wait for its end; a missing drill is not an error, also if it was never started."""
        try:
            client.cancel_job(job_id)
        except (NotFound, Conflict):
            return
        ended = JobStatusCondition(job_id, sorted(TERMINAL_STATES))
        wait = Wait(ended, time.time() + _REMOVAL_SECONDS, self.pause(), self.log)
        verdict = client.run(wait.until_verdict(client.calls))
        if verdict.status is Status.TIMEOUT:
            self.log.warning("Drill %s is cancelled and has not ended yet: %s", job_id, verdict.message)

    def after_timeout(self, context: Context, event: Json | None) -> str:
        """The drill is removed already, unless Airflow's own timeout came first."""
        job_id = Journal(context, _RECORD).read().get("job_id")
        if event is not None or job_id is None:
            return "The drill is removed"
        return self._cancel(job_id)

    def on_kill(self) -> None:
        """Remove the drill, and log what became of it."""
        if self._drilling is not None:
            self.log.warning("The task was killed. %s", self._cancel(self._drilling))

    def _cancel(self, job_id: str) -> str:
        try:
            with self.hook.get_conn(retry_timeout=ON_KILL_RETRY_TIMEOUT_SECONDS) as client:
                client.cancel_job(job_id)
        except (NotFound, Conflict):
            return f"Drill {job_id} has ended"
        except CkptClientError as error:
            return f"Cancelling drill {job_id} failed, it may keep running: {error}"
        return f"Drill {job_id} is being cancelled"


def _words(result: Json) -> str:
    restored, healthy = result.get("restored_after_ms"), result.get("healthy_after_ms")
    first = "" if restored is None else f"all tasks ran after {restored / 1000:.1f} s, "
    last = "" if healthy is None else f" after {healthy / 1000:.1f} s"
    return f"{first}{result.get('checkpoints')} checkpoints{last}"
