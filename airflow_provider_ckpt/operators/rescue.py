"""Gives a checkpoint that is nearly done more time before it expires (FLIP-571)."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.advice import TROUBLE
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Json, Status
from airflow_provider_ckpt.conditions.rescue import EXPIRING, JOB_ENDED, RescueRule
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptJobFailed
from airflow_provider_ckpt.operators.base import CkptJobOperator, Event
from airflow_provider_ckpt.operators.journal import Journal
from airflow_provider_ckpt.triggers.rescue import CkptRescueTrigger
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import CheckpointConfigPatch

if TYPE_CHECKING:
    from airflow.sdk import Context

_RECORD = "ckpt_rescue"
_DEFAULT_WATCH_SECONDS = 3600.0
_NEVER = 101.0
"""A progress that nothing reaches."""


class RescueCheckpointOperator(CkptJobOperator):
    """Watches a job's pending checkpoints; one that is nearly done when it is about to expire gets more time.

    The timeout of the job is patched, without a restart, so that what is persisted already is not lost. When it is
    about to expire again it gets as much again, up to ``max_timeout``. Once the checkpoint has ended the timeout is
    what it was before. Clocks of driver and triggerer must agree within a fraction of ``within``.

    Ends with the checkpoint that it has rescued; when ``wait_timeout`` (one hour unless given) has passed and none had
    to be; or with the job.

    Returns ``{"job_id", "checkpoint_id", "what", "timeout_ms", "former_timeout_ms"}``: ``what`` is ``COMPLETED`` or
    ``FAILED`` of a checkpoint that got more time, ``JOB_ENDED``, or ``NOTHING``.

    :param job: the job, by id or unique name. (templated)
    :param min_progress: percent of the subtasks that must have acknowledged it. (templated)
    :param within: how soon it must be about to expire: long enough for two polls and a request. (templated)
    :param extension: by how much the timeout is extended. (templated)
    :param max_timeout: the longest timeout that it may come to. (templated)
    :raises CkptJobFailed: the job has failed while it was watched
    """

    template_fields: Collection[str] = (
        *CkptJobOperator.template_fields,
        "min_progress",
        "within",
        "extension",
        "max_timeout",
    )

    def __init__(
        self,
        *,
        job: Templated[str],
        min_progress: Templated[int | float | str] = 95,
        within: Templated[Duration] = "15 s",
        extension: Templated[Duration] = "5 min",
        max_timeout: Templated[Duration] = "1 h",
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.min_progress = min_progress
        self.within = within
        self.extension = extension
        self.max_timeout = max_timeout

    def default_wait_timeout(self) -> float | None:
        return _DEFAULT_WATCH_SECONDS

    def rule(self, checkpoint_id: int | None = None) -> RescueRule:
        """Check and return the rule when to act.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        try:
            progress = float(self.min_progress)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            progress = -1.0
        if not 0 <= progress <= 100:
            raise CkptArgumentInvalid("min_progress", self.min_progress, "it must be a percentage from 0 to 100")
        return RescueRule(progress, arguments.millis("within", self.within), checkpoint_id)

    def execute(self, context: Context) -> Any:
        self.rule()
        for name in ("extension", "max_timeout"):
            arguments.millis(name, getattr(self, name))
        deadline = self.deadline()
        self.find(context, deadline)
        record = Journal(context, _RECORD).read()
        return self._watch(context, deadline, self.rule(record.get("checkpoint_id")), record)

    def _watch(
        self, context: Context, deadline: float | None, rule: RescueRule, record: Json, *, last: bool = False
    ) -> Any:
        """Wait for the rule; the ``record`` says what was extended, ``last`` that no more time is given."""
        trigger = CkptRescueTrigger(
            ckpt_conn_id=self.ckpt_conn_id,
            deadline=deadline,
            poll_interval=self.pause(),
            memo={"record": record, "last": last},
            job_id=self.found_job,
            rule=rule,
        )
        return self.wait_for(context, trigger)

    def _watch_its_end(self, context: Context, record: Json) -> Any:
        """It gets no more time, and ends within the timeout that it has."""
        deadline = time.time() + record["timeout_ms"] / 1000 + self.request_patience(None)
        rule = RescueRule(_NEVER, 0, record["checkpoint_id"])
        return self._watch(context, deadline, rule, record, last=True)

    def execute_complete(self, context: Context, event: Event | None = None) -> Any:
        event = event or {}
        self.publish_job(context, self.found_job)
        status, memo, facts = Status(event["status"]), event["trigger"]["memo"], event["result"]
        record = memo["record"]
        if status is Status.TIMEOUT and not memo["last"] and (record or not facts.get(TROUBLE)):
            if record:
                return self._watch_its_end(context, record)
            self.log.info("No checkpoint of job %s had to be rescued in this time", self.found_job)
            return self._end(context, {"what": "NOTHING"}, record)
        if status is not Status.DONE:
            raise self.failure(context, event, CkptJobFailed)
        if facts["what"] != EXPIRING:
            return self._end(context, facts, record)
        record, more = self._extend(context, facts, record)
        if not more:
            return self._watch_its_end(context, record)
        return self._watch(context, event["trigger"]["deadline"], self.rule(facts["checkpoint_id"]), record)

    def _extend(self, context: Context, facts: Json, record: Json) -> tuple[Json, bool]:
        """What was extended by now, and whether that is more than before."""
        extension, most = (arguments.millis(name, getattr(self, name)) for name in ("extension", "max_timeout"))
        number, progress = facts["checkpoint_id"], facts["progress"]
        with self.connected() as client:
            present = self.ask(client, requests.checkpoint_config(self.found_job)).timeout_ms
            wanted = max(present, min(present + extension, most))
            former = record.get("former_timeout_ms", present)
            # Written down first: a retry puts back what was there before the first extension.
            fields = {"checkpoint_id": number, "former_timeout_ms": former, "timeout_ms": wanted}
            record = Journal(context, _RECORD).write(**fields)
            if wanted == present:
                text = "Checkpoint %s is %s %% done and about to expire; max_timeout allows no more than %s ms"
                self.log.warning(text, number, progress, present)
                return record, False
            patch = CheckpointConfigPatch(timeout_ms=wanted)
            self.ask(client, requests.patch_checkpoint_config(self.found_job, patch))
        text = "Checkpoint %s is %s %% done and would expire in %s ms: the timeout is %s ms now, it was %s ms"
        self.log.warning(text, number, progress, facts["left_ms"], wanted, present)
        return record, True

    def _end(self, context: Context, facts: Json, record: Json) -> Json:
        """Put the timeout back, and say what became of the checkpoint."""
        former, extended, number = (record.get(name) for name in ("former_timeout_ms", "timeout_ms", "checkpoint_id"))
        if extended != former and facts["what"] != JOB_ENDED:
            patch = CheckpointConfigPatch(timeout_ms=former)
            with self.connected() as client:
                self.ask(client, requests.patch_checkpoint_config(self.found_job, patch))
            self.log.info("The timeout of job %s is %s ms again", self.found_job, former)
        if number is not None:
            self.log.info("Checkpoint %s: %s %s", number, facts["what"], facts.get("failure") or "")
        Journal(context, _RECORD).forget()
        self.forget_job(context)
        result = {"job_id": self.found_job, "what": facts["what"], "checkpoint_id": number}
        return result | {"timeout_ms": extended, "former_timeout_ms": former}

    def after_timeout(self, context: Context, event: Event | None) -> str:
        return "The timeout that the job has now stays as it is"

    def on_kill(self) -> None:
        """Say what stays."""
        text = "The task was killed; a timeout of job %s that it has extended stays as it is."
        self.log.warning(text, self.found_job)
