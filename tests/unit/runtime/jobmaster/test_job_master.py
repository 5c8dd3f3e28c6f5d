"""One job on a real loop, slot pool and control endpoint; only the far ends of the sockets are played."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.configuration.configuration import ChangeNote, Configuration
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.jobmaster.gateway_values import (
    AfterSavepoint,
    CheckpointKind,
    InvalidRequest,
    OperationStatus,
    SavepointRequest,
)
from ckpt_runtime.jobmaster.job_host import LoopHost
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.jobmaster.operations import OperationFailure
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import Slot
from ckpt_runtime.network.agent_messages import KillWorker, ProcessIdentity, RegisterWorker
from ckpt_runtime.network.connections import encode
from ckpt_runtime.network.control_messages import (
    AlignSources,
    CancelDeployment,
    Canceled,
    DeploymentFailed,
    DeploySubtasks,
    EndOfDataReport,
    LimitSources,
    NotifyCheckpointComplete,
    SourceProgress,
    TaskFailure,
    TaskStateChanged,
    WorkerCommand,
)
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.metadata import read_metadata
from tests.unit.runtime.jobmaster.fake_slots import JOB, FakeWorker, World, running_job

RESTARTING = {
    "restart_strategy__type": "fixed-delay",
    "restart_strategy__fixed_delay__attempts": "3",
    "restart_strategy__fixed_delay__delay": "0 ms",
}

LOST_CHANNEL = TaskFailure(FailureInfo("ChannelLostError", "connection to worker h:1 lost"), consequence=True)


async def test_job_that_ends_while_it_waits_for_slots_withdraws_its_request(tmp_path: Path) -> None:
    async with running_job(
        tmp_path, restart_strategy__type="fixed-delay", restart_strategy__fixed_delay__delay="1 ms"
    ) as (world, job):
        launch, world.slots.launch = world.slots.launch, lambda *arguments: None  # type: ignore[method-assign]
        world.slots.agents[0].close()
        await world.until(lambda: job.status is JobStatus.RESTARTING)
        job.cancel()
        await world.status(job, JobStatus.CANCELED)
        await world.until(lambda: not world.slot_pool._requests)
        assert all(slot.owner is None for slot in world.slot_pool.all())
        world.slots.launch = launch  # type: ignore[method-assign]


class SlowRecord(JobRecord):
    """Waits with the first attempt until ``go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()
        self.go_on = threading.Event()

    def begin_attempt(self, attempt: int) -> None:
        self.waits.set()
        assert self.go_on.wait(60)


async def test_slots_that_are_lost_while_state_is_restored_are_not_deployed_to(tmp_path: Path) -> None:
    record = SlowRecord()

    async with World.start(tmp_path) as world:
        try:
            job = world.start_job(record=record, **RESTARTING)
            await world.until(record.waits.is_set)
            for agent in world.slots.agents[:2]:
                agent.close()
            await world.until(lambda: not world.slot_pool.all())
        finally:
            record.go_on.set()
        await world.running(job)
        (entry,) = job.exception_history(10).entries
        assert entry.failure.exception == "SlotLostException"
        assert world.slots.launched == ["0", "1", "2", "3"]


@pytest.mark.parametrize("ready", [True, False])
async def test_slots_that_come_as_their_request_is_cancelled_are_given_back(tmp_path: Path, ready: bool) -> None:
    """Between the end of the request and its answer the job may end."""

    async with running_job(tmp_path) as (world, job):
        job.cancel()
        await world.until(lambda: world.slot_pool.available == 2)
        await world.until(lambda: all(slot.worker is not None for slot in world.slot_pool.all()))
        owner: Any = type("Owner", (), {})()
        answers: list[Any] = []
        request = LoopHost(world.slot_pool, world.pool).acquire_slots(owner, 2, [], answers.append)
        if ready:
            await asyncio.sleep(0)  # the slots are there, and the answer is on its way
            assert {slot.owner for slot in world.slot_pool.all()} == {owner}
        request.cancel()
        await world.until(lambda: world.slot_pool.available == 2)
        assert answers == []


async def test_a_worker_that_cannot_end_its_subtasks_is_replaced(tmp_path: Path) -> None:
    async with running_job(tmp_path) as (world, job):
        world.ignored = (CancelDeployment,)
        job.cancel()
        for worker in world.active():
            worker.peer.send(Canceled(worker.number, ended=False))
        await world.status(job, JobStatus.CANCELED)
        await world.until(lambda: all(agent.of(KillWorker) for agent in world.slots.agents))


_ELSEWHERE = (ModuleType, type, FunctionType, asyncio.AbstractEventLoop, SlotPool, Slot)


def _texts(root: object) -> Iterator[bytes | str]:
    """All that can be reached from an object, but for what its slots have: their far ends are played here."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        known = waiting.pop()
        if id(known) in seen or isinstance(known, _ELSEWHERE):
            continue
        seen[id(known)] = known
        if isinstance(known, bytes | str):
            yield known
        waiting += gc.get_referents(known)


@pytest.mark.parametrize("status", [JobStatus.FINISHED, JobStatus.CANCELED, JobStatus.FAILED])
async def test_a_job_that_has_ended_keeps_no_archive_in_memory(tmp_path: Path, status: JobStatus) -> None:
    async with World.start(tmp_path) as world:
        world.archive = b"archive" * 100_000
        job = world.start_job(restart_strategy__type="none")
        await world.running(job)
        assert max(len(text) for text in _texts(job)) > 500_000
        for worker in world.active():
            if status is JobStatus.FINISHED:
                worker.state(TaskState.FINISHED)
            elif status is JobStatus.FAILED:
                worker.fail()
        if status is JobStatus.CANCELED:
            job.cancel()
        await world.status(job, status)
        assert max(len(text) for text in _texts(job)) < 100_000


class TestFailures:
    async def test_a_lost_worker_is_the_cause_and_what_its_neighbours_lost_comes_along(self, tmp_path: Path) -> None:
        async with running_job(tmp_path, **RESTARTING) as (world, job):
            first, second = world.active()
            second.state(TaskState.FAILED, LOST_CHANNEL)
            await world.until(lambda: bool(job._shell._consequences._held))
            assert job.status is JobStatus.RUNNING
            first.peer.close()
            await world.until(lambda: job.metrics()["numRestarts"] == "1")
            (entry,) = job.exception_history(10).entries
            assert entry.failure.exception == "WorkerLostException"
            assert {other.failure.exception for other in entry.concurrent} <= {
                "ChannelLostError",
                "WorkerLostException",
            }

    @pytest.mark.parametrize("feeds", [True, False])
    async def test_a_lost_worker_whose_subtasks_have_finished_matters_if_others_take_their_rows(
        self, tmp_path: Path, feeds: bool
    ) -> None:
        async with running_job(tmp_path, **RESTARTING) as (world, job):
            lost, other = world.active() if feeds else reversed(world.active())
            lost.state(TaskState.FINISHED)
            await world.until(lambda: len(job._shell.core.machine.tasks.finished) == len(lost.deployment.subtasks))
            lost.peer.close()
            if feeds:
                await world.until(lambda: job.metrics()["numRestarts"] == "1")
                assert job.exception_history(1).entries[0].failure.exception == "WorkerLostException"
                return
            other.state(TaskState.FINISHED)
            await world.until(lambda: job.status is JobStatus.FINISHED)
            assert job.metrics()["numRestarts"] == "0"

    async def test_a_worker_in_which_subtasks_fail_again_and_again_is_replaced(self, tmp_path: Path) -> None:
        async with running_job(tmp_path, **{**RESTARTING, "restart_strategy__fixed_delay__attempts": "10"}) as (
            world,
            job,
        ):
            workers = [world.active()[0].peer.registration.worker]
            for restarts in range(1, 4):
                world.active()[0].fail(only="k")
                await world.until(lambda restarts=restarts: job.metrics()["numRestarts"] == str(restarts))
                await world.running(job)
                workers.append(world.active()[0].peer.registration.worker)
            assert workers[0] == workers[1] == workers[2] != workers[3]

    async def test_lost_channel_without_an_explanation_fails_the_job(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with World.start(tmp_path) as world:
            monkeypatch.setattr("ckpt_runtime.jobmaster.task_gateway.GRACE_MS", 10)
            job = world.start_job(**RESTARTING)
            await world.running(job)
            world.active()[1].state(TaskState.FAILED, LOST_CHANNEL)
            await world.until(lambda: job.metrics()["numRestarts"] == "1")
            (entry,) = job.exception_history(10).entries
            assert entry.failure.exception == "ChannelLostError"

    async def test_failures_that_come_along_belong_to_the_first(self, tmp_path: Path) -> None:
        async with running_job(tmp_path, **RESTARTING) as (world, job):
            world.ignored = (CancelDeployment,)
            first, second = world.active()
            first.fail("first", only="s")
            await world.status(job, JobStatus.RESTARTING)
            second.fail("second", only="s")
            await world.until(lambda: bool(job.exception_history(10).entries[0].concurrent))
            for worker in (first, second):
                worker.peer.send(Canceled(worker.number, ended=True))
            await world.running(job)
            (entry,) = job.exception_history(10).entries
            assert [other.failure.message for other in entry.concurrent] == ["second"]

    async def test_job_without_a_restart_strategy_fails_with_the_cause(self, tmp_path: Path) -> None:
        async with running_job(tmp_path) as (world, job):
            world.active()[0].fail(only="s")
            await world.status(job, JobStatus.FAILED)
            failure = job.result().failure
            assert failure is not None
            assert failure.message == "boom"

    async def test_failure_that_no_restart_can_repair_ends_the_job(self, tmp_path: Path) -> None:
        async with running_job(tmp_path, **RESTARTING) as (world, job):
            world.active()[0].fail("another plan", recoverable=False, only="s")
            await world.status(job, JobStatus.FAILED)
            assert job.metrics()["numRestarts"] == "0"

    async def test_a_deployment_that_fails_is_a_failure_of_its_subtasks(self, tmp_path: Path) -> None:
        def fail_once(worker: FakeWorker, message: WorkerCommand) -> bool:
            if not isinstance(message, DeploySubtasks) or message.deployment.attempt or worker.index:
                return False
            worker.deployments.append(message.deployment)
            worker.peer.send(DeploymentFailed(worker.number, TaskFailure(FailureInfo("ImportError", "no"))))
            return True

        async with World.start(tmp_path) as world:
            world.on_message = fail_once
            job = world.start_job(**RESTARTING)
            await world.until(lambda: job.metrics()["numRestarts"] == "1")
            await world.running(job)
            assert job.exception_history(1).entries[0].failure.exception == "ImportError"

    async def test_slots_that_cannot_be_had_are_in_the_history(self, tmp_path: Path) -> None:
        async with World.start(tmp_path) as world:
            world.slots.launch_error = RuntimeError("no cores")
            job = world.start_job(**RESTARTING)
            await world.status(job, JobStatus.FAILED)
            history = job.exception_history(10).entries
            assert [entry.failure.exception for entry in history] == ["NoResourceAvailableException"] * 4
            assert all("no cores" in entry.failure.message and entry.task_name is None for entry in history)

    async def test_a_message_of_an_earlier_deployment_changes_nothing(self, tmp_path: Path) -> None:
        async with running_job(tmp_path, **RESTARTING) as (world, job):
            worker = world.active()[0]
            late = TaskFailure(FailureInfo("E", "late"))
            worker.peer.send(TaskStateChanged(worker.number - 1, "s", 0, TaskState.FAILED, late))
            await job.trigger_checkpoint(CheckpointKind.CONFIGURED)
            assert job.exception_history(10).entries == ()

    @pytest.mark.parametrize(
        ("body", "reported"),
        [
            (b"\x81\xa4type\xa8nonsense", "a worker may not send message 'nonsense' here"),
            (encode(KillWorker("w")), "a worker may not send message 'KillWorker' here"),
            (
                encode(RegisterWorker("0-0", "w", ("h", 1), ProcessIdentity("", 1, 0), "")),
                "a worker may not send message 'RegisterWorker' here",
            ),
            (
                b"\x82\xa4type\xafEndOfDataReport\xaadeployment\xa1x",
                "the message EndOfDataReport of a worker is malformed: Expected `int`, got `str`",
            ),
            (b"\xff\x00 noise", "a worker sent bytes that are not a message"),
        ],
    )
    async def test_forbidden_message_of_a_worker_fails_its_subtasks_and_is_named(
        self, tmp_path: Path, body: bytes, reported: str
    ) -> None:
        async with World.start(tmp_path, loss_grace_s=60) as world:
            job = world.start_job(**RESTARTING)
            await world.running(job)
            broken = world.active()[0].peer.registration.worker
            world.active()[0].peer.send_raw(body)
            await world.until(lambda: job.metrics()["numRestarts"] == "1")
            await world.running(job)
            (entry,) = job.exception_history(10).entries
            assert entry.failure.exception == "WorkerLostException"
            assert f"worker {broken} was lost: {reported}" in entry.failure.message
            assert broken not in [worker.peer.registration.worker for worker in world.active()]

        # The agent says nothing of its own accord: the cause is known at once.

    @pytest.mark.parametrize("named", [("s", 1), ("k", 7), ("nowhere", 0)])
    async def test_a_worker_speaks_for_the_subtasks_that_it_was_given_and_no_others(
        self, tmp_path: Path, named: tuple[str, int]
    ) -> None:
        async with World.start(tmp_path, loss_grace_s=60) as world:
            job = world.start_job(**RESTARTING)
            await world.running(job)
            worker = world.active()[0]
            worker.peer.send(TaskStateChanged(worker.number, *named, TaskState.FINISHED))
            await world.until(lambda: job.metrics()["numRestarts"] == "1")
            (entry,) = job.exception_history(10).entries
            reported = f"the message TaskStateChanged of a worker names subtask {named[1]} of vertex '{named[0]}'"
            assert f"{reported}, which was not deployed to it" in entry.failure.message

    @staticmethod
    async def savepoint(world: World) -> CompletedCheckpoint:
        job = world.start_job()
        await world.running(job)
        done = await job.take_savepoint(SavepointRequest(str(world.directory / "savepoints"), AfterSavepoint.CANCEL))
        await world.status(job, JobStatus.CANCELED)
        await world.until(lambda: not (world.directory / "checkpoints" / JOB).exists())
        assert done.location is not None
        return CompletedCheckpoint.from_json(read_metadata(done.location).document, done.location)


class TestCheckpoints:
    async def test_a_request_before_all_tasks_run_is_refused(self, tmp_path: Path) -> None:
        async with World.start(tmp_path) as world:
            world.ignored = (DeploySubtasks,)
            job = world.start_job()
            with pytest.raises(OperationFailure, match="Not all required tasks"):
                await job.trigger_checkpoint(CheckpointKind.CONFIGURED)
            with pytest.raises(OperationFailure, match="not running"):
                await job.take_savepoint(SavepointRequest(str(tmp_path), AfterSavepoint.STOP))

    async def test_job_whose_time_is_over_is_stopped_with_a_savepoint_also_after_a_failed_stop(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt_runtime.jobmaster.job_master._STOP_AGAIN_S", 0.01)
        targets: list[str] = []

        async def stop(job: JobMaster, directory: str) -> OperationStatus:
            targets.append(directory)
            if len(targets) == 1:
                raise OperationFailure("the directory cannot be written")
            return await job.take_savepoint(SavepointRequest(directory, AfterSavepoint.STOP))

        async with World.start(tmp_path) as world:
            target = str(tmp_path / "savepoints")
            options = {"execution__stop_after": "50 ms", "execution__checkpointing__savepoint_dir": target}
            job = JobMaster(world.submission(**options), world.slot_pool, world.pool, stop=stop)
            world.jobs.append(job)
            job.prepare_storage()
            job.start()
            await world.running(job)
            await world.until(lambda: all(worker.peer.of(NotifyCheckpointComplete) for worker in world.active()))
            for worker in world.active():
                worker.state(TaskState.FINISHED)
            await world.status(job, JobStatus.FINISHED)
            assert set(targets) == {target}
            assert len(targets) >= 2
            assert len(list((tmp_path / "savepoints").iterdir())) == 1

    async def test_time_of_a_job_goes_on_while_it_restarts_and_ends_with_it(self, tmp_path: Path) -> None:
        stops: list[str] = []

        async def stop(job: JobMaster, directory: str) -> OperationStatus:
            stops.append(directory)
            return await job.take_savepoint(SavepointRequest(directory, AfterSavepoint.STOP))

        async with World.start(tmp_path) as world:
            limited = world.submission(execution__stop_after="1 h", **RESTARTING)
            job = JobMaster(limited, world.slot_pool, world.pool, stop=stop)
            world.jobs.append(job)
            job.prepare_storage()
            job.start()
            await world.running(job)
            first, since = job._time_limit, job._running_since
            assert first is not None
            world.active()[0].fail("commit", only="k")
            await world.until(lambda: job._time_limit not in (first, None))
            assert job._running_since == since
            job.cancel()
            await world.status(job, JobStatus.CANCELED)
            assert job._time_limit is None
            assert stops == []

    async def test_the_same_stop_again_is_the_one_in_progress(self, tmp_path: Path) -> None:
        async with running_job(tmp_path) as (world, job):
            target = str(tmp_path / "savepoints")
            first, second = (
                asyncio.create_task(job.take_savepoint(SavepointRequest(target, AfterSavepoint.STOP))) for _ in range(2)
            )
            await world.until(lambda: all(worker.peer.of(NotifyCheckpointComplete) for worker in world.active()))
            with pytest.raises(OperationFailure, match="Another stop is in progress"):
                await job.take_savepoint(SavepointRequest(target, AfterSavepoint.DRAIN))
            second.cancel()
            third = asyncio.create_task(job.take_savepoint(SavepointRequest(target, AfterSavepoint.STOP)))
            await asyncio.sleep(0)
            for worker in world.active():
                worker.state(TaskState.FINISHED)
            assert (await first).location == (await third).location is not None
            assert len(list((tmp_path / "savepoints").iterdir())) == 1

    async def test_a_stop_whose_tasks_fail_names_the_savepoint(self, tmp_path: Path) -> None:
        async with running_job(tmp_path, **RESTARTING) as (world, job):
            target = str(tmp_path / "savepoints")
            stopping = asyncio.create_task(job.take_savepoint(SavepointRequest(target, AfterSavepoint.STOP)))
            await world.until(lambda: all(worker.peer.of(NotifyCheckpointComplete) for worker in world.active()))
            world.active()[0].fail("commit", only="k")
            with pytest.raises(OperationFailure, match=r"savepoint: .*savepoint-"):
                await stopping
            assert job.status is JobStatus.FAILED

    async def test_stop_whose_client_has_disconnected_leaves_no_unhandled_error(self, tmp_path: Path) -> None:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        async with running_job(tmp_path) as (world, job):
            target = str(tmp_path / "savepoints")
            stopping = asyncio.create_task(job.take_savepoint(SavepointRequest(target, AfterSavepoint.STOP)))
            await world.until(lambda: bool(job._stopping))
            stopping.cancel()
            job.suspend()
            await world.until(lambda: not job._stopping)
        del stopping
        gc.collect()
        assert logged == []

    async def test_end_of_data_that_comes_while_others_are_deployed_is_not_lost(self, tmp_path: Path) -> None:
        def ends_early(worker: FakeWorker, message: WorkerCommand) -> bool:
            if not isinstance(message, DeploySubtasks) or worker.index == 1:
                return False
            worker.obey(message)
            for vertex_id, subtask in worker.subtasks:
                worker.peer.send(EndOfDataReport(worker.number, vertex_id, subtask))
            return True

        async with World.start(tmp_path) as world:
            world.on_message = ends_early
            job = world.start_job()
            await world.running(job)
            for vertex_id in ("s", "k"):
                world.active()[1].peer.send(EndOfDataReport(world.active()[1].number, vertex_id, 1))
            await world.until(lambda: job.checkpoint_statistics().counts.completed == 1)

    async def test_a_patch_holds_at_once_and_a_reset_returns(self, tmp_path: Path) -> None:
        async with running_job(tmp_path, execution__checkpointing__timeout="1 min") as (_, job):
            shown = await job.patch_checkpoint_config(CheckpointOverrides(timeout_ms=5000))
            assert (shown.settings.timeout_ms, shown.overrides) == (5000, ("timeout_ms",))
            assert (shown.exactly_once, shown.state_backend) == (True, "HashMapStateBackend")
            shown = await job.patch_checkpoint_config(CheckpointOverrides(min_pause_ms=7))
            assert (shown.settings.timeout_ms, shown.settings.min_pause_ms) == (5000, 7)
            shown = await job.patch_checkpoint_config(
                CheckpointOverrides(
                    unaligned_enabled=True, aligned_timeout_ms=30, max_inflight_data_bytes=4096, max_concurrent=2
                )
            )
            assert (
                shown.settings.unaligned_enabled,
                shown.settings.aligned_timeout_ms,
                shown.settings.max_inflight_data_bytes,
            ) == (True, 30, 4096)
            with pytest.raises(InvalidRequest, match="at least 10"):
                await job.patch_checkpoint_config(CheckpointOverrides(timeout_ms=1))
            assert job.checkpoint_config().settings.timeout_ms == 5000
            shown = await job.patch_checkpoint_config(None)
            assert (shown.settings.timeout_ms, shown.overrides) == (60_000, ())
            assert (
                shown.settings.unaligned_enabled,
                shown.settings.aligned_timeout_ms,
                shown.settings.max_inflight_data_bytes,
            ) == (False, 0, None)


ALIGNED = JobVertex("s", (OperatorNode("orders.reader", "orders", "range_reader", alignment_group="g"),), 2)


@pytest.mark.row("ends.3")
async def test_sources_of_a_group_receive_the_slowest_watermark_of_active_sources(tmp_path: Path) -> None:
    async with running_job(tmp_path, graph=JobGraph("job", (ALIGNED,), ())) as (world, _):
        workers = world.active()

        def progress(index: int, event_time: int | None, *, idle: bool = False) -> None:
            worker = workers[index]
            worker.peer.send(SourceProgress(worker.number, "s", worker.index, event_time, idle))

        async def learn(minimum: int) -> None:
            for worker in workers:
                expected = AlignSources(worker.number, (("s", worker.index),), minimum)
                await world.until(lambda worker=worker, expected=expected: expected in worker.peer.of(AlignSources))  # type: ignore[misc]

        progress(0, 500)
        progress(1, 300)
        await learn(300)
        progress(1, None, idle=True)
        await learn(500)
        progress(1, 400)
        await learn(400)
        workers[1].peer.send(EndOfDataReport(workers[1].number, "s", workers[1].index))
        progress(0, 600)
        await learn(600)
        assert [message.minimum for message in workers[0].peer.of(AlignSources)] == [300, 500, 400, 600]


@pytest.mark.row("ends.4")
async def test_rates_that_are_stored_reach_the_readers_without_a_restart(tmp_path: Path) -> None:
    async with running_job(tmp_path, graph=JobGraph("job", (ALIGNED,), ())) as (world, job):
        base = job.accepted_plan
        given = Configuration({"pipeline.source.rates": "orders:2.5,clicks:0"})
        own = base.own.changed(given, ChangeNote(2, 7, "a test", ("pipeline.source.rates",)))
        await job.change_configuration(replace(base, configuration=given, own=own), base, None, restarts=False)
        for worker in world.active():
            expected = LimitSources(worker.number, (("s", worker.index),), {"orders": 2.5, "clicks": 0.0})
            await world.until(lambda worker=worker, expected=expected: worker.peer.of(LimitSources) == [expected])  # type: ignore[misc]
        assert job.status is JobStatus.RUNNING
