"""Keeps one job of a name running with the program that the DAG declares: starts it, attaches to it, or upgrades it.

Starting is what :class:`SubmitJobOperator` does and upgrading what :class:`UpgradeJobOperator` does; here is only which
of them is due. A job carries labels with the task that has started it and with its program. A later run of the DAG
therefore recognizes an unchanged program, also if the running job was changed since.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import json, structs

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.conditions.job import job_facts
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptJobAmbiguous,
    CkptJobNotFound,
    CkptJobNotResumable,
    CkptProgramChanged,
    CkptUpgradeRefused,
)
from airflow_provider_ckpt.jobs import Plan, chosen_path, latest_ended, living, resolve
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.operators.program import FIELDS, RENDERERS
from airflow_provider_ckpt.operators.submit import RECORD as JOB_RECORD
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator
from airflow_provider_ckpt.operators.upgrade_steps import RECORD as UPGRADE_RECORD
from airflow_provider_ckpt.operators.upgrade_steps import CkptStepsOperator
from airflow_provider_ckpt.tasks import CONFIRMING_SECONDS, Journal
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Outcome, Upgrade
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.waiting import until_final
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobLine, RunOptions, UpgradeInProgress

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

ON_CHANGE: Final = ("UPGRADE", "REFUSE", "IGNORE")
LABELS: Final = "pipeline.global-job-parameters"
PROGRAM: Final = "airflow.program"
REJECTED: Final = "airflow.rejected-program"
_DIGITS: Final = 32
_BY_ITS_NAME: Final = "(the one of the name)"


class DeployJobOperator(SubmitJobOperator, UpgradeJobOperator):
    """Sees to it that the job called ``job_name`` runs, and runs this program; waits until it does.

    * No such job lives: it is started, from the latest snapshot of the job of this name that ended last, unless that
      job has finished by itself.
    * It lives and was started with the same program, entry point, arguments, parallelism and configuration: the task
      attaches to it. Changes of the running job since then, such as a checkpoint interval, stay.
    * It lives and something of these differs: ``on_change`` decides. An upgrade is that of
      :class:`UpgradeJobOperator`, with its check of the state, its gate and its rollback. A version that was rolled
      back is not tried again by later runs of the DAG; clear the task that failed to try it again.

    The job's labels (``pipeline.global-job-parameters``) name the DAG, the task, the run, and the version of the DAG
    bundle that has started it; the record of an upgrade has them as well.

    Returns what :class:`SubmitJobOperator` returns, and as ``change`` how it came to that: ``STARTED``, ``UNCHANGED``,
    ``UPGRADED``, ``IGNORED``, or ``ROLLED_BACK``.

    :param job_name: the job's name. (templated)
    :param pipeline: a ``.py``, a ``.zip`` or a directory on the worker. (templated)
    :param pipeline_id: instead of ``pipeline``: one that was uploaded already. (templated)
    :param entry: ``module:function``, when the pipeline has more than one entry point. (templated)
    :param args: arguments of the pipeline. A value that differs in each run, such as ``{{ ds }}``, makes each run
        another version. (templated)
    :param parallelism: the job's parallelism. (templated)
    :param configuration: options of the job. (templated)
    :param on_change: ``upgrade`` the job, ``refuse``, or ``ignore`` the change and attach to the job as it is.
        (templated)
    :param savepoint_path: when the job is started: the snapshot to start from, instead of the latest one. (templated)
    :param claim_mode: ``NO_CLAIM``, or ``CLAIM`` to make the system the owner of that snapshot. (templated)
    :param start_over: when the job is started: start from nothing. (templated)
    :param allow_non_restored_state: continue although the program has no place for some of the state. (templated)
    :param wait_for_completion: wait until the job is FINISHED instead, without a limit unless ``wait_timeout`` is
        given.
    :param cancel_on_kill: cancel the job that this task has started when a person marks the task failed.
    :param cancel_on_timeout: cancel the job that this task has started when the deadline passes.
    :param mode: of an upgrade: ``savepoint``, ``last-state`` or ``stateless``. (templated)
    :param last_state_max_age: of an upgrade, see :class:`UpgradeJobOperator`; also ``target_directory``,
        ``savepoint_format``, ``savepoint_timeout``, ``healthy_timeout``, ``healthy_checkpoints`` and
        ``fail_on_rollback``. (templated)
    :raises CkptProgramChanged: the program differs, and ``on_change`` is ``refuse``
    :raises CkptJobAmbiguous: several living jobs have the name
    :raises CkptJobNotResumable: the job of this name has ended, and has left nothing to resume from
    :raises CkptUpgradeRefused: an upgrade was not begun, or it failed; or it is to a version that was rolled back
    :raises CkptUpgradeRolledBack: the new version did not become healthy, and the old one runs again
    """

    fixed_parameters: ClassVar[tuple[str, ...]] = (
        *("job", "if_not_found", "pause_before_start"),
        *("if_running", "from_latest_of", "latest_kind", "if_no_snapshot", "fork", "source_positions"),
    )
    template_fields: Collection[str] = tuple(
        dict.fromkeys(
            (
                *(name for name in UpgradeJobOperator.template_fields if name != "source_positions"),
                *FIELDS,
                *("job_name", "on_change", "savepoint_path", "claim_mode", "start_over"),
            )
        )
    )
    template_fields_renderers: ClassVar[dict[str, str]] = RENDERERS
    operator_extra_links: Collection[BaseOperatorLink] = JOB_LINKS

    def __init__(
        self, *, job_name: Templated[str] | None, on_change: Templated[str] = "upgrade", **kwargs: Any
    ) -> None:
        fixed = next((name for name in self.fixed_parameters if name in kwargs), None)
        if fixed is not None:
            raise CkptArgumentInvalid(
                fixed, kwargs[fixed], "this operator has no such parameter, because job_name identifies the job"
            )
        super().__init__(job=_BY_ITS_NAME, job_name=job_name, if_running="reuse", pause_before_start=False, **kwargs)
        self.on_change = on_change
        self._labels: dict[str, str] = {}
        self._change = "STARTED"
        self._replaced: Mapping[str, str] = {}
        self._until: float | None = None
        self._has_looked_again = False
        self._content: tuple[str, bytes] | None = None

    # -- what is declared --------------------------------------------------------------------------------------

    def settle(self, context: Context) -> None:
        """Determine the values that depend on the run; each part of a try begins with this call."""
        instance: Any = context["ti"]
        bundle = getattr(instance, "bundle_instance", None)
        labels = {
            "airflow.dag-id": instance.dag_id,
            "airflow.task-id": instance.task_id,
            "airflow.run-id": instance.run_id,
            "airflow.bundle": getattr(bundle, "name", None),
            "airflow.bundle-version": getattr(bundle, "version", None),
        }
        self._labels = {key: str(value) for key, value in labels.items() if value is not None}

    def packed(self) -> tuple[str, bytes]:
        """The program at the beginning of this part of the try, also if the file changes during it."""
        if self._content is None:
            self._content = super().packed()
        return self._content

    def program_options(self) -> RunOptions:
        options = super().program_options()
        given = options.configuration.get(LABELS)
        ours = labels_text(self._labels | {PROGRAM: self._digest(options)})
        text = f"{given},{ours}" if given else ours
        return replace(options, configuration={**options.configuration, LABELS: text})

    def _declared(self) -> str:
        """The digest of the DAG's declaration."""
        return self._digest(super().program_options())

    def _digest(self, options: RunOptions) -> str:
        """Equal for equal program, entry point, arguments, parallelism and configuration."""
        program = self._uploaded() or hashlib.sha256(self.packed()[1]).hexdigest()
        parts = (program, options.entry_point, options.arguments, options.parallelism, dict(options.configuration))
        return hashlib.sha256(json.encode(parts, order="deterministic")).hexdigest()[:_DIGITS]

    def default_wait_timeout(self) -> float | None:
        return None if self.wait_for_completion else CkptStepsOperator.default_wait_timeout(self)

    def desired(self, job: str, client: CkptClient | None) -> DesiredUpgrade:
        rejected = labels_text({**self._replaced, REJECTED: self._declared()})
        return structs.replace(super().desired(job, client), rollback_options={"configuration": {LABELS: rejected}})

    # -- what is due -------------------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        self.settle(context)
        arguments.text("job_name", self.job_name)
        arguments.choice("on_change", self.on_change, ON_CHANGE)
        self.run_options()
        self.check_arguments()
        stored = Journal(context, UPGRADE_RECORD).read()
        if stored and Upgrade.from_json(stored).outcome is None:
            return self.take_steps(context)
        return self._deploy(context, self.deadline())

    def _deploy(self, context: Context, deadline: float | None) -> Any:
        name, journal = arguments.text("job_name", self.job_name), Journal(context, JOB_RECORD)
        self._end_if_killed()
        with self.connected(deadline) as client:
            lines = self._after_other_runs(context, client, name, deadline)
            found = living(name, lines)
            if len(found) > 1:
                shown = ", ".join(line.job_id for line in found)
                raise CkptJobAmbiguous(f"job_name: {name!r} is the name of {len(found)} active jobs, {shown}")
            self._change, program = self._judged(client, found[0], context) if found else ("STARTED", None)
        own, last = journal.read().get("job_id"), latest_ended(name, lines)
        if not found and last is not None and own in {line.job_id for line in lines} - {last.job_id}:
            journal.forget()  # another run has continued what this task instance has started
        if self._change == "UPGRADED":
            self.job = found[0].job_id
            return self.take_steps(context)
        if not found or found[0].job_id == own:
            return self._start_or_attach(context, self.run_options(), deadline)
        self.log.info("Job %r is active as %s: %s", name, found[0].job_id, self._change)
        return self._wait_for_operation(
            context, self._adopted(context, found[0].job_id, program), deadline, inherited=False
        )

    def _after_other_runs(
        self, context: Context, client: CkptClient, name: str, deadline: float | None
    ) -> Sequence[JobLine]:
        """Wait while another run of this task upgrades the job of the name, as in a backfill; return all jobs then.

        Upgrades that others have begun may wait for a person: those are refused at once when this task needs one.
        """
        own, waits = Journal(context, UPGRADE_RECORD).read().get("owner"), False
        while True:
            lines = self.ask(client, requests.list_jobs())
            line = next(iter(living(name, lines)), None) or latest_ended(name, lines)
            held = None if line is None else self._upgrade_of(client, line.job_id)
            if held is None or held.requester != self.requester or held.owner == own or _is_over(deadline):
                return lines
            if not waits:
                self.log.info("Another run of this task upgrades job %r; this one waits for the result", name)
            waits = True
            time.sleep(self.pause())

    def _upgrade_of(self, client: CkptClient, job_id: str) -> UpgradeInProgress | None:
        try:
            return self.ask(client, requests.job_details(job_id)).upgrade
        except NotFound:
            return None

    def _judged(self, client: CkptClient, line: JobLine, context: Context) -> tuple[str, str | None]:
        """The action for the living job of this name, as the result's ``change``; and its program."""
        config = self.ask(client, requests.job_config(line.job_id))
        labels: Mapping[str, str] = config.execution_config.get("user-config") or {}
        declared, named = self._declared(), f"job {line.job_id} ({line.name!r}, {line.state})"
        why = self._difference(client, config.pipeline_id, labels.get(PROGRAM), declared)
        if why is None:
            return "UNCHANGED", config.pipeline_id
        choice = arguments.choice("on_change", self.on_change, ON_CHANGE)
        if choice == "REFUSE":
            raise CkptProgramChanged(f"{named} {why}, and on_change is 'refuse'")
        if choice == "IGNORE":
            self.log.warning("%s %s. It is not changed, because on_change is 'ignore'", named, why)
            return "IGNORED", config.pipeline_id
        if labels.get(REJECTED) == declared and not self._was_cleared(context, declared):
            text = f"{named} was already upgraded to the program of this task, and rolled back"
            if self.fail_on_rollback:
                raise CkptUpgradeRefused(f"{text}. Change the program, or clear the task that failed to try it again")
            self.log.warning("%s. It is not changed", text)
            return "ROLLED_BACK", config.pipeline_id
        self.log.info("%s %s: it is upgraded", named, why)
        self._replaced = labels
        return "UPGRADED", config.pipeline_id

    def _difference(self, client: CkptClient, running: str | None, known: str | None, declared: str) -> str | None:
        """How the living job differs from the declaration, as the end of a sentence; None if it does not."""
        if known is None:
            return "was not started by such a task"
        if known != declared:
            return "has another program, entry point, parallelism or configuration, or other arguments"
        if running is None:
            return None
        # A person may have upgraded the job, which keeps its labels then. A session makes the id of the content, in the
        # form in which it stores it: only an upload tells it.
        program = self._uploaded() or self._upload(client)
        is_same = running.partition("_")[0] == program.partition("_")[0]
        return None if is_same else "runs another program since an upgrade"

    def _was_cleared(self, context: Context, declared: str) -> bool:
        """Whether this task instance has made the upgrade to this version that was rolled back."""
        stored = Journal(context, UPGRADE_RECORD).read()
        return bool(stored) and declared in Upgrade.from_json(stored).desired.options["configuration"].get(LABELS, "")

    def still_holds(self, client: CkptClient, record: Upgrade) -> bool:
        """Never: this try has observed that the job differs from the declaration."""
        return False

    def _follow_other_run(
        self, context: Context, options: RunOptions, others: Any, deadline: float | None, last: Any
    ) -> Any:
        """Another run has started a job of the name since the last poll of this one: poll again."""
        return self._deploy(context, deadline)

    # -- starting ----------------------------------------------------------------------------------------------

    def _with_snapshot(self, client: CkptClient, options: RunOptions) -> RunOptions:
        """Return the options with the snapshot of the last job of the name, unless they have one."""
        if options.savepoint_path is not None or self._starts_over():
            return options
        name = arguments.text("job_name", self.job_name)
        try:
            line = client.run(resolve(client.calls, name, ended=True, pause=min(self.pause(), CONFIRMING_SECONDS)))
        except CkptJobNotFound:
            self.log.info("There was no job named %r: it starts without a snapshot", name)
            return options
        if line.state in TERMINAL_STATES:
            client.run(until_final(client.calls, line.job_id))
        try:
            statistics = self.ask(client, requests.checkpoint_statistics(line.job_id))
        except NotFound:  # a Flink job without checkpoints has none
            return options
        stopped = bool(statistics.completed) and statistics.completed[-1].kind == "SYNC_SAVEPOINT"
        if line.state == "FINISHED" and not stopped:
            self.log.info(
                "Job %s of this name has finished by itself: the next one starts without a snapshot", line.job_id
            )
            return options
        try:
            path = chosen_path(line, statistics, "ANY")
        except CkptJobNotResumable as error:
            raise CkptJobNotResumable(
                f"job {line.job_id} ({name!r}, {line.state}) has committed output, and its latest checkpoint is not "
                "retained (execution.checkpointing.externalized-checkpoint-retention). Set savepoint_path to the "
                "snapshot to start from; or remove the output, and set start_over=True"
            ) from error
        self.log.info("Job %s of this name has left %s", line.job_id, path or "nothing: the next one starts from that")
        return replace(options, savepoint_path=path)

    def _new_record(self, context: Context, options: RunOptions, last: Json | None = None) -> Json:
        own = {"change": self._change, "declared": self._declared()}
        return super()._new_record(context, options, last) | own

    def _carry_out(self, client: CkptClient, context: Context, options: RunOptions, record: Json, found: Plan) -> Json:
        if record.get("declared") != self._declared():
            record = record | {"pipeline_id": self._uploaded()}  # a repeated request is for the program as it is now
        return super()._carry_out(client, context, options, record, found)

    def _adopted(self, context: Context, job_id: str, program: str | None, snapshot: str | None = None) -> Json:
        """Record a job that this task instance has not started as its job."""
        journal = Journal(context, JOB_RECORD)
        record = self._new_record(context, self.run_options(), journal.read() or None)
        facts = {"job_id": job_id, "pipeline_id": program, "snapshot": snapshot, "reused": True, "started": True}
        return journal.write(**record | facts)

    # -- ends --------------------------------------------------------------------------------------------------

    def _continue(self, context: Context, record: Upgrade, deadline: float | None) -> Any:
        self._until = deadline
        return super()._continue(context, record, deadline)

    def _ended(self, context: Context, record: Upgrade) -> Any:
        """After an upgrade, report the job that runs as a submission does.

        Another run of this task may have begun one at the same moment: this run looks again then.
        """
        if record.lost and not record.stop_requested and self._lost_to_other_run(record):
            self._record = None
            Journal(context, UPGRADE_RECORD).forget()
            return self._deploy(context, self._until)
        runs = super()._ended(context, record)["job_id"]
        upgraded = record.outcome is Outcome.UPGRADED
        self._change = "UPGRADED" if upgraded else "ROLLED_BACK"
        program = record.desired.program if upgraded else record.old_program
        own = self._adopted(context, runs, program, record.snapshot)
        if self.wait_for_completion:
            return self._wait_for_operation(context, own, self._until, inherited=False)
        with self.connected(self._until) as client:
            return self._succeed(context, own, job_facts(self.ask(client, requests.job_details(runs))))

    def _lost_to_other_run(self, record: Upgrade) -> bool:
        """Whether the upgrade that came first belongs to this task; an upgrade that has already ended counts as such
        once."""
        if _is_over(self._until):
            return False
        with self.connected(self._until) as client:
            held = self._upgrade_of(client, record.old_job)
        first, self._has_looked_again = not self._has_looked_again, True
        return first if held is None else held.requester == self.requester

    def _succeed(self, context: Context, record: Json, facts: Json) -> Json:
        return super()._succeed(context, record, facts) | {"change": record.get("change")}

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        self.settle(context)
        if _is_of_upgrade(event):
            return UpgradeJobOperator.execute_complete(self, context, event)
        return super().execute_complete(context, event)

    def after_timeout(self, context: Context, event: Json | None) -> str:
        stored = Journal(context, UPGRADE_RECORD).read()
        if _is_of_upgrade(event) or (event is None and stored and Upgrade.from_json(stored).outcome is None):
            return UpgradeJobOperator.after_timeout(self, context, event)
        return super().after_timeout(context, event)

    def on_kill(self) -> None:
        """Say where an upgrade stands; otherwise as after a submission."""
        if self._record is not None:
            UpgradeJobOperator.on_kill(self)
        else:
            super().on_kill()


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.time() > deadline


def _is_of_upgrade(event: Json | None) -> bool:
    return event is not None and "record" in event["trigger"]["condition"]


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as the text of the option: each key and value in quotes."""

    def quoted(text: str) -> str:
        return "'" + text.replace("'", "''") + "'"

    return ",".join(f"{quoted(key)}:{quoted(value)}" for key, value in labels.items())
