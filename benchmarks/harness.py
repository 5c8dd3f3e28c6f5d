"""The common parts of all benchmarks: a session in Spark's local mode, a job in it, the sink's reports, and the JSON
line.

Never prints anything else on stdout. A benchmark that finds its result wrong raises :class:`BenchmarkError`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped, unused-ignore]
import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from benchmarks.process_tree import PeakMemory, listening_port, workers_of
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.checkpoints import Checkpoint, CheckpointStatistics
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import TERMINAL_STATES, IoMetrics, RunOptions
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session

PIPELINES = Path(__file__).resolve().parent / "pipelines"
START_TIMEOUT_S = 120.0
HISTORY = 10_000
ALIVE_S = 0.1
BACKENDS = {"memory": "hashmap", "rocksdb": "rocksdb"}
"""What ``--backend`` may be, and how ``state.backend.type`` names it."""


class BenchmarkError(RuntimeError):
    """The run is void: it failed, or its result is wrong."""


def progress(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def parser_for(name: str, description: str) -> argparse.ArgumentParser:
    """The command line of a benchmark."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def add_keyed_options(parser: argparse.ArgumentParser, *, seconds: float = 20.0) -> None:
    """The options of the keyed benchmarks."""
    parser.add_argument("--keys", type=positive_int, default=100_000, help="number of keys")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="subtasks of each vertex, and slots")
    parser.add_argument("--seconds", type=float, default=seconds, help="length of the measured window")
    parser.add_argument("--interval-ms", type=int, default=1000, help="checkpoint interval; 0 means no checkpoints")
    add_backend_option(parser, default="memory")


def positive_int(text: str) -> int:
    """An argument that is a whole number above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    """An argument that is a number of at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def add_backend_option(parser: argparse.ArgumentParser, *, default: str) -> None:
    """The option of benchmarks with keyed state."""
    parser.add_argument("--backend", choices=tuple(BACKENDS), default=default, help="state backend")


def backend_configuration(backend: str) -> dict[str, str]:
    """The job's options for a choice of ``--backend``."""
    return {"state.backend.type": BACKENDS[backend]}


@dataclass
class Report:
    """The last reports of the sink's subtasks, by subtask."""

    subtasks: dict[int, dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Report:
        found = {}
        for file in directory.glob("subtask-*.json"):
            document = json.loads(file.read_text())
            found[int(document["subtask"])] = document
        return cls(found)

    def total(self, field: str) -> int:
        """A number summed over the subtasks."""
        return sum(int(document[field]) for document in self.subtasks.values())

    def rows_per_s_since(self, earlier: Report, *, idle_allowed: bool = False) -> float:
        """The rates of all subtasks, each between its own two reports, added up; an idle one may count as 0."""
        rate = 0.0
        for index, document in self.subtasks.items():
            before = earlier.subtasks[index]
            elapsed_ms = document["last_ms"] - before["last_ms"]
            if elapsed_ms <= 0:
                if idle_allowed:
                    continue
                raise BenchmarkError(f"subtask {index} of the sink got no rows during the measured window")
            rate += (document["rows"] - before["rows"]) * 1000 / elapsed_ms
        return rate


class BenchmarkSession:
    """A running session and its directory, which is deleted afterwards."""

    def __init__(self, info: SessionInfo, client: CkptClient, directory: Path, memory: PeakMemory) -> None:
        self.info = info
        self.client = client
        self.directory = directory
        self._memory = memory

    @property
    def peak_rss_mb(self) -> int:
        return round(self._memory.peak_mb)

    def peak_memory(self) -> PeakMemory:
        """To be entered: samples the memory of the session from now on."""
        return PeakMemory(self.info.pid)

    def kill(self) -> None:
        """Of the driver, its JVM and its Python process; what else is of the session ends by itself."""
        self.info.driver.signal(signal.SIGKILL)
        self.info.leader.signal(signal.SIGKILL)

    def run(
        self,
        pipeline: str,
        arguments: Sequence[object],
        parallelism: int,
        configuration: Mapping[str, str],
        snapshot: str | None = None,
    ) -> BenchmarkJob:
        """Starts a pipeline of ``benchmarks/pipelines``; its first argument is the report directory.

        With a ``snapshot`` it continues from there.
        """
        report = self.directory / f"report-{pipeline}-{time.monotonic_ns()}"
        pipeline_id = self.client.upload_pipeline(*pack_pipeline(PIPELINES / f"{pipeline}.py"))
        options = RunOptions(
            arguments=tuple(map(str, (report, *arguments))),
            parallelism=parallelism,
            configuration={**backend_configuration("memory"), **configuration},
            savepoint_path=snapshot,
        )
        job = BenchmarkJob(self, self.client.run_pipeline(pipeline_id, options), report, parallelism)
        self.client.wait_for_state(job.id, ["RUNNING"], timeout_s=START_TIMEOUT_S, poll_interval_s=0.1)
        return job


class BenchmarkJob:
    """A job whose sink has format ``verify``."""

    def __init__(self, session: BenchmarkSession, job_id: str, report: Path, parallelism: int) -> None:
        self.id = job_id
        self.session = session
        self._client = session.client
        self._report = report
        self._parallelism = parallelism

    def move_to(self, session: BenchmarkSession) -> None:
        """Another driver has taken over."""
        self.session = session
        self._client = session.client

    def report(self) -> Report:
        return Report.read(self._report)

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.1) -> None:
        """Raises BenchmarkError when the job ends or the time is over before the condition holds."""
        deadline, look_at = time.monotonic() + timeout_s, 0.0
        while not condition():
            if time.monotonic() >= look_at:  # each is a request to the driver, which has other work
                self.check_alive()
                look_at = time.monotonic() + ALIVE_S
            if time.monotonic() > deadline:
                raise BenchmarkError(f"waited {timeout_s:g} s for {what}")
            time.sleep(poll_s)

    def wait_for_rows(self) -> None:
        """Until every subtask of the sink has reported."""
        self.wait_for("the first rows", lambda: len(self.report().subtasks) == self._parallelism, START_TIMEOUT_S)

    def wait_for_spares(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every slot has its warm spare: one that is still starting takes the time of a core."""

        def ready() -> bool:
            ports = [listening_port(worker) for worker in workers_of(self.session.info.pid)]
            return len([port for port in ports if port is not None]) == 2 * self._parallelism

        self.wait_for("a spare worker in every slot", ready, timeout_s)

    def let_run(self, seconds: float, sample: Callable[[], None] | None = None) -> None:
        """Sleeps while the job runs and prints its progress now and then; raises when the job ends.

        ``sample`` is called about every second.
        """
        end = time.monotonic() + seconds
        before, at = self.report().total("rows"), time.monotonic()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 1.0 if sample else 5.0))
            self.check_alive()
            if sample:
                sample()
            if time.monotonic() - at < 5.0 and time.monotonic() < end:
                continue
            rows, now = self.report().total("rows"), time.monotonic()
            progress(f"  about {(rows - before) / (now - at):,.0f} rows/s")
            before, at = rows, now

    def check_alive(self) -> None:
        """Raises BenchmarkError when the job has ended."""
        state = self._client.job_status(self.id)
        if state in TERMINAL_STATES:
            entries = self._client.job_exceptions(self.id).entries
            raise BenchmarkError(f"the job is {state}: {entries[0].stack_trace if entries else 'no failure is known'}")

    def active_worker(self) -> psutil.Process:
        """One that runs subtasks: its data port is a subtask's endpoint. Raises BenchmarkError."""
        vertices = [self._client.vertex_details(self.id, v.id) for v in self._client.job_details(self.id).vertices]
        ports = {int(subtask.endpoint.rpartition(":")[2]) for vertex in vertices for subtask in vertex.subtasks}
        for worker in workers_of(self.session.info.pid):
            if listening_port(worker) in ports:
                return worker
        raise BenchmarkError(f"no worker listens on one of the ports {sorted(ports)}")

    def ready_workers(self) -> list[psutil.Process]:
        """Those that listen: active ones and spares."""
        return [worker for worker in workers_of(self.session.info.pid) if listening_port(worker) is not None]

    def io_metrics(self) -> list[IoMetrics]:
        """The rows that each vertex has read and written, in topological order, as of its workers' last heartbeats."""
        return [vertex.io for vertex in self._client.job_details(self.id).vertices]

    def metric(self, name: str) -> int:
        """A whole number among the job's metrics; 0 while it is not there."""
        return int(self._client.job_metrics(self.id, (name,)).get(name, 0))

    def all_running(self) -> bool:
        details = self._client.job_details(self.id)
        return details.state == "RUNNING" and all(
            vertex.tasks.get("RUNNING") == vertex.parallelism for vertex in details.vertices
        )

    def deployment_s(self) -> float:
        """How long the slowest subtask's deployment took, its state read: without the plan, and without slots."""
        vertices = [self._client.vertex_details(self.id, v.id) for v in self._client.job_details(self.id).vertices]
        durations = [subtask.durations_ms for vertex in vertices for subtask in vertex.subtasks]
        return max(times.get("DEPLOYING", 0) + times.get("INITIALIZING", 0) for times in durations) / 1000

    def checkpoint(self) -> Checkpoint:
        """Takes one now, and returns it completed."""
        trigger = self._client.trigger_checkpoint(self.id)
        status = self._client.wait_for_operation("checkpoint", trigger, self.id, timeout_s=300, poll_interval_s=0.02)
        assert status.checkpoint_id is not None
        return self._client.checkpoint_details(self.id, status.checkpoint_id)

    def savepoint(self, savepoint_format: Literal["NATIVE", "CANONICAL"]) -> Checkpoint:
        """Takes one now, and returns it completed."""
        target = str(self.session.directory / "savepoints")
        trigger = self._client.trigger_savepoint(self.id, target, savepoint_format=savepoint_format)
        status = self._client.wait_for_operation("savepoint", trigger, self.id, timeout_s=600, poll_interval_s=0.02)
        assert status.location is not None
        history = self._client.checkpoint_statistics(self.id).history
        return next(taken for taken in history if taken.external_path == status.location)

    def cancel(self) -> None:
        self._client.cancel_job(self.id)
        self._client.wait_for_state(self.id, ["CANCELED"], timeout_s=60, poll_interval_s=0.1)

    def checkpoint_statistics(self) -> CheckpointStatistics:
        return self._client.checkpoint_statistics(self.id)

    def file(self, name: str) -> Path:
        """A file in the report directory, for pipelines that look for one."""
        return self._report / name

    def completed_checkpoints(self) -> list[Checkpoint]:
        """Completed checkpoints, savepoints left out, oldest first."""
        history = self._client.checkpoint_statistics(self.id).history
        return sorted((c for c in history if c.status == "COMPLETED" and not c.is_savepoint), key=lambda c: c.id)

    def sync_times_ms(self, checkpoint: Checkpoint) -> list[float]:
        """The synchronous part of one checkpoint in each subtask."""
        vertices = self._client.job_details(self.id).vertices
        answers = [self._client.checkpoint_subtasks(self.id, checkpoint.id, vertex.id) for vertex in vertices]
        return [float(subtask["checkpoint"]["sync"]) for answer in answers for subtask in answer["subtasks"]]

    def patch_interval(self, interval_ms: int) -> None:
        """Changes the checkpoint interval of the running job (FLIP-571)."""
        self._client.patch_checkpoint_config(self.id, CheckpointConfigPatch(interval_ms=interval_ms))

    def rescale(self, parallelism: int) -> None:
        """Of all vertices of the running job; returns when that is stored and being deployed."""
        vertices = self._client.resource_requirements(self.id)
        self._client.rescale(self.id, dict.fromkeys(vertices, parallelism), timeout_s=START_TIMEOUT_S)

    def configure(self, options: Mapping[str, str]) -> None:
        """Changes options of the running job (FLIP-530); returns when that is stored and a restart is under way."""
        self._client.patch_job_config(self.id, options)

    def drain(self) -> str:
        """Stops the job with a savepoint of everything that was read; its URL."""
        return self.stop(drain=True)

    def stop(self, *, drain: bool = False) -> str:
        """Stops the job with a savepoint, from which it can continue unless it is drained; its URL."""
        trigger = self._client.stop_with_savepoint(self.id, str(self.session.directory / "savepoints"), drain=drain)
        status = self._client.wait_for_operation("savepoint", trigger, self.id, timeout_s=120, poll_interval_s=0.02)
        self._client.wait_for_state(self.id, ["FINISHED"], timeout_s=60, poll_interval_s=0.02)
        assert status.location is not None
        return status.location


@contextmanager
def session(
    slots: int, configuration: Mapping[str, str] | None = None, *, master: str = "local"
) -> Iterator[BenchmarkSession]:
    """A session, in Spark's local mode unless another master is given; its log is shown when the benchmark fails."""
    with standby(slots, configuration, master=master, is_to_wait=False) as leads:
        yield leads()


@contextmanager
def standby(
    slots: int, configuration: Mapping[str, str] | None = None, *, master: str = "local", is_to_wait: bool = True
) -> Iterator[Callable[[], BenchmarkSession]]:
    """A session that waits to lead, while another one does; the call returns it once it leads."""
    directory = Path(tempfile.mkdtemp(prefix="ckpt-benchmark-"))
    log_file = directory / "session.log"
    conf = {"web.checkpoints.history": str(HISTORY), **(configuration or {})}
    progress(f"starting a session of {slots} slots")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.push(partial(_show_log, log_file))
        # A benchmark that receives a signal to end ends its session, too.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _end))
        stack.callback(lambda: starting.exception() or stop_session(starting.result()))
        starting = stack.enter_context(ThreadPoolExecutor(1)).submit(
            start_session, master, slots, conf=conf, log_file=log_file, work_directory=directory / "work"
        )
        if is_to_wait:
            _wait_for_line(log_file, "waiting for the leadership", starting)

        def leads() -> BenchmarkSession:
            info = starting.result()
            client = stack.enter_context(CkptClient(info.rest_url, token=info.token))
            return BenchmarkSession(info, client, directory, stack.enter_context(PeakMemory(info.pid)))

        yield leads


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _wait_for_line(log_file: Path, text: str, starting: Future[SessionInfo]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (log_file.exists() and text in log_file.read_text(errors="replace")):
        if starting.done():
            starting.result()
        if time.monotonic() > deadline:
            raise BenchmarkError(f"waited {START_TIMEOUT_S:g} s for {text!r} in the log of a session")
        time.sleep(0.1)


def _show_log(log_file: Path, kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None and log_file.exists():
        progress("".join(log_file.read_text(errors="replace").splitlines(keepends=True)[-20:]))


@contextmanager
def spark_beside(parallelism: int, memory: str) -> Iterator[SparkSession]:
    """A session of Spark in this process, which is measured beside the engine; ``memory`` is for example ``"2g"``.

    Enter it before the engine plans a query here: a process has one session, and that of the planner has one thread and
    little memory. Raises BenchmarkError if there is a session.
    """
    if SparkContext._active_spark_context is not None:
        raise BenchmarkError("Spark has been started in this process, with other threads than those of the comparison")
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory,
        "spark.sql.shuffle.partitions": str(parallelism),
        "spark.sql.session.timeZone": "UTC",
    }
    # Spark would start the first python3 of the path, which may lack the packages of this interpreter.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = SparkSession.builder.master(f"local[{parallelism}]").config(map=settings).getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` (0..1) of all values do not exceed; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_here(
    name: str, options: argparse.Namespace, measure: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> None:
    """Measures what this process and its children do, in a directory that is deleted afterwards, and emits it."""
    with tempfile.TemporaryDirectory(prefix=f"ckpt-{name.replace('_', '-')}-", ignore_cleanup_errors=True) as directory:
        with PeakMemory(os.getpid()) as memory:
            measures = measure(options, Path(directory))
        emit(name, options, measures, round(memory.peak_mb))


def emit(name: str, options: argparse.Namespace, measures: Mapping[str, Any], peak_rss_mb: int) -> None:
    """Prints the JSON line."""
    document = {
        "name": name,
        "options": {key: value for key, value in vars(options).items() if value is not None},
        **measures,
        "python": platform.python_version(),
        "pyspark": pyspark.__version__,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "peak_rss_mb": peak_rss_mb,
    }
    print(json.dumps(document), flush=True)


def run_main(main: Callable[[], None]) -> None:
    """Runs a benchmark; an invalid one ends with code 1 and a line on stderr."""
    try:
        main()
    except (BenchmarkError, CkptClientError) as error:
        progress(f"the benchmark is void: {error}")
        sys.exit(1)
