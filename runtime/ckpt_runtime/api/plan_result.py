"""Request and answer of the plan process, as plain data with a JSON form. No user code, no process handling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import decoded


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan: see :func:`ckpt_runtime.api.entry_point.load_plan`.

    With ``archive``, a zip file, that is unpacked into ``archive_dir`` first.
    """

    archive_dir: str
    entry: str
    args: tuple[str, ...]
    configuration: dict[str, str]
    defaults: dict[str, str] = field(default_factory=dict)
    archive: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "archive_dir": self.archive_dir,
            "entry": self.entry,
            "args": list(self.args),
            "configuration": self.configuration,
            "defaults": self.defaults,
            "archive": self.archive,
        }

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
    """Either a job graph with warnings and the options that the pipeline's code set, or a failure."""

    job_graph: JobGraph | None = None
    warnings: tuple[str, ...] = ()
    failure: PlanFailure | None = None
    own_configuration: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        if self.failure is not None:
            failure = self.failure
            return {"error": {"type": failure.type, "message": failure.message, "traceback": failure.traceback}}
        assert self.job_graph is not None
        return {
            "job_graph": self.job_graph.to_json(),
            "warnings": list(self.warnings),
            "own_configuration": self.own_configuration,
        }

    @classmethod
    def from_json(cls, text: bytes) -> PlanResult:
        """Of JSON text that the author's code could have written. Raises :class:`DocumentError`."""
        document = decoded(text, _Answer)
        if document.error is not None:
            return cls(failure=document.error)
        graph = JobGraph.from_json(document.job_graph)
        return cls(graph, document.warnings, own_configuration=document.own_configuration)


class _Answer(Struct):
    error: PlanFailure | None = None
    job_graph: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    own_configuration: dict[str, str] = {}
