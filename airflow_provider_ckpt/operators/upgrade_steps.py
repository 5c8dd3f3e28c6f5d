"""The common parts of operators that replace, suspend and resume a job: they follow the steps of one record.

The record, with every id, is in the journal before the first request, and the result of each step before the next
one. A crash of worker, triggerer or scheduler repeats at most one step, whose requests have the same ids again.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Json, Status
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptOperationFailed,
    CkptUpgradeRefused,
    CkptUpgradeRolledBack,
    CkptUpgradeStranded,
)
from airflow_provider_ckpt.lineage import LineageReport, Written, program_location
from airflow_provider_ckpt.operators.base import CkptJobOperator
from airflow_provider_ckpt.tasks import Journal
from airflow_provider_ckpt.upgrades.actions import Action, Answer, Claim, Hold, JobMissing
from airflow_provider_ckpt.upgrades.executor import UpgradeCondition, perform, wall_clock_ms
from airflow_provider_ckpt.upgrades.record import (
    DesiredUpgrade,
    Goal,
    Mode,
    Outcome,
    Step,
    Upgrade,
    ending,
    result_of,
    standing,
)
from airflow_provider_ckpt.upgrades.steps import READS, WATCHES, begin, drive, take_step
from ckpt_runtime.client.clients import AsyncCalls, CkptClient

if TYPE_CHECKING:
    from airflow.sdk import Context

RECORD = "ckpt_upgrade"
_SPARE_SECONDS = 1800.0
"""How long a try waits beyond the limits of the steps: for an absent job manager, and for jobs that end slowly."""
_FAILURES = {
    Outcome.REFUSED: CkptUpgradeRefused,
    Outcome.ROLLED_BACK: CkptUpgradeRolledBack,
    Outcome.STRANDED: CkptUpgradeStranded,
}

_STARTED = frozenset({Outcome.UPGRADED, Outcome.ROLLED_BACK, Outcome.RESUMED})
"""Outcomes in which a job runs that did not run before."""


class CkptStepsOperator(CkptJobOperator):
    """Base of the operators that follow the steps of a record; not for use in DAGs.

    :param savepoint_timeout: how long the job may take to be ready for a savepoint; unused where none is taken.
        (templated)
    :param healthy_timeout: how long a started job may take to become healthy; unused where nothing is started.
        (templated)
    :raises CkptOperationFailed: there is no task state store (Airflow has one since 3.3) to write the steps down in;
        or another try of the task continues the upgrade
    """

    template_fields: Collection[str] = (*CkptJobOperator.template_fields, "savepoint_timeout", "healthy_timeout")

    def __init__(
        self,
        *,
        job: Templated[str],
        savepoint_timeout: Templated[Duration] = "10 min",
        healthy_timeout: Templated[Duration] = "5 min",
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.savepoint_timeout = savepoint_timeout
        self.healthy_timeout = healthy_timeout
        self._record: Upgrade | None = None

    @abstractmethod
    def desired(self, job: str, client: CkptClient | None) -> DesiredUpgrade:
        """Check all arguments and return them; without a ``client`` nothing is sent, and the program stays open."""

    def first_record(self, context: Context, client: CkptClient, deadline: float | None) -> Upgrade:
        """Make the first record from checked arguments."""
        return begin(self.desired(self.find_job(context, deadline), client), series(context))

    def check_arguments(self) -> None:
        """Raise an error for a bad argument before anything is sent."""
        self.desired("0" * 32, None)

    async def upload_again(self, client: AsyncCalls, program: str) -> bool:
        """Upload a program that the session does not have; tell whether it has it now."""
        return False

    def still_holds(self, client: CkptClient, record: Upgrade) -> bool:
        """Tell whether this try is to return the result that an earlier try has reached."""
        return False

    def limits(self) -> dict[str, Any]:
        """Return the limits of the steps in milliseconds."""
        return {
            "savepoint_within": arguments.millis("savepoint_timeout", self.savepoint_timeout),
            "healthy_within": arguments.millis("healthy_timeout", self.healthy_timeout),
        }

    def default_wait_timeout(self) -> float | None:
        limits: dict[str, int] = self.limits()
        return _SPARE_SECONDS + sum(limits.values()) * 2 / 1000

    # -- steps -------------------------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        self.check_arguments()
        return self.take_steps(context)

    def take_steps(self, context: Context) -> Any:
        """Continue the upgrade of an earlier try, or begin one."""
        journal, deadline = Journal(context, RECORD), self.deadline()
        if not journal.remembers:
            raise CkptOperationFailed("there is no task state store to record the steps in; it needs Airflow 3.3")
        stored = journal.read()
        with self.connected(deadline) as client:
            record = Upgrade.from_json(stored) if stored else None
            if record is not None and record.step in (Step.ENDED, Step.PAUSED):
                record = record if self.still_holds(client, record) else None
            if record is None:
                record = self.first_record(context, client, deadline)
                journal.write(**record.to_json())
            else:
                self.log.info("An earlier try has reached the step %s: %s", record.step, standing(record))
        return self._continue(context, record, deadline)

    def _continue(self, context: Context, record: Upgrade, deadline: float | None) -> Any:
        journal = Journal(context, RECORD)
        self._record = record
        self.publish_job(context, result_of(record)["job_id"])

        def keep(changed: Upgrade) -> None:
            stored = journal.read()
            if stored.get("series") != changed.series or stored.get("revision", 0) > changed.revision:
                raise CkptOperationFailed("another try of this task continues the upgrade")
            journal.write(**changed.to_json())
            self._record = changed
            self.log.info("Step %s: %s", changed.step, standing(changed))

        asked = ""
        with self.connected(deadline) as client:

            async def ask(action: Action) -> Answer:
                nonlocal asked
                answer = await perform(client.calls, action, self.pause(), self.requester)
                if (
                    isinstance(action, Hold)
                    and isinstance(answer, JobMissing)  # the session that it was uploaded to has ended since
                    and await self.upload_again(client.calls, action.program)
                ):
                    answer = await perform(client.calls, action, self.pause(), self.requester)
                if not isinstance(action, (*READS, Claim)):
                    asked = type(action).__name__
                return answer

            def take(current: Upgrade) -> Upgrade | None:
                nonlocal asked
                asked = ""
                return client.run(take_step(current, ask, wall_clock_ms()))

            record = drive(record, take, keep)
        if record.step in WATCHES:
            return self.wait_for(context, UpgradeCondition(record, asked, wall_clock_ms()), deadline)
        return self._ended(context, record)

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        if Status(event["status"]) is not Status.DONE:
            raise self.failure(context, event)
        record, journal = Upgrade.from_json(event["result"]["record"]), Journal(context, RECORD)
        stored = journal.read()
        if stored.get("series") == record.series and stored.get("revision", 0) > record.revision:
            record = Upgrade.from_json(stored)  # this suspension was resumed before
        else:
            journal.write(**record.to_json())
        self.log.info("Step %s: %s", record.step, standing(record))
        return self._continue(context, record, event["trigger"]["deadline"])

    # -- ends --------------------------------------------------------------------------------------------------

    def _ended(self, context: Context, record: Upgrade) -> Any:
        self._record = None
        self.publish_job(context, result_of(record)["job_id"])
        if record.diff:
            self.log.info("State against the snapshot:\n%s", "\n".join(record.diff))
        if record.outcome is None:
            self.log.info("Paused: %s", standing(record))
            self._report_lineage(record)
            return result_of(record) | {"upgrade": record.to_json()}
        self.forget_job(context)
        text = ending(record)
        failure = None if self.is_fine(record.outcome) else _FAILURES.get(record.outcome)
        if failure is not None:
            raise failure(text)
        self.log.info("%s", text)
        self._report_lineage(record)
        return result_of(record)

    def _report_lineage(self, record: Upgrade) -> None:
        """Report a savepoint taken by the stop as written, and any other snapshot that was resumed from as read."""
        writes = (
            record.desired.goal is not Goal.RESUME and record.desired.mode is Mode.SAVEPOINT and not record.falls_back
        )
        started = record.outcome in _STARTED
        program = record.desired.program if record.outcome is Outcome.UPGRADED else record.old_program
        self.lineage_report = LineageReport(
            reads=[
                program_location(self.ckpt_conn_id, None, program) if started else None,
                None if writes and not started else record.snapshot,
            ],
            writes=[Written(record.snapshot)] if writes and record.snapshot else [],
            job_id=result_of(record)["job_id"],
        )

    def is_fine(self, outcome: Outcome) -> bool:
        """Tell whether an outcome that is otherwise a failure counts as a success."""
        return False

    def after_timeout(self, context: Context, event: Json | None) -> str:
        stored = Journal(context, RECORD).read()
        where = f"{standing(Upgrade.from_json(stored))}. " if stored else ""
        return f"{where}Nothing was undone; the next try of this task continues from there"

    def on_kill(self) -> None:
        """Log the progress of the upgrade: nothing is undone."""
        if self._record is not None:
            self.log.warning(
                "The task was killed at the step %s: %s. Nothing is undone; a cleared task continues from there.",
                self._record.step,
                standing(self._record),
            )


def series(context: Context) -> str:
    """Return the text from which the ids of an upgrade that this try begins are made."""
    return f"{context['ti'].id}/{time.time_ns()}"


def mode_of(value: object, allowed: tuple[str, ...]) -> str:
    """Read a mode, also as ``last-state``."""
    given = value.replace("-", "_") if isinstance(value, str) else value
    return arguments.choice("mode", given, allowed)


def format_of(value: object) -> str:
    """Read a savepoint format."""
    return arguments.choice("savepoint_format", value, ("NATIVE", "CANONICAL"))


def age_of(value: object) -> int | None:
    """Read a maximum age in milliseconds; None when none is given."""
    given = arguments.optional_seconds("last_state_max_age", value)
    if given is not None and given <= 0:
        raise CkptArgumentInvalid("last_state_max_age", value, "it must be longer than 0")
    return None if given is None else round(given * 1000)
