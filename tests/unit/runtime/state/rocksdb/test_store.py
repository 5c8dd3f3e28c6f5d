"""A database of bytes: what rocksdict does, where its traps are walked around, and damage."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.configuration.state_options import CompactionStyle
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb.codec import BATCH
from ckpt_runtime.state.rocksdb.store import Store, StoreMemory
from tests.support.jobs import skip_unless_root

MEMORY = StoreMemory(8 << 20, 0.5)


@pytest.fixture(params=CompactionStyle)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = Store(tmp_path / "db", MEMORY, request.param)
    yield opened
    opened.close()


def number(n: int) -> bytes:
    return n.to_bytes(4, "big")


def test_entries_are_written_read_and_removed(store: Store) -> None:
    store.write([(b"a", b"1"), (b"b", b"2"), (b"c", b"")], [])
    store.write([(b"b", b"3")], [b"a", b"never there"])
    assert store.multi_get([b"a", b"b", b"c", b"d"]) == [None, b"3", b"", None]
    assert store.multi_get([]) == []


def test_more_than_one_batch(store: Store) -> None:
    count = 2 * BATCH + 7
    store.write(((number(n), number(n)) for n in range(count)), [])
    assert store.multi_get([number(0), number(count - 1)]) == [number(0), number(count - 1)]
    store.write([], (number(n) for n in range(1, count)))
    assert list(store.scan(b"")) == [(number(0), number(0))]


def test_a_scan_stays_within_its_prefix_and_shows_the_moment_of_its_start(store: Store) -> None:
    store.write([(b"a1", b"1"), (b"a2", b"2"), (b"a3", b"3"), (b"b1", b"4"), (b"A", b"5")], [])
    scan = store.scan(b"a")
    first = next(scan)
    store.write([(b"a22", b"new")], [b"a3"])
    assert [first, *scan] == [(b"a1", b"1"), (b"a2", b"2"), (b"a3", b"3")]
    assert list(store.scan(b"a", b"a2")) == [(b"a2", b"2"), (b"a22", b"new")]
    assert list(store.scan(b"\xff")) == []


def test_a_range_is_deleted_up_to_its_end(store: Store) -> None:
    store.write([(number(n), b"") for n in range(10)], [])
    store.delete_range(number(3), number(8))
    store.delete_range(number(9), number(9))
    store.delete_range(number(9), number(2))
    assert [int.from_bytes(key, "big") for key, _ in store.scan(b"")] == [0, 1, 2, 8, 9]


def test_a_checkpoint_is_a_store_of_its_own(store: Store, tmp_path: Path) -> None:
    store.write([(b"a", b"1")], [])
    store.flush()
    store.checkpoint(tmp_path / "copy")
    store.write([(b"a", b"2")], [])
    copy = Store(tmp_path / "copy", MEMORY)
    copy.write([(b"b", b"3")], [])
    assert copy.multi_get([b"a", b"b"]) == [b"1", b"3"]
    assert store.multi_get([b"a", b"b"]) == [b"2", None]
    copy.close()
    with pytest.raises(Exception, match="exists"):
        store.checkpoint(tmp_path / "copy")


def test_sorted_entries_come_as_a_file(store: Store, tmp_path: Path) -> None:
    store.write([(b"a", b"1"), (b"b", b"1")], [])
    store.ingest(iter([(b"b", b"2"), (b"c", b"2")]), tmp_path / "part.sst")
    store.ingest(iter([]), tmp_path / "empty.sst")
    assert list(store.scan(b"")) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"2")]
    assert {path.name for path in tmp_path.iterdir()} == {"db"}


def test_threads_share_a_store(store: Store) -> None:
    def work(thread: int) -> int:
        keys = [number(thread * 1000 + n) for n in range(1000)]
        for start in range(0, 1000, 100):
            store.write(((key, key) for key in keys[start : start + 100]), [])
            store.flush()
        return sum(value is not None for value in store.multi_get(keys))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [1000] * 4
    assert sum(1 for _ in store.scan(b"")) == 4000


def test_small_changes_do_not_have_all_the_others_written_again(store: Store, tmp_path: Path) -> None:
    """Each of a dozen snapshots, with keys from everywhere, adds a small file to the large ones before it."""
    store.write(((number(n), bytes(500)) for n in range(20_000)), [])
    store.flush()
    store.checkpoint(tmp_path / "first")
    before = {path.name for path in (tmp_path / "first").glob("*.sst")}
    for taken in range(12):
        store.write(((number(n), b"changed") for n in range(taken, 20_000, 100)), [])
        store.flush()
        store.checkpoint(tmp_path / f"later-{taken}")
        after = {path.name for path in (tmp_path / f"later-{taken}").glob("*.sst")}
        assert before <= after
        before = after
    assert (store.figure("compaction-pending"), store.figure("num-running-compactions")) == (0, 0)


def settled(store: Store) -> None:
    """Waits until all merges that are due have been done."""
    deadline = time.monotonic() + 300
    while store.figure("compaction-pending") or store.figure("num-running-compactions"):
        assert time.monotonic() < deadline, "merges do not end"
        time.sleep(0.01)


def files_of(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.glob("*.sst")}


def test_keys_that_change_often_do_not_rewrite_files_of_other_keys(tmp_path: Path) -> None:
    """A hundredth of the keys, from everywhere, in each of sixty snapshots: their files are merged with each other."""
    store = Store(tmp_path / "db", StoreMemory(128 << 20, 0.5), CompactionStyle.UNIVERSAL)
    store.write((number(n), random.Random(n).randbytes(500)) for n in range(20_000))
    store.flush()
    before = files_of(tmp_path / "db")
    for taken in range(60):
        store.write((number(n), random.Random(taken).randbytes(500)) for n in range(0, 20_000, 100))
        store.flush()
        settled(store)
    after = files_of(tmp_path / "db")
    store.close()
    assert before.keys() <= after.keys()
    assert len(after) - len(before) < 20
    assert sum(after.values()) < 1.25 * sum(before.values())


@pytest.mark.parametrize("style", CompactionStyle)
def test_entries_that_were_overwritten_give_their_space_back(tmp_path: Path, style: CompactionStyle) -> None:
    noise = random.Random(0).randbytes(500)
    store = Store(tmp_path / "db", MEMORY, style)
    for taken in range(100):
        store.write((number(n), number(taken) + noise) for n in range(taken % 10, 20_000, 10))
        store.flush()
        settled(store)
    store.checkpoint(tmp_path / "last")
    assert sum(files_of(tmp_path / "last").values()) < 2.5 * 20_000 * 250  # what compression leaves of 500 bytes
    assert [value[:4] for _, value in store.scan(b"")] == [number(90 + n % 10) for n in range(20_000)]
    store.close()


@pytest.mark.parametrize("first", CompactionStyle)
def test_a_store_may_be_opened_with_another_style_and_back(tmp_path: Path, first: CompactionStyle) -> None:
    (second,) = set(CompactionStyle) - {first}
    for opened, style in enumerate((first, second, first)):
        store = Store(tmp_path / "db", MEMORY, style)
        for taken in range(30):
            store.write((number(n), number(100 * opened + taken) * 125) for n in range(taken, 3000, 10))
            store.flush()
        settled(store)
        newest = {n: taken for taken in range(30) for n in range(taken, 3000, 10)}
        assert list(store.scan(b"")) == [(number(n), number(100 * opened + newest[n]) * 125) for n in range(3000)]
        assert store.multi_get([number(7)]) == [number(100 * opened + newest[7]) * 125]
        store.close()


def test_files_that_are_read_once_are_not_merged(tmp_path: Path) -> None:
    store = Store(tmp_path / "db", MEMORY, CompactionStyle.UNIVERSAL)
    for taken in range(18):
        store.write([(number(taken), b"")])
        store.flush()
    store.checkpoint(tmp_path / "copy")
    store.close()
    before = files_of(tmp_path / "copy")
    copy = Store(tmp_path / "copy", MEMORY)
    assert [int.from_bytes(key, "big") for key, _ in copy.scan(b"")] == list(range(18))
    for number_of_write in range(3):  # each looks for merges that are due
        copy.write([(b"later", number(number_of_write))])
        copy.flush()
    assert (copy.figure("compaction-pending"), copy.figure("num-running-compactions")) == (1, 0)
    assert before.items() <= files_of(tmp_path / "copy").items()
    assert len(before) == 18
    copy.close()


def test_calls_after_the_end_raise(tmp_path: Path) -> None:
    store = Store(tmp_path / "db", MEMORY)
    store.write([(number(n), b"") for n in range(10)], [])
    scan = store.scan(b"")
    next(scan)
    store.close()
    assert len(list(scan)) == 9
    with pytest.raises(Exception, match="closed"):
        store.multi_get([b"a"])
    with pytest.raises(Exception, match="closed"):
        store.write([(b"a", b"")], [])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files of a small database."""
    store = Store(tmp_path / "db", MEMORY)
    store.write([(b"a", b"1")], [])
    store.flush()
    store.checkpoint(tmp_path / "copy")
    store.close()
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("CURRENT", Path.unlink),
        (".sst", Path.unlink),
        (".sst", lambda path: os.truncate(path, 100)),
        ("MANIFEST", lambda path: os.truncate(path, 30)),
    ],
)
def test_files_that_are_no_whole_database_are_damage(copy: Path, file: str, damage: Callable[[Path], None]) -> None:
    [victim] = [path for path in copy.iterdir() if file in path.name]
    damage(victim)
    with pytest.raises(CorruptStateError, match="copy"):
        Store(copy, MEMORY)


def fails_without_proof(directory: Path, reason: str) -> None:
    with pytest.raises(OSError, match=f"RocksDB cannot open {directory}: .*IO error: .*{reason}"):
        Store(directory, MEMORY)


def test_full_disk_does_not_count_as_damage(copy: Path, tmp_path: Path) -> None:
    skip_unless_root()
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        shutil.copytree(copy, small / "db")
        with (small / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
            while True:
                ballast.write(bytes(4096))
        fails_without_proof(small / "db", "No space left on device")
        (small / "ballast").unlink()
        Store(small / "db", MEMORY).close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_lack_of_file_descriptors_does_not_count_as_damage(copy: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    taken: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(copy / "CURRENT", os.O_RDONLY))
        for _ in range(3):
            os.close(taken.pop())
        fails_without_proof(copy, "Too many open files")
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    Store(copy, MEMORY).close()


def test_a_database_that_another_process_has_open_does_not_count_as_damaged(copy: Path) -> None:
    opened = Store(copy, MEMORY)
    fails_without_proof(copy, "lock hold by current process")
    opened.close()


def test_missing_local_manifest_does_not_count_as_damage(copy: Path) -> None:
    """It was there, and verified, when the directory was made."""
    [manifest] = copy.glob("MANIFEST-*")
    manifest.unlink()
    fails_without_proof(copy, "No such file or directory")


def test_rocksdb_is_not_imported_before_a_backend_needs_it() -> None:
    script = (
        "import sys, ckpt_runtime.task.worker, ckpt_runtime.spark.template_main, ckpt_runtime.state.registry as r;"
        "r.warm_up(); print([m for m in sys.modules if 'rocksdict' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": "runtime"}, check=False
    )
    assert done.stdout == "[]\n", done.stderr
