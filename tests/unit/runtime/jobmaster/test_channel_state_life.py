"""How long channel state files live: real files, a real coordinator, and tasks that refer to what they have stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateSegment,
    ChannelStateStream,
    CompletedCheckpoint,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.jobmaster import storage_effects
from ckpt_runtime.storage.channel_state import (
    CapturedStream,
    ChannelStateReader,
    InFlightElement,
    InFlightWatermark,
    PersistedElement,
    WrittenChannelState,
    write_channel_state,
)
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import read_metadata, write_metadata
from tests.unit.runtime.jobmaster.shell_bench import TASKS, Bench, opened

SCHEMA = pa.schema([("v", pa.int64())])
VERTICES = (VertexDescriptor(TASKS[0].vertex_id, "v", (), len(TASKS), 128),)
OTHER_JOB = "f" * 32


@pytest.fixture(autouse=True)
def hasty_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_effects, "RETRY_BASE_MS", 1)


def rows(value: int) -> pa.RecordBatch:
    return pa.record_batch([[value]], schema=SCHEMA)


def write(options: CheckpointOptions, elements: Sequence[InFlightElement]) -> WrittenChannelState:
    """As a task does it."""
    stream = CapturedStream(0, 0, SCHEMA, elements)
    full = options.properties.full
    return write_channel_state(
        resolve(options.shared_directory), resolve(options.directory), [stream], [], 0, full=full
    )


def state_of(written: WrittenChannelState) -> SubtaskState:
    return SubtaskState({}, written.written_bytes, written.inputs, written.outputs)


def acknowledge(bench: Bench, number: int, task: int, directory: str, written: WrittenChannelState) -> None:
    bench.shell.tell(on.Acknowledged(number, TASKS[task], directory, state_of(written)))


async def checkpoint(bench: Bench, *elements: Sequence[InFlightElement]) -> list[WrittenChannelState]:
    """A whole one, of what each task has in flight."""
    number, options = await bench.trigger()
    written = [write(options, entry) for entry in elements]
    for task, entry in enumerate(written):
        acknowledge(bench, number, task, options.directory, entry)
    await bench.until(lambda: number in bench.listener.completed)
    await bench.settle()
    return written


def place(written: WrittenChannelState) -> PersistedElement:
    ((found,),) = written.input_places
    assert found is not None
    return found


def shared(directory: Path) -> list[str]:
    """Checkpoint id and path of every shared file of a job."""
    return sorted(path.name for path in (directory / "shared").iterdir())


def names(*written: WrittenChannelState) -> list[str]:
    return sorted(resolve(entry.file.path).name for entry in written if entry.file is not None)


def values(directory: str, streams: Sequence[ChannelStateStream]) -> list[object]:
    found: list[object] = []
    for stream in streams:
        reader = ChannelStateReader(resolve(directory), stream)
        while (element := reader.read()) is not None:
            content = element.content
            if not isinstance(content, InFlightWatermark):
                found += pa.ipc.read_record_batch(content, reader.schema).column("v").to_pylist()
        reader.close()
    return found


async def restore(
    bench: Bench, snapshot: CompletedCheckpoint | None, mode: RecoveryClaimMode
) -> CompletedCheckpoint | None:
    bench.shell.tell(on.TasksLeftRunning())
    bench.listener.answers.clear()
    bench.shell.tell(on.RestoreRequested("restore-0", snapshot, mode))
    await bench.until(lambda: bool(bench.listener.answers))
    await bench.settle()
    bench.shell.tell(on.JobRunning(TASKS))
    answer = next(entry for entry in bench.listener.answers if isinstance(entry, out.RestoreFrom))
    return answer.checkpoint


@pytest.mark.row("76.11")
async def test_in_flight_file_stays_while_a_retained_checkpoint_refers_to_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        first = await checkpoint(bench, [rows(1)], [rows(2)])
        assert shared(bench.directory) == names(*first)
        second = await checkpoint(bench, [place(first[0])], [rows(3)])
        assert shared(bench.directory) == sorted(names(first[0]) + names(second[1]))
        (directory,) = (path for path in bench.directory.iterdir() if path.name.startswith("chk-"))
        found = CompletedCheckpoint.from_json(read_metadata(str(directory)).document)
        assert [values(str(directory), found.states[task.key].inputs) for task in TASKS] == [[1], [3]]
        await checkpoint(bench, [], [place(second[1])])
        assert shared(bench.directory) == names(second[1])
        await checkpoint(bench, [], [])
        assert shared(bench.directory) == []


async def test_files_left_by_a_killed_worker_are_deleted_after_the_restart(tmp_path: Path) -> None:
    """Only by name and when nothing refers to it; what a task of the next deployment writes meanwhile stays."""

    async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
        await restore(bench, None, RecoveryClaimMode.NO_CLAIM)
        first = await checkpoint(bench, [rows(1)], [])
        number, options = await bench.trigger()
        orphan = write(options, [rows(2)])
        (bench.directory / "shared" / "of-another-job").write_bytes(b"x")
        await restore(bench, None, RecoveryClaimMode.NO_CLAIM)
        assert number in bench.listener.aborted
        assert set(names(orphan)) <= set(shared(bench.directory))
        third, later = await bench.trigger()
        unknown = write(later, [rows(5)])
        for task in (0, 1):
            acknowledge(bench, third, task, later.directory, write(later, [place(first[0])] if task == 0 else []))
        await bench.until(lambda: third in bench.listener.completed)
        await bench.settle()
        assert shared(bench.directory) == sorted(["of-another-job", *names(first[0], unknown)])


def foreign_snapshot(tmp_path: Path, *, second_file: str | None = None) -> tuple[Path, CompletedCheckpoint]:
    """An unaligned checkpoint of another job, with a channel state file for each subtask."""
    directory = tmp_path / OTHER_JOB / "chk-5"
    (tmp_path / OTHER_JOB / "shared").mkdir(parents=True)
    directory.mkdir()
    options = CheckpointOptions(
        CheckpointProperties(), directory.as_uri(), shared_directory=(tmp_path / OTHER_JOB / "shared").as_uri()
    )
    written = [write(options, [rows(value)]) for value in (1, 2)]
    states = {task.key: state_of(entry) for task, entry in zip(TASKS, written, strict=True)}
    if second_file is not None:
        file = StateFile(second_file, 1, "c")
        stream = ChannelStateStream(0, 0, "", (ChannelStateSegment(file, 0, 1),))
        states[TASKS[1].key] = SubtaskState(inputs=(stream,))
    snapshot = CompletedCheckpoint(5, OTHER_JOB, 1, 2, directory.as_uri(), CheckpointProperties(), VERTICES, states)
    write_metadata(resolve(directory.as_uri()), snapshot.to_json())
    return directory, snapshot


def stored(snapshot: CompletedCheckpoint, task: int) -> PersistedElement:
    (stream,) = snapshot.states[TASKS[task].key].inputs
    (segment,) = stream.segments
    return PersistedElement(segment.file, segment.offset, segment.length)


@pytest.mark.row("203.6")
async def test_checkpoints_never_refer_to_files_of_a_snapshot_that_stays_the_users(tmp_path: Path) -> None:
    directory, snapshot = foreign_snapshot(tmp_path)
    before = {path: path.read_bytes() for path in directory.parent.rglob("*") if path.is_file()}

    async with opened(tmp_path, tolerable_failed_checkpoints=5, max_concurrent=2) as bench:
        assert await restore(bench, snapshot, RecoveryClaimMode.NO_CLAIM) == snapshot
        assert not bench.shell.core.coordinator.latest_is_owned
        number, options = await bench.trigger()
        assert options.properties.full
        careless = write(replace(options, properties=CheckpointProperties()), [stored(snapshot, 0)])
        acknowledge(bench, number, 0, options.directory, careless)
        await bench.until(lambda: number in bench.listener.aborted)
        (copied, _) = await checkpoint(bench, [stored(snapshot, 0)], [])
        assert values("file:///", copied.inputs) == [1]
        assert copied.file is not None
        assert copied.referenced_bytes == 0
        assert bench.shell.core.coordinator.latest_is_owned
        _, options = await bench.trigger()
        assert not options.properties.full
    assert {path: path.read_bytes() for path in directory.parent.rglob("*") if path.is_file()} == before


@pytest.mark.row("203.6")
async def test_files_of_a_claimed_snapshot_are_deleted_when_no_checkpoint_refers_to_them(tmp_path: Path) -> None:
    directory, snapshot = foreign_snapshot(tmp_path)

    async with opened(tmp_path) as bench:
        assert await restore(bench, snapshot, RecoveryClaimMode.CLAIM) == snapshot
        (referring, _) = await checkpoint(bench, [stored(snapshot, 0)], [])
        assert referring.file is None
        assert values("file:///", referring.inputs) == [1]
        assert not directory.exists()
        assert shared(directory.parent) == [resolve(stored(snapshot, 0).file.path).name]
        await checkpoint(bench, [], [])
        assert shared(directory.parent) == []


async def test_a_claimed_snapshot_cannot_have_other_files_deleted(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    _, snapshot = foreign_snapshot(tmp_path, second_file=precious.as_uri())

    async with opened(tmp_path) as bench:
        await restore(bench, snapshot, RecoveryClaimMode.CLAIM)
        await checkpoint(bench, [], [])
        await checkpoint(bench, [], [])
        assert resolve(stored(snapshot, 0).file.path).name not in shared(tmp_path / OTHER_JOB)
        assert precious.read_bytes() == b"x"
