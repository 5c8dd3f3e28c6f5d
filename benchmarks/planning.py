"""How long a query is planned in a warm session: from the program to the job graph. No job runs.

``plan_ms`` is the driver's whole work for a program that it has never seen: processes that run the program, and Spark's
analysis. The parts of it are measured in this process, without starting others: ``capture_ms`` until the program asks
Spark, ``analysis_ms`` until Spark has answered, and ``mapping_ms`` from the typed plan to the job graph. Both ways have
to give the same graph.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from benchmarks.harness import PIPELINES, BenchmarkError, emit, parser_for, positive_int, progress, run_main
from benchmarks.pipelines.planning import LEAST_OPERATORS
from ckpt_runtime.frontend.analysis import ANALYZER
from ckpt_runtime.frontend.program import load_plan
from ckpt_runtime.frontend.typed_plan import AnalysisNeeded
from ckpt_runtime.jobmaster.gateway_values import RunRequest
from ckpt_runtime.testing.mini_cluster import MiniCluster

NAME = "planning"
_PROGRAM = PIPELINES / "planning.py"


@dataclass(frozen=True)
class Parts:
    """The seconds of each part, and the fingerprint of the graph."""

    capture: float
    analysis: float
    mapping: float
    graph: str


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument(
        "--operators", type=positive_int, default=10, help="operators of the query, reader and writer too"
    )
    parser.add_argument("--rounds", type=positive_int, default=10, help="programs that are planned, each a new one")
    options = parser.parse_args()
    if options.operators < LEAST_OPERATORS:
        parser.error(f"--operators {options.operators}: it has to be at least {LEAST_OPERATORS}")
    with tempfile.TemporaryDirectory(prefix="ckpt-planning-", ignore_cleanup_errors=True) as directory:
        measures = _measured(options, directory)
        emit(NAME, options, measures, psutil.Process().memory_info().rss // (1 << 20))


def _measured(options: Namespace, directory: str) -> dict[str, Any]:
    whole: list[float] = []
    parts: list[Parts] = []
    with MiniCluster() as cluster:
        for version in range(-2, options.rounds):  # the first two warm Spark, the template and this process up
            given = (directory, str(options.operators), str(version))
            took, graph = _in_driver(cluster, given)
            here = _here(given)
            if here.graph != graph:
                raise BenchmarkError(f"the driver's graph of {given} is not the one that this process makes")
            if version >= 0:
                whole.append(took)
                parts.append(here)
                progress(f"{took * 1000:.0f} ms; {here}")
    return {
        "plan_ms_p50": round(median(whole) * 1000),
        "plan_ms_max": round(max(whole) * 1000),
        "capture_ms": round(median(part.capture for part in parts) * 1000),
        "analysis_ms": round(median(part.analysis for part in parts) * 1000),
        "mapping_ms": round(median(part.mapping for part in parts) * 1000),
    }


def _in_driver(cluster: MiniCluster, given: tuple[str, ...]) -> tuple[float, str]:
    """The seconds of a plan, the upload included, and the graph's fingerprint."""
    started = time.perf_counter()
    stored = cluster.upload(_PROGRAM)
    shown = cluster.call(cluster.dispatcher.plan_pipeline(RunRequest(stored, "planning:pipeline", given)))
    return time.perf_counter() - started, shown.graph.fingerprint


def _here(given: tuple[str, ...]) -> Parts:
    answers: dict[str, str] = {}
    captures: list[float] = []
    analysis = 0.0
    while True:
        started = time.perf_counter()
        try:
            plan = load_plan(PIPELINES, "planning:pipeline", given, {}, analyses=answers)
        except AnalysisNeeded as question:
            asked = time.perf_counter()
            captures.append(asked - started)
            answers.update(ANALYZER.answer(question.text))
            analysis += time.perf_counter() - asked
            continue
        mapping = time.perf_counter() - started - captures[-1]
        return Parts(sum(captures), analysis, mapping, plan.job_graph.fingerprint)


if __name__ == "__main__":
    run_main(main)
