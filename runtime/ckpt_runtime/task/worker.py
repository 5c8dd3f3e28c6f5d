"""A worker process: receives the driver's messages, runs at most one deployment, reports its events.

It owns the threads other than the task threads: the control loop, the heartbeat, and the pool that writes snapshots. It
trusts only the driver, whose connection is authenticated.

On request it reports thread dumps, its log, and the code in which its subtasks spend time. A task's thread never
answers such a request, because it may be the subject of the question.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions, SavepointDuplication
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.configuration.registry import VERTEX_BOUNDS, VERTEX_PARALLELISM
from ckpt_runtime.configuration.state_options import StateOptions
from ckpt_runtime.connectors.tagged_values import UnreadableValueError, ValueNotCarriedError
from ckpt_runtime.failure_report import log_failure, report_of, summary_of
from ckpt_runtime.frontend.static_tables import unpack
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.network import control_messages as messages
from ckpt_runtime.network.agent_messages import LAST_WRITES_S, ProcessIdentity, RegisterWorker
from ckpt_runtime.network.connections import ChannelLostError, ControlConnection
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.network.transport import DataTransport
from ckpt_runtime.operators.task_context import HelperThread
from ckpt_runtime.process_figures import ProcessMeter
from ckpt_runtime.processes.thread_dump import dump_threads, frames_of
from ckpt_runtime.scheduler.deployment import JobDescriptor
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.state.backend import SharedHandles
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError, UnsupportedBackendError
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.structured_log import about, log_of_process, recent_lines
from ckpt_runtime.task.deployed_job import DeployedJob, PlanMismatchError, load_checked_plan
from ckpt_runtime.task.metrics import Activity
from ckpt_runtime.task.restored_input import StateRestoreError, UnreadableInFlightDataError
from ckpt_runtime.task.snapshot_files import NewFiles, WrittenSnapshot, write_snapshot
from ckpt_runtime.task.subtask import Subtask
from ckpt_runtime.task.subtask_checkpoints import SnapshotMeasures, SubtaskSnapshot

logger = logging.getLogger(__name__)

_SAMPLERS = 2
_MAX_STACKS = 2_000


class Diagnosis:
    """Answers the driver's questions. ``send`` may be called from any thread; ``present`` returns the deployment."""

    def __init__(
        self, send: Callable[[messages.WorkerAnswer], None], present: Callable[[], DeployedJob | None]
    ) -> None:
        self._send = send
        self._present = present
        self._samplers = ThreadPoolExecutor(_SAMPLERS, thread_name_prefix="sampler")
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        self._samplers.shutdown(wait=False, cancel_futures=True)

    def answer(self, question: messages.WorkerQuestion) -> None:
        """Answers a question without blocking; if no answer can be made, the driver stops waiting for it."""
        match question:
            case messages.DumpThreads():
                self._send(messages.ThreadDump(question.question, dump_threads()))
            case messages.ReadLog():
                self._send(messages.RecentLog(question.question, recent_lines()))
            case messages.SampleStacks():
                self._samplers.submit(self._sample, question)

    def _sample(self, order: messages.SampleStacks) -> None:
        try:
            sampler = StackSampler(_threads_of(self._present(), order))
            for _ in range(order.samples):
                if sampler.is_empty or self._closing.wait(order.interval_ms / 1000):
                    break
                sampler.look()
            self._send(messages.SampledStacks(order.question, sampler.stacks()))
        except Exception as error:
            log_failure(logger, logging.WARNING, f"vertex {order.vertex_id} could not be sampled", error)


def _threads_of(job: DeployedJob | None, order: messages.SampleStacks) -> list[tuple[Subtask, threading.Thread]]:
    if job is None or job.job_id != order.job_id:
        return []
    return [
        (subtask, thread.thread)
        for thread in job.threads
        for subtask in thread.subtasks
        if subtask.vertex_id == order.vertex_id
    ]


class StackSampler:
    """Repeatedly samples the stacks of the threads that work for some subtasks.

    A stack counts as on a processor when its thread has run for at least half of the time since the last sample.
    A thread that several subtasks share counts for the one that it currently runs.
    """

    def __init__(self, threads: Sequence[tuple[Subtask, threading.Thread]]) -> None:
        self._threads = threads
        self._seen: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        self._looked_ns = time.perf_counter_ns()
        self._ran_ns: dict[int, int] = {
            thread.native_id: _ran_ns(thread.native_id) or 0 for _, thread in threads if thread.native_id is not None
        }

    @property
    def is_empty(self) -> bool:
        return not self._threads

    def look(self) -> None:
        now_ns = time.perf_counter_ns()
        passed_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        frames = sys._current_frames()  # noqa: SLF001 -- there is no public way
        helpers = [thread for thread in threading.enumerate() if isinstance(thread, HelperThread)]
        ran: dict[int, bool] = {}
        for subtask, own in self._threads:
            activity = subtask.metrics.timer.activity
            for thread in (own, *(helper for helper in helpers if helper.helps is own)):
                # The subtask's thread may currently work for another subtask, or for none.
                if thread.ident is None or thread.ident not in frames or (thread is own and activity is None):
                    continue
                if thread.ident not in ran:
                    ran[thread.ident] = self._has_run(thread, passed_ns, activity)
                key = (subtask.index, tuple(frames_of(frames[thread.ident])))
                if key not in self._seen and len(self._seen) >= _MAX_STACKS:
                    key = (subtask.index, ("(further stacks)",))
                self._seen.setdefault(key, [0, 0])[0 if ran[thread.ident] else 1] += 1

    def stacks(self) -> tuple[messages.SampledStack, ...]:
        return tuple(messages.SampledStack(index, frames, on, off) for (index, frames), (on, off) in self._seen.items())

    def _has_run(self, thread: threading.Thread, passed_ns: int, activity: Activity | None) -> bool:
        ran_ns = None if thread.native_id is None else _ran_ns(thread.native_id)
        if thread.native_id is None or ran_ns is None:
            return activity is Activity.BUSY
        before, self._ran_ns[thread.native_id] = self._ran_ns.get(thread.native_id, ran_ns), ran_ns
        return 2 * (ran_ns - before) >= passed_ns


def _ran_ns(thread: int) -> int | None:
    """CPU time of a thread of this process in ns, by the kernel; None where it is unknown (other than Linux)."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None


SNAPSHOT_THREADS = 2
HEARTBEAT_S = 1.0
SPARK_WAIT_S = 600.0
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


class AgentWatch(Protocol):
    """Binds the process to its slot agent: it ends when the agent ends. See ``spark/worker_main.py``."""

    @property
    def identity(self) -> ProcessIdentity: ...

    @property
    def directory(self) -> str:
        """The directory of temporary files, which the agent removes after the process has ended."""

    def begin_work(self) -> None: ...

    def adopted_by(self, agent: ProcessIdentity) -> None: ...


class TaskWorker:
    """One worker process's life: :meth:`run` serves the driver until the connection ends."""

    def __init__(
        self,
        connection: ControlConnection,
        secret: str,
        parent_watch: AgentWatch,
        *,
        slot: str,
        worker_id: str,
        data_ports: tuple[int, int] | None = None,
    ) -> None:
        self._connection = connection
        self._parent_watch = parent_watch
        self._transport = DataTransport(connection.local_host, secret, data_ports)
        self._job: DeployedJob | None = None
        self._descriptor: JobDescriptor | None = None
        self._plan: tuple[str, CompiledPlan] | None = None
        self._programs: dict[str, str] = {}
        self._shared_handles = SharedHandles()
        self._writing: dict[tuple[Subtask, int], NewFiles] = {}
        self._snapshots = ThreadPoolExecutor(SNAPSHOT_THREADS, thread_name_prefix="snapshot")
        self._unfinished: set[Future[None]] = set()
        """Snapshots that are being written or wait for a thread."""
        self._diagnosis = Diagnosis(self._report, lambda: self._job)
        self._spark: Future[str] | None = None
        self._closing = threading.Event()
        self._cores = _allowed_cores()
        process, address = parent_watch.identity, self._transport.address
        connection.send(RegisterWorker(slot, worker_id, address, process, parent_watch.directory))

    def run(self) -> None:
        """Serves the driver. Raises ConnectionError when it has ended, MalformedMessageError for an invalid message."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        commands: SimpleQueue[messages.WorkerCommand | BaseException] = SimpleQueue()
        threading.Thread(target=self._receive, args=(commands,), name="control", daemon=True).start()
        while True:
            command = commands.get()
            if isinstance(command, BaseException):
                raise command
            self._handle(command)

    def close(self) -> None:
        """Waits until discarded snapshots that are still being written have deleted their files.

        If the process ended earlier, its last requests could still create files in an object store, which would stay.
        """
        self._closing.set()
        job, self._job = self._job, None
        if job is not None:
            job.cancel(timeout_s=1)
        self._give_up_snapshots()
        self._snapshots.shutdown(wait=False, cancel_futures=True)
        wait_for_all(set(self._unfinished), LAST_WRITES_S)
        self._diagnosis.close()
        self._transport.close()
        self._connection.close()
        self._shared_handles.close()
        for directory in self._programs.values():
            shutil.rmtree(directory, ignore_errors=True)

    def _receive(self, commands: SimpleQueue[messages.WorkerCommand | BaseException]) -> None:
        """Receives messages. Commands may take minutes (cancelling stuck user code); questions are answered then."""
        try:
            while True:
                command = self._connection.receive(messages.TO_WORKER)
                if isinstance(command, messages.WorkerQuestion):
                    self._diagnosis.answer(command)
                elif isinstance(command, messages.SparkAddress):
                    self._take_spark(command)
                else:
                    commands.put(command)
        except BaseException as error:
            commands.put(error)

    def _handle(self, command: messages.WorkerCommand) -> None:
        match command:
            case messages.DeploySubtasks():
                # From now on the worker ends with its agent: only one that has never worked may be adopted by another.
                self._parent_watch.begin_work()
                self._deploy(command)
            case messages.CancelDeployment():
                self._cancel(command)
            case messages.TriggerCheckpoint():
                self._trigger(command)
            case messages.NotifyCheckpointComplete():
                self._mail_tasks(command, lambda subtask: subtask.notify_complete(command.checkpoint_id))
            case messages.NotifyCheckpointAborted():
                self._mail_tasks(
                    command, lambda subtask: subtask.notify_aborted(command.checkpoint_id, command.latest_completed)
                )
            case messages.AlignSources():
                self._mail_tasks(command, lambda subtask: subtask.align(command.minimum))
            case messages.LimitSources():
                self._mail_tasks(command, lambda subtask: subtask.limit(command.rates))
            case messages.FollowAgent():
                self._parent_watch.adopted_by(command.agent)
                self._connection.send(messages.Following())

    def _deploy(self, command: messages.DeploySubtasks) -> None:
        """Deploys subtasks. Any failure is reported as this deployment's, and the worker keeps running."""
        deployment = command.deployment
        try:
            job = self._descriptor = command.job or self._descriptor
            if job is None:
                raise RuntimeError("the driver has not sent this worker the job graph")
            log_of_process(job_id=job.job_id, job_name=job.graph.name, attempt=deployment.attempt)
            _bind(self._cores if deployment.pin_cpu is None else {deployment.pin_cpu})
            directory = self._unpack(job.program.directory, command.archive, has_tables=bool(job.graph.tables))
            plan = self._plan_of(job, directory)
            self._spark = None
            spark_url = partial(self._spark_url, deployment.deployment)
            self._job = DeployedJob(job, deployment, plan, self._transport, self, self._shared_handles, spark_url)
            self._job.start()
            names = ", ".join(subtask.name for subtask in self._job.subtasks.values())
            logger.info("runs attempt %d of job %s: %.1000s", deployment.attempt, job.job_id, names)
        # An entry point may call sys.exit(), which must not end the worker.
        except (Exception, SystemExit) as error:
            failure = _logged(f"deployment {deployment.deployment} failed", error)
            self._report(messages.DeploymentFailed(deployment.deployment, failure))

    def _unpack(self, program_id: str, archive: bytes | None, *, has_tables: bool = False) -> str:
        """The directory of the pipeline's files; the driver sends them once per worker."""
        known = self._programs.get(program_id)
        if known is not None:
            return known
        if archive is None:
            raise RuntimeError(f"the files of program {program_id} were never sent to this worker")
        directory = tempfile.mkdtemp(prefix="ckpt-program-")
        try:
            unpack(archive, directory, has_tables=has_tables)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._programs[program_id] = directory
        return directory

    def _plan_of(self, job: JobDescriptor, directory: str) -> CompiledPlan:
        """The entry point runs once per worker, job and configuration, not once per restart."""
        graph = job.graph
        # A live rescale changes only these options, which operators do not see: the entry point need not run again.
        rescaled = (VERTEX_PARALLELISM, VERTEX_BOUNDS)
        options = sorted((key, text) for key, text in graph.configuration.items() if key not in rescaled)
        key = f"{job.program.directory}:{graph.plan_fingerprint}:{options}"
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, load_checked_plan(job, directory))
        return self._plan[1]

    def _cancel(self, command: messages.CancelDeployment) -> None:
        # Cleared first: the answer below covers the reports of tasks while they end.
        job, self._job = self._job, None
        self._give_up_snapshots()
        ended = True
        if job is not None:
            timeout_ms = job.configuration.get(ExecutionOptions.TASK_CANCELLATION_TIMEOUT)
            ended = job.cancel(timeout_ms / 1000 if timeout_ms else threading.TIMEOUT_MAX)
        self._report(messages.Canceled(command.deployment, ended))

    def _spark_url(self, deployment: int) -> str:
        """Asks the driver for the address of the session's Spark, and waits for it. Raises RuntimeError without one."""
        waiting = self._spark
        if waiting is None:
            waiting = self._spark = Future()
            self._report(messages.SparkWanted(deployment))
        return waiting.result(SPARK_WAIT_S)

    def _take_spark(self, answer: messages.SparkAddress) -> None:
        waiting = self._spark
        if waiting is None or waiting.done():
            return
        if answer.error:
            waiting.set_exception(RuntimeError(f"the session's Spark cannot be used: {answer.error}"))
        else:
            waiting.set_result(answer.url)

    def _give_up_snapshots(self) -> None:
        for files in list(self._writing.values()):
            files.give_up()

    def _trigger(self, command: messages.TriggerCheckpoint) -> None:
        barrier = CheckpointBarrier(command.checkpoint_id, command.timestamp, command.options)
        job = self._current(command.deployment)
        for key in command.tasks:
            if job is None or not job.mail(key, lambda task: task.trigger_checkpoint(barrier)):
                reason, message = "CHECKPOINT_DECLINED_TASK_NOT_READY", "the subtask is not deployed here"
                self._report(
                    messages.DeclineCheckpoint(command.deployment, *key, barrier.checkpoint_id, reason, message)
                )

    def _mail_tasks(
        self,
        command: messages.NotifyCheckpointComplete
        | messages.NotifyCheckpointAborted
        | messages.AlignSources
        | messages.LimitSources,
        action: Callable[[Subtask], None],
    ) -> None:
        job = self._current(command.deployment)
        if job is not None:
            for key in command.tasks:
                job.mail(key, action)

    def _current(self, deployment: int) -> DeployedJob | None:
        job = self._job
        return job if job is not None and job.deployment.deployment == deployment else None

    # SubtaskHost: called by task threads.

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic_ns() / 1_000_000

    def state_changed(self, subtask: Subtask, error: BaseException | None = None) -> None:
        with about(vertex_id=subtask.vertex_id, subtask=subtask.index):
            failure = None if error is None else _logged(f"subtask {subtask.name} failed", error)
        if (sender := self._sender(subtask)) is not None:
            self._report(messages.TaskStateChanged(*sender, subtask.state, failure, subtask.last_intervals))

    def end_of_data(self, subtask: Subtask, waits: bool) -> None:
        if (sender := self._sender(subtask)) is not None:
            self._report(messages.EndOfDataReport(*sender, waits))

    def source_progress(self, subtask: Subtask, progress: Progress) -> None:
        if (sender := self._sender(subtask)) is not None:
            self._report(messages.SourceProgress(*sender, *progress))

    def decline(self, subtask: Subtask, checkpoint_id: int, reason: str, message: str) -> None:
        if (sender := self._sender(subtask)) is not None:
            self._report(messages.DeclineCheckpoint(*sender, checkpoint_id, reason, message))

    def _sender(self, subtask: Subtask) -> tuple[int, str, int] | None:
        """The first fields of its messages; None for an earlier deployment, whose snapshot may still be written."""
        job = self._job
        if job is None or not _runs(job, subtask):
            return None
        return job.deployment.deployment, subtask.vertex_id, subtask.index

    def write_snapshot(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        writing = self._snapshots.submit(self._write_and_tell, subtask, snapshot)
        self._unfinished.add(writing)
        writing.add_done_callback(self._unfinished.discard)

    def _write_and_tell(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        """Writes, then notifies the subtask, which may only end after the driver has received the acknowledgement."""
        try:
            self._write_snapshot(subtask, snapshot)
        finally:
            job, checkpoint_id = self._job, snapshot.barrier.checkpoint_id
            if job is not None and _runs(job, subtask):
                job.mail((subtask.vertex_id, subtask.index), lambda task: task.snapshot_written(checkpoint_id))

    def _write_snapshot(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        job = self._job
        if job is None or not _is_awaited(job, subtask):
            snapshot.release()
            return
        start = time.monotonic()
        settings = job.configuration
        threshold = settings.get(StateOptions.FS_MEMORY_THRESHOLD)
        copies_only = settings.get(CheckpointingOptions.SAVEPOINT_DUPLICATION) is SavepointDuplication.COPY
        barrier, measures = snapshot.barrier, snapshot.measures
        key = (subtask, barrier.checkpoint_id)

        def begun(files: NewFiles) -> None:
            self._writing[key] = files

        try:
            written = write_snapshot(
                snapshot, threshold, subtask.checkpoints.persisted, copies_only=copies_only, begun=begun
            )
        except Exception as error:
            self._decline_failed(subtask, barrier.checkpoint_id, error)
            return
        finally:
            self._writing.pop(key, None)
        sender = self._sender(subtask)
        if sender is None or not _is_awaited(self._job, subtask):
            written.files.discard()
            return
        async_ms = round((time.monotonic() - start) * 1000)
        metrics, directory = _metrics(measures, written, async_ms), barrier.options.directory
        try:
            self._report(
                messages.AcknowledgeCheckpoint(
                    *sender, barrier.checkpoint_id, directory, written.state, metrics, snapshot.intervals
                )
            )
        except ValueError as error:  # the state contains values that a document cannot hold, or is too large
            written.files.discard()
            self._decline_failed(subtask, barrier.checkpoint_id, error)

    def _decline_failed(self, subtask: Subtask, checkpoint_id: int, error: Exception) -> None:
        if self._sender(subtask) is None:
            return
        with about(vertex_id=subtask.vertex_id, subtask=subtask.index, checkpoint_id=checkpoint_id):
            log_failure(logger, logging.WARNING, f"checkpoint {checkpoint_id} of {subtask.name} failed", error)
        reason = "IO_EXCEPTION" if isinstance(error, OSError) else "CHECKPOINT_ASYNC_EXCEPTION"
        self.decline(subtask, checkpoint_id, reason, summary_of(error))

    def _report(self, message: messages.DeploymentMessage | messages.WorkerAnswer) -> None:
        try:
            self._connection.send(message)
        except OSError:
            logger.debug("the driver is gone, cannot report %s", type(message).__name__)

    def _progress(self, job: DeployedJob) -> tuple[messages.SnapshotProgress, ...]:
        return tuple(
            messages.SnapshotProgress(
                subtask.vertex_id, subtask.index, checkpoint_id, files.written_bytes, files.duplicated_bytes
            )
            # Iterates over a copy, because pool threads start and finish writes concurrently.
            for (subtask, checkpoint_id), files in list(self._writing.items())
            if _runs(job, subtask)
        )

    def _beat(self) -> None:
        meter = ProcessMeter()
        while not self._closing.wait(HEARTBEAT_S):
            try:
                self._report(self._heartbeat(meter))
            except Exception as error:
                # Measuring may fail, because the subtasks change during it. The thread must continue with the next
                # heartbeat: without heartbeats, the driver could not detect a job that makes no progress.
                log_failure(logger, logging.WARNING, "a heartbeat was left out", error)

    def _heartbeat(self, meter: ProcessMeter) -> messages.WorkerHeartbeat:
        job = self._job
        if job is None:
            return messages.WorkerHeartbeat(-1, process=meter.measure())
        tasks = tuple(_measures(subtask) for subtask in job.subtasks.values())
        return messages.WorkerHeartbeat(job.deployment.deployment, tasks, self._progress(job), meter.measure())


def _runs(job: DeployedJob | None, subtask: Subtask) -> bool:
    """Whether the subtask belongs to the current deployment; reports of an earlier one are not needed."""
    return job is not None and job.subtasks.get((subtask.vertex_id, subtask.index)) is subtask


def _is_awaited(job: DeployedJob | None, subtask: Subtask) -> bool:
    """Whether a snapshot of the subtask is still needed.

    A subtask may end while a checkpoint is pending, for example after a stop with savepoint. The coordinator then
    aborts checkpoints that lack its acknowledgement. When all subtasks have ended, the job's files are deleted, and
    files written later would stay.
    """
    return _runs(job, subtask) and subtask.state is TaskState.RUNNING


def _metrics(measures: SnapshotMeasures, written: WrittenSnapshot, async_ms: int) -> CheckpointMetrics:
    return CheckpointMetrics(
        sync_duration=round(measures.sync_ms),
        async_duration=async_ms,
        checkpointed_size=written.written_bytes,
        reused_size=written.reused_bytes,
        processed_data=measures.processed_bytes,
        persisted_data=written.in_flight_bytes,
        alignment_duration=measures.alignment_ms,
        start_delay=measures.start_delay_ms,
        unaligned=measures.unaligned,
    )


def describe_error(error: BaseException) -> messages.TaskFailure:
    """An error as the exception history shows it; the trace begins with the line that clients show.

    Unavailable storage or a full local disk counts as recoverable, because a retry need not meet the same error. So
    does a planning error that another error caused, such as that of a source whose schema was requested: the driver
    made the same plan successfully before. A consequence has no trace: the place where a thread noticed another
    worker's end is irrelevant.
    """
    report = report_of(error)
    consequence = issubclass(type(error), ChannelLostError)
    trace = f"{report.exception}: {report.message}" if consequence else report.stack_trace
    caused = issubclass(type(error), PlanError) and error.__cause__ is not None
    recoverable = caused or not issubclass(type(error), _HOPELESS)
    return messages.TaskFailure(FailureInfo(report.exception, report.message, trace), recoverable, consequence)


def _logged(what: str, error: BaseException) -> messages.TaskFailure:
    """Describes an error once for both the log and the driver: an exception may be as large as memory."""
    failure = describe_error(error)
    level = logging.WARNING if failure.consequence else logging.ERROR
    logger.log(level, "%s: %s", what, failure.cause.stack_trace)
    return failure


def _measures(subtask: Subtask) -> messages.SubtaskMeasures:
    metrics = subtask.metrics
    now_ns = time.perf_counter_ns()
    spent = metrics.timer.until(now_ns)
    return messages.SubtaskMeasures(
        vertex_id=subtask.vertex_id,
        subtask=subtask.index,
        rows_in=metrics.rows_in,
        bytes_in=metrics.bytes_in,
        rows_out=subtask.chain.end.rows,
        bytes_out=subtask.chain.end.bytes,
        late_rows_dropped=sum(operator.late_rows_dropped for operator in subtask.chain.operators),
        bad_rows_dropped=sum(operator.bad_rows_dropped for operator in subtask.chain.operators),
        busy_ms=spent.busy / 1e6,
        idle_ms=spent.idle / 1e6,
        backpressured_ms=spent.backpressured / 1e6,
        measured_ms=now_ns / 1e6,
        slices=metrics.slices,
        work_waits=subtask.work_waits,
        backpressured=subtask.backpressured,
        operator_rows=subtask.chain.operator_rows,
        input_watermark=subtask.input_watermark,
        output_watermark=subtask.chain.end.watermark,
        queued_elements=subtask.gate.queued,
        input_usage=subtask.gate.usage,
        output_usage=subtask.chain.end.usage,
        alignment_ms=metrics.alignment_ms,
        start_delay_ms=metrics.start_delay_ms,
        debloated_buffer_size=metrics.debloated_buffer_size,
        pending_rows=subtask.chain.head.pending_rows,
        alignment_drift_ms=subtask.chain.head.alignment_drift_ms,
        state=subtask.chain.state_metrics(),
    )


def _allowed_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _bind(cores: set[int]) -> None:
    """Binds the process to cores, if the system supports it; threads started later inherit the binding."""
    if cores and cores != _allowed_cores():
        # Each thread has its own affinity, and many threads already run.
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), cores)
            except OSError:
                logger.debug("thread %s cannot be bound to cores %s", thread, sorted(cores))
