"""The common parts of backpressure and progress: FLIP-76's topology, its options, the policies, and the check of its
result.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import expected
from benchmarks.harness import BenchmarkError, BenchmarkJob, Report, not_negative, positive_int, progress

PIPELINE = "backpressure"
POLICIES = ("none", "aligned", "unaligned", "timeout")
"""No checkpoints; aligned ones; unaligned at once; aligned up to a timeout, then unaligned."""


def add_topology_options(parser: argparse.ArgumentParser, policies: Sequence[str], sleep_ms: float) -> None:
    """The options of the topology and of its checkpoints."""
    parser.add_argument("--sleep-ms", type=not_negative, default=sleep_ms, help="sleep per row of the sleepy map")
    parser.add_argument("--policy", choices=policies, default=policies[0], help="how checkpoints are taken")
    parser.add_argument("--parallelism", type=positive_int, default=4, help="subtasks of each vertex, and slots")
    parser.add_argument("--payload", type=int, default=100, help="bytes of each row's payload")
    parser.add_argument("--interval-ms", type=positive_int, default=1000, help="checkpoint interval")
    parser.add_argument("--timeout-ms", type=positive_int, default=100, help="policy timeout: aligned for so long")
    parser.add_argument("--conf", type=setting, action="append", metavar="KEY=VALUE", help="an option of the job")


def setting(text: str) -> str:
    """An argument of the form ``key=value``."""
    if not text.partition("=")[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return text


def policy_configuration(options: argparse.Namespace) -> dict[str, str]:
    """The job options that make the policy, and those of ``--conf``; not the interval."""
    configuration = {}
    if options.policy in ("unaligned", "timeout"):
        configuration["execution.checkpointing.unaligned.enabled"] = "true"
    if options.policy == "timeout":
        configuration["execution.checkpointing.aligned-checkpoint-timeout"] = f"{options.timeout_ms} ms"
    for text in options.conf or ():
        key, _, value = text.partition("=")
        configuration[key] = value
    return configuration


def drain_and_check(job: BenchmarkJob) -> None:
    """Ends the sleeping, lets everything that is under way arrive, and checks it. Raises BenchmarkError."""
    job.file("hurry").touch()
    savepoint = expected.Savepoint(job.drain())
    wrong = faults(savepoint.positions("source"), savepoint.rows("verify-sink"), job.report())
    if wrong:
        raise BenchmarkError("; ".join(wrong))
    progress(f"checked {job.report().total('rows'):,} rows: each has come exactly once")


def faults(positions: dict[int, int], rows_in_state: int, report: Report) -> list[str]:
    """The faults of a drained job whose source has emitted ``positions[s]`` rows of each split ``s``."""
    emitted = sum(positions.values())
    found = sum(int(document["digest"], 16) for document in report.subtasks.values()) % (1 << 64)
    facts = {
        "rows at the sink": (report.total("rows"), emitted),
        "rows in the state": (rows_in_state, emitted),
        "digest of the rows": (f"{found:016x}", f"{expected.digest(positions):016x}"),
        "unfinished subtasks of the sink": ([i for i, d in report.subtasks.items() if not d["finished"]], []),
    }
    return [f"{what}: {value}, expected {right}" for what, (value, right) in facts.items() if value != right]
