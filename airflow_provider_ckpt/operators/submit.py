"""Submits a job and waits until it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.conditions.base import Json, Status
from airflow_provider_ckpt.conditions.job import job_facts
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptJobFailed
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.operators.base import CkptOperator, Event
from airflow_provider_ckpt.operators.journal import Journal, new_id
from airflow_provider_ckpt.secret_values import hide
from airflow_provider_ckpt.triggers.job import CkptJobTrigger
from ckpt_runtime.client import CkptClient, CkptClientError, NotFound, requests
from ckpt_runtime.client.models import TERMINAL_STATES, RunOptions
from ckpt_runtime.client.packaging import PackagingError, pack_pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

_RECORD = "ckpt_job"
CLAIM_MODES = ("NO_CLAIM", "CLAIM")


class SubmitJobOperator(CkptOperator):
    """Uploads a pipeline, starts a job of it and waits until all its tasks run.

    The job's id is chosen and written down before anything is sent, and starting is idempotent on it, so that no crash
    or retry starts the job twice. A task that is tried again, or cleared, while its job still lives attaches to that
    job; when the job has ended in the meantime, a new one is started.

    Returns ``{"job_id", "name", "status", "pipeline_id", "start_time_ms", "end_time_ms", "duration_ms"}``.

    :param pipeline: a ``.py``, a ``.zip`` or a directory on the worker. (templated)
    :param pipeline_id: instead of ``pipeline``: one that was uploaded already. (templated)
    :param entry: ``module:function``, when the pipeline has more than one entry point. (templated)
    :param args: arguments of the pipeline. (templated)
    :param parallelism: the job's parallelism. (templated)
    :param configuration: options of the job. (templated)
    :param savepoint_path: the savepoint or checkpoint to resume from. (templated)
    :param allow_non_restored_state: resume although the job has no place for some of the state. (templated)
    :param claim_mode: ``NO_CLAIM``, or ``CLAIM`` to make the system the owner of the snapshot. (templated)
    :param wait_for_completion: wait until the job is FINISHED instead.
    :param cancel_on_kill: cancel the job when a person ends this task while it waits.
    :param cancel_on_timeout: cancel the job when the deadline passes.
    """

    template_fields: Collection[str] = (
        *CkptOperator.template_fields,
        "pipeline",
        "pipeline_id",
        "entry",
        "args",
        "parallelism",
        "configuration",
        "savepoint_path",
        "allow_non_restored_state",
        "claim_mode",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"configuration": "json", "args": "json"}
    operator_extra_links: Collection[BaseOperatorLink] = JOB_LINKS

    def __init__(  # noqa: PLR0913 - keyword arguments of a DAG author
        self,
        *,
        pipeline: str | None = None,
        pipeline_id: str | None = None,
        entry: str | None = None,
        args: Sequence[str] = (),
        parallelism: int | str | None = None,
        configuration: Mapping[str, Any] | None = None,
        savepoint_path: str | None = None,
        allow_non_restored_state: bool | str = False,
        claim_mode: str = "NO_CLAIM",
        wait_for_completion: bool = False,
        cancel_on_kill: bool = True,
        cancel_on_timeout: bool = True,
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
        self.wait_for_completion = wait_for_completion
        self.cancel_on_kill = cancel_on_kill
        self.cancel_on_timeout = cancel_on_timeout
        self._waiting_for: str | None = None

    # -- starting ----------------------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        options, deadline = self.run_options(), self.deadline()
        hide(options.configuration)
        record = Journal(context, _RECORD).read()
        with self.connected() as client:
            found = self._look_up(client, record) if record else None
            if found is not None and found["status"] == "FINISHED" and not record.get("reported"):
                return self._succeed(context, record, found)
            inherited = found is not None and found["status"] not in TERMINAL_STATES
            if not inherited:
                # Unknown to the job manager: the request never arrived, or is still on its way. The same id again
                # makes one job of the two.
                same = record if record and found is None else None
                record = self._start(client, context, options, deadline, same, "")
        return self._attend(context, record, deadline, inherited=inherited)

    def run_options(self) -> RunOptions:
        """The request's options, checked.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        if (self._pipeline() is None) == (self._uploaded() is None):
            allowed = "give either pipeline, a path, or pipeline_id"
            raise CkptArgumentInvalid("pipeline", self.pipeline, allowed)
        if isinstance(self.args, str) or not all(isinstance(item, (str, int, float)) for item in self.args):
            raise CkptArgumentInvalid("args", self.args, "it must be a list of texts")
        parallelism = None if self.parallelism in (None, "", "None") else self.parallelism
        return RunOptions(
            entry_point=arguments.optional_text("entry", self.entry),
            arguments=tuple(str(item) for item in self.args),
            parallelism=None if parallelism is None else arguments.integer("parallelism", parallelism, minimum=1),
            configuration=arguments.options("configuration", self.configuration),
            savepoint_path=arguments.optional_text("savepoint_path", self.savepoint_path),
            allow_non_restored_state=arguments.boolean("allow_non_restored_state", self.allow_non_restored_state),
            claim_mode=arguments.choice("claim_mode", self.claim_mode, CLAIM_MODES),
        )

    def _pipeline(self) -> str | None:
        return arguments.optional_text("pipeline", self.pipeline)

    def _uploaded(self) -> str | None:
        return arguments.optional_text("pipeline_id", self.pipeline_id)

    def _look_up(self, client: CkptClient, record: Json) -> Json | None:
        """The job of an earlier try, or ``None`` when the job manager does not know it."""
        try:
            found = job_facts(client.execute(requests.job_details(record["job_id"])))
        except NotFound:
            self.log.info("The job manager does not know job %s of an earlier try", record["job_id"])
            return None
        self.log.info("Job %s of an earlier try is %s", record["job_id"], found["status"])
        return found

    def _start(
        self,
        client: CkptClient,
        context: Context,
        options: RunOptions,
        deadline: float,
        same: Json | None,
        suffix: str,
    ) -> Json:
        journal = Journal(context, _RECORD)
        record = same or journal.write(job_id=new_id(context, f"job{suffix}"), pipeline_id=self._uploaded())
        job_id, pipeline_id = record["job_id"], record.get("pipeline_id")
        self.publish_links(context, job_id)
        if pipeline_id is None:
            pipeline_id = self._upload(client)
            record = journal.write(job_id=job_id, pipeline_id=pipeline_id)
        self._waiting_for = job_id
        self.ask(client, requests.run_pipeline(pipeline_id, options, job_id=job_id), deadline)
        self.log.info("Started job %s of pipeline %s", job_id, pipeline_id)
        return record

    def _upload(self, client: CkptClient) -> str:
        try:
            filename, content = pack_pipeline(Path(self._pipeline() or ""))
        except PackagingError as error:
            raise CkptArgumentInvalid("pipeline", self.pipeline, str(error)) from error
        pipeline_id = client.execute(requests.upload_pipeline(filename, content))
        self.log.info("Uploaded %s (%d bytes) as pipeline %s", filename, len(content), pipeline_id)
        return pipeline_id

    # -- waiting -----------------------------------------------------------------------------------------------

    def _attend(self, context: Context, record: Json, deadline: float, *, inherited: bool) -> Any:
        self._waiting_for = record["job_id"]
        self.publish_links(context, record["job_id"])
        trigger = CkptJobTrigger(
            ckpt_conn_id=self.ckpt_conn_id,
            deadline=deadline,
            poll_interval=self.poll_interval,
            memo={"record": record, "inherited": inherited},
            job_id=record["job_id"],
            expected=["FINISHED"] if self.wait_for_completion else ["RUNNING", "FINISHED"],
            all_tasks=True,
            cancel_on_kill=self.cancel_on_kill,
        )
        return self.wait_for(context, trigger)

    def execute_complete(self, context: Context, event: Event | None = None) -> Any:
        event = event or {}
        status, memo = Status(event["status"]), event["trigger"]["memo"]
        self.publish_links(context, memo["record"]["job_id"])
        if status is Status.DONE:
            return self._succeed(context, memo["record"], event["result"])
        if status in (Status.FAILED, Status.MISSING) and memo["inherited"]:
            self.log.warning("The job of an earlier try ended (%s); starting another", event["message"])
            return self._start_once_more(context, event["trigger"]["deadline"])
        raise self.failure(context, event, CkptJobFailed)

    def _start_once_more(self, context: Context, deadline: float) -> Any:
        with self.connected() as client:
            record = self._start(client, context, self.run_options(), deadline, None, "/again")
        return self._attend(context, record, deadline, inherited=False)

    def _succeed(self, context: Context, record: Json, facts: Json) -> Json:
        # The record stays, so that a cleared task finds the job that still runs; but its end is news no more.
        Journal(context, _RECORD).write(**record | {"reported": True})
        self._waiting_for = None
        self.publish_links(context, record["job_id"])
        self.log.info("Job %s is %s", record["job_id"], facts["status"])
        return facts | {"pipeline_id": record.get("pipeline_id")}

    # -- ends --------------------------------------------------------------------------------------------------

    def after_timeout(self, context: Context, event: Event | None) -> str:
        job_id = Journal(context, _RECORD).read().get("job_id")
        if job_id is None and event is not None:
            job_id = event["trigger"]["job_id"]
        if job_id is None or not self.cancel_on_timeout:
            return f"Job {job_id} was not cancelled and goes on"
        return self._cancel(job_id)

    def on_kill(self) -> None:
        """Cancel the job that this task started or waits for, and say what became of it."""
        job_id = self._waiting_for
        if job_id is None:
            return
        if not self.cancel_on_kill:
            self.log.warning("The task was killed; job %s was not cancelled and goes on.", job_id)
            return
        self.log.warning("The task was killed. %s", self._cancel(job_id))

    def _cancel(self, job_id: str) -> str:
        try:
            with self.hook.get_conn() as client:
                client.execute(requests.cancel_job(job_id))
        except CkptClientError as error:
            return f"Cancelling job {job_id} failed, it may go on: {error}"
        return f"Job {job_id} is being cancelled"
