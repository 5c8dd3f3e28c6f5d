"""Waits for a session cluster to answer, or to be gone."""

from __future__ import annotations

from typing import Any

from airflow_provider_ckpt.conditions.base import Condition
from airflow_provider_ckpt.conditions.session import SessionGoneCondition, SessionReadyCondition
from airflow_provider_ckpt.session_process import SessionProcess
from airflow_provider_ckpt.triggers.base import CkptTrigger


class CkptSessionTrigger(CkptTrigger):
    """Polls the REST API's overview.

    :param wait_for: ``ready`` or ``gone``.
    :param process: the session's process, as of ``SessionProcess.to_json``; watched when it runs on this machine, so
        that a session that dies while starting is reported at once.
    :param terminate_on_kill: end that process when a person marks the waiting task failed.
    """

    def __init__(
        self,
        *,
        wait_for: str,
        process: dict[str, Any] | None = None,
        terminate_on_kill: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if wait_for not in ("ready", "gone"):
            raise ValueError(f"wait_for: {wait_for!r} is not acceptable, it must be ready or gone")
        self.wait_for = wait_for
        self.process = None if process is None else SessionProcess.from_json(process)
        self.terminate_on_kill = terminate_on_kill

    def condition(self) -> Condition:
        if self.wait_for == "gone":
            return SessionGoneCondition()
        process = self.process
        return SessionReadyCondition(None if process is None or not process.is_here else lambda: process.is_alive)

    def arguments(self) -> dict[str, Any]:
        return {
            "wait_for": self.wait_for,
            "process": None if self.process is None else self.process.to_json(),
            "terminate_on_kill": self.terminate_on_kill,
        }

    async def on_kill(self) -> None:
        """End the session that was being started if asked to and no other try continues with it, and say in the log
        what became of it."""
        if self.process is None:
            return
        name = f"session {self.process.session_id} (pid {self.process.pid} on {self.process.hostname})"
        if not self.terminate_on_kill or not await self.is_given_up():
            self.log.warning("The task was killed; %s goes on.", name)
        elif not self.process.is_here:
            self.log.error("The task was killed; %s runs on another machine and goes on.", name)
        else:
            self.process.signal(15)
            self.log.warning("The task was killed; %s was told to end.", name)
