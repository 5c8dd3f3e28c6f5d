"""Snapshots that a version wrote and every later one has to restore: ``tests/data/golden/<version of the metadata>``.

``python -m tests.support.golden <directory>`` writes a set with the present code, from the root of the project;
``python -m tests.support.golden <directory> canonical`` a single kind. Beside each snapshot lies what a job that starts
from it has to write.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.jobmaster.gateway_values import CheckpointKind, ExecutionState, OperationKind
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import encode, read_metadata
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import ROCKSDB, all_run, fast, program_of
from tests.support.outputs import visible
from tests.support.pipelines.golden import GROUP

DIRECTORY = Path(__file__).parents[1] / "data" / "golden"
TABLES = {"kept": 4, "totals": 4, "matches": 3}
"""The sinks of the job, and how many columns each has."""
SOURCES = 20
PER_SOURCE = 60
PARALLELISM = 2
IN_FILES = {"state.storage.fs.memory-threshold": "0 b"}
UNALIGNED = {"execution.checkpointing.unaligned.enabled": "true", "taskmanager.network.buffer.max-rows": "32"}
LARGE = {
    **ROCKSDB,
    "state.backend.rocksdb.cache.max-keys": "8",
    "state.backend.rocksdb.cache.max-rows": "8",
    "state.backend.rocksdb.memory.fixed-per-slot": "4 mb",
}
LARGE_TABLES = ("totals", "matches")
Rows = dict[str, list[list[int | None]]]


@dataclass(frozen=True)
class Kind:
    """How a snapshot comes about. The job stands still, nearly, when its snapshot is taken, or it is held back.

    ``increment``: a checkpoint comes before it, on which it may build.
    """

    configuration: Mapping[str, str]
    savepoint: bool = False
    stop: bool = False
    drain: bool = False
    right_rows_per_source: int = 40
    rate: int = 75
    sleep_ms: float = 0
    savepoint_format: SavepointFormat = SavepointFormat.NATIVE
    increment: bool = False
    pipeline: str = "golden"
    arguments: tuple[str, ...] = ()
    tables: tuple[str, ...] = tuple(TABLES)

    @property
    def unaligned(self) -> bool:
        return UNALIGNED.items() <= self.configuration.items()


KINDS = {
    "checkpoint": Kind({}),
    "checkpoint-partly-finished": Kind(IN_FILES, right_rows_per_source=1, rate=100),
    "unaligned": Kind(UNALIGNED, rate=0, sleep_ms=10),
    "unaligned-files": Kind({**UNALIGNED, **IN_FILES}, rate=0, sleep_ms=10),
    "savepoint": Kind(IN_FILES, savepoint=True),
    "stop": Kind({}, savepoint=True, stop=True),
    "canonical": Kind({}, savepoint=True, savepoint_format=SavepointFormat.CANONICAL),
    "drain": Kind({}, savepoint=True, stop=True, drain=True),
    "increment": Kind({**IN_FILES, "execution.checkpointing.incremental": "true"}, increment=True),
    "rocksdb": Kind(ROCKSDB, savepoint=True),
    "rocksdb-checkpoint": Kind(ROCKSDB),
    "rocksdb-large": Kind(LARGE, savepoint=True, pipeline="golden_large", tables=LARGE_TABLES),
    "rocksdb-large-increment": Kind(LARGE, increment=True, pipeline="golden_large", tables=LARGE_TABLES),
}


SETS = sorted(path.name for path in DIRECTORY.iterdir())
KEPT = [(version, name) for version in SETS for name in KINDS if (DIRECTORY / version / name).exists()]


def whole_output(right_rows_per_source: int) -> Rows:
    """What the job writes from its beginning to its end."""
    numbers = [(source, n) for source in range(SOURCES) for n in range(PER_SOURCE)]
    kept: list[list[int | None]] = [[source, n, n + 1, sum(range(max(0, n - 2), n + 1))] for source, n in numbers]
    for source, start in numbers:
        if start % GROUP == 0:
            group = range(start, min(start + GROUP, PER_SOURCE))
            kept.append([source, -1 - start, len(group), sum(group)])
    return {
        "kept": kept,
        "totals": [[source, n + 1, n, sum(range(n + 1))] for source, n in numbers],
        "matches": [[source, n, n if n < right_rows_per_source else None] for source, n in numbers],
    }


def written(output: Path, tables: Iterable[str] = TABLES) -> Rows:
    """The rows that are visible, in order."""
    found: Rows = {}
    for table in tables:
        frame = visible(output / table)
        rows = frame.astype(object).where(frame.notna(), None).values.tolist()
        found[table] = in_order([None if value is None else int(value) for value in row] for row in rows)
        assert all(len(row) == TABLES[table] for row in found[table]), table
    return found


def in_order(rows: Iterable[list[int | None]]) -> list[list[int | None]]:
    return sorted(rows, key=lambda row: [(value is None, value or 0) for value in row])


def placed(snapshot: Path, directory: Path) -> Path:
    """A copy below ``directory`` that counts as written there: its metadata names this place and its shared files."""
    copy = directory / snapshot.name
    shutil.copytree(snapshot, copy)
    if any((copy / "shared").glob("*")):
        document = read_metadata(str(copy)).document
        old = f"{document['directory'].rpartition('/')[0]}/shared/"
        text = json.dumps(document).replace(old, f"{resolve(copy).url}/shared/")
        (copy / "_metadata").write_bytes(encode({**json.loads(text), "directory": resolve(copy).url}))
    return copy


def submit(
    cluster: MiniCluster,
    kind: Kind,
    directory: Path,
    *,
    savepoint: str | None = None,
    parallelism: int = PARALLELISM,
    job_id: str | None = None,
) -> str:
    """The job of a kind. One that starts from a savepoint runs as fast as it can."""
    rate, sleep_ms = (kind.rate, kind.sleep_ms) if savepoint is None else (0, 0)
    _write_input(directory / "left.parquet", PER_SOURCE)
    _write_input(directory / "right.parquet", kind.right_rows_per_source)
    configuration = {
        **fast(execution__checkpointing__interval="1h"),
        "execution.checkpointing.dir": str(directory / "checkpoints"),
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "pipeline.max-parallelism": "16",
        **kind.configuration,
    }
    return cluster.submit(
        program_of(kind.pipeline),
        entry=f"{kind.pipeline}:pipeline",
        arguments=[str(directory), str(rate), str(sleep_ms), *kind.arguments],
        configuration=configuration,
        parallelism=parallelism,
        savepoint=savepoint,
        fork=savepoint is not None,  # several jobs start from one snapshot at the same time
        job_id=job_id,
    )


def _write_input(file: Path, rows_per_source: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [(source, n) for n in range(rows_per_source) for source in range(SOURCES)]
    sources, numbers = zip(*rows, strict=True)
    pq.write_table(pa.table({"source": sources, "n": numbers}), file)


def restored(
    cluster: MiniCluster, snapshot: Path, kind: Kind, directory: Path, parallelisms: Sequence[int] = (PARALLELISM,)
) -> list[Rows]:
    """What jobs write that start from a snapshot at these parallelisms, at the same time, and run to their end."""
    places = [directory / str(parallelism) for parallelism in parallelisms]
    jobs = [
        submit(cluster, kind, place, savepoint=str(snapshot), parallelism=parallelism)
        for place, parallelism in zip(places, parallelisms, strict=True)
    ]
    for job in jobs:
        cluster.wait_for_status(job, JobStatus.FINISHED, timeout_s=180)  # kernels may have to be compiled
    return [written(place / "out", kind.tables) for place in places]


def expected(snapshot: Path) -> Rows:
    """What :func:`restored` has to give."""
    found: Rows = json.loads(gzip.decompress((snapshot.parent / f"{snapshot.name}.json.gz").read_bytes()))
    return found


def take(cluster: MiniCluster, kind: Kind, scratch: Path) -> tuple[Path, Rows]:
    """Runs the job of a kind until its snapshot is taken; where that is, and the rows that it covers."""
    job = submit(cluster, kind, scratch)
    cluster.wait_for_status(job, JobStatus.RUNNING)
    wait_for_rows(cluster, job)
    if kind.right_rows_per_source == 1:
        _wait_for_finished_source(cluster, job)
    if kind.increment:
        take_checkpoint(cluster, job)
    if kind.savepoint:
        found = cluster.savepoint(
            job, scratch / "savepoints", stop=kind.stop, drain=kind.drain, savepoint_format=kind.savepoint_format
        )
    else:
        found = take_checkpoint(cluster, job)
    if not kind.stop:
        cluster.call(cluster.dispatcher.cancel_job(job))
        cluster.wait_for_status(job, JobStatus.CANCELED)
    for pending in (scratch / "out").rglob(".*.pending"):  # sinks get no notification of a plain savepoint
        pending.rename(pending.with_name(pending.name.removeprefix(".").removesuffix(".pending")))
    taken = Path(found.removeprefix("file://"))
    has_channel_state = any(state["state"]["inputs"] for state in read_metadata(str(taken)).document["states"])
    assert has_channel_state == kind.unaligned
    return taken, written(scratch / "out", kind.tables)


def assert_whole(kind: Kind, before: Rows, after: Rows) -> None:
    """Both parts together are all that the job writes."""
    whole = whole_output(kind.right_rows_per_source)
    for table in kind.tables:
        assert in_order(before[table] + after[table]) == in_order(whole[table]), table


def write_snapshot(cluster: MiniCluster, kind: Kind, target: Path, scratch: Path) -> None:
    """Writes the snapshot of a kind to ``target``, beside it what it continues with."""
    taken, before = take(cluster, kind, scratch)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(taken, target, ignore=shutil.ignore_patterns("catalogue"))
    if (taken.parent / "shared").is_dir():
        shutil.copytree(taken.parent / "shared", target / "shared")
    (after,) = restored(cluster, placed(target, scratch / "placed"), kind, scratch / "restored")
    if not kind.drain:  # a drain fires timers early: what comes after is as that version made it
        assert_whole(kind, before, after)
    (target.parent / f"{target.name}.json.gz").write_bytes(gzip.compress(json.dumps(after).encode(), mtime=0))
    print(target.name, {table: (len(before[table]), len(after[table])) for table in kind.tables})


def wait_for_rows(cluster: MiniCluster, job: str) -> None:
    """Until all subtasks run and rows have reached every vertex behind the sources; there are more to come then."""

    def flowing() -> bool:
        details = cluster.call(cluster.dispatcher.job_details(job))
        behind = {edge.target for edge in details.graph.edges}
        reached = [vertex for vertex in details.vertices if vertex.vertex_id in behind]
        read = [sum(subtask.measures.rows_in for subtask in vertex.subtasks if subtask.measures) for vertex in reached]
        return all_run(cluster, job) and min(read) > 0 and max(read) > 100

    cluster.wait_until(flowing, "rows")


def _wait_for_finished_source(cluster: MiniCluster, job: str) -> None:
    """A source whose rows have ended is finished when a checkpoint has covered them."""

    def finished() -> bool:
        vertices = cluster.call(cluster.dispatcher.job_details(job)).vertices
        return any(vertex.status is ExecutionState.FINISHED for vertex in vertices)

    take_checkpoint(cluster, job)
    cluster.wait_until(finished, "a source to finish")


def take_checkpoint(cluster: MiniCluster, job: str) -> str:
    trigger = cluster.call(cluster.dispatcher.trigger_checkpoint(job, CheckpointKind.CONFIGURED, None))
    status = partial(cluster.dispatcher.operation_status, OperationKind.CHECKPOINT, trigger, job)
    cluster.wait_until(lambda: cluster.call(status()).completed, "the checkpoint")
    latest = cluster.of_job(job, lambda job: job.checkpoint_statistics()).latest_completed
    assert latest is not None, cluster.call(status()).failure
    assert latest.external_path is not None
    return latest.external_path


def main(directory: Path, kinds: Iterable[str]) -> None:
    """Writes a set."""
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch, MiniCluster(heartbeat_interval_s=0.1) as cluster:
        for name in kinds:
            write_snapshot(cluster, KINDS[name], directory / name, Path(scratch) / name)
    sizes = Counter({path.name: path.stat().st_size for path in directory.rglob("*") if path.is_file()})
    print(sum(sizes.values()), "bytes", sizes.most_common(5))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:] or KINDS)
