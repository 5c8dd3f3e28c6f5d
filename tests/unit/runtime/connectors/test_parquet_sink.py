"""Format ``parquet``: rows become visible exactly once, with the checkpoint that covers them."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.sink_state import PENDING, SINK_ID, SinkLineage
from ckpt_runtime.connectors.file_sink import FileSink, _partitioned
from ckpt_runtime.connectors.part_directory import CommitError, PartDirectory
from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.storage.errors import NotFoundError, StorageError
from tests.support.effort import examples
from tests.unit.runtime.connectors.harness import JOB, SINK, context, opened, redistributed, snapshot_of

# A sink that crashes leaves its files as they are.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file")


def sink(path: Path | str, **options: Any) -> CommittingSinkOperator:
    given = {"path": str(path), **{key: str(value) for key, value in options.items()}}
    return CommittingSinkOperator(FileSink("parquet", given))


def rows(first: int, count: int = 1) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(first, first + count), pa.int64())})


def visible(path: Path) -> list[int]:
    if not any(not file.name.startswith(".") for file in path.iterdir()):
        return []
    return sorted(ds.dataset(path, format="parquet").to_table().column("n").to_pylist())


def hidden(path: Path) -> list[str]:
    return sorted(file.name.rsplit(".", 1)[-1] for file in path.iterdir() if file.name.startswith("."))


def test_rows_are_hidden_until_their_checkpoint_completes(tmp_path: Path) -> None:
    writer = sink(tmp_path)
    opened(writer, context())
    writer.process_batch(rows(0, 10), 0)
    assert (visible(tmp_path), hidden(tmp_path)) == ([], ["inprogress"])
    writer.snapshot(1)
    writer.process_batch(rows(10, 5), 0)
    assert (visible(tmp_path), hidden(tmp_path)) == ([], ["inprogress", "pending"])
    writer.notify_complete(1)
    assert (visible(tmp_path), hidden(tmp_path)) == (list(range(10)), ["inprogress"])
    writer.close()
    assert (visible(tmp_path), hidden(tmp_path)) == (list(range(10)), [])


@pytest.mark.row("147.2")
def test_a_completion_covers_all_earlier_checkpoints_and_an_abort_covers_nothing(tmp_path: Path) -> None:
    """Three pending, the middle one is notified first; the last one stays valid and lingers nowhere after its own."""
    writer = sink(tmp_path)
    opened(writer, context())
    for checkpoint in (42, 43, 44):
        writer.process_batch(rows(checkpoint), 0)
        writer.snapshot(checkpoint)
    writer.notify_aborted(42)
    assert visible(tmp_path) == []
    writer.notify_complete(43)
    assert visible(tmp_path) == [42, 43]
    writer.notify_complete(42)
    writer.notify_complete(44)
    assert (visible(tmp_path), hidden(tmp_path)) == ([42, 43, 44], [])


def test_a_finished_sink_commits_its_last_rows_with_the_final_checkpoint(tmp_path: Path) -> None:
    writer = sink(tmp_path)
    opened(writer, context())
    writer.process_batch(rows(0, 3), 0)
    writer.finish()
    writer.snapshot(9)
    writer.close()
    assert (visible(tmp_path), hidden(tmp_path)) == ([], ["pending"])
    writer.notify_complete(9)
    assert visible(tmp_path) == [0, 1, 2]


def test_files_are_split_by_rows_and_empty_epochs_make_none(tmp_path: Path) -> None:
    writer = sink(tmp_path, maxRecordsPerFile=4)
    opened(writer, context())
    writer.process_batch(rows(0, 10), 0)
    writer.snapshot(1)
    writer.snapshot(2)
    writer.notify_complete(2)
    sizes = sorted(pq.read_metadata(file).num_rows for file in tmp_path.iterdir())
    assert sizes == [2, 4, 4]
    assert visible(tmp_path) == list(range(10))


@pytest.mark.parametrize("compression", ["snappy", "ZSTD", "lz4", "lz4_raw", "gzip", "none", "uncompressed"])
def test_compressions(tmp_path: Path, compression: str) -> None:
    writer = sink(tmp_path, compression=compression)
    opened(writer, context())
    writer.process_batch(rows(0, 10), 0)
    writer.snapshot(1)
    writer.notify_complete(1)
    [file] = tmp_path.iterdir()
    found = pq.read_metadata(file).row_group(0).column(0).compression.lower()
    assert found == {"none": "uncompressed", "lz4_raw": "lz4"}.get(compression, compression.lower())


def test_rows_of_many_partition_values_are_distinguished_beyond_64_bits() -> None:
    """The product of the numbers of values of five columns is 2 ** 65."""
    values = list(range(8192))
    columns = [[*values, 0, 4096], *[[*values, 7, 7]] * 4]
    names = [*"abcde"]
    batch = pa.record_batch([*columns, list(range(8194))], names=[*names, "n"])
    found = list(_partitioned(batch, {name: lambda column: column.cast(pa.string()) for name in names}))
    assert [part.num_rows for _, part in found] == [1] * 8194


def crashed_attempt(path: Path) -> tuple[Any, ...]:
    """Attempt 0: checkpoint 5 taken, 6 taken but never completed, some rows after it, then the process dies."""
    writer = sink(path)
    opened(writer, context())
    writer.process_batch(rows(0, 2), 0)
    state = snapshot_of(writer, 5)
    writer.process_batch(rows(2, 2), 0)
    writer.snapshot(6)
    writer.process_batch(rows(4, 2), 0)
    return state


def test_a_restore_commits_what_it_covers_and_removes_the_rest(tmp_path: Path) -> None:
    state = crashed_attempt(tmp_path)
    assert hidden(tmp_path) == ["inprogress", "pending", "pending"]
    opened(sink(tmp_path), context(attempt=1, state=state, restored=5))
    assert (visible(tmp_path), hidden(tmp_path)) == ([0, 1], [])


def test_a_restore_may_be_repeated(tmp_path: Path) -> None:
    state = crashed_attempt(tmp_path)
    for attempt in (1, 2, 3):
        opened(sink(tmp_path), context(attempt=attempt, state=state, restored=5))
    assert (visible(tmp_path), hidden(tmp_path)) == ([0, 1], [])


def test_only_hidden_files_of_earlier_attempts_of_the_same_sink_are_removed(tmp_path: Path) -> None:
    crashed_attempt(tmp_path)
    (tmp_path / ".part-of-another.parquet.pending").touch()
    (tmp_path / ".hidden").touch()
    before = sorted(tmp_path.iterdir())
    opened(sink(tmp_path), context(attempt=1, uid="another"))
    opened(sink(tmp_path), context(attempt=1, sink=SinkLineage("1" * 16)))
    opened(sink(tmp_path), context(attempt=1, job_id="f" * 32))
    opened(sink(tmp_path), context(attempt=0, restored=5))
    opened(sink(tmp_path), context(subtask=1, parallelism=2, attempt=1))
    assert sorted(tmp_path.iterdir()) == before
    opened(sink(tmp_path), context(subtask=0, parallelism=2, attempt=1))
    assert {file.name for file in tmp_path.iterdir()} == {".part-of-another.parquet.pending", ".hidden"}


@pytest.mark.row("147.8")
def test_two_jobs_from_one_savepoint_publish_its_files_once(tmp_path: Path) -> None:
    """A savepoint notifies no task: the running job commits the file later, and the restored job commits it, too."""
    running = sink(tmp_path)
    opened(running, context())
    running.process_batch(rows(0, 3), 0)
    savepoint = snapshot_of(running, 6)
    opened(sink(tmp_path), context(state=savepoint, restored=6, job_id="e" * 32))
    assert visible(tmp_path) == [0, 1, 2]
    running.snapshot(7)
    running.notify_complete(7)
    assert (visible(tmp_path), hidden(tmp_path)) == ([0, 1, 2], [])


@pytest.mark.row("147.8")
def test_two_jobs_that_commit_the_same_file_at_once_publish_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one renames it between the look for the pending file and the renaming of it."""
    writer = sink(tmp_path)
    opened(writer, context())
    writer.process_batch(rows(0, 3), 0)
    state = snapshot_of(writer, 5)
    rename = PartDirectory._rename

    def slow(directory: PartDirectory, source: str, target: str) -> None:
        monkeypatch.setattr(PartDirectory, "_rename", rename)
        opened(sink(tmp_path), context(job_id="f" * 32, state=state, restored=5))
        rename(directory, source, target)

    monkeypatch.setattr(PartDirectory, "_rename", slow)
    writer.notify_complete(5)
    assert (visible(tmp_path), hidden(tmp_path)) == ([0, 1, 2], [])


@pytest.mark.row("147.8")
def test_resumed_job_removes_hidden_files_that_an_ended_job_wrote_after_its_snapshot(tmp_path: Path) -> None:
    """The driver of the first job was killed, without a clean-up. The sink is the same, the job is another."""
    state = crashed_attempt(tmp_path)
    lineage = SinkLineage(SINK.sink_id, ended_jobs=(JOB,))
    for index in range(2):
        opened(sink(tmp_path), context(index, 2, state=state, restored=5, job_id="e" * 32, sink=lineage))
    assert (visible(tmp_path), hidden(tmp_path)) == ([0, 1], [])


def test_a_resumed_job_leaves_the_files_of_a_job_that_may_be_alive(tmp_path: Path) -> None:
    """Two jobs from one savepoint: each commits what it covers, and neither harms what the other still writes."""
    running = sink(tmp_path)
    opened(running, context())
    running.process_batch(rows(0), 0)
    savepoint = snapshot_of(running, 6)
    running.process_batch(rows(1), 0)
    running.snapshot(7)
    running.process_batch(rows(2), 0)
    for other in ("d", "e"):
        resumed = sink(tmp_path)
        opened(resumed, context(state=savepoint, restored=6, job_id=other * 32, attempt=3))
        resumed.process_batch(rows(10), 0)
    assert (visible(tmp_path), hidden(tmp_path)) == ([0], ["inprogress", "inprogress", "inprogress", "pending"])
    running.snapshot(8)
    running.notify_complete(8)
    assert visible(tmp_path) == [0, 1, 2]


def test_files_covered_by_a_savepoint_outlive_a_restore_from_an_older_checkpoint(tmp_path: Path) -> None:
    """A savepoint notifies no task: its files wait for a checkpoint. A failure before that one must not take them."""
    first = sink(tmp_path)
    opened(first, context())
    first.process_batch(rows(0), 0)
    savepoint = snapshot_of(first, 6)
    first.process_batch(rows(1), 0)
    first.snapshot(7)
    opened(sink(tmp_path), context(attempt=1, restored=5, sink=SinkLineage(SINK.sink_id, savepoint_id=6)))
    assert (visible(tmp_path), hidden(tmp_path)) == ([], ["pending"])
    opened(sink(tmp_path), context(state=savepoint, restored=6, job_id="e" * 32))
    assert (visible(tmp_path), hidden(tmp_path)) == ([0], [])


def test_a_late_writer_of_an_earlier_attempt_brings_nothing_back(tmp_path: Path) -> None:
    """A worker that was frozen while its job was deployed elsewhere: what it had open is gone."""
    late = sink(tmp_path)
    opened(late, context())
    late.process_batch(rows(0), 0)
    opened(sink(tmp_path), context(attempt=1))
    with pytest.raises(NotFoundError):
        late.snapshot(4)
    late.close()
    assert (visible(tmp_path), hidden(tmp_path)) == ([], [])


def test_the_id_of_a_sink_is_kept_in_its_state(tmp_path: Path) -> None:
    writer = sink(tmp_path)
    opened(writer, context())
    assert {state.name: state.items for state in snapshot_of(writer, 1)} == {PENDING: (), SINK_ID: (SINK.sink_id,)}


def test_a_lost_pending_file_fails_the_restore_with_its_name_unless_the_sink_ignores_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = crashed_attempt(tmp_path)
    for file in list(tmp_path.iterdir()):
        file.unlink()
    with pytest.raises(CommitError, match=r"checkpoint 5: neither the pending file .*c5\.parquet\.pending nor its"):
        opened(sink(tmp_path), context(attempt=1, state=state, restored=5))
    opened(sink(tmp_path, onMissing="ignore"), context(attempt=1, state=state, restored=5))
    assert "1 pending files are missing" in caplog.text


def test_all_files_that_can_be_committed_are_before_an_error_is_raised(tmp_path: Path) -> None:
    writer = sink(tmp_path)
    opened(writer, context())
    for checkpoint in (1, 2, 3):
        writer.process_batch(rows(checkpoint), 0)
        writer.snapshot(checkpoint)
    next(file for file in tmp_path.iterdir() if "-c2." in file.name).unlink()
    with pytest.raises(CommitError, match="checkpoint 2: neither the pending file"):
        writer.notify_complete(3)
    assert visible(tmp_path) == [1, 3]


def test_restored_state_cannot_name_other_files(tmp_path: Path) -> None:
    writer = sink(tmp_path)
    opened(writer, context())
    writer.process_batch(rows(0), 0)
    [state] = [state for state in snapshot_of(writer, 1) if state.name == PENDING]
    for name in ("../x.pending", "data.parquet", "part-j-u-00000000-s0-a0-n0-00000000-c1.parquet"):
        forged = type(state)(state.name, state.mode, ({"directory": str(tmp_path), "name": name},))
        with pytest.raises(CommitError, match="is not a pending file"):
            opened(sink(tmp_path), context(state=[forged], restored=1))


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_disk_that_takes_no_more_fails_with_the_name_of_the_file_and_keeps_only_what_a_checkpoint_covers(
    tmp_path: Path, format_: str
) -> None:
    """The limit of the process stands for the disk: the system refuses the write in the same place."""
    writer = CommittingSinkOperator(FileSink(format_, {"path": str(tmp_path), "partitionBy": "part"}))
    opened(writer, context())
    values = pa.array(random.Random(3).choices(range(1 << 62), k=100_000), pa.int64())
    batch = pa.record_batch({"n": values, "part": pa.array(["a", "b"] * 50_000)})
    writer.process_batch(batch.slice(0, 10), 0)
    writer.snapshot(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(StorageError, match=rf"cannot write file://{tmp_path}/\.part-.*inprogress: File too large"):
            for _ in range(5):
                writer.process_batch(batch, 0)
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert hidden(tmp_path) == ["pending", "pending"]


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(PlanError, match="an absolute path or a URL"):
        sink("out")


def test_parquet_sink_writes_to_other_file_systems() -> None:
    memory = fsspec.filesystem("memory")
    writer = sink("memory://lake/out")
    opened(writer, context())
    writer.process_batch(rows(0, 5), 0)
    state = snapshot_of(writer, 1)
    opened(sink("memory://lake/out"), context(attempt=1, state=state, restored=1))
    names = list(memory.ls("/lake/out", detail=False))
    assert len(names) == 1
    with memory.open(names[0]) as stream:
        assert pq.read_table(stream).column("n").to_pylist() == list(range(5))
    memory.rm("/lake", recursive=True)


EVENTS = st.lists(
    st.sampled_from(
        ["write", "write", "snapshot", "complete", "abort", "crash", "cancel", "savepoint", "half_complete"]
    ),
    max_size=30,
)


@pytest.mark.row("147.4")
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, parallelisms=st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_visible_rows_are_those_of_the_completed_checkpoints_through_any_crashes(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], parallelisms: list[int]
) -> None:
    """A numbered source behind any schedule: at the end each number is visible exactly once, and nothing is hidden."""
    path = tmp_path_factory.mktemp("out")
    run = _Run(path, parallelisms)
    for event in events:
        getattr(run, event)()
        assert set(visible(path)) <= set(range(run.position))
    run.finish()
    assert (visible(path), hidden(path)) == (list(range(run.position)), [])


class _Run:
    """One job: subtasks, the last completed checkpoint's state, and the position of its source."""

    def __init__(self, path: Path, parallelisms: list[int]) -> None:
        self.path = path
        self.parallelisms = parallelisms
        self.attempt = -1
        self.jobs = 1
        self.checkpoint = 0
        self.position = 0
        self.completed: tuple[int | None, int, list[tuple[Any, ...]]] = (None, 0, [])
        self.taken: list[tuple[int, int, list[tuple[Any, ...]]]] = []
        self.crash()

    def crash(self) -> None:
        restored, self.position, snapshots = self.completed
        self.attempt += 1
        self.taken = []
        count = self.parallelisms[self.attempt % len(self.parallelisms)]
        states = redistributed(snapshots, count)
        self.subtasks = [sink(self.path) for _ in range(count)]
        for index, writer in enumerate(self.subtasks):
            where = context(
                index,
                count,
                attempt=self.attempt,
                state=states[index],
                restored=restored,
                job_id=f"{self.jobs:032x}",
                sink=SinkLineage(SINK.sink_id, ended_jobs=(f"{self.jobs - 1:032x}",)),
            )
            opened(writer, where)

    def cancel(self) -> None:
        """All are killed, and another job resumes from what is complete; its attempts count from the start."""
        self.jobs += 1
        self.attempt = -1
        self.crash()

    def write(self) -> None:
        for _ in range(5):
            self.subtasks[self.position % len(self.subtasks)].process_batch(rows(self.position), 0)
            self.position += 1

    def snapshot(self) -> None:
        self.checkpoint += 1
        states = [snapshot_of(writer, self.checkpoint) for writer in self.subtasks]
        self.taken.append((self.checkpoint, self.position, states))

    def savepoint(self) -> None:
        """A snapshot of which no task is notified."""
        self.checkpoint += 1
        for writer in self.subtasks:
            snapshot_of(writer, self.checkpoint)

    def complete(self) -> None:
        if self.taken:
            self.completed = self.taken.pop()
            self.taken = []
            for writer in self.subtasks:
                writer.notify_complete(self.completed[0] or 0)

    def half_complete(self) -> None:
        """The completion is durable, one subtask hears of it, then all die."""
        if self.taken:
            self.completed = self.taken.pop()
            self.subtasks[0].notify_complete(self.completed[0] or 0)
            self.crash()

    def abort(self) -> None:
        if self.taken:
            for writer in self.subtasks:
                writer.notify_aborted(self.taken[0][0])
            self.taken = self.taken[1:]

    def finish(self) -> None:
        for writer in self.subtasks:
            writer.finish()
        self.snapshot()
        self.complete()
        for writer in self.subtasks:
            writer.close()
