"""What an incremental checkpoint of in-memory state costs beside a complete one, in one process without a job.

A backend counts and sums ``--keys`` keys, as keyed_count does. Then ``--change`` of them, at random, are updated
between two checkpoints, which are written to real files and completed in turn. The first one is complete. Another
backend is restored from the last checkpoint, and has to hold the same counts and sums.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import emit, parser_for, positive_int, progress, run_main
from benchmarks.state_memory import AGGREGATES, BATCH, MAX_PARALLELISM
from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.kernels.compiler import warm_up
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.task.restored_input import StoredFiles
from ckpt_runtime.task.snapshot_files import NewFiles

NAME = "memory_increments"
INLINE_BYTES = 20_000
KEY = pa.schema([pa.field("key", pa.int64())])
_SPREAD = 0x9E3779B97F4A7C15
"""Odd, so that numbers times it, modulo 2^64, stay distinct."""


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--keys", type=positive_int, default=5_000_000)
    parser.add_argument("--change", type=float, default=0.01, help="share of the keys updated between two checkpoints")
    parser.add_argument("--checkpoints", type=positive_int, default=10, help="increments after the complete one")
    options = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="ckpt-increments-") as directory:
        measures = measure(Path(directory), options.keys, options.change, options.checkpoints)
    emit(NAME, options, measures, round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measure(directory: Path, keys: int, change: float, checkpoints: int) -> dict[str, Any]:
    """Raises AssertionError when what is restored is not what was there."""
    job = _Job(directory)
    for start in range(0, keys, BATCH):
        job.update(np.arange(start, min(start + BATCH, keys), dtype=np.int64))
    progress(f"{keys:,} keys")
    complete = job.checkpoint()
    random = np.random.default_rng(7)
    taken = []
    for _ in range(checkpoints):
        changed = random.choice(keys, max(1, round(keys * change)), replace=False)
        for start in range(0, len(changed), BATCH):
            job.update(changed[start : start + BATCH])
        taken.append(job.checkpoint())
    restore_s, restore_cpu_s = job.restored_s(keys)
    return {
        "complete_bytes": complete["bytes"],
        "complete_cpu_s": complete["cpu_s"],
        "first_increment_bytes": taken[0]["bytes"],
        "increment_bytes": statistics.fmean(one["bytes"] for one in taken),
        "increment_cpu_s": statistics.fmean(one["cpu_s"] for one in taken),
        "increment_s_p50": statistics.median(one["s"] for one in taken),
        "sync_ms_p50": statistics.median(one["sync_ms"] for one in taken),
        "sync_ms_complete": complete["sync_ms"],
        "sync_ms_max": max(one["sync_ms"] for one in taken),
        "stored_bytes": taken[-1]["stored"],
        "parts": taken[-1]["parts"],
        "restore_s": restore_s,
        "restore_cpu_s": restore_cpu_s,
    }


class _Job:
    """A backend and the directories of its checkpoints."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shared = directory / "shared"
        self._shared.mkdir()
        self._number = 0
        self._handles: list[KeyedHandle] = []
        self._groups = KeyGroupRange(0, MAX_PARALLELISM - 1)
        self._backend = MemoryKeyedStateBackend(self._groups, MAX_PARALLELISM, NAME, incremental=True)
        self._table = self._backend.aggregate_table("totals", KEY, AGGREGATES)

    def update(self, numbers: Any) -> None:
        """One row for each of these keys, which are spread over all integers."""
        keys = (numbers.astype(np.uint64) * np.uint64(_SPREAD)).view(np.int64)
        self._table.update(pa.record_batch({"key": pa.array(keys), "value": pa.array(numbers)}))

    def checkpoint(self) -> dict[str, float]:
        self._number += 1
        place = self._directory / f"chk-{self._number}"
        place.mkdir()
        properties = CheckpointProperties()
        before = time.perf_counter()
        snapshot = self._backend.snapshot(self._number, properties)
        sync_ms = 1000 * (time.perf_counter() - before)
        files = NewFiles(CheckpointOptions(properties, str(place), shared_directory=str(self._shared)), INLINE_BYTES)
        cpu, began = time.process_time(), time.perf_counter()
        self._handles = list(snapshot.write(files))
        files.settle()
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        snapshot.release()
        self._backend.notify_complete(self._number)
        stored = [file for handle in self._handles for file in handle.state_files()]
        return {
            "bytes": files.written_bytes,
            "cpu_s": cpu,
            "s": took,
            "sync_ms": sync_ms,
            "stored": sum(file.length for file in stored),
            "parts": len(stored),
        }

    def restored_s(self, keys: int) -> tuple[float, float]:
        """Restores the last checkpoint and compares the content; the time and the processor time of the former."""
        cpu, began = time.process_time(), time.perf_counter()
        backend = MemoryKeyedStateBackend(self._groups, MAX_PARALLELISM, NAME)
        backend.restore(self._handles, StoredFiles(str(self._directory)), owned=True)
        table = backend.aggregate_table("totals", KEY, AGGREGATES)
        took = time.perf_counter() - began, time.process_time() - cpu
        for start in range(0, keys, BATCH):
            numbers = np.arange(start, min(start + BATCH, keys), dtype=np.uint64)
            key = [pa.array((numbers * np.uint64(_SPREAD)).view(np.int64))]
            found, wanted = (each.rows(each.find(key)) for each in (table, self._table))
            assert found.equals(wanted), "the restored state differs"
        assert len(table) == keys
        return took


if __name__ == "__main__":
    run_main(main)
