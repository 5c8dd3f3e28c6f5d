"""Waiting for a session cluster to answer, or to stop answering."""

from __future__ import annotations

from collections.abc import Callable

from airflow_provider_ckpt.conditions.base import Condition, Json, Poll, Status, Verdict
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import Unreachable
from ckpt_runtime.client.models import ClusterOverview


class SessionReadyCondition(Condition):
    """Done when the session leads: it answers about jobs then. FAILED when its process is seen to have ended.

    A session that waits for another one's lease already answers its overview, but 503 to requests about jobs.

    :param is_alive: tells whether the process lives; ``None`` where that cannot be told.
    """

    def __init__(self, is_alive: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._is_alive = is_alive

    @property
    def subject(self) -> str:
        return "the session to answer and to lead"

    def poll(self) -> Poll:
        ended = self._is_alive is not None and not self._is_alive()
        if ended:
            return Verdict(Status.FAILED, "the session's process has ended")
        overview: ClusterOverview = yield requests.cluster_overview()
        yield requests.list_jobs()
        return Verdict(Status.DONE, result=session_facts(overview))


class SessionGoneCondition(Condition):
    """Done when the REST API no longer answers."""

    @property
    def subject(self) -> str:
        return "the session's REST API to be gone"

    def poll(self) -> Poll:
        try:
            yield requests.cluster_overview()
        except Unreachable:
            return Verdict(Status.DONE)
        self.standing = "it still answers"
        return None


def session_facts(overview: ClusterOverview) -> Json:
    """What tasks return about a session."""
    return {
        "slots_total": overview.slots_total,
        "slots_available": overview.slots_available,
        "jobs_running": overview.jobs_running,
        "version": overview.version,
    }
