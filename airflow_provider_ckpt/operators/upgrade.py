"""Replaces a running job by another version of its program, and rolls back when that version is not healthy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration, Templated, refuse_secrets
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.program import FIELDS, RENDERERS, RunsProgram
from airflow_provider_ckpt.operators.upgrade_steps import CkptStepsOperator, age_of, format_of, mode_of
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade
from airflow_provider_ckpt.upgrades.steps import decide
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCalls, CkptClient
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from airflow.sdk import Context

MODES = tuple(mode.value for mode in Mode)


class UpgradeJobOperator(RunsProgram, CkptStepsOperator):
    """Stops a job, starts another version of it from its snapshot, and waits until that is healthy; or rolls back.

    Before anything is stopped, both programs are held, and the fit of the state is checked. At most one version runs
    at any time. A new version that does not complete ``healthy_checkpoints`` within ``healthy_timeout`` is cancelled,
    and the old one is started again from the same snapshot; output that the new one has committed is written again.
    See ``docs/upgrades.md``.

    Returns ``{"outcome", "job_id", "old_job_id", "name", "savepoint_path", "mode", "fell_back", "pipeline_id",
    "old_pipeline_id", "diff", "why", "approved_by"}``, with the job that runs now as ``job_id``; when it pauses also
    ``upgrade``, which :class:`FinishUpgradeOperator` takes. Arguments of the run that are not given are the old job's.

    :param job: the job that runs, by id or unique name. (templated)
    :param pipeline: the new version: a ``.py``, a ``.zip`` or a directory on the worker. (templated)
    :param pipeline_id: instead of ``pipeline``: one that was uploaded already. (templated)
    :param entry: ``module:function``. (templated)
    :param args: arguments of the pipeline. (templated)
    :param parallelism: the job's parallelism. (templated)
    :param configuration: options that override those of the old job. (templated)
    :param allow_non_restored_state: continue although the new version has no place for some of the state. (templated)
    :param source_positions: where sources continue, not where they were in the snapshot: by uid ``earliest``,
        ``latest``, a time such as ``2026-11-01T09:00``, or offsets. All other state is as it was. A rollback
        continues where the old version was. (templated)
    :param mode: ``savepoint``: the old version stops with one; ``last-state``: it is cancelled, and its latest
        checkpoint is retained; ``stateless``: the new version starts with nothing. (templated)
    :param last_state_max_age: when no savepoint can be taken, fall back to the latest checkpoint if it is no older than
        this. (templated)
    :param target_directory: where to put the savepoint; without one the job's default directory. (templated)
    :param savepoint_format: ``NATIVE`` or ``CANONICAL``. (templated)
    :param savepoint_timeout: how long the job may take to be ready for a savepoint, and with a fallback to take it.
        (templated)
    :param healthy_timeout: how long the new version may take to become healthy. (templated)
    :param healthy_checkpoints: how many checkpoints of the new version have to complete. (templated)
    :param pause_before_start: end with the old version stopped, for an approval. (templated)
    :param fail_on_rollback: whether a rollback fails the task, without a retry.
    :raises CkptUpgradeRefused: it was not begun, or it failed; the old job keeps running, or is unchanged
    :raises CkptUpgradeStranded: nothing runs, and a person has to act; the message names the snapshot to start from
    :raises CkptUpgradeRolledBack: the new version did not become healthy, and the old one runs again; not with
        ``fail_on_rollback=False``
    """

    template_fields: Collection[str] = (
        *CkptStepsOperator.template_fields,
        *FIELDS,
        "mode",
        "last_state_max_age",
        "target_directory",
        "savepoint_format",
        "healthy_checkpoints",
        "pause_before_start",
        "source_positions",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {**RENDERERS, "source_positions": "json"}

    def __init__(  # noqa: PLR0913 - keyword arguments of a DAG author
        self,
        *,
        job: Templated[str],
        pipeline: Templated[str] | None = None,
        pipeline_id: Templated[str] | None = None,
        entry: Templated[str] | None = None,
        args: Templated[Sequence[str]] = (),
        parallelism: Templated[int | str] | None = None,
        configuration: Templated[Mapping[str, Any]] | None = None,
        allow_non_restored_state: Templated[bool | str] = False,
        mode: Templated[str] = "savepoint",
        last_state_max_age: Templated[Duration] | None = None,
        target_directory: Templated[str] | None = None,
        savepoint_format: Templated[str] = "NATIVE",
        healthy_checkpoints: Templated[int | str] = 1,
        pause_before_start: Templated[bool | str] = False,
        fail_on_rollback: bool = True,
        source_positions: Templated[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.pipeline = pipeline
        self.pipeline_id = pipeline_id
        self.entry = entry
        self.args = args
        self.parallelism = parallelism
        self.configuration = configuration
        self.allow_non_restored_state = allow_non_restored_state
        self.mode = mode
        self.last_state_max_age = last_state_max_age
        self.target_directory = target_directory
        self.savepoint_format = savepoint_format
        self.healthy_checkpoints = healthy_checkpoints
        self.pause_before_start = pause_before_start
        self.source_positions = source_positions
        self.fail_on_rollback = arguments.flag("fail_on_rollback", fail_on_rollback)

    def is_fine(self, outcome: Outcome) -> bool:
        return outcome is Outcome.ROLLED_BACK and not self.fail_on_rollback

    def still_holds(self, client: CkptClient, record: Upgrade) -> bool:
        """An upgrade to this program whose job still lives is done; so is a paused one while nothing was started."""
        if record.desired.program != self._program(client):
            return False
        if record.step is Step.PAUSED:
            return not any(self._lives(client, job) for job in (record.old_job, record.new_job, record.restarted_job))
        return record.outcome is Outcome.UPGRADED and self._lives(client, record.new_job)

    def _lives(self, client: CkptClient, job: str) -> bool:
        try:
            return self.ask(client, requests.job_details(job)).state not in TERMINAL_STATES
        except NotFound:
            return False

    def desired(self, job: str, client: CkptClient | None) -> DesiredUpgrade:
        options = self._options()
        return DesiredUpgrade(
            goal=Goal.UPGRADE,
            job=job,
            mode=Mode(mode_of(self.mode, MODES)),
            program=None if client is None else self._program(client),
            options=options,
            directory=arguments.optional_text("target_directory", self.target_directory),
            format=format_of(self.savepoint_format),
            fallback_age=age_of(self.last_state_max_age),
            checkpoints=arguments.integer("healthy_checkpoints", self.healthy_checkpoints, minimum=1),
            pauses=arguments.boolean("pause_before_start", self.pause_before_start),
            **self.limits(),
        )

    def _options(self) -> dict[str, Any]:
        options = self.program_options()
        refuse_secrets(options.configuration)
        if options.source_positions and mode_of(self.mode, MODES) == Mode.STATELESS.value:
            allowed = "a stateless upgrade starts without state, and its sources start where their options say"
            raise CkptArgumentInvalid("source_positions", dict(options.source_positions), allowed)
        return {
            "entry_point": options.entry_point,
            "arguments": list(options.arguments),
            "parallelism": options.parallelism,
            "configuration": dict(options.configuration),
            "allow_non_restored_state": options.allow_non_restored_state,
            "source_positions": dict(options.source_positions),
        }

    def _program(self, client: CkptClient) -> str:
        return self._uploaded() or self._upload(client)

    async def upload_again(self, client: AsyncCalls, program: str) -> bool:
        if self._uploaded() is not None:
            return False
        self.log.info("The session no longer has the program %s: it is uploaded again", program)
        return await client.upload_pipeline(*self.packed()) == program


class FinishUpgradeOperator(CkptStepsOperator):
    """Continues a paused upgrade: starts the new version and waits for its health, or starts the old one again.

    Returns what :class:`UpgradeJobOperator` returns.

    :param upgrade: the result of the operator that paused. (templated)
    :param approve: true to start the new version, anything else to go back to the old one. (templated)
    :param approved_by: the person that decided, for the record. (templated)
    :param fail_on_rollback: whether a rollback fails the task, without a retry.
    :raises CkptUpgradeRefused: it was not begun, or it failed; the old job keeps running, or is unchanged
    :raises CkptUpgradeStranded: nothing runs, and a person has to act; the message names the snapshot to start from
    :raises CkptUpgradeRolledBack: it was rejected, or did not become healthy, and the old version runs again; not
        with ``fail_on_rollback=False``
    """

    template_fields: Collection[str] = (*CkptStepsOperator.template_fields, "upgrade", "approve", "approved_by")
    template_fields_renderers: ClassVar[dict[str, str]] = {"upgrade": "json"}

    def __init__(
        self,
        *,
        upgrade: Templated[Mapping[str, Any]],
        approve: Templated[bool | str],
        approved_by: Templated[str] | None = None,
        fail_on_rollback: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(job="(that of the upgrade)", **kwargs)
        self.upgrade = upgrade
        self.approve = approve
        self.approved_by = approved_by
        self.fail_on_rollback = arguments.flag("fail_on_rollback", fail_on_rollback)

    def desired(self, job: str, client: CkptClient | None) -> DesiredUpgrade:
        return self._paused().desired

    def check_arguments(self) -> None:
        self.limits()
        super().check_arguments()
        arguments.boolean("approve", self.approve)

    def _paused(self) -> Upgrade:
        given: Any = self.upgrade
        document = given.get("upgrade", given) if isinstance(given, Mapping) else given
        try:
            record = Upgrade.from_json(document)
        except ValueError as error:
            allowed = f"it must be what a paused one gives: {error}"
            shown = None if given is None else type(given).__name__
            raise CkptArgumentInvalid("upgrade", shown, allowed) from error
        if record.step is not Step.PAUSED:
            raise CkptArgumentInvalid("upgrade", record.step.value, "it must be one that is PAUSED")
        return record

    def first_record(self, context: Context, client: CkptClient, deadline: float | None) -> Upgrade:
        record, by = self._paused(), arguments.optional_text("approved_by", self.approved_by) or ""
        approved = arguments.boolean("approve", self.approve)
        self.log.info("The upgrade of job %s was %s", record.old_job, "approved" if approved else "rejected")
        return decide(record, approved=approved, by=by)

    def still_holds(self, client: CkptClient, record: Upgrade) -> bool:
        """A paused upgrade is finished only once."""
        return record.series == self._paused().series and record.outcome is not None

    def is_fine(self, outcome: Outcome) -> bool:
        return outcome is Outcome.ROLLED_BACK and not self.fail_on_rollback
