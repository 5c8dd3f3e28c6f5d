"""A notifier for callbacks: the state of a task's job in words, for any notifier that delivers messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.sdk import BaseNotifier
from airflow.sdk.exceptions import AirflowException

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.conditions.base import Json, moment
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.jobs import chosen
from airflow_provider_ckpt.links import CkptJobLink, pages_path
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import CkptApiError, CkptClientError, is_passing
from ckpt_runtime.contract.jobs import JobLine, root_cause_line

if TYPE_CHECKING:
    from airflow.sdk import Context

MESSAGE: Final = (
    "Job {{ ckpt.job }}{% if ckpt.state %} is {{ ckpt.state }}{% endif %}"
    "{% if ckpt.verdict %}, {{ ckpt.verdict }}{% if ckpt.reasons %} ({{ ckpt.reasons | join('; ') }}){% endif %}"
    "{% endif %}."
    "{% if ckpt.trouble %} {{ ckpt.trouble }}.{% endif %}"
    "{% if ckpt.failure %} Last failure: {{ ckpt.failure }}.{% endif %}"
    "{% if ckpt.checkpoint %} Last completed checkpoint: {{ ckpt.checkpoint.id }}, {{ ckpt.checkpoint.at }}, "
    "{{ ckpt.checkpoint.path }}.{% elif ckpt.job_id %} No checkpoint has completed.{% endif %}"
    "{% if ti is defined and ti %} Task: {{ ti.dag_id }}.{{ ti.task_id }}, run {{ ti.run_id }}.{% endif %}"
    "{% if ckpt.link %} {{ ckpt.link }}{% endif %}"
)
"""The default message."""
RETRY_TIMEOUT_SECONDS: Final = 10.0


class CkptNotifier(BaseNotifier):
    """Says how the job of a task is: its state, the verdict on its health, its last completed checkpoint, and a link.

    For ``on_failure_callback`` and the other callbacks of tasks and DAGs, and for deadlines. It requests the state from
    the job manager when it is called. If the job manager does not answer or does not know the job, the message says so;
    the callback never fails for it. The message is logged, and ``notifiers`` deliver it: their templates use it as ``{{
    ckpt.message }}``, and its parts by their names.

    ``ckpt`` has ``message``, ``job``, ``job_id``, ``ckpt_conn_id``, ``state``, ``verdict``, ``reasons``, ``restarts``,
    ``checkpoint`` (``id``, ``at``, ``path``, ``size``), ``failure``, ``link`` and ``trouble``; unknown parts are
    ``None``.

    :param job: the job, by name or id. By default it is the job of the callback's task. (templated)
    :param ckpt_conn_id: the Airflow connection of the job manager. By default it is the connection of the task.
        (templated)
    :param message: the message, a template; by default one line with all of this.
    :param notifiers: other notifiers or callbacks, such as those of the Slack provider, which deliver the message. They
        are called one after the other; if one of them fails, the others still get the message.
    """

    template_fields: Sequence[str] = ("job", "ckpt_conn_id")

    def __init__(
        self,
        *,
        job: str | None = None,
        ckpt_conn_id: str | None = None,
        message: str | None = None,
        notifiers: Sequence[Callable[[Context], Any]] = (),
    ) -> None:
        super().__init__()
        self.job = job
        self.ckpt_conn_id = ckpt_conn_id
        self.message = MESSAGE if message is None else message
        self.notifiers = notifiers

    def notify(self, context: Context) -> None:
        """Send the notification from a worker or the DAG processor."""
        conn_id, job = self._subject(context)
        hook, facts, outside = CkptHook(conn_id), _unknown(conn_id, job), None
        try:
            outside = hook.endpoint().browser_address
            if job is not None:
                with hook.get_conn(retry_timeout=RETRY_TIMEOUT_SECONDS) as client:
                    facts |= client.run(facts_of(client.calls, job))
        except (CkptClientError, AirflowException) as error:
            facts["trouble"] = _trouble(conn_id, error)
        self._deliver(context, facts, outside)

    async def async_notify(self, context: Context) -> None:
        """Send the notification from a triggerer, for a deadline."""
        conn_id, job = self._subject(context)
        hook, facts, outside = CkptHook(conn_id), _unknown(conn_id, job), None
        try:
            outside = (await hook.aendpoint()).browser_address
            if job is not None:
                async with await hook.aget_conn(retry_timeout=RETRY_TIMEOUT_SECONDS) as client:
                    facts |= await facts_of(client, job)
        except (CkptClientError, AirflowException) as error:
            facts["trouble"] = _trouble(conn_id, error)
        self._deliver(context, facts, outside)

    def _subject(self, context: Context) -> tuple[str, str | None]:
        """The connection and the job: those that were given, or those of the task."""
        task: Any = context.get("task")
        conn_id = arguments.optional_text("ckpt_conn_id", self.ckpt_conn_id)
        conn_id = conn_id or getattr(task, "ckpt_conn_id", None) or CkptHook.default_conn_name
        given = arguments.optional_text("job", self.job) or _pushed(context)
        if given is None:
            given = getattr(task, "job_name", None) or getattr(task, "job", None)
        try:
            return conn_id, None if given is None else arguments.job(given)
        except AirflowException:  # such as the output of a task without a result
            return conn_id, None

    def _deliver(self, context: Context, facts: Json, outside: str | None) -> None:
        facts["link"] = None if facts["job_id"] is None else _link(facts["ckpt_conn_id"], facts["job_id"], outside)
        around: Any = {**context, "ckpt": facts}
        # A template that cannot be rendered must not hide that something is wrong.
        try:
            facts["message"] = self.render_template(self.message, around)
        except Exception as error:
            facts["message"] = (
                f"Job {facts['job']}: {facts}. The message cannot be rendered from its template: {error!r}"
            )
        self.log.warning("%s", facts["message"])
        for notifier in self.notifiers:
            try:
                notifier(around)
            except Exception:
                self.log.exception("%s cannot deliver the message", type(notifier).__name__)


def _pushed(context: Context) -> str | None:
    """The id of the job that the task knows, which it has stored as soon as it knew it."""
    instance: Any = context.get("ti")
    if instance is None or not hasattr(instance, "xcom_pull"):
        return None
    try:
        found = instance.xcom_pull(task_ids=instance.task_id, key="job_id", map_indexes=instance.map_index)
    except Exception:  # in the DAG processor there may be nothing that answers
        return None
    return found if isinstance(found, str) else None


def _unknown(conn_id: str, job: str | None) -> Json:
    keys = ("job_id", "state", "verdict", "reasons", "restarts", "checkpoint", "failure", "link", "message")
    trouble = "The task does not say which job it is about" if job is None else None
    return {"ckpt_conn_id": conn_id, "job": job, "trouble": trouble, **dict.fromkeys(keys)}


def _trouble(conn_id: str, error: Exception) -> str:
    text = str(error).rstrip(".")
    if isinstance(error, CkptClientError) and is_passing(error):
        return f"The job manager of the connection {conn_id!r} does not answer: {text}"
    return text


async def facts_of(client: AsyncCalls, job: str) -> Json:
    """The facts that the job manager has about a job, given by id or name; the latest of the name when none lives.

    :raises CkptJobAmbiguous: for a name that several living jobs have.
    :raises CkptClientError: when the job manager does not answer.
    """
    line = chosen(job, await client.list_jobs(), ended=True)
    if line is None:
        return {"trouble": f"The job manager does not know job {job!r}"}
    facts: Json = {"job": line.name, "job_id": line.job_id, "state": line.state}
    return facts | await _health(client, line) | await _checkpoint(client, line) | await _failure(client, line)


async def _health(client: AsyncCalls, line: JobLine) -> Json:
    """The verdict on the job's health; nothing on Flink, which has none."""
    try:
        health = await client.job_health(line.job_id)
    except CkptApiError as error:
        if is_passing(error):
            raise
        return {}
    return {"verdict": health.verdict, "reasons": list(health.reasons), "restarts": health.restarts}


async def _checkpoint(client: AsyncCalls, line: JobLine) -> Json:
    try:
        last = (await client.checkpoint_statistics(line.job_id)).latest_completed
    except CkptApiError as error:
        if is_passing(error):
            raise
        return {}
    if last is None:
        return {}
    at_ms = last.triggered_at_ms + last.duration_ms
    age = max(0, round(time.time() - at_ms / 1000))
    at = f"{moment(at_ms)} ({age} s ago)"
    return {"checkpoint": {"id": last.id, "at": at, "path": last.external_path, "size": last.state_size}}


async def _failure(client: AsyncCalls, line: JobLine) -> Json:
    try:
        entries = (await client.job_exceptions(line.job_id, 1)).entries
    except CkptApiError as error:
        if is_passing(error):
            raise
        return {}
    if not entries:
        return {}
    return {"failure": root_cause_line(entries[0].stack_trace) or entries[0].exception}


def _link(conn_id: str, job_id: str, outside: str | None) -> str:
    """The address of the job's page: at the connection's address for browsers, or else in Airflow."""
    pages = f"{outside}/web/" if outside else pages_path(conn_id)
    base = urlsplit(conf.get("api", "base_url", fallback="") or "")
    if not outside and base.netloc:
        pages = f"{base.scheme}://{base.netloc}{pages}"
    return CkptJobLink().address(pages, job_id)
