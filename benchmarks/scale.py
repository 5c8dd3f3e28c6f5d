"""``python -m benchmarks.scale``: the work of the driver to deploy a job of many subtasks. No Spark.

Two vertices of ``--subtasks`` subtasks each, with a shuffle between them: the deployments are planned, and encoded as
for the control connections. The driver does both on its event loop. ``message_bytes`` is the first message of a worker,
without the program's archive; ``restart_message_bytes`` is that of a restart in the same worker.

Then the job runs, on workers that only answer, with a checkpoint and heartbeats per second. ``driver_cpu`` is the share
of a processor that the driver uses, twenty REST requests per second and their client included; ``driver_mb`` is its
memory.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from benchmarks import scale_driver
from benchmarks.harness import BenchmarkError, emit, parser_for, positive_int, progress, run_main
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.jobmaster.task_gateway import SlotPlacement, plan_deployments
from ckpt_runtime.network.connections import framed
from ckpt_runtime.network.control_messages import DeploySubtasks
from ckpt_runtime.scheduler.deployment import JobDescriptor, Program, input_channels

NAME = "scale"


def main() -> None:
    """The command."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--subtasks", default="10,100,1000", help="parallelism, one run for each")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the driver is watched in each run")
    options = parser.parse_args()
    counts = [positive_int(text) for text in options.subtasks.split(",")]
    _measure(10)  # imports, and code that runs for the first time
    runs = [{**_measure(count), **_driven(count, options.seconds)} for count in counts]
    emit(NAME, options, {"runs": runs}, psutil.Process().memory_info().rss // (1 << 20))


def _driven(subtasks: int, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory(prefix="ckpt-scale-") as directory:
        found = scale_driver.measure(_graph(subtasks), Path(directory), seconds)
    progress(f"{subtasks} subtasks: {found}")
    return found


def _graph(subtasks: int) -> JobGraph:
    vertices = tuple(
        JobVertex(name * 32, (OperatorNode(name, name, kind),), subtasks, max(128, subtasks))
        for name, kind in (("a", "source"), ("b", "aggregate"))
    )
    return JobGraph("job", vertices, (JobEdge("a" * 32, "b" * 32, Partitioning.HASH, ("k",)),))


def _measure(subtasks: int) -> dict[str, Any]:
    graph = _graph(subtasks)
    job = JobDescriptor("0" * 32, graph, Program("p", "m:f", ()))
    slots = [SlotPlacement((f"10.0.{index // 250}.{index % 250}", 40_000 + index)) for index in range(subtasks)]
    started = time.perf_counter()
    deployments = plan_deployments(graph, slots, deployment=1, attempt=0, restored=None)
    planned = time.perf_counter()
    messages = [framed(DeploySubtasks(deployment, job)) for deployment in deployments]
    encoded = time.perf_counter()
    if len(input_channels(graph, "b" * 32, subtasks - 1)[0][1]) != subtasks:
        raise BenchmarkError("a subtask behind a shuffle has not one channel from each producer")
    plan_s, encode_s = planned - started, encoded - planned
    progress(f"{subtasks} subtasks: planned in {plan_s:.4f} s, encoded in {encode_s:.4f} s")
    return {
        "subtasks": subtasks,
        "plan_deployments_s": round(plan_s, 4),
        "encode_s": round(encode_s, 4),
        "message_bytes": max(map(len, messages)),
        "restart_message_bytes": max(len(framed(DeploySubtasks(deployment))) for deployment in deployments),
    }


if __name__ == "__main__":
    run_main(main)
