"""Lists the jobs of a session, so that other tasks can be mapped over them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.job import STATES
from airflow_provider_ckpt.operators.base import CkptOperator
from ckpt_runtime.client import requests
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from airflow.sdk import Context

_LIVING = tuple(state for state in STATES if state not in TERMINAL_STATES)


class ListJobsOperator(CkptOperator):
    """Lists jobs, for ``.expand``: the mapped task has one independent instance for each job.

    Returns a list of ``{"job_id", "name", "status", "start_time_ms"}``, ordered by name. Each entry can be given as the
    argument ``job`` of other tasks. Restore drills are left out. With an empty list, the mapped tasks are skipped.

    :param name: only jobs whose names match this pattern, in which ``*`` matches any text, ``?`` any character
        and ``[ab]`` for one of several. (templated)
    :param states: only jobs in one of these states; by default all that live. (templated)
    """

    template_fields: Collection[str] = (*CkptOperator.template_fields, "name", "states")

    def __init__(
        self, *, name: Templated[str] = "*", states: Templated[str | Sequence[str]] = _LIVING, **kwargs: Any
    ) -> None:
        # The result is a list, whose entries can be no XComs with names.
        super().__init__(multiple_outputs=False, **kwargs)
        self.name = name
        self.states = states

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """List them once."""
        deadline = self.deadline()
        pattern, states = arguments.text("name", self.name), arguments.choices("states", self.states, STATES)
        with self.connected(deadline) as client:
            lines = self.ask(client, requests.list_jobs())
        found = [
            {"job_id": line.job_id, "name": line.name, "status": line.state, "start_time_ms": line.start_time_ms}
            for line in sorted(lines, key=lambda line: (line.name, line.start_time_ms))
            if line.state in states and not line.drill and fnmatchcase(line.name, pattern)
        ]
        self.log.info("%d of %d jobs: %s", len(found), len(lines), ", ".join(str(job["name"]) for job in found))
        return found
