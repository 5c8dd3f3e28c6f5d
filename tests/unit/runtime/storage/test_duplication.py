"""State files duplicated into a savepoint: by each means, what each refuses, and what is never left behind."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.storage import duplication
from ckpt_runtime.storage.duplication import Duplicator, Means
from ckpt_runtime.storage.errors import CorruptFileError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, memory_allowed, resolve
from ckpt_runtime.storage.publish import checksum_of

CONTENT = b"sst" * 1000


class Files:
    """A source file and the directory of a savepoint."""

    def __init__(self, root: Path, content: bytes = CONTENT) -> None:
        self.source = root / "shared" / "chk-1-x"
        self.savepoint = root / "savepoint"
        self.source.parent.mkdir()
        self.savepoint.mkdir()
        self.source.write_bytes(content)
        self.file = StateFile(self.source.as_uri(), len(content), checksum_of(content))

    def duplicate(self, *, copies_only: bool = False) -> tuple[StateFile, Means]:
        duplicator = Duplicator(resolve(str(self.savepoint)), copies_only=copies_only)
        return duplicator.duplicate(resolve(self.file.path), self.file)

    @property
    def left(self) -> list[Path]:
        return list(self.savepoint.iterdir())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def no_reflinks(*_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def shares_blocks(descriptor: int, request: int, source: int) -> None:
    """What FICLONE does, as far as anybody can see."""
    assert request == 0x40049409
    os.pwrite(descriptor, os.pread(source, 1 << 20, 0), 0)


def test_a_hard_link_where_blocks_cannot_be_shared(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", no_reflinks)
    copy, means = files.duplicate()
    (path,) = files.left
    assert means is Means.HARD_LINK
    assert path.samefile(files.source)
    assert copy == StateFile(path.name, len(CONTENT), files.file.checksum)


def test_refused_means_of_duplication_is_not_tried_again(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def refused(*arguments: Any) -> None:
        tried.append(arguments)
        no_reflinks()

    monkeypatch.setattr(fcntl, "ioctl", refused)
    duplicator = Duplicator(resolve(str(files.savepoint)), copies_only=False)
    for _ in range(3):
        assert duplicator.duplicate(resolve(files.file.path), files.file)[1] is Means.HARD_LINK
    assert len(tried) == 1
    assert len(files.left) == 3


def test_a_reflink_comes_first(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", shares_blocks)
    copy, means = files.duplicate()
    (path,) = files.left
    assert means is Means.REFLINK
    assert (path.name, path.read_bytes()) == (copy.path, CONTENT)
    assert path.stat().st_nlink == 1
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_a_copy_where_nothing_can_be_linked(files: Files, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(fcntl, "ioctl", no_reflinks)
    monkeypatch.setattr(os, "link", refused)
    copy, means = files.duplicate()
    (path,) = files.left
    assert means is Means.COPY
    assert (path.name, path.read_bytes()) == (copy.path, CONTENT)


def test_copies_only_share_no_damage(files: Files) -> None:
    copy, means = files.duplicate(copies_only=True)
    assert means is Means.COPY
    files.source.write_bytes(b"damaged")
    assert (files.savepoint / copy.path).read_bytes() == CONTENT


@pytest.mark.parametrize("copies_only", [False, True])
def test_a_source_of_another_length_is_refused(files: Files, copies_only: bool) -> None:
    files.source.write_bytes(CONTENT[:-1])
    with pytest.raises(CorruptFileError, match="chk-1-x: damaged, it has 2999 bytes and not 3000"):
        files.duplicate(copies_only=copies_only)
    assert files.left == []


def test_copy_is_compared_with_its_checksum(files: Files) -> None:
    files.source.write_bytes(b"?" + CONTENT[1:])
    with pytest.raises(CorruptFileError, match="chk-1-x: damaged, its checksum is"):
        files.duplicate(copies_only=True)
    assert files.left == []


@pytest.mark.parametrize("copies_only", [False, True])
def test_duplication_of_a_missing_file_fails(files: Files, copies_only: bool) -> None:
    files.source.unlink()
    with pytest.raises(NotFoundError, match="chk-1-x"):
        files.duplicate(copies_only=copies_only)
    assert files.left == []


@pytest.mark.parametrize("copies_only", [False, True])
def test_other_errors_do_not_count_as_a_missing_means_of_duplication(
    files: Files, monkeypatch: pytest.MonkeyPatch, copies_only: bool
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fcntl, "ioctl", full)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        files.duplicate(copies_only=copies_only)
    assert files.left == []


@pytest.mark.parametrize("copies_only", [False, True])
def test_only_files_are_duplicated(files: Files, copies_only: bool) -> None:
    files.source.unlink()
    os.mkfifo(files.source)
    with pytest.raises(StorageError, match="chk-1-x"):
        files.duplicate(copies_only=copies_only)
    assert files.left == []


def test_content_of_a_symbolic_link_is_copied(files: Files, tmp_path: Path) -> None:
    files.source.rename(tmp_path / "elsewhere")
    files.source.symlink_to(tmp_path / "elsewhere")
    copy, _ = files.duplicate()
    path = files.savepoint / copy.path
    assert not path.is_symlink()
    assert path.read_bytes() == CONTENT


def test_file_is_copied_to_another_file_system_in_pieces(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplication, "_CHUNK_BYTES", 1000)
    with memory_allowed():
        target = resolve("memory://bucket/savepoint")
        copy, means = Duplicator(target, copies_only=False).duplicate(resolve(files.file.path), files.file)
        assert means is Means.COPY
        assert _content(target, copy) == CONTENT
        back = Duplicator(resolve(str(files.savepoint)), copies_only=False)
        local, means = back.duplicate(target.child(copy.path), copy)
        assert means is Means.COPY
        assert (files.savepoint / local.path).read_bytes() == CONTENT


def _content(directory: Location, file: StateFile) -> bytes:
    return bytes(directory.filesystem.cat_file(directory.child(file.path).path))
