"""The memory of a key of keyed_count's state: measured in a process of its own, without a job around it.

A job's processes hold more that grows with the keys, the checking sink's copy of all counts and sums above all, so
their size does not tell. Here a backend counts and sums keys in the order in which the generator brings them, and
writes snapshots of all of them meanwhile; what its process has needed at most is divided by the keys.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]
import pyarrow as pa

from benchmarks.expected import KEY_FORMS, scattered
from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend, SnapshotFile, SnapshotFiles
from ckpt_runtime.state.kernels.compiler import warm_up
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.states import AggregateColumn

BATCH = 65_536
LEAST_KEYS = 1_000_000
MOST_KEYS_ON_DISK = 2_000_000
"""Most of them lie on the disk by then; reading them back takes long, and says nothing new about memory."""
MAX_PARALLELISM = 128
AGGREGATES = [
    AggregateColumn("count", None, "count", None, pa.int64()),
    AggregateColumn("sum", "value", "sum", pa.int64(), pa.int64()),
]


def bytes_per_key(
    backend: str, keys: int, form: str = "int", configuration: Mapping[str, str] = MappingProxyType({})
) -> float:
    """Of ``keys`` keys, or a million, in a backend by its name in ``state.backend.type``, while a snapshot is written.

    ``form`` is one of :data:`~benchmarks.expected.KEY_FORMS`. Of RocksDB it is what its caches and buffers need, of a
    bounded size, divided by the keys, those on the disk included, two million at most.

    Fewer keys than a million are lost among what a process needs anyway.
    """
    filled = max(keys if backend == "hashmap" else min(keys, MOST_KEYS_ON_DISK), LEAST_KEYS)
    command = [sys.executable, "-m", "benchmarks.state_memory", backend, str(filled), form]
    command += [f"{key}={value}" for key, value in configuration.items()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout)["bytes_per_key"])


class _Discarded(SnapshotFile):
    """A file that is written and never read."""

    def __init__(self) -> None:
        self.stream = open("/dev/null", "wb")  # noqa: SIM115 - closed by __exit__

    def finish(self) -> StateFile:
        return StateFile("discarded", 0, "")

    def __exit__(self, *_: object) -> None:
        self.stream.close()


class _NoFiles(SnapshotFiles):
    """Where files cost the time of reading them."""

    def private(self, suffix: str = "") -> SnapshotFile:
        return _Discarded()

    def shared(self) -> SnapshotFile:
        return _Discarded()

    def shared_from(self, path: Path) -> StateFile:
        with self.shared() as file, path.open("rb") as source:
            shutil.copyfileobj(source, file.stream)
            return file.finish()

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        return {}


def _add(backend: KeyedStateBackend, first: int, last: int, keys: int, form: str) -> None:
    """Rows whose keys are ``first`` to ``last`` in an order that scatters them over all keys."""
    kind = pa.string() if form == "string" else pa.int64()
    table = backend.aggregate_table("aggregates", pa.schema([("key", kind)]), AGGREGATES)
    step = next(number for number in range(keys * 5 // 8 | 1, 2 * keys + 2, 2) if np.gcd(number, keys) == 1)
    for start in range(first, last, BATCH):
        numbers = np.arange(start, min(last, start + BATCH)) * step % keys
        made = numbers if form == "int" else scattered(numbers)
        column = pa.array([f"{key:016x}" for key in made.view(np.uint64).tolist()] if form == "string" else made)
        table.update(pa.record_batch({"key": column, "value": numbers & 1023}))


def measured(name: str, keys: int, form: str, configuration: Mapping[str, str]) -> dict[str, Any]:
    """Fills, takes a snapshot, updates every key while it is written, and says what that has needed at most."""
    warm_up()
    with tempfile.TemporaryDirectory() as directory:
        groups = KeyGroupRange(0, MAX_PARALLELISM - 1)

        def make_directory() -> str:
            return tempfile.mkdtemp(dir=directory)

        def filled(count: int) -> KeyedStateBackend:
            parameters = BackendParameters("state", groups, MAX_PARALLELISM, make_directory, configuration)
            backend = create_backend(name, parameters)
            _add(backend, 0, count, count, form)
            snapshot = backend.snapshot(1, CheckpointProperties())
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(snapshot.write, _NoFiles())
                _add(backend, 0, count, count, form)
                written.result()
            snapshot.release()
            return backend

        filled(BATCH).close()  # libraries and pools have their memory from here on
        before = psutil.Process().memory_info().rss
        filled(keys).close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"keys": keys, "bytes_per_key": round((peak - before) / keys, 1)}


def main() -> None:
    """Prints one line; :func:`bytes_per_key` reads it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("keys", type=int)
    parser.add_argument("form", choices=KEY_FORMS)
    parser.add_argument("configuration", nargs="*", help="options of the backend, KEY=VALUE")
    options = parser.parse_args()
    configuration = dict(text.split("=", 1) for text in options.configuration)
    print(json.dumps(measured(options.backend, options.keys, options.form, configuration)))


if __name__ == "__main__":
    main()
