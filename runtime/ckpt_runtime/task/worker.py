"""A worker process: receives the driver's messages, runs at most one deployment, reports what happens.

Owns the threads around the subtasks: the control loop, the heartbeat, and the pool that writes snapshots. It trusts the
driver (the connection is authenticated) and nothing else.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import shutil
import tempfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Protocol

from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.configuration.state_options import StateOptions
from ckpt_runtime.connectors.tagged_values import UnreadableValueError, ValueNotCarriedError
from ckpt_runtime.failure_report import log_failure, report_of, summary_of
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.network.connections import ChannelLostError, ControlConnection
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.network.transport import DataTransport
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError, UnsupportedBackendError
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.task.deployed_job import DeployedJob, PlanMismatchError, load_checked_plan
from ckpt_runtime.task.deployment import Deployment
from ckpt_runtime.task.restore import StateRestoreError
from ckpt_runtime.task.restored_input import UnreadableInFlightDataError
from ckpt_runtime.task.snapshot_writer import WrittenSnapshot, write_snapshot
from ckpt_runtime.task.subtask import Subtask, TaskState
from ckpt_runtime.task.subtask_checkpoints import Snapshot, SnapshotMeasures

logger = logging.getLogger(__name__)

Message = dict[str, Any]

SNAPSHOT_THREADS = 2
HEARTBEAT_S = 1.0
_HOPELESS = (
    PlanMismatchError,
    PlanError,
    StateSchemaError,
    CorruptStateError,
    CorruptFileError,
    StateRestoreError,
    UnsupportedBackendError,
    UnreadableInFlightDataError,
    UnreadableValueError,
    ValueNotCarriedError,
)


class AgentTether(Protocol):
    """How the process is bound to its slot agent; see ``spark/tether.py``."""

    def identity(self) -> dict[str, str | int]: ...

    def begin_work(self) -> None: ...

    def adopted_by(self, pid: int, began: int) -> None: ...


class TaskWorker:
    """One worker process's life: :meth:`run` serves the driver until the connection ends or it says shutdown."""

    def __init__(
        self, connection: ControlConnection, secret: str, tether: AgentTether, *, slot: str, worker_id: str
    ) -> None:
        self._connection = connection
        self._tether = tether
        self._worker_id = worker_id
        self._transport = DataTransport(connection.local_host, secret)
        self._job: DeployedJob | None = None
        self._plan: tuple[str, CompiledPlan] | None = None
        self._programs: dict[str, str] = {}
        self._snapshots = ThreadPoolExecutor(SNAPSHOT_THREADS, thread_name_prefix="snapshot")
        self._closing = threading.Event()
        connection.send(
            {
                "type": "hello",
                "role": "worker",
                "slot": slot,
                "worker": worker_id,
                **tether.identity(),
                "data_address": list(self._transport.address),
            }
        )

    def run(self) -> None:
        """Raises ConnectionError when the driver is gone."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        while True:
            message = self._connection.receive()
            if message["type"] == "shutdown":
                return
            self._handle(message)

    def close(self) -> None:
        self._closing.set()
        if self._job is not None:
            self._job.cancel(timeout_s=1)
        self._snapshots.shutdown(wait=False, cancel_futures=True)
        self._transport.close()
        self._connection.close()
        for directory in self._programs.values():
            shutil.rmtree(directory, ignore_errors=True)

    def _handle(self, message: Message) -> None:
        match message["type"]:
            case "deploy":
                self._tether.begin_work()
                self._deploy(message)
            case "cancel":
                self._cancel(message)
            case "trigger":
                self._trigger(message)
            case "complete":
                checkpoint_id = message["checkpoint_id"]
                self._mail_tasks(message, lambda subtask: subtask.notify_complete(checkpoint_id))
            case "abort":
                checkpoint_id, latest = message["checkpoint_id"], message["latest_completed"]
                self._mail_tasks(message, lambda subtask: subtask.notify_aborted(checkpoint_id, latest))
            case "adopt":
                self._tether.adopted_by(message["pid"], message["started"])
                self._connection.send({"type": "adopted"})
            case other:
                logger.warning("worker %s: unknown message %r", self._worker_id, other)

    def _deploy(self, message: Message) -> None:
        """Any failure is reported as this deployment's; the worker lives on."""
        deployment = Deployment.from_json(message["deployment"])
        try:
            _pin(deployment.pin_cpu)
            directory = self._unpack(deployment.program.directory, message.get("archive"))
            plan = self._plan_of(deployment, directory)
            self._job = DeployedJob(deployment, plan, self._transport, self)
            self._job.start()
        except (Exception, SystemExit) as error:
            _log_error(f"deployment {deployment.deployment} failed", error)
            self._report({"type": "deploy_failed", "error": describe_error(error)}, deployment.deployment)

    def _unpack(self, program_id: str, archive: str | None) -> str:
        """The directory of the pipeline's files; the driver sends them once per worker."""
        known = self._programs.get(program_id)
        if known is not None:
            return known
        if archive is None:
            raise RuntimeError(f"the files of program {program_id} were never sent to this worker")
        directory = tempfile.mkdtemp(prefix="ckpt-program-")
        try:
            with zipfile.ZipFile(io.BytesIO(base64.b64decode(archive))) as files:
                files.extractall(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._programs[program_id] = directory
        return directory

    def _plan_of(self, deployment: Deployment, directory: str) -> CompiledPlan:
        """The entry point runs once per worker and job, not once per restart."""
        key = f"{deployment.program.directory}:{deployment.graph.fingerprint}"
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, load_checked_plan(deployment.program, deployment, directory))
        return self._plan[1]

    def _cancel(self, message: Message) -> None:
        job, self._job = self._job, None
        ended = True
        if job is not None:
            timeout_ms = Configuration(job.deployment.graph.configuration).get(
                ExecutionOptions.TASK_CANCELLATION_TIMEOUT
            )
            ended = job.cancel(timeout_ms / 1000 if timeout_ms else threading.TIMEOUT_MAX)
        self._report({"type": "canceled", "ended": ended}, message["deployment"])

    def _trigger(self, message: Message) -> None:
        barrier = CheckpointBarrier(
            message["checkpoint_id"], message["timestamp"], CheckpointOptions.from_json(message["options"])
        )
        job = self._current(message)
        for vertex_id, index in message["tasks"]:
            if job is None or not job.mail((vertex_id, index), lambda task: task.trigger_checkpoint(barrier)):
                self._report(
                    {
                        "type": "decline",
                        "vertex_id": vertex_id,
                        "subtask": index,
                        "checkpoint_id": barrier.checkpoint_id,
                        "reason": "CHECKPOINT_DECLINED_TASK_NOT_READY",
                        "message": "the subtask is not deployed here",
                    },
                    message["deployment"],
                )

    def _mail_tasks(self, message: Message, action: Any) -> None:
        job = self._current(message)
        if job is not None:
            for vertex_id, index in message["tasks"]:
                job.mail((vertex_id, index), action)

    def _current(self, message: Message) -> DeployedJob | None:
        job = self._job
        return job if job is not None and job.deployment.deployment == message["deployment"] else None

    # SubtaskHost: called by task threads.

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic_ns() / 1_000_000

    def state_changed(self, subtask: Subtask, error: BaseException | None = None) -> None:
        if error is not None:
            _log_error(f"subtask {subtask.name} failed", error)
        self._report_subtask(
            subtask,
            {"type": "state", "state": subtask.state.value, "error": None if error is None else describe_error(error)},
        )

    def end_of_data(self, subtask: Subtask) -> None:
        self._report_subtask(subtask, {"type": "end_of_data"})

    def decline(self, subtask: Subtask, checkpoint_id: int, reason: str, message: str) -> None:
        self._report_subtask(
            subtask, {"type": "decline", "checkpoint_id": checkpoint_id, "reason": reason, "message": message}
        )

    def write_snapshot(self, subtask: Subtask, snapshot: Snapshot) -> None:
        self._snapshots.submit(self._write_snapshot, subtask, snapshot)

    def _write_snapshot(self, subtask: Subtask, snapshot: Snapshot) -> None:
        job = self._job
        if job is None or not _is_awaited(job, subtask):
            snapshot.release()
            return
        start = time.monotonic()
        threshold = Configuration(job.deployment.graph.configuration).get(StateOptions.FS_MEMORY_THRESHOLD)
        barrier, measures = snapshot.barrier, snapshot.measures
        try:
            written = write_snapshot(snapshot, threshold, subtask.checkpoints.persisted)
        except Exception as error:
            self._decline_failed(subtask, barrier.checkpoint_id, error)
            return
        if not _is_awaited(self._job, subtask):
            written.files.discard()
            return
        async_ms = round((time.monotonic() - start) * 1000)
        try:
            self._report_subtask(subtask, _acknowledgement(barrier, measures, written, async_ms))
        except (TypeError, ValueError) as error:  # the state has a text that is no Unicode, or is too large
            written.files.discard()
            self._decline_failed(subtask, barrier.checkpoint_id, error)

    def _decline_failed(self, subtask: Subtask, checkpoint_id: int, error: Exception) -> None:
        log_failure(logger, logging.WARNING, f"checkpoint {checkpoint_id} of {subtask.name} failed", error)
        reason = "IO_EXCEPTION" if isinstance(error, OSError) else "CHECKPOINT_ASYNC_EXCEPTION"
        self.decline(subtask, checkpoint_id, reason, summary_of(error))

    def _report_subtask(self, subtask: Subtask, message: Message) -> None:
        """Says nothing of a subtask of an earlier deployment, whose snapshot may still be written."""
        job = self._job
        if job is not None and _runs(job, subtask):
            message |= {"vertex_id": subtask.vertex_id, "subtask": subtask.index}
            self._report(message, job.deployment.deployment)

    def _report(self, message: Message, deployment: int) -> None:
        try:
            self._connection.send({**message, "deployment": deployment})
        except OSError:
            logger.debug("the driver is gone, cannot report %s", message["type"])

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            job = self._job
            tasks = [] if job is None else [_measures(subtask) for subtask in job.subtasks.values()]
            deployment = -1 if job is None else job.deployment.deployment
            self._report({"type": "heartbeat", "tasks": tasks}, deployment)


def _runs(job: DeployedJob | None, subtask: Subtask) -> bool:
    """Whether the subtask is of the present deployment; of an earlier one nobody waits for news."""
    return job is not None and job.subtasks.get((subtask.vertex_id, subtask.index)) is subtask


def _is_awaited(job: DeployedJob | None, subtask: Subtask) -> bool:
    """Whether anybody waits for a snapshot of the subtask.

    A subtask may end while a checkpoint is pending, after a stop with savepoint for example. The coordinator aborts
    what lacks its acknowledgement then; when all have ended the job's files are deleted, and what came later would
    stay.
    """
    return _runs(job, subtask) and subtask.state is TaskState.RUNNING


def _acknowledgement(
    barrier: CheckpointBarrier, measures: SnapshotMeasures, written: WrittenSnapshot, async_ms: int
) -> Message:
    return {
        "type": "ack",
        "checkpoint_id": barrier.checkpoint_id,
        "directory": barrier.options.directory,
        "state": written.state.to_json(),
        "finished_operators": measures.finished_operators,
        "metrics": {
            "sync_duration": round(measures.sync_ms),
            "async_duration": async_ms,
            "checkpointed_size": written.written_bytes,
            "alignment_buffered": 0,
            "processed_data": measures.processed_bytes,
            "persisted_data": written.in_flight_bytes,
            "alignment_duration": measures.alignment_ms,
            "start_delay": measures.start_delay_ms,
            "unaligned": measures.unaligned,
        },
    }


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as the exception history shows it; the trace begins with the line that clients show.

    ``recoverable`` is false where trying again, on whatever host, meets the same error: the plan or the stored state is
    proven not to fit. That storage is away is no such proof. A ``consequence`` is most probably one of another worker's
    end, and has no trace: where a thread was when it learned of it says nothing.
    """
    report = report_of(error)
    if consequence := issubclass(type(error), ChannelLostError):
        report = replace(report, stack_trace=f"{report.exception}: {report.message}")
    recoverable = not issubclass(type(error), _HOPELESS)
    return {**asdict(report), "recoverable": recoverable, "consequence": consequence}


def _log_error(what: str, error: BaseException) -> None:
    if isinstance(error, ChannelLostError):
        logger.warning("%s: %s", what, error)
    else:
        log_failure(logger, logging.ERROR, what, error)


def _measures(subtask: Subtask) -> dict[str, Any]:
    metrics = subtask.metrics
    return {
        "vertex_id": subtask.vertex_id,
        "subtask": subtask.index,
        "rows_in": metrics.rows_in,
        "bytes_in": metrics.bytes_in,
        "rows_out": subtask.chain.end.rows,
        "bytes_out": subtask.chain.end.bytes,
        "late_rows_dropped": sum(operator.late_rows_dropped for operator in subtask.chain.operators),
        "busy_ms": metrics.busy_ns / 1e6,
        "idle_ms": metrics.idle_ns / 1e6,
        "backpressured_ms": metrics.backpressured_ns / 1e6,
        "debloated_buffer_size": metrics.debloated_buffer_size,
    }


def _pin(cpu: int | None) -> None:
    """Binds the process to a core; threads started later inherit it. None leaves it alone."""
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), {cpu})
            except OSError:
                logger.debug("thread %s cannot be bound to core %d", thread, cpu)
