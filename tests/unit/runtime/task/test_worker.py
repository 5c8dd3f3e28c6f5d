"""A worker on one end of a real connection, the driver's part played by hand on the other."""

from __future__ import annotations

import io
import socket
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle, KeyedSection, KeyedStateHandle, StateFile
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.connectors.tagged_values import UnreadableValueError, ValueNotCarriedError
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import source_schema
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.agent_messages import FROM_UNREGISTERED, ProcessIdentity
from ckpt_runtime.network.connections import ChannelLostError, ControlConnection, MalformedMessageError
from ckpt_runtime.network.control_messages import (
    FROM_WORKER,
    AlignSources,
    CancelDeployment,
    Canceled,
    DeclineCheckpoint,
    DeploymentFailed,
    DeploySubtasks,
    EndOfDataReport,
    FollowAgent,
    Following,
    LimitSources,
    SnapshotProgress,
    SourceProgress,
    TaskStateChanged,
    TriggerCheckpoint,
    WorkerHeartbeat,
)
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.process_figures import ProcessFigures, ProcessMeter
from ckpt_runtime.scheduler.deployment import Deployment, JobDescriptor, Program, SubtaskDescriptor
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.state.backend import SnapshotFiles
from ckpt_runtime.state.errors import StateSchemaError
from ckpt_runtime.storage.duplication import Means
from ckpt_runtime.storage.publish import checksum_of
from ckpt_runtime.task.in_flight import InFlight, PersistedBuffers
from ckpt_runtime.task.snapshot_files import NewFiles
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, SnapshotMeasures, SubtaskSnapshot
from ckpt_runtime.task.worker import TaskWorker, describe_error

VERTEX = "a" * 32
M = TypeVar("M")


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, content in files.items():
            zipped.writestr(name.replace("__", "/").replace("dot", "."), content)
    return buffer.getvalue()


class NoAgent:
    """A parent_watch that notes what is asked of it."""

    identity = ProcessIdentity("m", 12, 34)
    directory = "/tmp/w"

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin_work(self) -> None:
        self.calls.append("work")

    def adopted_by(self, agent: ProcessIdentity) -> None:
        self.calls.append(agent)


class Driver:
    """The driver's end."""

    def __init__(self, connection: ControlConnection, worker: TaskWorker, parent_watch: NoAgent) -> None:
        self.connection = connection
        self.worker = worker
        self.parent_watch = parent_watch
        self.registration = connection.receive(FROM_UNREGISTERED)

    def start(self) -> threading.Thread:
        def serve() -> None:
            try:
                self.worker.run()
            except ConnectionError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        return thread

    def receive(self, kind: type[M]) -> M:
        """The next message that is no heartbeat."""
        while isinstance(message := self.connection.receive(FROM_WORKER), WorkerHeartbeat):
            pass
        assert isinstance(message, kind)
        return message

    def hang_up(self, thread: threading.Thread) -> None:
        self.connection.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def driver() -> Iterator[Driver]:
    near = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(near.getsockname())
    accepted, _ = near.accept()
    near.close()
    parent_watch = NoAgent()
    worker = TaskWorker(ControlConnection(far), "secret", parent_watch, slot="0-0", worker_id="w1")
    driver = Driver(ControlConnection(accepted), worker, parent_watch)
    yield driver
    driver.connection.close()
    worker.close()


GRAPH = JobGraph("job", (JobVertex(VERTEX, (OperatorNode("s", "Source", "source"),), 1),), ())
JOB = JobDescriptor("j", GRAPH, Program("p", "entry:pipeline", ()))
DEPLOYMENT = Deployment(1, 0, (SubtaskDescriptor(VERTEX, 0),))


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (b"\x81\xa4type\xa8nonsense", "the driver may not send message 'nonsense' here"),
        (
            b"\x82\xa4type\xb0CancelDeployment\xaadeployment\xa1x",
            "the message CancelDeployment of the driver is malformed",
        ),
        (b"\xff", "the driver sent bytes that are not a message"),
        (struct.pack("<I", 1 << 31), "of 2147483648 bytes was announced"),
    ],
)
def test_worker_refuses_a_driver_that_it_cannot_understand(driver: Driver, body: bytes, reported: str) -> None:
    raw = driver.connection._connection
    raw.sendall(body if "announced" in reported else struct.pack("<I", len(body)) + body)
    with pytest.raises(MalformedMessageError, match=reported):
        driver.worker.run()


def test_worker_follows_the_agent_that_adopts_it(driver: Driver) -> None:
    agent = ProcessIdentity("m", 5, 6)
    driver.worker._handle(FollowAgent(agent))
    assert driver.receive(Following) == Following()
    assert driver.parent_watch.calls == [agent]


def test_a_deployment_binds_it_to_its_agent_before_anything_runs(driver: Driver) -> None:
    driver.worker._handle(DeploySubtasks(DEPLOYMENT, JOB))
    assert driver.parent_watch.calls == ["work"]
    driver.receive(DeploymentFailed)


def test_triggers_for_another_deployment_are_declined(driver: Driver) -> None:
    options = CheckpointOptions(CheckpointProperties(), "dir")
    driver.worker._handle(TriggerCheckpoint(9, ((VERTEX, 0),), 5, 0, options))
    answer = driver.receive(DeclineCheckpoint)
    assert answer.reason == "CHECKPOINT_DECLINED_TASK_NOT_READY"
    assert (answer.vertex_id, answer.subtask, answer.checkpoint_id, answer.deployment) == (VERTEX, 0, 5, 9)


class TestPrograms:
    def test_files_are_unpacked_once(self, driver: Driver) -> None:
        directory = driver.worker._unpack("p", archive(mdotpy="x = 1", pkg__ndotpy="y = 2"))
        assert (Path(directory) / "m.py").read_text() == "x = 1"
        assert (Path(directory) / "pkg" / "n.py").read_text() == "y = 2"
        assert driver.worker._unpack("p", None) == directory
        driver.worker.close()
        assert not Path(directory).exists()

    def test_archive_is_unpacked_inside_its_directory_only(self, driver: Driver, tmp_path: Path) -> None:
        absolute = str(tmp_path / "absolute.py")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as files:
            files.writestr("../escape.py", "x")
            files.writestr("a/../../escape2.py", "x")
            files.writestr(absolute, "x")
            link = zipfile.ZipInfo("link")
            link.external_attr = 0o120777 << 16
            files.writestr(link, "/etc/passwd")
        directory = Path(driver.worker._unpack("p", buffer.getvalue()))
        assert not (directory.parent / "escape.py").exists()
        assert not (directory.parent / "escape2.py").exists()
        assert not Path(absolute).exists()
        assert not (directory / "link").is_symlink()
        assert all(path.resolve().is_relative_to(directory.resolve()) for path in directory.rglob("*"))

    def test_files_that_were_never_sent_are_missed_by_name(self, driver: Driver) -> None:
        with pytest.raises(RuntimeError, match="program 'p'|program p"):
            driver.worker._unpack("p", None)

    def test_a_damaged_archive_leaves_nothing_and_is_not_taken_for_unpacked(
        self, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt_runtime.task.worker.tempfile.tempdir", str(tmp_path))
        with pytest.raises(zipfile.BadZipFile):
            driver.worker._unpack("p", b"no zip")
        assert list(tmp_path.iterdir()) == []
        directory = driver.worker._unpack("p", archive(mdotpy=""))
        assert (Path(directory) / "m.py").exists()


class TestDeployment:
    def test_a_deployment_whose_job_graph_was_never_sent_fails_by_name(self, driver: Driver) -> None:
        driver.worker._handle(DeploySubtasks(DEPLOYMENT))
        assert "has not sent this worker the job graph" in driver.receive(DeploymentFailed).failure.cause.message

    def test_a_program_that_cannot_be_loaded_fails_the_deployment_and_not_the_worker(self, driver: Driver) -> None:
        thread = driver.start()
        driver.connection.send(DeploySubtasks(DEPLOYMENT, JOB, archive(mdotpy="")))
        answer = driver.receive(DeploymentFailed)
        assert answer.deployment == 1
        assert "entry" in answer.failure.cause.message
        driver.connection.send(CancelDeployment(1))
        assert driver.receive(Canceled) == Canceled(1, ended=True)
        driver.hang_up(thread)

    def test_messages_of_a_subtask_of_an_earlier_deployment_are_dropped(self, driver: Driver) -> None:
        class Stub:
            """Looks like a subtask, or a job of one subtask."""

            vertex_id, index, name = VERTEX, 0, "s"

            def __init__(self, number: int) -> None:
                self.deployment = replace(DEPLOYMENT, deployment=number)
                self.subtasks = {(VERTEX, 0): self}

        earlier, present = Stub(1), Stub(2)
        driver.worker._job = present  # type: ignore[assignment]
        try:
            driver.worker.end_of_data(earlier, True)  # type: ignore[arg-type]
            driver.worker.end_of_data(present, True)  # type: ignore[arg-type]
        finally:
            driver.worker._job = None
        assert driver.receive(EndOfDataReport) == EndOfDataReport(2, VERTEX, 0)


@pytest.mark.row("ends.3")
@pytest.mark.row("ends.4")
def test_minima_and_rates_reach_the_sources_of_the_present_deployment_and_their_progress_the_driver(
    driver: Driver,
) -> None:
    class Source:
        vertex_id, index, name = VERTEX, 0, "s"

        def __init__(self) -> None:
            self.deployment = replace(DEPLOYMENT, deployment=2)
            self.subtasks = {(VERTEX, 0): self}
            self.calls: list[object] = []

        def mail(self, key: object, action: Callable[[object], None]) -> None:
            action(self)

        def align(self, minimum: int) -> None:
            self.calls.append(minimum)

        def limit(self, rates: dict[str, float]) -> None:
            self.calls.append(rates)

        def trigger_checkpoint(self, barrier: CheckpointBarrier) -> None:
            driver.worker.source_progress(self, Progress(7))  # type: ignore[arg-type]

    source = Source()
    driver.worker._job = source  # type: ignore[assignment]
    thread = driver.start()
    try:
        tasks = ((VERTEX, 0),)
        driver.connection.send(AlignSources(1, tasks, 100))
        driver.connection.send(AlignSources(2, tasks, 200))
        driver.connection.send(LimitSources(2, tasks, {"s": 5.0}))
        options = CheckpointOptions(CheckpointProperties(), "file:///c")
        driver.connection.send(TriggerCheckpoint(2, tasks, 1, 0, options))
        assert driver.receive(SourceProgress) == SourceProgress(2, VERTEX, 0, 7, False)
    finally:
        driver.worker._job = None
    assert source.calls == [200, {"s": 5.0}]
    driver.hang_up(thread)


class _Ending:
    """Looks like a subtask, its job, and the keyed state of its snapshot; it ends when that is written, or before."""

    vertex_id, index, name = VERTEX, 0, "s"
    last_intervals = ()

    def __init__(self, *, ends_while_writing: bool) -> None:
        self.deployment = DEPLOYMENT
        self.configuration = Configuration()
        self.subtasks = {(VERTEX, 0): self}
        self.state = TaskState.RUNNING if ends_while_writing else TaskState.FINISHED
        self.checkpoints = self
        self.persisted = PersistedBuffers()
        self.written = self.released = 0

    def write(self, files: SnapshotFiles) -> list[KeyedHandle]:
        self.state = TaskState.FINISHED
        with files.private() as file:
            self.written = file.stream.write(b"x" * 100_000)
            return [KeyedStateHandle(KeyGroupRange(0, 127), file.finish(), ())]

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("ends_while_writing", [False, True])
def test_a_subtask_that_has_ended_leaves_no_snapshot_behind(
    driver: Driver, tmp_path: Path, ends_while_writing: bool
) -> None:
    subtask: Any = _Ending(ends_while_writing=ends_while_writing)
    barrier = CheckpointBarrier(5, 0, CheckpointOptions(CheckpointProperties(), str(tmp_path)))
    snapshot = SubtaskSnapshot(
        barrier, (OperatorSnapshot("s", (), subtask),), InFlight(), SnapshotMeasures(0, 0, 0, 0.0)
    )
    driver.worker._job = subtask
    try:
        driver.worker._write_snapshot(subtask, snapshot)
        driver.worker.end_of_data(subtask, waits=True)
    finally:
        driver.worker._job = None
    driver.receive(EndOfDataReport)
    assert subtask.released == 1
    assert (subtask.written > 0) is ends_while_writing
    assert list(tmp_path.iterdir()) == []


class _Writing(_Ending):
    """Its snapshot has written a shared file, and stands still in the request of the next one."""

    def __init__(self) -> None:
        super().__init__(ends_while_writing=True)
        self.in_request, self.answered = threading.Event(), threading.Event()
        self.files_after_it: list[str] = []

    def cancel(self, timeout_s: float) -> bool:
        return True

    def write(self, files: SnapshotFiles) -> list[KeyedHandle]:
        for number in range(3):
            with files.shared() as file:
                file.write(b"x" * 100_000)
                if number == 1:
                    self.in_request.set()
                    assert self.answered.wait(60)
                file.finish()
            if number:
                self.files_after_it.append(str(number))
        raise AssertionError("it was given up")


@pytest.mark.parametrize("closed", [False, True])
def test_snapshot_in_progress_is_aborted_and_removed_with_its_job(driver: Driver, tmp_path: Path, closed: bool) -> None:
    """Cancelled, where the worker continues; and released, where it waits for its requests before it ends."""
    (own := tmp_path / "chk-5").mkdir()
    (shared := tmp_path / "shared").mkdir()
    subtask: Any = _Writing()
    options = CheckpointOptions(CheckpointProperties(), str(own), shared_directory=str(shared))
    snapshot = SubtaskSnapshot(
        CheckpointBarrier(5, 0, options),
        (OperatorSnapshot("s", (), subtask),),
        InFlight(),
        SnapshotMeasures(0, 0, 0, 0.0),
    )
    worker = driver.worker
    worker._job = subtask
    worker.write_snapshot(subtask, snapshot)
    [writing] = worker._unfinished
    assert subtask.in_request.wait(60)
    assert len(list(shared.iterdir())) == 2
    if closed:
        closing = threading.Thread(target=worker.close)
        closing.start()
        while worker._job is not None:
            closing.join(0.01)
        closing.join(0.1)
        assert closing.is_alive(), "the process would end before its request is answered"
        subtask.answered.set()
        closing.join(60)
        assert not closing.is_alive()
    else:
        worker._cancel(CancelDeployment(1))
        subtask.answered.set()
        writing.result(60)
        assert driver.receive(Canceled) == Canceled(1, ended=True)
    assert subtask.files_after_it == ["1"]
    assert list(shared.iterdir()) == []
    assert worker._unfinished == set()


def test_errors_are_described_with_their_class_message_and_trace() -> None:
    try:
        raise zipfile.BadZipFile("broken")
    except zipfile.BadZipFile as error:
        described = describe_error(error)
    assert described.cause.exception == "zipfile.BadZipFile"
    assert described.cause.message == "broken"
    assert "in test_errors_are_described" in described.cause.stack_trace
    assert describe_error(ValueError("x")).cause.exception == "ValueError"


class Unprintable(OSError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [Unprintable(), ValueError("\ud800"), ValueError("x" * 1_000_000)])
def test_error_whose_text_cannot_be_made_is_reported(driver: Driver, error: Exception) -> None:
    subtask: Any = _Ending(ends_while_writing=True)
    driver.worker._job = subtask
    try:
        driver.worker.state_changed(subtask, error)
    finally:
        driver.worker._job = None
    reported = driver.receive(TaskStateChanged).failure
    assert reported is not None
    assert reported.recoverable
    assert len(reported.cause.message) < 10_000


@pytest.mark.parametrize("error", [Unprintable(), ValueError("\ud800")])
def test_a_snapshot_that_fails_with_such_an_error_is_declined(driver: Driver, tmp_path: Path, error: Exception) -> None:
    def write(files: SnapshotFiles) -> NoReturn:
        raise error

    answer = _snapshot_answer(driver, tmp_path, write)
    assert answer.checkpoint_id == 5
    assert type(error).__name__ in answer.message


@pytest.mark.parametrize("value", ["\ud800", b"bytes", {1: 2}, 1 << 64, datetime.now(UTC), nested(65)])
def test_a_snapshot_that_cannot_be_acknowledged_is_declined_and_leaves_no_file(
    driver: Driver, tmp_path: Path, value: Any
) -> None:
    def write(files: SnapshotFiles) -> list[KeyedHandle]:
        with files.private() as file:
            file.stream.write(b"x" * 100_000)
            section = KeyedSection("state", {"name": value}, ((0, 0, 100_000),))
            return [KeyedStateHandle(KeyGroupRange(0, 127), file.finish(), (section,))]

    _snapshot_answer(driver, tmp_path, write)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row("571.9")
def test_heartbeat_has_the_progress_of_a_snapshot(driver: Driver, tmp_path: Path) -> None:
    found: list[tuple[SnapshotProgress, ...]] = []

    def write(files: SnapshotFiles) -> NoReturn:
        with files.private() as file:
            for _ in range(2):
                file.stream.write(b"x" * 100_000)
                found.append(driver.worker._progress(driver.worker._job))  # type: ignore[arg-type]
            raise OSError("disk full")

    _snapshot_answer(driver, tmp_path, write)
    assert found == [(SnapshotProgress(VERTEX, 0, 5, size, 0),) for size in (100_000, 200_000)]
    assert driver.worker._writing == {}


def test_a_heartbeat_that_cannot_be_measured_is_followed_by_the_next(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt_runtime.task.worker.HEARTBEAT_S", 0.01)
    measured = ProcessMeter.measure
    failures = [RuntimeError("changed during iteration")]

    def measure(meter: ProcessMeter) -> ProcessFigures:
        if failures:
            raise failures.pop()
        return measured(meter)

    monkeypatch.setattr(ProcessMeter, "measure", measure)
    thread = driver.start()
    beat = driver.connection.receive(FROM_WORKER)
    assert isinstance(beat, WorkerHeartbeat)
    assert not failures
    assert "a heartbeat was left out" in caplog.text
    driver.hang_up(thread)


@pytest.mark.parametrize(("option", "copied"), [("FASTEST", False), ("COPY", True)])
def test_duplicates_are_copies_where_the_options_ask_for_them(
    driver: Driver, tmp_path: Path, option: str, copied: bool
) -> None:
    source, savepoint = tmp_path / "source", tmp_path / "savepoint"
    source.write_bytes(b"x" * 100)
    savepoint.mkdir()
    means: list[Means] = []

    def write(files: SnapshotFiles) -> NoReturn:
        assert isinstance(files, NewFiles)
        files.duplicate_all({"table": StateFile(source.as_uri(), 100, checksum_of(source.read_bytes()))})
        means.extend(files.duplicated)
        raise OSError("that is all")

    _snapshot_answer(driver, savepoint, write, {CheckpointingOptions.SAVEPOINT_DUPLICATION.key: option})
    assert (means == [Means.COPY]) is copied
    assert list(savepoint.iterdir()) == []


def _snapshot_answer(
    driver: Driver,
    directory: Path,
    write: Callable[[SnapshotFiles], list[KeyedHandle]],
    configuration: dict[str, str] | None = None,
) -> DeclineCheckpoint:
    subtask: Any = _Ending(ends_while_writing=True)
    subtask.write = write
    subtask.configuration = Configuration(configuration or {})
    barrier = CheckpointBarrier(5, 0, CheckpointOptions(CheckpointProperties(), str(directory)))
    snapshot = SubtaskSnapshot(
        barrier, (OperatorSnapshot("s", (), subtask),), InFlight(), SnapshotMeasures(0, 0, 0, 0.0)
    )
    driver.worker._job = subtask
    try:
        driver.worker._write_snapshot(subtask, snapshot)
    finally:
        driver.worker._job = None
    return driver.receive(DeclineCheckpoint)


def test_a_lost_channel_is_reported_as_a_secondary_failure_and_logged_without_a_trace(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    subtask: Any = _Ending(ends_while_writing=True)
    driver.worker._job = subtask
    try:
        raise ChannelLostError("connection to worker h:1 lost")
    except ChannelLostError as error:
        driver.worker.state_changed(subtask, error)
    finally:
        driver.worker._job = None
    reported = driver.receive(TaskStateChanged).failure
    assert reported is not None
    assert reported.consequence
    assert "Traceback" not in reported.cause.stack_trace + caplog.text
    assert "connection to worker h:1 lost" in caplog.text
    assert not describe_error(ConnectionError("of user code")).consequence


@pytest.mark.parametrize(
    "error", [ValueNotCarriedError("a lock"), UnreadableValueError("a class"), StateSchemaError("1")]
)
def test_error_that_would_repeat_is_not_recoverable(error: Exception) -> None:
    assert describe_error(error).recoverable is False
    assert describe_error(RuntimeError("x")).recoverable is True


def test_a_plan_that_another_error_prevents_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as missing:
        source_schema("replay", {"path": str(tmp_path / "away")}, None)
    assert describe_error(missing.value).recoverable is True
    with pytest.raises(PlanError) as wrong:
        source_schema("replay", {"path": str(tmp_path), "partitionBy": "a"}, pa.schema([("b", pa.int64())]))
    assert describe_error(wrong.value).recoverable is False
