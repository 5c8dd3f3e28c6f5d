"""Who is to blame for an error of storage."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from fsspec.spec import AbstractFileSystem

from ckpt_runtime.storage import errors
from ckpt_runtime.storage.filesystem import Location, make_directory, read_bytes, resolve


class Failing(AbstractFileSystem):
    """A file system whose reads end as ``failure`` says."""

    def __init__(self, failure: BaseException, **options: Any) -> None:
        super().__init__(skip_instance_cache=True, **options)
        self._failure = failure

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        raise self._failure

    cat_file = _open


@pytest.mark.parametrize(
    ("failure", "to_blame"),
    [
        (TimeoutError(errno.ETIMEDOUT, "timed out"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (OSError(errno.EIO, "input/output error"), True),
        (OSError(errno.ENOSPC, "no space left"), True),
        (OSError(errno.ESTALE, "stale handle"), True),
        (OSError("503 slow down"), True),
        (RuntimeError("a file system's own error"), True),
        (PermissionError("access denied"), False),
        (PermissionError(errno.EACCES, "permission denied"), False),
        (FileNotFoundError(errno.ENOENT, "nothing there"), False),
        (IsADirectoryError(errno.EISDIR, "a directory"), False),
        (NotADirectoryError(errno.ENOTDIR, "no directory"), False),
        (OSError(errno.EROFS, "read-only"), False),
    ],
    ids=repr,
)
def test_errors_of_file_systems_are_mapped(tmp_path: Path, failure: BaseException, to_blame: bool) -> None:
    location = Location(Failing(failure), str(tmp_path / "file"), "other")
    with pytest.raises(errors.StorageError) as raised:
        read_bytes(location, 100)
    assert errors.storage_failed(raised.value) is to_blame


def test_path_of_another_kind_than_expected_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(errors.StorageError, match="more than the 10 allowed") as raised:
        read_bytes(resolve(str(tmp_path / "file")), 10)
    assert not errors.storage_failed(raised.value)
    with pytest.raises(errors.StorageError) as raised:
        make_directory(resolve(str(tmp_path / "file")), exist_ok=False)
    assert not errors.storage_failed(raised.value)


def test_missing_mount_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError, match="its storage is away") as raised:
        make_directory(resolve(str(tmp_path / "away" / "mine")), parents=False)
    assert errors.storage_failed(raised.value)
    assert errors.storage_failed(errors.PoolExhaustedError("too many", ""))
    assert errors.storage_failed(errors.StorageTimeoutError("no answer", ""))
    assert not errors.storage_failed(errors.CorruptFileError("a bit flipped", ""))
