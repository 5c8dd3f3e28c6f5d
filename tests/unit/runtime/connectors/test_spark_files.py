"""Files that Spark writes for a checkpoint: each is visible once, whatever step a crash interrupts.

Arrow stands for Spark's batch writer here; tests/differential/test_sinks.py has Spark itself.
"""

from __future__ import annotations

import stat
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pytest

from ckpt_runtime.connectors import staged_sinks
from ckpt_runtime.connectors.file_sink import PendingFile
from ckpt_runtime.connectors.part_directory import PartDirectory, PartName
from ckpt_runtime.connectors.sink_operators import PreparingSinkOperator
from ckpt_runtime.connectors.staged_sinks import _BatchCommitter, staged_sink
from ckpt_runtime.frontend.batch_writers import SparkWrite
from ckpt_runtime.graph.specs import SinkSpec, UserFunction
from ckpt_runtime.sinks import CommitOutcome, SinkContext, Transaction
from ckpt_runtime.storage.filesystem import Location, list_names, move_file, upload_file
from tests.unit.runtime.connectors.harness import JOB, SINK, context, opened

SCHEMA = pa.schema([("n", pa.int64())])
TRANSACTION = Transaction(f"{SINK.sink_id}-{JOB}", 7)


class ArrowWrite(SparkWrite):
    """Writes one file for each row, in two partitions, under names that are new each time, as Spark does."""

    def to(self, frame: Any, directory: str) -> None:
        for n in frame.column("n").to_pylist():
            part = Path(directory.removeprefix("file://"), f"part={n % 2}")
            part.mkdir(parents=True, exist_ok=True)
            pc.write_csv(pa.table({"n": [n]}), part / f"part-{uuid.uuid4()}.csv")
            (part / f".part-{n}.csv.crc").touch()
        Path(directory.removeprefix("file://"), "_SUCCESS").touch()


class Committer(_BatchCommitter):
    def _frame(self, transaction: Transaction, files: Sequence[PendingFile]) -> AbstractContextManager[Any]:
        return nullcontext(pa.concat_tables([self._read(file) for file in files]))


class World:
    """Staged rows of one checkpoint, and a committer for each attempt."""

    def __init__(self, directory: Path, out: Location) -> None:
        self.out, self.staging = out, directory / "staged"
        self.written = Path(out.path) if out.is_local else self.staging
        """Where the files are before they are visible."""
        self.function = UserFunction(ArrowWrite("csv", {}, ("part",), out.url), None)
        operator = PreparingSinkOperator(
            staged_sink(SinkSpec("foreachBatch", {"path": str(self.staging)}, self.function))
        )
        output = opened(operator, context(uid="out"))
        for n in range(4):
            operator.process_batch(pa.record_batch({"n": pa.array([n], pa.int64())}), 0)
        operator.prepare_snapshot(TRANSACTION.checkpoint_id)
        self.committables = [operator._sink.decode(text) for text in output.column("message")]

    def committer(self, attempt: int, job_id: str = JOB, ended: tuple[str, ...] = ()) -> Committer:
        place = SinkContext(SINK.sink_id, job_id, "out", 0, 1, attempt, ended_jobs=ended)
        return Committer(PartDirectory(str(self.staging)), self.function, SCHEMA, place)

    def commit(self, attempt: int) -> CommitOutcome:
        return self.committer(attempt).commit(TRANSACTION, self.committables)

    def rows(self) -> list[int]:
        files = [file for file in self.out.filesystem.find(self.out.path) if "/part=" in file]
        assert all(file.endswith(".csv") for file in files)
        tables = [pc.read_csv(pa.BufferReader(self.out.filesystem.cat_file(file))) for file in files]
        return sorted(n for table in tables for n in table.column("n").to_pylist())

    def left(self) -> list[str]:
        names = [*list_names(self.out), *(path.name for path in self.staging.iterdir())]
        return [name for name in names if not name.startswith("part=")]


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture
def world(tmp_path: Path, base: Location) -> World:
    return World(tmp_path, base.child("out"))


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("step", ["written", "completed", "moving", "moved", "staged rows deleted"])
def test_commit_that_a_crash_interrupts_is_completed_by_the_next_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    moves = 0
    finish, discard = staged_sinks.SparkFiles.finish, PartDirectory.discard

    def crashing(move: Callable[[Location, Location], None]) -> Callable[[Location, Location], None]:
        def crashing_move(source: Location, target: Location) -> None:
            nonlocal moves
            moves += 1
            if (step, moves) == ("written", 1):
                raise Crash
            move(source, target)
            if (step, moves) in (("completed", 1), ("moving", 3)):
                raise Crash

        return crashing_move

    def crashing_discard(directory: PartDirectory, part: PartName) -> None:
        if step == "moved":
            raise Crash
        discard(directory, part)

    def crashing_finish(files: staged_sinks.SparkFiles, transaction: Transaction) -> None:
        if step == "staged rows deleted":
            raise Crash
        finish(files, transaction)

    monkeypatch.setattr(staged_sinks, "move_file", crashing(move_file))
    monkeypatch.setattr(staged_sinks, "upload_file", crashing(upload_file))
    monkeypatch.setattr(staged_sinks.SparkFiles, "finish", crashing_finish)
    monkeypatch.setattr(PartDirectory, "discard", crashing_discard)
    with pytest.raises(Crash):
        world.commit(0)
    monkeypatch.undo()
    assert stat.S_IMODE(world.staging.stat().st_mode) == 0o700
    outcome = world.commit(1)
    assert outcome is (CommitOutcome.ALREADY_COMMITTED if step == "staged rows deleted" else CommitOutcome.COMMITTED)
    assert world.commit(2) is CommitOutcome.ALREADY_COMMITTED
    assert (world.rows(), world.left()) == ([0, 1, 2, 3], [])


def test_incomplete_output_of_an_attempt_is_removed_and_completed_output_stays(world: World) -> None:
    """A complete directory may be half published: only a repetition of its commit knows what to do with it."""
    others = [
        f"_ckpt-{SINK.sink_id}-{'e' * 32}-7-a0",
        f"_ckpt-{'f' * 16}-{JOB}-7-a0",
        f"_ckpt-{TRANSACTION.id}",
        "_ckpt-x",
    ]
    own = [f"_ckpt-{TRANSACTION.id}-a0", f"_ckpt-{SINK.sink_id}-{'d' * 32}-6-a3"]
    for name in (*others, *own):
        (world.written / name).mkdir(parents=True)
    world.committer(1, ended=("d" * 32,)).close()
    assert sorted(path.name for path in world.written.glob("_*")) == sorted(others)
