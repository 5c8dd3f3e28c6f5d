"""Jobs whose target, or whose directory of snapshots, takes no writes for a while: a full disk, a lost right, a server.

The job fails with an error that names the place and the cause, restarts by its strategy, and continues when the fault
has ended. Each row is in the target once, and nothing lies there that belongs to no row.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.sinks import CommitOutcome
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.testing.mini_cluster import ClusterTimeoutError, MiniCluster
from tests.support.jobs import skip_unless_root, wait_for_restarts
from tests.support.object_store import ObjectStore, object_store
from tests.support.sink_targets import ROWS, Numbers, numbers_once, target
from tests.unit.runtime.connectors.test_spark_files import ArrowWrite, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store(read_timeout_s=1.5) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(store: ObjectStore) -> Iterator[MiniCluster]:
    """Its workers find the store."""
    with MiniCluster() as started:
        yield started


def _mounted(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")


@contextmanager
def _small_disk(place: Path) -> Iterator[None]:
    skip_unless_root()
    place.mkdir()
    _mounted("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def _full(disk: Path) -> Iterator[None]:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def _forbidden(disk: Path) -> Iterator[None]:
    """No file in it can be made, renamed or deleted, by no user."""
    done = subprocess.run(["chattr", "+i", str(disk)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot make a directory immutable here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(disk)], check=True)


def _reasons(cluster: MiniCluster, job: str) -> list[str]:
    found = cluster.of_job(job, lambda job: job.exception_history(100))
    return [f"{entry.failure.exception}: {entry.failure.message}" for entry in found.entries]


def _survives(numbers: Numbers, fault: Callable[[], AbstractContextManager[Any]], reason: str) -> None:
    """Has a job meet the fault, waits until it has failed with the reason, twice, and completes a checkpoint."""
    cluster = numbers.cluster
    job = numbers.start(20, restart_delay="500 ms")
    cluster.wait_until(lambda: len(numbers.target.numbers()) > 0, "visible rows")
    place = numbers.target.options["path"]
    with fault():
        try:
            cluster.wait_until(
                lambda: any(place in entry and reason in entry for entry in _reasons(cluster, job)),
                f"a failure that names {place} and {reason!r}",
            )
        except ClusterTimeoutError as error:
            error.add_note("\n".join(_reasons(cluster, job)))
            raise
        failed = cluster.restarts(job)
        cluster.wait_until(lambda: cluster.restarts(job) > failed, "another attempt")
    wait_for_restarts(cluster, job, failed + 1)
    cluster.wait_for_checkpoints(job, 1)
    numbers.finish(numbers.stopped(job))
    assert numbers_once(numbers.target) == list(range(ROWS))
    assert numbers.left() == []


@pytest.mark.row("ends.5")
@pytest.mark.parametrize(
    ("format_", "fault", "reason"),
    [
        pytest.param("parquet", _full, "No space left", marks=pytest.mark.long),
        ("delta", _full, "No space left"),
        pytest.param("parquet", _forbidden, "not permitted", marks=pytest.mark.long),
        pytest.param("delta", _forbidden, "not permitted", marks=pytest.mark.long),
    ],
)
def test_job_outlives_a_disk_that_takes_no_writes(
    cluster: MiniCluster,
    tmp_path: Path,
    format_: str,
    fault: Callable[[Path], AbstractContextManager[Any]],
    reason: str,
) -> None:
    with _small_disk(tmp_path / "target"), target(format_, tmp_path) as place:
        _survives(Numbers(cluster, format_, place, tmp_path), lambda: fault(tmp_path / "target"), reason)


@pytest.mark.row("ends.5")
@pytest.mark.parametrize(("fault", "reason"), [(_full, "No space left"), (_forbidden, "not permitted")])
@pytest.mark.parametrize("written", [False, True])
def test_files_of_sparks_writer_are_there_once_when_their_disk_takes_no_writes_for_a_while(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path], AbstractContextManager[Any]],
    reason: str,
    written: bool,
) -> None:
    """From before Spark writes on, and from then on when only names have to be changed, which a full disk allows."""
    out = tmp_path / "out"
    with _small_disk(out):
        world = World(tmp_path, resolve(str(out)))
        with ExitStack() as faults, monkeypatch.context() as patched:
            write = ArrowWrite.to

            def meets_fault(self: ArrowWrite, frame: Any, directory: str) -> None:
                if written:
                    write(self, frame, directory)
                faults.enter_context(fault(out))
                if not written:
                    write(self, frame, directory)

            patched.setattr(ArrowWrite, "to", meets_fault)
            if written and fault is _full:
                assert world.commit(0) is CommitOutcome.COMMITTED
            else:
                with pytest.raises(OSError, match=reason):
                    world.commit(0)
                patched.undo()
                with pytest.raises(OSError, match=reason):
                    world.commit(1)
                assert list(out.glob("part=*")) == []  # nothing is visible
        repeated = CommitOutcome.ALREADY_COMMITTED if written and fault is _full else CommitOutcome.COMMITTED
        assert world.commit(2) is repeated
        assert (world.rows(), world.left()) == ([0, 1, 2, 3], [])


_ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "forbidden": ({"status": 403, "code": "AccessDenied"}, "AccessDenied"),
    "failing": ({"status": 500, "code": "InternalError"}, "InternalError"),
    "silent": ({"silent": True}, "imeout"),
}


@pytest.mark.long
@pytest.mark.row("ends.5")
@pytest.mark.parametrize("format_", ["json-s3", "delta-s3"])
@pytest.mark.parametrize("fault", _ANSWERS)
def test_job_outlives_an_object_store_that_takes_no_writes(
    cluster: MiniCluster, store: ObjectStore, tmp_path: Path, format_: str, fault: str
) -> None:
    answer, reason = _ANSWERS[fault]
    with target(format_, tmp_path) as place:
        bucket = place.options["path"].removeprefix("s3:/")

        def fails() -> AbstractContextManager[Any]:
            return store.failing(lambda method, path: method in ("PUT", "POST") and path.startswith(bucket), **answer)

        _survives(Numbers(cluster, format_, place, tmp_path), fails, reason)
