"""Waiting for a session cluster to answer, or to stop answering."""

from __future__ import annotations

from ckpt_runtime.client import CkptUnreachable

from airflow_provider_ckpt import calls
from airflow_provider_ckpt.conditions.base import Condition, Json, Poll, Status, Verdict


class SessionReadyCondition(Condition):
    """Done when the REST API answers its overview."""

    @property
    def subject(self) -> str:
        return "the session's REST API to answer"

    def poll(self) -> Poll:
        overview: Json = yield calls.overview()
        return Verdict(Status.DONE, result=session_facts(overview))


class SessionGoneCondition(Condition):
    """Done when the REST API does not answer any more."""

    @property
    def subject(self) -> str:
        return "the session's REST API to be gone"

    def poll(self) -> Poll:
        try:
            yield calls.overview()
        except CkptUnreachable:
            return Verdict(Status.DONE)
        return None


def session_facts(overview: Json) -> Json:
    """What tasks return about a session."""
    return {
        "slots_total": overview.get("slots-total"),
        "slots_available": overview.get("slots-available"),
        "jobs_running": overview.get("jobs-running"),
        "version": overview.get("flink-version"),
    }
