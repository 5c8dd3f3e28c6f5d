"""What all triggers share: a place at the hub, one condition, a deadline of their own, one event.

The event carries the verdict and all arguments of the trigger, so that the operator needs no memory of its own to
continue. A trigger never raises for a job manager that is away: it keeps trying until its deadline. Nothing is
cancelled when a trigger is cleaned up, because that also happens whenever a triggerer restarts.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_ckpt import defaults
from airflow_provider_ckpt.conditions.base import Condition, Verdict
from airflow_provider_ckpt.conditions.progress import Log
from airflow_provider_ckpt.conditions.waiting import Wait
from airflow_provider_ckpt.event_hub import joined
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.hooks.connection import Endpoint
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import CkptClientError

_GIVEN_UP = ("failed", "skipped", "upstream_failed", "removed")
ON_KILL_PATIENCE_SECONDS = 20.0
"""How long a killed task repeats its last request: Airflow ends a trigger's ``on_kill`` after 30 s by default."""


class CkptTrigger(BaseTrigger):
    """Waits for one condition.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param deadline: when to give up, in seconds since the epoch; ``None``: never.
    :param poll_interval: seconds between two polls, where no stream of events says when to look.
    :param memo: plain JSON values that come back in the event untouched.
    """

    def __init__(
        self, *, ckpt_conn_id: str, deadline: float | None, poll_interval: float, memo: dict[str, Any] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ckpt_conn_id = ckpt_conn_id
        self.deadline = deadline
        self.poll_interval = poll_interval
        self.memo = memo or {}

    @abstractmethod
    def condition(self) -> Condition:
        """Make a fresh condition; called once for each run of the trigger."""

    def arguments(self) -> dict[str, Any]:
        """Return what a subclass adds to the keyword arguments of ``__init__``; JSON values only."""
        return {}

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Name the class and the keyword arguments that make an equal trigger elsewhere."""
        base = {
            "ckpt_conn_id": self.ckpt_conn_id,
            "deadline": self.deadline,
            "poll_interval": self.poll_interval,
            "memo": self.memo,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", base | self.arguments()

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Give one event, whatever happens; not before ``[ckpt] min_deferral`` seconds.

        A worker's supervisor looks every five seconds only whether the process of a deferred task has ended. When the
        scheduler hears of it while the task, resumed by then, is queued or runs again, it takes that end for the end of
        the second process, and fails the task.
        """
        earliest = time.monotonic() + defaults.min_deferral()
        verdict = await self._verdict(CkptHook(self.ckpt_conn_id))
        await asyncio.sleep(max(0.0, earliest - time.monotonic()))
        yield TriggerEvent(event_payload(verdict, self))  # type: ignore[no-untyped-call]

    async def is_given_up(self) -> bool:
        """See :func:`is_given_up`."""
        return await asyncio.to_thread(is_given_up, self.task_instance, self.log)

    async def cancel(self, job_id: str, name: str) -> None:
        """Cancel a job of a task that was killed, and say in the log what became of it."""
        try:
            async with await CkptHook(self.ckpt_conn_id).aget_conn(patience=ON_KILL_PATIENCE_SECONDS) as client:
                await client.execute(requests.cancel_job(job_id))
        except CkptClientError as error:
            self.log.error("The task was killed; cancelling %s %s failed, it may go on: %s", name, job_id, error)
        else:
            self.log.warning("The task was killed; %s %s is being cancelled.", name, job_id)

    async def _verdict(self, hook: CkptHook) -> Verdict:
        condition = self.condition()
        while True:
            begun_with = await hook.aendpoint()
            verdict = await self._waited_for(condition, hook)
            if not verdict.refuses_token or not goes_on(hook, begun_with, await hook.aendpoint()):
                return verdict

    async def _waited_for(self, condition: Condition, hook: CkptHook) -> Verdict:
        """A condition without events is polled over a connection of its own."""
        wait = Wait(condition, self.deadline, self.poll_interval, self.log)
        if condition.job is None:
            async with await hook.aget_conn() as client:
                return await wait.in_the_triggerer(client)
        async with joined(hook, condition, condition.job, self.poll_interval) as member:
            return await wait.in_the_triggerer(member)


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
            dag_id=instance.dag_id,
            map_index=instance.map_index,
            task_ids=[instance.task_id],
            run_ids=[instance.run_id],
        )
    except Exception as error:  # whatever keeps Airflow from answering: what was started can be ended later
        log.info("Airflow does not say what became of the killed task: %s", error)
        return False
    states = runs.get(instance.run_id) or {}
    return not states or any(state in _GIVEN_UP for state in states.values())


def goes_on(hook: CkptHook, begun_with: Endpoint, now: Endpoint) -> bool:
    """Whether a wait continues after its first token was refused: it does if the connection has changed."""
    if now == begun_with:
        return False
    hook.log.info("The token was refused; the connection %r has changed, and is read again", hook.ckpt_conn_id)
    return True


def with_time_left(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event of a wait for its task, with the deadline extended by the time Airflow took to resume the task.

    A paused DAG, or a pool without a free slot, delays the task: the rest of its time still has to be enough for its
    next steps, such as starting a job.
    """
    deadline, at = event["trigger"]["deadline"], event.get("at")
    if deadline is None or at is None:
        return event
    return event | {"trigger": event["trigger"] | {"deadline": deadline + max(0.0, time.time() - at)}}


def event_payload(verdict: Verdict, trigger: CkptTrigger) -> dict[str, Any]:
    """Make the event of a wait's end, also for an operator that waits without a triggerer."""
    return {
        "status": verdict.status.value,
        "message": verdict.message,
        "result": verdict.result,
        "trace": verdict.trace,
        "at": time.time(),
        "trigger": trigger.serialize()[1],
    }
