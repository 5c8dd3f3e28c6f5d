"""What may be left of a run, judged by names alone: hidden files, files without owner, descriptors, memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.errors import StorageError
from tests.chaos.session import Session
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until

MAX_DESCRIPTORS = 400
MAX_MEMORY_MB = 1500
_CLEAN_UP_S = patient(120.0)
"""Deletions that failed are tried again every 30 s at the latest."""


def check_hidden_files(root: Path) -> None:
    """Nothing hidden anywhere, nor a draft of a file. Raises AssertionError."""
    _wait_for_none(lambda: _hidden(root), "hidden files")


def _wait_for_none(look: Callable[[], list[str]], what: str) -> None:
    """What is being deleted while it is looked at is still there."""
    found: list[str] = []

    def gone() -> bool:
        with suppress(FileNotFoundError, StorageError):
            found[:] = look()
            return not found
        return False

    try:
        wait_until(gone, f"{what} to go", _CLEAN_UP_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: there are {found[:5]}") from None


def _hidden(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob(".*"))


def check_checkpoints(checkpoints: Path, cancelled: list[str], savepoints: Path) -> None:
    """Only cancelled jobs have kept checkpoints, whole ones, and files that these refer to. Raises AssertionError."""
    _wait_for_none(lambda: _without_owner(checkpoints, cancelled), "files without owner")
    broken = [path.name for path in savepoints.iterdir() if not (path / "_metadata").exists()]
    assert not broken, f"savepoints without metadata: {broken}"


def _without_owner(checkpoints: Path, cancelled: list[str]) -> list[str]:
    found = []
    for job in checkpoints.iterdir():
        if job.name not in cancelled:
            found.append(job.name)
            continue
        for entry in job.iterdir():
            retained = re.fullmatch(r"chk-\d+", entry.name) and (entry / "_metadata").exists()
            if not retained and (entry.is_file() or entry.name.startswith("chk-")):
                found.append(f"{job.name}/{entry.name}")
        if len(list(job.glob("chk-*"))) > 2:
            found.append(f"{job.name}: more than the two that are retained")
        found += [f"{job.name}/shared/{name}" for name in _unused(job)]
    return found


def _unused(job: Path) -> set[str]:
    """Shared files up to the newest checkpoint that none refers to. What was under way at the end may stay."""
    retained = [open_snapshot(str(file.parent)).metadata for file in job.glob("chk-*/_metadata")]
    used = {file.path.rpartition("/")[2] for one in retained for state in one.states.values() for file in state.files()}
    newest = max((one.id for one in retained), default=0)
    there = {path.name for path in job.glob("shared/*")}
    return {name for name in there - used if int(name.split("-")[1]) <= newest}


def check_resources(session: Session) -> None:
    """No process of the session holds more descriptors or memory than a young one. Raises AssertionError."""
    for pid in session.processes():
        try:
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        memory = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert descriptors <= MAX_DESCRIPTORS, f"process {pid} has {descriptors} descriptors"
        if memory is not None:
            assert int(memory[1]) <= MAX_MEMORY_MB * 1024, f"process {pid} takes {memory[1]} kB"
