"""Temporary directories of processes that live, have ended, and were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckpt_runtime.processes.held_directory import LOCK, HeldDirectory, hold, remove_abandoned

HOLDER = """
import sys
from ckpt_runtime.processes.held_directory import HeldDirectory, hold
directory = HeldDirectory("ckpt-x-", sys.argv[1]) if len(sys.argv) == 2 else hold(sys.argv[2])
print(getattr(directory, "path", directory), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Another process, and the directory that it has made unless it is to hold a given one."""
    with ExitStack() as started:

        def start(*directory: str) -> tuple[subprocess.Popen[str], str]:
            process = started.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", HOLDER, str(tmp_path), *directory],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={"PYTHONPATH": "runtime"},
                )
            )
            started.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        yield start


def test_held_directory_is_private_and_removed_with_its_block_or_last_reference(tmp_path: Path) -> None:
    with HeldDirectory("ckpt-x-", tmp_path) as name:
        assert Path(name).stat().st_mode & 0o777 == 0o700
        (Path(name) / "below").mkdir()
        assert [entry.name for entry in tmp_path.iterdir()] == [Path(name).name]
    assert list(tmp_path.iterdir()) == []
    HeldDirectory("ckpt-x-", tmp_path)
    assert list(tmp_path.iterdir()) == []
    directory = HeldDirectory("ckpt-x-", tmp_path)
    directory.remove()
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_next_held_directory_removes_those_of_killed_processes(
    tmp_path: Path, holder: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    process, theirs = holder()
    (tmp_path / "ckpt-x-of-a-user").mkdir()
    (tmp_path / "ckpt-y-other").mkdir()
    (tmp_path / "ckpt-y-other" / LOCK).touch()
    with HeldDirectory("ckpt-x-", tmp_path):
        assert Path(theirs).is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert Path(theirs).is_dir()
    with HeldDirectory("ckpt-x-", tmp_path) as name:
        assert {entry.name for entry in tmp_path.iterdir()} == {"ckpt-x-of-a-user", "ckpt-y-other", Path(name).name}


def test_held_directory_stays_while_any_process_holds_it(
    tmp_path: Path, holder: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    mine = HeldDirectory("ckpt-x-", tmp_path)
    process, _ = holder(str(mine.path))
    mine.leave()
    mine.leave()
    remove_abandoned("ckpt-x-", tmp_path)
    assert mine.path.is_dir()
    process.kill()
    process.wait(30)
    remove_abandoned("ckpt-x-", tmp_path)
    assert not mine.path.exists()


def test_removed_directory_cannot_be_held(tmp_path: Path) -> None:
    with HeldDirectory("ckpt-x-", tmp_path) as name:
        os.close(hold(name))
    with pytest.raises(FileNotFoundError):
        hold(name)


def test_a_directory_that_was_taken_for_abandoned_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def meanwhile(path: str | Path) -> int:
        seen.append(Path(path))
        if len(seen) == 1:
            remove_abandoned("ckpt-x-", tmp_path)
        return hold(path)

    monkeypatch.setattr("ckpt_runtime.processes.held_directory.hold", meanwhile)
    with HeldDirectory("ckpt-x-", tmp_path) as name:
        assert [str(path) for path in seen] == [str(seen[0]), name]
        assert list(tmp_path.iterdir()) == [Path(name)]


def test_creator_decides_how_an_abandoned_directory_is_cleaned(tmp_path: Path) -> None:
    def keep_results(path: Path) -> None:
        (path / "garbage").unlink(missing_ok=True)
        (path / LOCK).unlink()

    with HeldDirectory("ckpt-x-", tmp_path, keep_results) as name:
        (Path(name) / "garbage").touch()
        (Path(name) / "result").touch()
    assert [path.name for path in Path(name).iterdir()] == ["result"]
    remove_abandoned("ckpt-x-", tmp_path)
    assert [path.name for path in Path(name).iterdir()] == ["result"]
