"""The process that runs an author's pipeline function, so that the driver never does.

:func:`plan_in_process` is the caller's side; it imports no user code. The process (``main``) unpacks the archive, runs
the function and answers with a job graph or an error of the author's code. Output that the author's code prints is
discarded and cannot corrupt the answer.
"""

from __future__ import annotations

import json
import traceback
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckpt_runtime.failure_report import MAX_TRACE_CHARS, printable, report_of
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import DocumentError, decoded
from ckpt_runtime.processes.limited_process import (
    LimitedProcessError,
    ProcessLimits,
    ProcessTimeLimitError,
    run_limited,
    serve,
)

_REFUSALS = frozenset(
    {
        "InvalidConfigurationError",
        "InvalidOptionError",
        "PlanError",
        "PlanProcessFailed",
        "PlanTimeout",
        "UnknownOptionError",
    }
)
"""Types of failures whose message says everything: users see it without the type."""
_OWN_PACKAGE = str(Path(__file__).resolve().parents[1])
NEEDED = ("ckpt_runtime.frontend.program", "ckpt_runtime.frontend.captured_session", "pyspark.sql.types")
"""Modules that a template imports (see ``process_template``): the engine's, and what captures every program."""
OFTEN_NEEDED = ("pyarrow.parquet", "pyspark.sql.datasource", "pyspark.sql.streaming.stateful_processor")
"""Libraries that many programs use."""
PLAN_LIMITS = ProcessLimits(time_s=120.0, memory_bytes=2 << 30, answer_bytes=8 << 20)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The program to plan: see :func:`ckpt_runtime.frontend.program.load_plan`.

    If ``archive`` is set, that zip file is unpacked into ``archive_dir`` first. ``analyses`` has Spark's answers, and
    ``remembered`` those that it gave when the program was planned before.
    """

    archive_dir: str
    entry: str
    args: tuple[str, ...]
    configuration: dict[str, str]
    defaults: dict[str, str] = field(default_factory=dict)
    archive: str | None = None
    analyses: dict[str, str] = field(default_factory=dict)
    remembered: dict[str, str] = field(default_factory=dict)
    submitted: bool = False

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
        return self.message if self.type in _REFUSALS else f"{self.type}: {self.message}"


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
            raise DocumentError("neither a job graph nor a failure is given")
        found.job_graph.check()
        return found


def plan_in_process(
    request: PlanRequest, limits: ProcessLimits = PLAN_LIMITS, environment: Mapping[str, str] | None = None
) -> PlanResult:
    """Plans in a new process and waits for it; blocks, so call it from a pool thread.

    ``environment`` replaces the caller's, so that secrets of the driver need not reach user code. A process that dies,
    exceeds a limit or does not answer with a plan gives a failure of type ``PlanProcessFailed`` or
    ``PlanTimeout``.
    """
    document = json.dumps(asdict(request)).encode()
    try:
        answer = run_limited(__name__, document, limits, environment)
        return PlanResult.from_json(answer)
    except ProcessTimeLimitError as error:
        return PlanResult(failure=PlanFailure("PlanTimeout", f"the pipeline was not planned in time: {error}"))
    except LimitedProcessError as error:
        return PlanResult(failure=PlanFailure("PlanProcessFailed", f"the plan process: {error}", error.last_words))
    except DocumentError as error:
        return PlanResult(failure=PlanFailure("PlanProcessFailed", f"the plan process returned no plan: {error}"))


def run(request: PlanRequest) -> PlanResult:
    """Plans in this process and turns every error of the author's code into a result."""
    from ckpt_runtime.frontend.program import load_plan
    from ckpt_runtime.frontend.typed_plan import AnalysisNeeded

    try:
        if request.archive is not None:
            with zipfile.ZipFile(request.archive) as files:
                files.extractall(request.archive_dir)
        plan = load_plan(
            Path(request.archive_dir),
            request.entry,
            request.args,
            request.configuration,
            request.defaults,
            analyses=request.analyses,
            remembered=request.remembered,
            submitted=request.submitted,
        )
    except AnalysisNeeded as question:
        return PlanResult(needed=question.text)
    except (Exception, SystemExit) as error:
        report = report_of(error)
        trace = printable(_user_traceback(error), MAX_TRACE_CHARS)
        message = report.message
        if isinstance(error, MemoryError) and not message:
            message = "the plan process needs more memory than is allowed; see jobmanager.planning.memory"
        return PlanResult(failure=PlanFailure(report.exception.rpartition(".")[2], message, trace))
    return PlanResult(plan.job_graph, plan.warnings, own_configuration=plan.own_configuration)


def _user_traceback(error: BaseException) -> str:
    """The traceback without frames of this package, PySpark and the import machinery, and without local directories."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN_PACKAGE, "<frozen")) and "/pyspark/" not in frame.filename
    ]
    return "\n".join(
        f'File "{Path(frame.filename).name}", line {frame.lineno}, in {frame.name}\n  {frame.line}' for frame in frames
    )


def _answer(document: bytes) -> bytes:
    return json.dumps(asdict(run(PlanRequest.from_json(document)))).encode()


def main() -> None:
    """The process's entry point."""
    from ckpt_runtime.frontend import program  # noqa: F401 what the engine itself takes does not count

    serve(_answer)


if __name__ == "__main__":
    main()
