"""Locations, atomic creation and deletion: on a local disk, in memory, and where storage says no."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.storage import filesystem
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import (
    Location,
    check_url,
    delete_empty_directory,
    delete_file,
    delete_tree,
    exists,
    file_size,
    is_directory,
    list_names,
    make_directory,
    read_bytes,
    read_range,
    resolve,
)
from ckpt_runtime.storage.metadata import read_metadata
from ckpt_runtime.storage.publish import checksum_of, publish, replace
from ckpt_runtime.storage.state_files import StateFileReader, StateFileWriter


@pytest.fixture
def directory(base: Location) -> Location:
    return base


@pytest.mark.parametrize(
    "url", ["/a/b", "/a/b/", "//a//b", "file:/a/b", "file:///a/b", "file://localhost/a/b", "FILE:/a/b"]
)
def test_all_forms_of_a_local_path_are_the_same(url: str) -> None:
    location = resolve(url)
    assert location.path == "/a/b"
    assert location.url == "file:///a/b"
    assert location.is_local
    assert resolve(location.url) == location


@pytest.mark.parametrize("path", ["/data/100%", "/data/a%20b", "/data/manual__2026-11-23T10%3A52", "/a?b#c", "/ü/x y"])
def test_every_local_path_has_a_url_that_leads_back(path: str) -> None:
    assert resolve(path).path == path
    assert resolve(resolve(path).url) == resolve(path)


def test_urls_with_escapes_are_decoded() -> None:
    assert resolve("file:///a%20b").path == "/a b"
    assert resolve("/a%20b").path == "/a%20b"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "relative/path",
        "17",
        "./x",
        "file:x",
        "file://host/x",
        "file:///a?x=1",
        "/a/../b",
        "file:///a/%2e%2e/b",
        "memory://a/../b",
        "nosuch://x",
        "http://x/y",
        "simplecache::memory://x",
        "memory://x::file:///etc/passwd",
        "/a\nb",
        "/a\0b",
        "/" + "a" * 5_000,
    ],
)
def test_unusable_locations_are_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidLocationError, match="allowed") as caught:
        resolve(url)
    assert len(str(caught.value)) < 600


def test_unknown_schemes_and_missing_packages_are_named() -> None:
    with pytest.raises(InvalidLocationError, match=r"'nosuch://x'.*file, s3"):
        resolve("nosuch://x")
    pytest.importorskip("fsspec")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(InvalidLocationError, match="s3fs"):
            resolve("s3://bucket/x")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb", "x" * 256])
def test_names_below_a_directory_are_plain(directory: Location, name: str) -> None:
    with pytest.raises(InvalidLocationError, match="plain file name"):
        directory.child(name)


def test_a_location_contains_what_is_strictly_below(directory: Location) -> None:
    assert directory.contains(directory.child("a", "b"))
    assert not directory.contains(directory)
    assert not directory.child("a").contains(directory.child("ab"))
    assert directory.child("a").parent == directory


def test_publishing_creates_once(directory: Location) -> None:
    file = directory.child("x")
    publish(file, b"first")
    with pytest.raises(AlreadyExistsError, match="already exists"):
        publish(file, b"second")
    assert read_bytes(file, 100) == b"first"
    replace(file, b"third")
    assert read_bytes(file, 100) == b"third"
    assert list_names(directory) == ["x"]
    if directory.is_local:
        assert os.listdir(directory.path) == ["x"]


def test_exactly_one_of_many_publishers_wins(directory: Location) -> None:
    file = directory.child("x")
    outcomes: list[bytes] = []
    barrier = threading.Barrier(8)

    def attempt(content: bytes) -> None:
        barrier.wait()
        try:
            publish(file, content)
        except AlreadyExistsError:
            return
        outcomes.append(content)

    threads = [threading.Thread(target=attempt, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [read_bytes(file, 100)]


def test_files_are_read_in_whole_and_in_part(directory: Location) -> None:
    file = directory.child("x")
    publish(file, b"0123456789")
    assert file_size(file) == 10
    assert read_range(file, 2, 3) == b"234"
    assert read_range(file, 8, 10) == b"89"
    assert read_range(file, 3, 0) == b""
    with pytest.raises(StorageError, match="more than the 9 allowed"):
        read_bytes(file, 9)
    with pytest.raises(NotFoundError, match="no such file"):
        read_bytes(directory.child("y"), 9)


def test_listing_leaves_out_what_a_crashed_writer_left(tmp_path: Path) -> None:
    (tmp_path / ".x.abc.tmp").write_bytes(b"partial")
    (tmp_path / "x").write_bytes(b"whole")
    assert list_names(resolve(tmp_path)) == ["x"]
    assert list_names(resolve(tmp_path / "nothing")) == []


def test_deleting_is_complete_and_repeatable(directory: Location) -> None:
    tree = directory.child("tree")
    make_directory(tree)
    assert delete_empty_directory(tree)
    make_directory(tree)
    publish(tree.child("x"), b"1")
    assert not delete_empty_directory(tree)
    assert is_directory(tree)
    for _ in range(2):
        delete_file(tree.child("x"))
        delete_tree(tree)
    assert not exists(tree)


def test_making_a_directory_that_must_be_new(directory: Location) -> None:
    publish(directory.child("x"), b"")
    with pytest.raises(AlreadyExistsError):
        make_directory(directory.child("x"), exist_ok=False)


def test_deleting_a_tree_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    delete_tree(resolve(tree))
    assert (outside / "keep").exists()
    (tmp_path / "alias").symlink_to(outside)
    with pytest.raises(StorageError, match="symbolic link"):
        delete_tree(resolve(tmp_path / "alias"))


def test_failed_directories_and_publications_are_named_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="file:///proc/nowhere"):
        make_directory(resolve("/proc/nowhere"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=f"file://{tmp_path}/file/below"):
        make_directory(resolve(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="Not a directory"):
        publish(resolve(tmp_path / "file" / "below"), b"x")
    with pytest.raises(NotFoundError):
        publish(resolve(tmp_path / "missing" / "below"), b"x")
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    attribute = subprocess.run(["chattr", "+i", str(tmp_path)], capture_output=True, check=False)
    if attribute.returncode != 0:
        pytest.skip(f"chattr does not work here: {attribute.stderr.decode().strip()}")
    try:
        with pytest.raises(StorageError, match=f"file://{tmp_path}/x"):
            publish(resolve(tmp_path / "x"), b"x")
    finally:
        subprocess.run(["chattr", "-i", str(tmp_path)], check=True)


class LyingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Stores what it is given, or does not, and fails afterwards."""

    protocol = "lying"
    cachable = False

    def __init__(self, stores: bool, error: BaseException) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs: list[str] = [""]
        self._stores = stores
        self._error = error

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self._stores:
            super().pipe_file(path, value, mode=mode, **kwargs)
        raise self._error


@pytest.mark.parametrize("write", [publish, replace])
def test_an_error_after_success_is_settled_by_reading_back(write: Any) -> None:
    file = Location(LyingFileSystem(stores=True, error=OSError("connection reset")), "/x", "lying")
    write(file, b"content")
    assert read_bytes(file, 100) == b"content"


@pytest.mark.parametrize("write", [publish, replace])
def test_a_write_that_may_still_arrive_is_ambiguous(write: Any) -> None:
    file = Location(LyingFileSystem(stores=False, error=TimeoutError("no answer")), "/x", "lying")
    with pytest.raises(AmbiguousWriteError, match="unknown whether lying:///x was written: no answer"):
        write(file, b"content")


def test_refused_write_does_not_count_as_ambiguous() -> None:
    file = Location(LyingFileSystem(stores=False, error=PermissionError("denied")), "/x", "lying")
    with pytest.raises(StorageError, match="denied") as caught:
        publish(file, b"content")
    assert not isinstance(caught.value, AmbiguousWriteError)


def test_a_directory_entry_that_may_be_lost_is_ambiguous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr("ckpt_runtime.storage.publish.fsync_directory", fail)
    with pytest.raises(AmbiguousWriteError, match="power failure"):
        publish(resolve(tmp_path / "x"), b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


@pytest.mark.parametrize("url", ["/a/b", "memory://a/b"])
def test_location_is_the_same_in_every_thread_that_resolves_it(url: str) -> None:
    found: list[Location] = []
    thread = threading.Thread(target=lambda: found.append(resolve(url)))
    thread.start()
    thread.join()
    here = resolve(url)
    assert found == [here]
    assert len({here, *found}) == 1
    assert here.contains(found[0].child("c"))
    assert found[0] != resolve("/a/c")
    assert not here.contains(resolve("/c" if url.startswith("memory") else "memory://a/b/c"))


class TestOnlyRegularFilesAreOpened:
    """Opening a FIFO would wait for a writer for ever, and reading a device never ends."""

    @pytest.fixture(params=["fifo", "socket", "device"])
    def special(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
        path = tmp_path / "_metadata"
        if request.param == "fifo":
            os.mkfifo(path)
            yield path
        elif request.param == "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
                yield path
        else:
            path.symlink_to("/dev/zero")
            yield path

    @pytest.mark.timeout(120)
    def test_special_files_are_refused_when_read_as_bytes_metadata_or_state(self, special: Path) -> None:
        for read in (lambda file: read_bytes(file, 100), lambda file: read_range(file, 0, 10)):
            with pytest.raises(StorageError, match=str(special)):
                read(resolve(special))
        for url in (special, special.parent):
            with pytest.raises(StorageError, match=str(special)):
                read_metadata(resolve(url))
        file = StateFile(special.name, 0, checksum_of(b""))
        with pytest.raises(StorageError, match=str(special)):
            StateFileReader(resolve(special.parent), file).verify()

    def test_a_fifo_is_named(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x")
        with pytest.raises(StorageError, match="it is a FIFO, and only files are read"):
            read_bytes(resolve(tmp_path / "x"), 1)


class TestNoPlaceThatEndsWithItsProcess:
    def test_memory_is_refused_outside_tests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filesystem, "_volatile_allowed", False)
        for check in (resolve, check_url):
            with pytest.raises(InvalidLocationError, match=r"'memory://x'.*allowed: .*file, s3"):
                check("memory://x")

    @pytest.mark.parametrize("url", ["data:,x", "dir://x", "http://x/y", "local://x", "zip://x", "MEMORY://x"])
    def test_loaded_file_system_that_ends_with_the_process_is_refused(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filesystem, "_volatile_allowed", False)
        scheme = url.partition(":")[0].lower()
        if scheme not in ("http", "zip"):
            fsspec.get_filesystem_class(scheme)
        with pytest.raises(InvalidLocationError, match="allowed"):
            resolve(url)


class TestWhoMayRead:
    @pytest.fixture(autouse=True)
    def careless(self) -> Iterator[None]:
        before = os.umask(0)
        yield
        os.umask(before)

    @staticmethod
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    def test_directories_of_state_are_private_to_their_user(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        directory = resolve(tmp_path / "checkpoints" / "job" / "chk-1")
        make_directory(directory, exist_ok=False)
        publish(directory.child("_metadata"), b"x")
        with StateFileWriter(directory, 0) as writer:
            writer.write(b"state")
            writer.finish()
        made = [tmp_path / "checkpoints", *(tmp_path / "checkpoints").rglob("*")]
        assert {self.mode(path) for path in made if path.is_dir()} == {0o700}
        files = [path for path in made if path.is_file()]
        assert len(files) == 2
        assert {self.mode(path) for path in files} == {0o600}
        assert self.mode(tmp_path) == 0o755

    def test_an_output_is_for_whom_the_umask_says(self, tmp_path: Path) -> None:
        make_directory(resolve(tmp_path / "a" / "out"), private=False)
        assert self.mode(tmp_path / "a" / "out") == 0o777

    def test_existing_directory_keeps_its_rights(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o750)
        make_directory(resolve(tmp_path))
        assert self.mode(tmp_path) == 0o750
        with pytest.raises(AlreadyExistsError):
            make_directory(resolve(tmp_path), exist_ok=False)
