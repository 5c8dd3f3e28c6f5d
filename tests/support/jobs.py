"""Submitting the test pipelines to a ``MiniCluster``, and waiting for what they do."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.jobmaster.gateway_values import ExecutionState
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import ClusterTimeoutError, MiniCluster
from tests.support.outputs import assert_sequence, hidden, visible

PIPELINES = Path(__file__).parent / "pipelines"


@cache
def program_of(module: str) -> Path:
    """A directory with one of the test pipelines and the modules that it imports.

    A job of it starts sooner than one of :data:`PIPELINES`, whose files are packed, read and unpacked for each job.
    """
    from tests.support.run_directory import RUN  # this module is also imported where no tests run

    directory = RUN.kept("programs") / module
    directory.mkdir(parents=True)
    wanted = [module]
    while wanted:
        file = PIPELINES / f"{wanted.pop()}.py"
        if file.exists() and not (directory / file.name).exists():
            shutil.copy(file, directory)
            wanted += _imported(file)
    return directory


def _imported(file: Path) -> list[str]:
    """The names of the modules that a file imports."""
    statements = list(ast.walk(ast.parse(file.read_text())))
    plain = [alias.name for each in statements if isinstance(each, ast.Import) for alias in each.names]
    return plain + [each.module for each in statements if isinstance(each, ast.ImportFrom) and each.module]


FAST: Mapping[str, str] = {
    "execution.checkpointing.interval": "250ms",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000",
    "restart-strategy.fixed-delay.delay": "0 ms",
}
"""Frequent checkpoints, restarts without end and without delay."""
UNRIVALLED_S = 120
"""The lease of a driver for which no other one waits: that of a session is shorter than a busy machine stands still."""


ROCKSDB: Mapping[str, str] = {
    "state.backend.type": "rocksdb",
    "execution.checkpointing.incremental": "true",
    "state.storage.fs.memory-threshold": "0 b",
}
"""Increments, however small their files are."""


def fast(**changes: str | None) -> dict[str, str]:
    """:data:`FAST` with changes; double underscores stand for dots, single ones for dashes; None removes a key."""
    configuration = dict(FAST)
    for name, value in changes.items():
        key = name.replace("__", ".").replace("_", "-")
        configuration.pop(key, None)
        if value is not None:
            configuration[key] = value
    return configuration


UNALIGNED: Mapping[str, str] = fast(
    execution__checkpointing__unaligned__enabled="true",
    execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
    execution__checkpointing__tolerable_failed_checkpoints="100",
    taskmanager__network__buffer__max_rows="512",
    pipeline__max_parallelism="64",
)
"""Unaligned checkpoints that stay, of a job which may be rescaled; small buffers, so that there are many."""


def _entries(directory: Path) -> list[Path]:
    """What lies in a directory; nothing in one that is being deleted, or in a file."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass
class SequenceJob:
    """The ``sequence`` pipeline in a directory of its own: ``out`` for its sinks, ``faults`` for injected failures."""

    cluster: MiniCluster
    directory: Path
    job_id: str = ""
    configuration: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.faults.mkdir(parents=True, exist_ok=True)

    @property
    def out(self) -> Path:
        return self.directory / "out"

    @property
    def faults(self) -> Path:
        return self.directory / "faults"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def start(
        self,
        *,
        rows: int = 0,
        rate: int = 500,
        batch: int = 64,
        parallelism: int = 2,
        uids: str = "",
        sleep_ms: float = 0,
        savepoint: str | None = None,
        allow_non_restored_state: bool = False,
        fork: bool = False,
        configuration: Mapping[str, str] | None = None,
    ) -> str:
        """Submits it; without ``rows`` it runs until it is stopped."""
        arguments = ["--output", str(self.out), "--rows", str(rows), "--rate", str(rate), "--batch", str(batch)]
        arguments += ["--faults", str(self.faults), f"--uids={uids}", "--sleep-ms", str(sleep_ms)]
        given = {
            "execution.checkpointing.dir": str(self.checkpoints),
            **(FAST if configuration is None else configuration),
        }
        self.job_id = self.cluster.submit(
            program_of("sequence"),
            entry="sequence:pipeline",
            arguments=arguments,
            configuration=given,
            parallelism=parallelism,
            savepoint=savepoint,
            allow_non_restored_state=allow_non_restored_state,
            fork=fork,
        )
        return self.job_id

    def running(self) -> None:
        """Waits until all subtasks run."""
        self.cluster.wait_for_status(self.job_id, JobStatus.RUNNING)
        self.cluster.wait_until(lambda: all_run(self.cluster, self.job_id), "all subtasks to run")

    def inject(self, fault: str) -> None:
        """Drops the file and waits until user code has acted on it."""
        file = self.faults / fault
        file.touch()
        self.cluster.wait_until(lambda: not file.exists(), f"user code to act on {fault}")

    def hold(self, place: str) -> None:
        """Waits until user code stands still; no checkpoint completes then."""
        (self.faults / f"{place}-holds").unlink(missing_ok=True)
        (self.faults / f"{place}-held").touch()
        self.stands_still((self.faults / f"{place}-holds").exists, f"{place} to be held up")

    def _where_rows_are(self) -> str:
        """For a job that stands still for an unknown reason."""
        details = self.cluster.call(self.cluster.dispatcher.job_details(self.job_id))
        subtasks = [(vertex.name, subtask) for vertex in details.vertices for subtask in vertex.subtasks]
        return "\n".join([str(details.overview), *(f"{name}: {subtask}" for name, subtask in subtasks)])

    def release(self, place: str) -> None:
        """Releases it, if it is held up."""
        (self.faults / f"{place}-held").unlink(missing_ok=True)

    def stands_still(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for what must come although user code is held up; says where the rows are if it does not."""
        try:
            self.cluster.wait_until(condition, what)
        except ClusterTimeoutError as error:
            error.add_note(self._where_rows_are())
            raise

    def restarted(self, restarts: int) -> None:
        """Waits until that many restarts are over."""
        wait_for_restarts(self.cluster, self.job_id, restarts)

    def finished(self, timeout_s: float = 120) -> None:
        self.cluster.wait_for_status(self.job_id, JobStatus.FINISHED, timeout_s=timeout_s)

    def stopped(self) -> int:
        """Ends a job that runs until everything has happened, however long that takes. Returns its rows, all exact."""
        self.running()
        self.has_rows()
        self.cluster.savepoint(self.job_id, self.directory / "savepoints", stop=True)
        self.finished()
        rows = assert_sequence(self.out)
        assert rows > 0
        return rows

    def has_rows(self) -> None:
        """Waits until a row has come through."""
        self.cluster.wait_until(self._has_rows, "a row to come through")

    def _has_rows(self) -> bool:
        """Workers tell it with their heartbeats."""
        vertices = self.cluster.call(self.cluster.dispatcher.job_details(self.job_id)).vertices
        measures = [subtask.measures for vertex in vertices for subtask in vertex.subtasks]
        return any(measured is not None and measured.rows_in > 0 for measured in measures)

    def has_output(self) -> None:
        """Waits for the first committed rows."""
        self.cluster.wait_until(lambda: len(visible(self.out / "order")) > 0, "the first rows")

    def pause_checkpoints(self) -> None:
        """Waits until all that the last checkpoint covers is committed; an hour passes before the next one."""
        living = self.cluster.dispatcher.jobs[self.job_id].living()
        self.cluster.call(living.patch_checkpoint_config(CheckpointOverrides(interval_ms=3_600_000)))

        def is_committed() -> bool:
            counts = self.cluster.of_job(self.job_id, lambda job: job.checkpoint_statistics()).counts
            return not counts.in_progress and not any(name.endswith(".pending") for name in hidden(self.out))

        self.cluster.wait_until(is_committed, "the last checkpoint and its commits")

    def canceled(self) -> None:
        """Cancels and waits."""
        self.cluster.call(self.cluster.dispatcher.cancel_job(self.job_id))
        self.cluster.wait_for_status(self.job_id, JobStatus.CANCELED)

    def end(self) -> None:
        """Cancels what still runs, or the tests after a failed one would wait for its slots."""
        if self.job_id and not self.cluster.status(self.job_id).is_globally_terminal:
            self.canceled()

    def left_behind(self) -> list[str]:
        """The names in the job's checkpoint directory, but for the two of shared files while these are empty."""
        root = self.checkpoints / self.job_id
        names = [entry.name for entry in _entries(root) if entry.name.startswith("chk-") or _entries(entry)]
        return sorted(names)

    def plant_incomplete_checkpoint(self) -> Path:
        """What an aborted checkpoint, or one that another driver still writes, looks like. Returns its file."""
        file = self.checkpoints / self.job_id / "chk-999999" / "state"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"state")
        return file

    def assert_retained(self, *names: str) -> None:
        """Waits until the job's checkpoint directory holds exactly these; with none, until it is gone."""
        self.cluster.wait_until(lambda: self.left_behind() == list(names), f"{names} to be all that is left")
        if not names:
            self.cluster.wait_until(lambda: not (self.checkpoints / self.job_id).exists(), "the clean-up")


def all_run(cluster: MiniCluster, job_id: str) -> bool:
    """Whether all subtasks run. Before, a checkpoint that is triggered fails."""
    tasks = cluster.call(cluster.dispatcher.job_details(job_id)).overview.tasks_by_state
    return {state for state, number in tasks.items() if number} == {ExecutionState.RUNNING}


def wait_for_restarts(cluster: MiniCluster, job_id: str, restarts: int) -> None:
    """Waits until that many restarts are over.

    A checkpoint that completes behind a restart does not say so: it may be one whose metadata was just being written.
    """
    cluster.wait_until(
        lambda: cluster.restarts(job_id) >= restarts and all_run(cluster, job_id), f"{restarts} restarts to be over"
    )


def skip_unless_root() -> None:
    """For tests that mount."""
    import os

    if os.geteuid() != 0:
        pytest.skip("needs to mount a file system: runs as root only")
