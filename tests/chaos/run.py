"""One run: a job, seeded faults one after the other, and what must hold in the end."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError, OperationFailed
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import TERMINAL_STATES, RunOptions
from tests.chaos.disk import Disk
from tests.chaos.ends import KINDS
from tests.chaos.oracle import Input, check_content
from tests.chaos.remains import check_checkpoints, check_hidden_files, check_resources
from tests.chaos.session import STORAGE_TIMEOUT_S, Session, freeze, kill, thaw
from tests.chaos.spark_session import SparkSession
from tests.support.patience import patient
from tests.support.processes import cut_connections, silence_connections
from tests.support.spark_sessions import wait_until

T = TypeVar("T")

PIPELINE = Path(__file__).parent / "pipeline"
OPTIONS = {
    "execution.checkpointing.interval": "300 ms",
    "execution.checkpointing.tolerable-failed-checkpoints": "1000000",
    "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
    "execution.checkpointing.num-retained": "2",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000000",
    "restart-strategy.fixed-delay.delay": "200 ms",
    "pipeline.max-parallelism": "16",
    "taskmanager.network.buffer.max-rows": "512",
    "state.storage.fs.memory-threshold": "0 b",
}
BACKENDS: Mapping[str, Mapping[str, str]] = {
    "hashmap": {"state.backend.type": "hashmap"},
    # So few keys stay in memory that most are read from the database again.
    "rocksdb": {
        "state.backend.type": "rocksdb",
        "execution.checkpointing.incremental": "true",
        "state.backend.rocksdb.cache.max-keys": "16",
        "state.backend.rocksdb.cache.max-rows": "64",
        "state.backend.rocksdb.memory.fixed-per-slot": "4 mb",
    },
}
BUFFER_TIMEOUT = "execution.buffer-timeout.interval"
ROLES = ("worker", "template", "agent")
LEASE_S = 4.0
"""Of drivers without Spark; of others it is the default."""
PROGRESS_S = patient(600.0)
"""How long a job may take after a fault is over until it has completed two more checkpoints."""


@dataclass
class Run:
    """``rows`` orders come at ``rate`` rows per second while faults happen; what is left then comes at once.

    ``kind`` is one of :data:`~tests.chaos.ends.KINDS`, a job between two systems; without one it is that of
    ``chaos_job.py``. The source of a job between two systems ends with the faults.
    """

    directory: Path
    seed: int
    rows: int
    rate: int
    log: Callable[[str], None] = print
    spark: bool = False
    backend: str = "hashmap"
    lease_s: float = LEASE_S
    kind: str | None = None
    parallelism: int = 2
    job_id: str = ""
    cancelled: list[str] = field(default_factory=list)
    faults: int = 0

    def __post_init__(self) -> None:
        self.choice = random.Random(self.seed)
        self.session = SparkSession(self.directory) if self.spark else Session(self.directory, self.lease_s)
        self.input = Input.generate(self.seed, self.rows)
        self.input.write(self.directory)
        self.disk = Disk(self.directory / "disk")
        self._away = ExitStack()
        self.ends = self.kind and KINDS[self.kind](self.directory, self.output, self.input, max(1, self.rate // 10))

    @property
    def output(self) -> Path:
        return self.disk.root / "out"

    @property
    def checkpoints(self) -> Path:
        return self.disk.root / "checkpoints"

    @property
    def client(self) -> CkptClient:
        assert self.session.client is not None
        return self.session.client

    # --- the life of a run

    def begin(self) -> None:
        """The job runs and has completed checkpoints."""
        if self.ends:
            self.ends.start()
        self.session.start()
        self._submit(self.rate, None)
        self._progress()

    def fault(self, name: str) -> None:
        """Lets it happen, and waits until the job makes progress again. Disk and target are whole then."""
        self.faults += 1
        self.log(f"fault {self.faults}: {name}")
        try:
            SPARK_FAULTS[name](self)
        finally:
            self.heal()
        self._progress()

    def kinds(self, names: list[str]) -> Iterator[str]:
        """Faults without end, in which every kind comes once before any comes again."""
        while True:
            yield from self.choice.sample(names, len(names))

    def finish(self) -> None:
        """Ends the job with all of its input, and checks everything."""
        check_resources(self.session)
        if self.ends:
            self.ends.finish()
            self.stop()
            self.ends.check()
        else:
            self.rescale(0)
            self._finished()
            check_content(self.input, self.output)
        check_hidden_files(self.disk.root)
        check_checkpoints(self.checkpoints, self.cancelled, self.directory / "savepoints")
        self.session.end()

    def clean_up(self) -> None:
        """Whatever happened."""
        self.session.kill_everything()
        self._away.close()
        if self.ends:
            self.ends.close()
        self.disk.unmount()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- the job

    def _submit(self, rate: int, snapshot: str | None) -> None:
        options = RunOptions(
            entry_point=self.ends.entry if self.ends else "chaos_job:pipeline",
            arguments=self.ends.arguments() if self.ends else (str(self.directory), str(self.output), str(rate)),
            parallelism=self.parallelism,
            configuration={**OPTIONS, **BACKENDS[self.backend], "execution.checkpointing.dir": str(self.checkpoints)},
            savepoint_path=snapshot,
        )
        self.job_id = self.client.run_pipeline(self.client.upload_pipeline(*pack_pipeline(PIPELINE)), options)
        wait_until(lambda: self._status() != "INITIALIZING", "the job to start")

    def _status(self) -> str:
        """Raises AssertionError with the cause when the job has failed; empty while the driver does not answer."""
        try:
            status = self.client.job_status(self.job_id)
            cause = self.client.job_exceptions(self.job_id, 1) if status == "FAILED" else None
        except CkptClientError:
            return ""
        assert status != "FAILED", f"the job has failed: {cause}"
        return status

    def _completed(self) -> int:
        try:
            return self.client.checkpoint_statistics(self.job_id).counts.completed
        except CkptClientError:
            return -1

    def _progress(self) -> None:
        """Two more checkpoints than now, or the end of the input. A new driver counts from zero."""
        known = -1

        def moved() -> bool:
            nonlocal known
            if self._replaced():
                known = -1
            if known < 0:
                known = self._completed()
                return False
            status = self._status()
            assert status not in TERMINAL_STATES, f"the job is {status}: give it more rows"
            return status == "RUNNING" and self._completed() >= known + 2

        wait_until(moved, f"the job to make progress after fault {self.faults}", PROGRESS_S)

    def _replaced(self) -> bool:
        """On a busy machine a driver may give up its leadership; its supervisor then starts another one."""
        if not self.session.has_given_up():
            return False
        self.log("  the driver has given up its leadership; another one is started")
        self.session.kill_driver()
        return True

    def asked(self, ask: Callable[[], T]) -> T:
        """What may be asked twice; asks the next driver when this one gives up meanwhile."""
        while True:
            try:
                return ask()
            except CkptClientError:
                if not self._replaced():
                    raise

    def _finished(self) -> None:
        """However long the rest of the input takes, as long as checkpoints of it complete."""
        moved_at, known = time.monotonic(), -1
        while self._status() != "FINISHED":
            completed = self._completed()
            if self._replaced() or completed != known:
                moved_at, known = time.monotonic(), completed
            assert time.monotonic() - moved_at < PROGRESS_S, "the job neither finishes nor completes checkpoints"
            time.sleep(0.5)

    def stop(self) -> str:
        """Stops the job, and returns its savepoint. One that comes while the job restarts is asked for again."""
        locations: list[str] = []

        def stopped() -> bool:
            try:
                trigger = self.client.stop_with_savepoint(self.job_id, str(self.directory / "savepoints"))
                done = self.client.wait_for_operation("savepoint", trigger, self.job_id, timeout_s=patient(180))
            except OperationFailed as error:
                self.log(f"  the stop failed, again: {str(error)[:200]}")
                return False
            except CkptClientError:
                if not self._replaced():
                    raise
                return False
            assert done.location is not None
            locations.append(done.location)
            return True

        wait_until(stopped, "the job to stop with a savepoint", PROGRESS_S)
        return locations[0]

    def rescale(self, rate: int) -> None:
        """Resumes from a savepoint with another parallelism."""
        savepoint = self.stop()
        self.parallelism = self.choice.choice((1, 2, 3))
        self.log(f"  resumes from {savepoint} with parallelism {self.parallelism}")
        self._submit(rate, savepoint)

    def rescale_live(self) -> None:
        """The job keeps its parallelism when a checkpoint of it fails meanwhile; another driver or job may come."""
        self.parallelism = self.choice.choice((1, 2, 3))
        try:
            wanted = {vertex.id: self.parallelism for vertex in self.client.job_details(self.job_id).vertices}
            self.client.rescale(self.job_id, wanted, timeout_s=patient(180))
            self.log(f"  rescaled to {self.parallelism}")
        except CkptClientError as error:
            self.log(f"  not rescaled: {str(error)[:200]}")

    def cancel(self) -> None:
        """Cancels and waits; the newest checkpoint stays."""
        self.asked(lambda: self.client.cancel_job(self.job_id))
        wait_until(lambda: self._status() == "CANCELED", "the job to be cancelled", PROGRESS_S)
        self.cancelled.append(self.job_id)

    def resume(self) -> None:
        """Continues from the newest checkpoint of the cancelled job, as another job."""
        retained = self.checkpoints / self.job_id
        newest = max(retained.glob("chk-*/_metadata"), key=lambda file: int(file.parent.name[4:])).parent
        self.log(f"  resumes from {newest}")
        self._submit(self.rate, str(newest))

    # --- faults

    def victim(self, role: str) -> int:
        """A process of the session. There may be none for a moment."""
        found: list[int] = []

        def there() -> bool:
            found[:] = self.session.of_role(role)
            return bool(found)

        wait_until(there, f"a {role}")
        return self.choice.choice(found)

    def hide(self, name: str) -> None:
        """A directory vanishes, until :meth:`heal`; of the output of a job into a server, the server is away."""
        outages = self.ends.outages() if self.ends and name == "out" else ()
        if outages:
            self._away.enter_context(self.choice.choice(outages)())
        else:
            self.disk.vanish(name, mounted=self.choice.random() < 0.5)

    def heal(self) -> None:
        self._away.close()
        if delayed := self.disk.heal():
            self.log(f"  {delayed} files were slow to open")

    def hold(self, longest_s: float = 3.0) -> None:
        """The time that a fault lasts."""
        time.sleep(self.choice.uniform(0.2, longest_s))


def _kill(role: str) -> Callable[[Run], None]:
    def happen(run: Run) -> None:
        kill(run.victim(role))

    return happen


def _freeze(role: str) -> Callable[[Run], None]:
    """Shorter and longer than a heartbeat is waited for."""

    def happen(run: Run) -> None:
        pid = run.victim(role)
        freeze(pid)
        try:
            run.hold(5.0)
        finally:
            thaw(pid)

    return happen


def _kill_driver(run: Run) -> None:
    run.session.kill_driver()


def _freeze_driver(run: Run) -> None:
    """Shorter and longer than its lease."""
    pid = run.session.driver_pid
    freeze(pid)
    try:
        run.hold(2 * LEASE_S)
    finally:
        thaw(pid)


def _kill_driver_with_standby(run: Run) -> None:
    former = run.session.driver_pid
    run.session.stand_by()
    kill(former)
    run.session.lead()
    run.session.dismiss()


def _freeze_driver_beyond_its_lease(run: Run) -> None:
    """Its standby leads when it wakes: it changes nothing any more."""
    former = run.session.driver_pid
    run.session.stand_by()
    freeze(former)
    try:
        run.session.lead()
    finally:
        thaw(former)
    run.session.dismiss()


def _cut(run: Run) -> None:
    """The network between two slots. At parallelism 1 there is none."""
    workers = run.session.of_role("worker")
    pairs = list(combinations(workers, 2))
    for one, other in run.choice.sample(pairs, len(pairs)):
        with suppress(OSError):  # one of them has ended
            count = cut_connections(one, other)
            if count:
                run.log(f"  {count} connections")
                return
    run.log("  nothing to cut")


def _silence(run: Run) -> None:
    """Packets between two slots vanish, which no process notices until the kernel gives up their connection."""
    pairs = list(combinations(run.session.of_role("worker"), 2))
    for one, other in run.choice.sample(pairs, len(pairs)):
        with suppress(OSError, AssertionError):  # one of them has ended
            count = silence_connections(one, other)
            if count:
                run.log(f"  {count} connections")
                return
    run.log("  nothing to silence")


def _kill_jvm(run: Run) -> None:
    assert isinstance(run.session, SparkSession)
    run.session.kill_jvm()


def _kill_host(run: Run) -> None:
    assert isinstance(run.session, SparkSession)
    run.session.kill_host(run.choice)


def _configure(run: Run) -> None:
    """An option that needs a restart, perhaps while a worker is killed."""
    milliseconds = run.choice.choice((10, 50, 100, 200))
    run.log(f"  buffer timeout {milliseconds} ms")
    if run.choice.random() < 0.5:
        kill(run.victim("worker"))
    try:
        run.client.patch_job_config(run.job_id, {BUFFER_TIMEOUT: f"{milliseconds} ms"})
    except CkptClientError as error:
        run.log(f"  not changed: {str(error)[:200]}")


def _vanish(name: str) -> Callable[[Run], None]:
    def happen(run: Run) -> None:
        run.hide(name)
        run.hold()

    return happen


def _fill(run: Run) -> None:
    if run.disk.is_small:
        run.disk.fill()
        run.hold()


def _kill_while_full(run: Run) -> None:
    """The job restarts where nothing can be written."""
    if run.disk.is_small:
        run.disk.fill()
    kill(run.victim("worker"))
    run.hold()


def _slow_down(run: Run) -> None:
    """A checkpoint opens many files one after the other: it takes longer than its interval."""
    if run.disk.slow_down(run.choice.choice((0.02, 0.2, 1.0))):
        run.hold(8.0)


def _no_answer(run: Run) -> None:
    """Shorter and longer than a call is waited for."""
    if run.disk.slow_down(None):
        run.hold(2 * STORAGE_TIMEOUT_S)


def _kill_while_slow(run: Run) -> None:
    """State is loaded slowly while heartbeats continue."""
    run.disk.slow_down(run.choice.choice((0.2, 1.0, None)))
    kill(run.victim("worker"))
    run.hold(8.0)


def _kill_driver_while_slow(run: Run) -> None:
    """The next driver finds its jobs, and the snapshots that they resume from, on slow storage."""
    run.disk.slow_down(0.2)
    run.session.kill_driver()


def _cancel_while_slow(run: Run) -> None:
    """What the job deletes at its end takes its time; what is not away may not be taken for deleted."""
    run.disk.slow_down(0.2)
    run.hold()
    run.cancel()
    run.heal()
    run.resume()


def _patch(run: Run) -> None:
    interval, timeout = run.choice.choice((100, 300, 1000)), run.choice.choice((10, 500, 60_000))
    unaligned = run.choice.random() < 0.5
    run.log(f"  interval {interval} ms, timeout {timeout} ms, unaligned {unaligned}")
    harsh = CheckpointConfigPatch(interval_ms=interval, timeout_ms=timeout, unaligned=unaligned)
    mild = CheckpointConfigPatch(interval_ms=300, timeout_ms=60_000)
    run.asked(lambda: run.client.patch_checkpoint_config(run.job_id, harsh))
    run.hold()
    run.asked(lambda: run.client.patch_checkpoint_config(run.job_id, mild))


def _cancel_and_resume(run: Run) -> None:
    run.cancel()
    run.resume()


def _cancel_while_it_restarts(run: Run) -> None:
    """Workers are gone, so that no sink closes; or the job is already back when the cancellation comes."""
    for pid in run.session.of_role("worker"):
        kill(pid)
    _cancel_and_resume(run)


def _cancel_while_frozen(run: Run) -> None:
    """What is thawed has been given up: it belongs to a job that has ended."""
    pids = [pid for role in ROLES for pid in run.session.of_role(role)]
    for pid in pids:
        freeze(pid)
    try:
        run.hold(5.0)
        run.cancel()
    finally:
        for pid in pids:
            thaw(pid)
    run.resume()


def _cancel_while_the_output_is_away(run: Run) -> None:
    """The clean-up of the job cannot see what it should remove."""
    run.hide("out")
    run.hold()
    run.cancel()
    run.heal()
    run.resume()


def _rescale_and_kill(run: Run) -> None:
    """The worker ends before, while or after the job is brought to its new parallelism."""
    killer = threading.Timer(run.choice.uniform(0.0, 1.0), lambda: kill(run.victim("worker")))
    killer.start()
    run.rescale_live()
    killer.join()


def _kill_while(name: str) -> Callable[[Run], None]:
    """The job is restored from, or opens, what is not there."""

    def happen(run: Run) -> None:
        run.hide(name)
        kill(run.victim("worker"))
        run.hold()

    return happen


FAULTS: dict[str, Callable[[Run], None]] = {
    **{f"kill {role}": _kill(role) for role in ROLES},
    **{f"freeze {role}": _freeze(role) for role in ROLES},
    "kill driver": _kill_driver,
    "kill driver with a standby": _kill_driver_with_standby,
    "freeze driver": _freeze_driver,
    "freeze driver beyond its lease": _freeze_driver_beyond_its_lease,
    "network between two slots": _cut,
    "packets between two slots vanish": _silence,
    "output vanishes": _vanish("out"),
    "checkpoints vanish": _vanish("checkpoints"),
    "disk is full": _fill,
    "storage is slow": _slow_down,
    "storage does not answer": _no_answer,
    "patch": _patch,
    "worker killed while the output is away": _kill_while("out"),
    "worker killed while the checkpoints are away": _kill_while("checkpoints"),
    "worker killed while the disk is full": _kill_while_full,
    "worker killed while storage is slow": _kill_while_slow,
    "driver killed while storage is slow": _kill_driver_while_slow,
    "rescale": lambda run: run.rescale(run.rate),
    "rescale while it runs": Run.rescale_live,
    "worker killed while it is rescaled": _rescale_and_kill,
    "configuration": _configure,
    "cancel and resume": _cancel_and_resume,
    "cancel while it restarts": _cancel_while_it_restarts,
    "cancel while all is frozen": _cancel_while_frozen,
    "cancel while the output is away": _cancel_while_the_output_is_away,
    "cancel while storage is slow": _cancel_while_slow,
}
"""By name: returns when the fault is over, but for what :meth:`Run.fault` heals."""

SPARK_FAULTS: dict[str, Callable[[Run], None]] = {
    **FAULTS,
    "kill jvm": _kill_jvm,
    "freeze jvm": _freeze("jvm"),
    "kill executor": _kill("executor"),
    "freeze executor": _freeze("executor"),
    "kill host": _kill_host,
}
"""With those of a session in Spark."""
