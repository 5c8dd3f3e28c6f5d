"""The process that runs an author's pipeline function, so that the driver never does.

``python -m ckpt_runtime.api.plan_process --output FILE`` (or ``--output-fd N``) reads one JSON request on standard
input and writes one JSON result there; what the author prints goes to standard output and cannot corrupt it. The exit
code is 0 whenever a result was written, an error of the author's included. :func:`plan_in_process` is the caller's
side; it imports no user code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from ckpt_runtime.api.plan_result import PlanFailure, PlanRequest, PlanResult
from ckpt_runtime.failure_report import MAX_TRACE_CHARS, printable, report_of

_OWN_PACKAGE = str(Path(__file__).resolve().parents[1])
_STDERR_LIMIT = 4_000


def plan_in_process(
    request: PlanRequest, timeout_s: float = 120.0, environment: Mapping[str, str] | None = None
) -> PlanResult:
    """Plans in a new process and waits for it; blocks, so call it from a pool thread.

    ``environment`` replaces the caller's, so that secrets of the driver need not reach user code. A process that dies
    or takes longer than ``timeout_s`` gives a failure of type ``PlanProcessFailed`` or ``PlanTimeout``.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-plan-") as directory:
        output = Path(directory) / "result.json"
        command = [sys.executable, "-m", "ckpt_runtime.api.plan_process", "--output", str(output)]
        variables = dict(os.environ if environment is None else environment)
        own_root = str(Path(_OWN_PACKAGE).parent)
        variables["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys([own_root, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))])
        )
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request.to_json()).encode(),
                capture_output=True,
                timeout=timeout_s,
                env=variables,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return PlanResult(failure=PlanFailure("PlanTimeout", f"the pipeline was not planned in {timeout_s:g} s"))
        if not output.exists():
            tail = done.stderr.decode(errors="replace")[-_STDERR_LIMIT:]
            message = f"the plan process ended with code {done.returncode} and no result"
            return PlanResult(failure=PlanFailure("PlanProcessFailed", message, tail))
        return PlanResult.from_json(json.loads(output.read_text()))


def run(request: PlanRequest) -> PlanResult:
    """Plans in this process and turns every error of the author's into a result."""
    from ckpt_runtime.api.entry_point import load_plan

    try:
        plan = load_plan(
            Path(request.archive_dir), request.entry, request.args, request.configuration, request.defaults
        )
    except (Exception, SystemExit) as error:
        report = report_of(error)
        trace = printable(_user_traceback(error), MAX_TRACE_CHARS)
        return PlanResult(failure=PlanFailure(report.exception.rpartition(".")[2], report.message, trace))
    return PlanResult(plan.job_graph, plan.warnings, own_configuration=plan.own_configuration)


def _user_traceback(error: BaseException) -> str:
    """The traceback without the frames of this package and of the import machinery, and without local directories."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN_PACKAGE, "<frozen"))
    ]
    return "\n".join(
        f'File "{Path(frame.filename).name}", line {frame.lineno}, in {frame.name}\n  {frame.line}' for frame in frames
    )


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(description="Plans one pipeline: JSON request on stdin, JSON result to a file.")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", help="file to write the result to")
    target.add_argument("--output-fd", type=int, help="open file descriptor to write the result to")
    options = parser.parse_args()
    request = PlanRequest.from_json(json.load(sys.stdin))
    sys.argv = [sys.argv[0]]
    document = json.dumps(run(request).to_json()).encode()
    if options.output is None:
        with os.fdopen(options.output_fd, "wb") as stream:
            stream.write(document)
        return
    partial = Path(f"{options.output}.partial")
    partial.write_bytes(document)
    partial.replace(options.output)


if __name__ == "__main__":
    main()
