"""Request and answer of the plan process: plain data, encoded as JSON. No user code, no process handling."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import DocumentError, decoded


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan: see :func:`ckpt_runtime.api.entry_point.load_plan`.

    If ``archive`` is set, that zip file is unpacked into ``archive_dir`` first. ``analyses`` has Spark's answers.
    """

    archive_dir: str
    entry: str
    args: tuple[str, ...]
    configuration: dict[str, str]
    defaults: dict[str, str] = field(default_factory=dict)
    archive: str | None = None
    analyses: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: bytes) -> PlanRequest:
        """Raises :class:`DocumentError`."""
        return decoded(text, cls)


@dataclass(frozen=True, slots=True)
class PlanFailure:
    """Why a pipeline could not be planned. ``traceback`` shows the author's frames only."""

    type: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Either a job graph with warnings and the options that the pipeline's code set, or a failure, or a question.

    ``needed`` is the JSON text of a request that Spark has to answer before the program can be planned.
    """

    job_graph: JobGraph | None = None
    warnings: tuple[str, ...] = ()
    failure: PlanFailure | None = None
    own_configuration: dict[str, str] = field(default_factory=dict)
    needed: str = ""

    @classmethod
    def from_json(cls, text: bytes) -> PlanResult:
        """Reads JSON text that the author's code could have written. Raises :class:`DocumentError`."""
        found = decoded(text, cls)
        if found.failure is not None:
            return cls(failure=found.failure)
        if found.needed:
            return cls(needed=found.needed)
        if found.job_graph is None:
            raise DocumentError("there is neither a job graph nor a failure")
        found.job_graph.check()
        return found
