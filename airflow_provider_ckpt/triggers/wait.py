"""The trigger of all tasks that wait: one condition, a deadline, one event.

The event carries the verdict and all arguments of the trigger, so that the operator needs no memory of its own to
continue. A trigger never raises for a job manager that does not answer: it keeps trying until its deadline. Nothing is
cancelled when a trigger is cleaned up, because that also happens whenever a triggerer restarts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

from airflow.triggers.base import BaseTrigger, TriggerEvent
from msgspec import ValidationError, convert

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.conditions.base import Condition, Json, Log, Verdict, Wait
from airflow_provider_ckpt.conditions.checkpoint import CheckpointCondition
from airflow_provider_ckpt.conditions.health import (
    DrillCondition,
    HealthCondition,
    SessionGoneCondition,
    SessionReadyCondition,
)
from airflow_provider_ckpt.conditions.job import (
    ConfigurationCondition,
    DisposalCondition,
    JobStatusCondition,
    OperationCondition,
    ReadyForSnapshotCondition,
    RescaleCondition,
)
from airflow_provider_ckpt.event_hub import joined
from airflow_provider_ckpt.hooks.ckpt import CkptHook, Endpoint
from airflow_provider_ckpt.jobs import NameFreeCondition
from airflow_provider_ckpt.upgrades.executor import UpgradeCondition
from ckpt_runtime.client.errors import CkptClientError

_CONDITIONS: Final[Mapping[str, type[Condition]]] = {
    kind.__name__: kind
    for kind in (
        CheckpointCondition,
        ConfigurationCondition,
        DisposalCondition,
        DrillCondition,
        HealthCondition,
        JobStatusCondition,
        NameFreeCondition,
        OperationCondition,
        ReadyForSnapshotCondition,
        RescaleCondition,
        SessionGoneCondition,
        SessionReadyCondition,
        UpgradeCondition,
    )
}
_GIVEN_UP = ("failed", "skipped", "upstream_failed", "removed")
ON_KILL_RETRY_TIMEOUT_SECONDS = 20.0
"""How long a killed task repeats its last request: Airflow ends a trigger's ``on_kill`` after 30 s by default."""


class CkptTrigger(BaseTrigger):
    """Waits for one condition of :mod:`airflow_provider_ckpt.conditions`.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param condition: the condition, or its JSON form: its class as ``type``, and its fields.
    :param deadline: when to give up, in seconds since the epoch; ``None``: never.
    :param poll_interval: seconds between two polls, if no stream of events triggers them.
    :param memo: plain JSON values that the event returns unchanged.
    :raises ValueError: for a condition that does not exist
    """

    def __init__(
        self,
        *,
        ckpt_conn_id: str,
        condition: Condition | Json,
        deadline: float | None,
        poll_interval: float,
        memo: Json | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ckpt_conn_id = ckpt_conn_id
        self.condition = condition if isinstance(condition, Condition) else _condition_of(condition)
        self.deadline = deadline
        self.poll_interval = poll_interval
        self.memo = memo or {}

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Name the class and the keyword arguments that make an equal trigger in another process."""
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            "ckpt_conn_id": self.ckpt_conn_id,
            "condition": self.condition.to_json(),
            "deadline": self.deadline,
            "poll_interval": self.poll_interval,
            "memo": self.memo,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Give one event in every case; not before ``[ckpt] min_deferral`` seconds.

        A worker's supervisor checks only every five seconds whether the process of a deferred task has ended. If the
        scheduler gets its report while the resumed task is queued or runs again, it takes it for the end of the second
        process and fails the task.
        """
        earliest = time.monotonic() + arguments.configured_seconds("min_deferral")
        hook = CkptHook(self.ckpt_conn_id)
        while True:
            begun_with = await hook.aendpoint()
            verdict = await self._verdict(hook)
            if not verdict.refuses_token or not has_changed(hook, begun_with, await hook.aendpoint()):
                break
        await asyncio.sleep(max(0.0, earliest - time.monotonic()))
        yield TriggerEvent(event_payload(verdict, self))  # type: ignore[no-untyped-call]

    async def _verdict(self, hook: CkptHook) -> Verdict:
        """A condition without events is polled over a connection of its own."""
        condition = self.condition
        wait = Wait(condition, self.deadline, self.poll_interval, self.log)
        if condition.job is None:
            async with await hook.aget_conn() as client:
                return await wait.until_verdict(client)
        async with joined(hook, condition, condition.job, self.poll_interval) as member:
            return await wait.until_verdict(member)

    async def on_kill(self) -> None:
        """Let the condition end everything that has to end with the task, and log whether the remote side continues.

        Airflow's triggerer cancels a killed trigger again about every second until it has ended, and so also this call,
        which is therefore completed through all of that: otherwise a job that should be cancelled would keep running.
        """
        work = asyncio.ensure_future(self.condition.on_kill(self))
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(work)
        work.result()

    async def is_given_up(self) -> bool:
        """See :func:`is_given_up`."""
        return await asyncio.to_thread(is_given_up, self.task_instance, self.log)

    async def cancel(self, job_id: str, name: str) -> None:
        """Cancel a job of a task that was killed, and log what became of it."""
        try:
            async with await CkptHook(self.ckpt_conn_id).aget_conn(
                retry_timeout=ON_KILL_RETRY_TIMEOUT_SECONDS
            ) as client:
                await client.cancel_job(job_id)
        except CkptClientError as error:
            text = "The task was killed; cancelling %s %s failed, it may keep running: %s"
            self.log.error(text, name, job_id, error)
        else:
            self.log.warning("The task was killed; %s %s is being cancelled.", name, job_id)


def _condition_of(document: Json) -> Condition:
    given = dict(document)
    name = given.pop("type", None)
    kind = _CONDITIONS.get(str(name))
    if kind is None:
        raise ValueError(f"condition: {name!r} does not exist; the conditions are {', '.join(_CONDITIONS)}")
    try:
        return convert(given, kind)
    except ValidationError as error:
        raise ValueError(f"condition: {name} cannot be made of {given}: {error}") from error


def is_given_up(instance: Any, log: Log) -> bool:
    """Whether a waiting task was ended for good: it was marked failed, or was deleted together with its DAG.

    Airflow ends the wait in the same way for a task that was marked successful, which needs nothing undone, and for a
    task that was cleared, whose next try continues with what this one has started.
    """
    if instance is None:
        return True
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    try:
        runs = RuntimeTaskInstance.get_task_states(
            dag_id=instance.dag_id, map_index=instance.map_index, task_ids=[instance.task_id], run_ids=[instance.run_id]
        )
    except Exception as error:  # whatever prevents Airflow from answering: a started operation can be ended later
        log.info("Airflow does not report the state of the killed task: %s", error)
        return False
    states = runs.get(instance.run_id) or {}
    return not states or any(state in _GIVEN_UP for state in states.values())


def has_changed(hook: CkptHook, begun_with: Endpoint, now: Endpoint) -> bool:
    """Whether the connection has changed since a wait began, which then continues after its token was refused."""
    if now == begun_with:
        return False
    hook.log.info("The token was refused; the connection %r has changed, and is read again", hook.ckpt_conn_id)
    return True


def event_payload(verdict: Verdict, trigger: CkptTrigger) -> Json:
    """Make the event of a wait's end, also for an operator that waits without a triggerer."""
    return {
        "status": verdict.status.value,
        "message": verdict.message,
        "result": verdict.result,
        "trace": verdict.trace,
        "at": time.time(),
        "trigger": trigger.serialize()[1],
    }


def with_time_left(event: Json) -> Json:
    """Return the event of a wait for its task, with the deadline extended by the time Airflow took to resume the task.

    A paused DAG, or a pool without a free slot, delays the task: the rest of its time still has to be enough for its
    next steps, such as starting a job.
    """
    deadline, at = event["trigger"]["deadline"], event.get("at")
    if deadline is None or at is None:
        return event
    return event | {"trigger": event["trigger"] | {"deadline": deadline + max(0.0, time.time() - at)}}
