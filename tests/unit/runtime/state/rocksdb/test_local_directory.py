"""Where databases lie: below a directory of the user's, and gone with their backend, or after a killed process."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.configuration.option import InvalidOptionError
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.processes.held_directory import LOCK
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.rocksdb.local_files import LocalDirectory
from tests.support.inline_snapshots import CHECKPOINT

KEY = pa.schema([("k", pa.int64())])
HOLDER = """
import sys
from ckpt_runtime.state.rocksdb.local_files import LocalDirectory
made = LocalDirectory(sys.argv[1], str)
print(made.path, flush=True)
sys.stdin.read()
"""


def backend(root: str) -> KeyedStateBackend:
    options = {"state.backend.rocksdb.localdir": root}
    return create_backend("rocksdb", BackendParameters("op", KeyGroupRange(0, 1), 2, refuse, options))


def refuse() -> str:
    raise AssertionError("the worker's directory was used")


def test_database_directory_stays_until_its_backend_and_its_snapshots_are_closed(tmp_path: Path) -> None:
    root = tmp_path / "new" / "state"
    first, second, idle = backend(str(root)), backend(str(root)), backend(str(root))
    for made in (first, second):
        made.value_state("v", KEY, KEY).put((1,), (2,))
    assert len(list(root.iterdir())) == 3
    assert len(list(root.glob("*/db/CURRENT"))) == 2
    snapshot = first.snapshot(1, CHECKPOINT)
    for made in (first, second, idle):
        made.close()
    assert len(list(root.iterdir())) == 1
    snapshot.release()
    assert list(root.iterdir()) == []


def test_directories_of_killed_processes_are_removed_by_the_next_one_and_used_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "ckpt-state-of-ended").mkdir()
    (tmp_path / "ckpt-state-of-ended" / LOCK).touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "ckpt-state-link").symlink_to(tmp_path / "other")
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": "runtime"}
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        assert not (tmp_path / "ckpt-state-of-ended").exists()
        mine = LocalDirectory(str(tmp_path), refuse)
        assert held.is_dir()
        holder.kill()
        holder.wait(120)
        another = LocalDirectory(str(tmp_path), refuse)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"other", "ckpt-state-link", mine.path.name, another.path.name}
    mine.remove()
    another.remove()
    another.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"other", "ckpt-state-link"}


def test_directories_are_private_to_their_user(tmp_path: Path) -> None:
    made = LocalDirectory(str(tmp_path / "new" / "state"), refuse)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made.path.parent, made.path)] == [0o700, 0o700]
    made.remove()


@pytest.mark.timeout(60)
def test_a_lock_on_the_users_directory_delays_no_worker(tmp_path: Path) -> None:
    """A user who may read a directory can lock it, and keep the lock."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        made = LocalDirectory(str(tmp_path), refuse)
        made.remove()
    finally:
        os.close(descriptor)


def test_processes_that_start_at_the_same_time_keep_their_directories(tmp_path: Path) -> None:
    def one(_: int) -> bool:
        made = LocalDirectory(str(tmp_path), refuse)
        kept = made.path.is_dir()
        made.remove()
        return kept

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(400)))
    assert list(tmp_path.iterdir()) == []


def test_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="state.backend.rocksdb.localdir: .*file"):
        backend(str(tmp_path / "file" / "below"))
    with pytest.raises(InvalidOptionError, match=r"localdir.*relative.*an absolute path"):
        backend("relative")
