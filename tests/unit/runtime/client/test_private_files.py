"""Files for their owner alone, whatever the process's umask is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.private_files import append_private, make_private_directory, write_private
from ckpt_runtime.client.session_command import properties_text


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_every_level_of_a_directory_is_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private_directory(tmp_path / "a" / "b")
    make_private_directory(tmp_path / "a" / "b")
    assert (mode(tmp_path), mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o755, 0o700, 0o700)


def test_file_is_private_replaces_links_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    for text in ("one", "two"):
        write_private(path, text)
        assert (path.read_text(), mode(path)) == (text, 0o600)
    assert list(path.parent.iterdir()) == [path]
    path, other = tmp_path / "file", tmp_path / "other"
    path.symlink_to(other)
    write_private(path, "text")
    assert not other.exists()
    assert not path.is_symlink()


def test_a_draft_that_cannot_take_its_place_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    (path / "full").mkdir(parents=True)
    with pytest.raises(OSError):
        write_private(path, "text")
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_becomes_private_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    path.chmod(0o644)
    with append_private(path) as log:
        log.write(b"after\n")
    assert (path.read_text(), mode(path)) == ("before\nafter\n", 0o600)


def test_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    path, other = tmp_path / "log", tmp_path / "other"
    other.write_text("of another user")
    path.symlink_to(other)
    with pytest.raises(OSError):
        append_private(path)
    assert other.read_text() == "of another user"


def test_sparks_settings_survive_the_properties_file() -> None:
    text = properties_text("yarn", {"spark.x": "a=b:c #d!\\e\n", "spark.y": " f"})
    assert text == "spark.x=a\\=b\\:c\\ \\#d\\!\\\\e\\n\nspark.y=\\ f\n"
