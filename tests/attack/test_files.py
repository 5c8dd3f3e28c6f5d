"""Another user of the machine at the files and in the process list of a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attack.conftest import SECRET_OPTION, AttackedSession
from tests.support.spark_sessions import wait_until

pytestmark = [pytest.mark.attack, pytest.mark.spark, pytest.mark.timeout(600)]


def below(directory: Path) -> list[Path]:
    """What comes and goes meanwhile is there or not."""
    return [Path(place, name) for place, directories, files in os.walk(directory) for name in (*directories, *files)]


def test_no_file_of_a_session_can_be_read(
    attacked: AttackedSession, as_other_user: Callable[[Callable[[], Any]], Any]
) -> None:
    """Its log, its address, the uploaded pipelines, the checkpoints. What its job writes is for whom the umask says."""

    def readable() -> list[str]:
        return sorted(name for name in os.listdir(attacked.directory) if os.access(attacked.directory / name, os.R_OK))

    there = {path.name for path in attacked.directory.iterdir()}
    assert {"session.log", "session.ready.json", "work"} <= there

    def are_kept() -> bool:
        names = [path.name for path in below(attacked.directory / "work")]
        return any(name.startswith("chk-") for name in names) and any(name.endswith(".archive") for name in names)

    wait_until(are_kept, "a checkpoint and an upload")
    assert as_other_user(readable) == ["report"]


def test_checkpoints_and_uploads_are_private_wherever_they_lie(attacked: AttackedSession) -> None:
    for path in below(attacked.directory / "work"):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:  # a checkpoint that was replaced meanwhile
            continue
        assert mode & 0o077 == 0, path


def test_the_process_list_shows_no_secret(attacked: AttackedSession) -> None:
    lines = attacked.command_lines()
    assert any("main.py" in line for line in lines)
    assert attacked.info.token
    assert [line for line in lines if attacked.info.token in line] == []
    assert Path(attacked.info.log_file).read_text().count(attacked.info.token) == 0


def test_secret_options_are_in_no_command_line_no_file_and_no_answer(attacked: AttackedSession) -> None:
    assert not [line for line in attacked.command_lines() if SECRET_OPTION in line]
    files = [file for file in attacked.directory.iterdir() if file.is_file()]
    assert Path(attacked.info.log_file) in files
    assert not [file for file in files if SECRET_OPTION.encode() in file.read_bytes()]
    assert attacked.client.cluster_configuration()["my.db.password"] == "******"
