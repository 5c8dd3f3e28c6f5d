"""Brings a running job to another parallelism."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.conditions.job import RescaleCondition, in_words
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptConflict, CkptJobFailed
from airflow_provider_ckpt.operators.base import CkptJobOperator
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import Conflict
from ckpt_runtime.contract.configuration import Bounds
from ckpt_runtime.contract.jobs import TERMINAL_STATES, Vertex

if TYPE_CHECKING:
    from airflow.sdk import Context


class RescaleJobOperator(CkptJobOperator):
    """Rescales a running job, which gets its slots and takes a checkpoint before anything is stopped.

    Waits until it runs with the new parallelism. A refusal - no slots in time, a checkpoint that failed - leaves the
    job as it was and fails the task. Repeating it is harmless.

    Returns the job's facts and ``parallelism``, that of each vertex by its id.

    :param job: the job, by id or unique name. (templated)
    :param parallelism: a number for all vertices that can have more than one subtask, or a mapping of vertices, by id
        or name, to numbers: others keep the bounds that were declared for them. (templated)
    :raises CkptJobFailed: the job has ended, and cannot be rescaled
    """

    template_fields: Collection[str] = (*CkptJobOperator.template_fields, "parallelism")

    def __init__(
        self, *, job: Templated[str], parallelism: Templated[int | str | Mapping[str, int | str]], **kwargs: Any
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.parallelism = parallelism

    def execute(self, context: Context) -> Any:
        given = self.wanted()
        deadline = self.deadline()
        job_id = self.find_job(context, deadline)
        with self.connected(deadline) as client:
            job = self.ask(client, requests.job_details(job_id))
            if job.state in TERMINAL_STATES:
                raise CkptJobFailed(f"job {job_id} is {job.state}, so it cannot be rescaled")
            try:
                present = self.ask(client, requests.parallelism_bounds(job_id))
            except Conflict as error:
                raise CkptConflict(f"job {job_id} cannot be rescaled: {error}") from error
            wanted = chosen_parallelism(given, job.vertices, present)
        for vertex in job.vertices:
            self.log.info("%s: parallelism %s -> %s", vertex.name, vertex.parallelism, in_words(wanted[vertex.id]))
        return self.wait_for(context, RescaleCondition(job_id, wanted), deadline)

    def wanted(self) -> int | dict[str, int]:
        """Check and return the argument.

        :raises CkptArgumentInvalid: naming it, its value and what is allowed.
        """
        given: Any = self.parallelism
        if not isinstance(given, Mapping):
            return arguments.integer("parallelism", given, minimum=1)
        if not given:
            raise CkptArgumentInvalid("parallelism", given, "it must name at least one vertex")
        return {str(key): arguments.integer(f"parallelism[{key!r}]", item, minimum=1) for key, item in given.items()}

    def reached(self, context: Context, event: Json) -> Any:
        self.forget_job(context)
        self.log.info("Job %s is rescaled", self.found_job)
        return event["result"]

    def after_timeout(self, context: Context, event: Json | None) -> str:
        return "A rescale that has begun cannot be undone; the next try of this task attaches to it"

    def on_kill(self) -> None:
        """Log what becomes of the rescale."""
        text = "The task was killed; a rescale of job %s that has begun cannot be undone, and continues."
        self.log.warning(text, self.found_job)


def chosen_parallelism(
    given: int | Mapping[str, int], vertices: Sequence[Vertex], present: Mapping[str, Bounds]
) -> dict[str, int | Bounds]:
    """Choose for every vertex by id. A number for all leaves those out that cannot have more than one subtask.

    :raises CkptArgumentInvalid: for a vertex that is not there, or not the only one of its name.
    """
    if isinstance(given, int):
        many = {vertex.id for vertex in vertices if vertex.max_parallelism > 1}
        return {vertex.id: given if vertex.id in many else present[vertex.id] for vertex in vertices}
    wanted: dict[str, int | Bounds] = dict(present)
    for name, number in given.items():
        chosen = [vertex for vertex in vertices if name in (vertex.id, vertex.name)]
        if len(chosen) != 1:
            known = ", ".join(f"{vertex.name!r} ({vertex.id})" for vertex in vertices)
            raise CkptArgumentInvalid("parallelism", name, f"it must be one of the job's vertices: {known}")
        wanted[chosen[0].id] = number
    return wanted
