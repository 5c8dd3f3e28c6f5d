"""``python -m benchmarks.coordinator``: what one checkpoint of many subtasks costs its coordinator. No Spark.

The pure core takes all acknowledgements of a checkpoint, its metadata is written to a local directory, and read and
registered again as a driver does that takes over. ``--shared-files`` are spread over the subtasks.
"""

from __future__ import annotations

import gc
import tempfile
import time
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from benchmarks.harness import BenchmarkError, emit, parser_for, positive_int, progress, run_main
from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.storage.filesystem import file_size, resolve
from ckpt_runtime.storage.metadata import METADATA_NAME, read_metadata, write_metadata

NAME = "coordinator"
_NOW = Instant(0, 0)
_MEGABYTE = 1 << 20


def main() -> None:
    """The command."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--subtasks", default="100,1000,10000", help="numbers of subtasks, one run for each")
    parser.add_argument("--shared-files", type=int, default=0, help="shared files that the checkpoint refers to")
    options = parser.parse_args()
    counts = [positive_int(text) for text in options.subtasks.split(",")]
    _measure(10, 10)  # imports, and code that runs for the first time
    runs = [_measure(count, options.shared_files) for count in counts]
    emit(NAME, options, {"runs": runs}, psutil.Process().memory_info().rss // _MEGABYTE)


def _measure(subtasks: int, shared_files: int) -> dict[str, Any]:
    gc.collect()
    before = psutil.Process().memory_info().rss
    vertex = JobVertex("v", (OperatorNode("op", "op", "source"),), subtasks, max(128, subtasks))
    graph = JobGraph("job", (vertex,), ())
    coordinator = CheckpointCoordinator("job", graph, CheckpointConfiguration())
    executions = tuple(ExecutionId("v", index, 0) for index in range(subtasks))
    coordinator.handle(on.JobRunning(executions), _NOW)
    coordinator.handle(on.TriggerRequested("r", CheckpointProperties()), _NOW)
    with tempfile.TemporaryDirectory(prefix="ckpt-benchmark-") as directory:
        coordinator.handle(on.LocationReady(1, directory, f"{directory}/shared"), _NOW)
        states = [_state(index, subtasks, shared_files, directory) for index in range(subtasks)]
        started, cpu = time.perf_counter(), time.process_time()
        effects: list[Any] = []
        for execution, state in zip(executions, states, strict=True):
            effects = coordinator.handle(on.Acknowledged(1, execution, directory, state), _NOW)
        ack_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        written = next(effect for effect in effects if isinstance(effect, out.WriteMetadata)).checkpoint
        started = time.perf_counter()
        write_metadata(resolve(directory), written.to_json())
        metadata_write_s = time.perf_counter() - started
        file = resolve(directory).child(METADATA_NAME)
        started = time.perf_counter()
        found = CompletedCheckpoint.from_json(read_metadata(directory).document, directory)
        decode_s = time.perf_counter() - started
        later = CheckpointCoordinator("job", graph, CheckpointConfiguration(), None, [RetainedCheckpoint(found)])
        recovery_s = time.perf_counter() - started
        if later.latest_checkpoint is None or later.latest_checkpoint.states != written.states:
            raise BenchmarkError("what was read back is not what was written")
        metadata_bytes = file_size(file)
    memory_mb = (psutil.Process().memory_info().rss - before) / _MEGABYTE
    progress(f"{subtasks} subtasks: acknowledged in {ack_s:.3f} s, recovered in {recovery_s:.3f} s")
    return {
        "subtasks": subtasks,
        "ack_s": round(ack_s, 4),
        "cpu_s": round(cpu_s, 4),
        "memory_mb": round(memory_mb, 1),
        "metadata_bytes": metadata_bytes,
        "metadata_write_s": round(metadata_write_s, 4),
        "decode_s": round(decode_s, 4),
        "register_s": round(recovery_s - decode_s, 4),
        "recovery_s": round(recovery_s, 4),
    }


def _state(index: int, subtasks: int, shared_files: int, directory: str) -> SubtaskState:
    """A subtask's part of the files, after one of its own."""
    checksum = f"xxh3-64:{index:016x}"
    files = {"MANIFEST-000001": StateFile(f"{index:08x}", 1_000, checksum)}
    for number in range(index, shared_files, subtasks):
        files[f"{number:06}.sst"] = StateFile(f"{directory}/shared/chk-1-{number:032x}", 4_000_000, checksum)
    groups = key_group_range(max(128, subtasks), subtasks, index)
    handle = IncrementalKeyedStateHandle(groups, "rocksdb", files, {"states": []})
    return SubtaskState({"op": OperatorSubtaskState((handle,))}, 1_000)


if __name__ == "__main__":
    run_main(main)
