"""What a line of the log holds when it is a JSON object."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime import structured_log
from ckpt_runtime.configuration.cluster_options import LogFormat
from ckpt_runtime.secret_keys import without_secrets
from ckpt_runtime.structured_log import JsonLines, LogSettings, about, fields, log_of_process, start_logging


class Log:
    """A logger of its own whose lines can be read."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        handler = logging.StreamHandler(self._text)
        handler.setFormatter(JsonLines())
        self.logger = logging.RootLogger(logging.INFO)
        self.logger.addHandler(handler)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._text.getvalue().splitlines()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(structured_log, "_process", {})
    return Log()


def test_a_line_has_time_level_logger_message_and_process(log: Log) -> None:
    log.logger.warning("%d of %s", 3, "four")
    (line,) = log.lines()
    assert line.pop("time").endswith("Z")
    assert isinstance(line.pop("pid"), int)
    assert line == {"level": "WARNING", "logger": "root", "message": "3 of four"}


def test_ids_come_from_the_process_from_what_is_being_done_and_from_the_line(log: Log) -> None:
    log_of_process(process="worker", job_id="a", attempt=1)
    with about(subtask=2, attempt=2):
        log.logger.info("x", extra=fields(checkpoint_id=7, attempt=3))
        log.logger.info("y")
    log_of_process(job_id=None)
    log.logger.info("z")
    first, second, third = log.lines()
    assert {"process": "worker", "job_id": "a", "subtask": 2, "checkpoint_id": 7, "attempt": 3}.items() <= first.items()
    assert second["attempt"] == 2
    assert "checkpoint_id" not in second
    assert third["attempt"] == 1
    assert not {"subtask", "job_id"} & third.keys()


def test_a_thread_does_not_have_the_ids_of_another_one(log: Log) -> None:
    with about(subtask=1):
        thread = threading.Thread(target=log.logger.info, args=("x",))
        thread.start()
        thread.join()
    assert "subtask" not in log.lines()[0]


def test_tasks_of_the_event_loop_keep_their_log_ids(log: Log) -> None:
    async def main() -> None:
        done = asyncio.Event()
        with about(job_id="a"):
            asyncio.get_running_loop().call_later(0, lambda: (log.logger.info("x"), done.set()))
        log.logger.info("y")
        await done.wait()

    asyncio.run(main())
    outside, inside = log.lines()
    assert "job_id" not in outside
    assert inside["job_id"] == "a"


def test_log_line_of_user_code_is_one_line_of_json(log: Log) -> None:
    log.logger.info('two\nlines "quoted" \ud800 \x00')
    log.logger.info("arguments %d that do not fit", "x")
    log.logger.info("x", extra=fields(odd=object))
    try:
        raise ValueError("no")
    except ValueError:
        log.logger.exception("failed")
    lines = log.lines()
    assert lines[0]["message"] == 'two\nlines "quoted" \ud800 \x00'
    assert "arguments %d that do not fit" in lines[1]["message"]
    assert "object" in lines[2]["odd"]
    assert "ValueError: no" in lines[3]["exception"]


def test_children_log_as_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LOG_FORMAT", "nonsense")
    assert LogSettings.of_environment().format is LogFormat.TEXT
    settings = LogSettings(LogFormat.JSON, "app-1")
    monkeypatch.setattr("os.environ", {})
    settings.for_children()
    assert LogSettings.of_environment() == settings


@pytest.mark.parametrize("chosen", LogFormat)
def test_a_process_logs_as_configured(log: Log, chosen: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    text = io.StringIO()
    monkeypatch.setattr("sys.stderr", text)
    start_logging(LogSettings(LogFormat.TEXT), "driver")
    start_logging(LogSettings(chosen, "app-1"), "driver")
    root.info("said")
    (line,) = text.getvalue().splitlines()
    if chosen is LogFormat.JSON:
        found = json.loads(line)
        assert (found["message"], found["process"], found["session"]) == ("said", "driver", "app-1")
    else:
        assert line.endswith("INFO root: said")


def test_a_warning_of_python_is_a_line_of_the_log() -> None:
    code = (
        "import warnings; from ckpt_runtime.structured_log import LogSettings, start_logging;"
        "from ckpt_runtime.configuration.cluster_options import LogFormat;"
        "start_logging(LogSettings(LogFormat.JSON, 'app-1'), 'driver'); warnings.warn('use another', FutureWarning)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], "FutureWarning: use another" in found["message"]) == (
        "WARNING",
        "py.warnings",
        True,
    )


def test_the_last_lines_are_kept_without_secrets_and_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_log, "MAX_RECENT_CHARS", 90)
    recent = structured_log.RecentLines()
    logger = logging.RootLogger(logging.INFO)
    logger.addHandler(recent)
    logger.info("first")
    logger.info("connects with password=hunter2 to s3://key:secret@bucket/x \x1b[31m")
    logger.info("x" * 20)
    assert recent.text() == "connects with password=****** to s3://******@bucket/x \\x1b[31m\n" + "x" * 20 + "\n"


def test_lines_kept_in_a_directory_are_bounded_and_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = logging.RootLogger(logging.INFO)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(structured_log, "MAX_KEPT_BYTES", 400)
    structured_log.keep_lines_in(str(tmp_path))
    for number in range(50):
        root.info("line %d", number)
    root.info("password=hunter2")
    for handler in root.handlers:
        handler.close()
    kept = structured_log.kept_lines(str(tmp_path))
    assert kept.endswith("INFO root: line 49\n" + kept.splitlines()[-1] + "\n")
    assert kept.endswith("INFO root: password=******\n")
    assert len(kept) <= 400
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 800


def test_kept_lines_are_read_from_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another file")
    (tmp_path / ".ckpt-worker.log").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / ".ckpt-worker.log.1")
    assert structured_log.kept_lines(str(tmp_path)) == ""
    assert structured_log.kept_lines(str(tmp_path / "missing")) == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"s3.secret-key": "abc", "n": 1}', '{"s3.secret-key": "******", "n": 1}'),
        ("Authorization: Bearer abcdefgh123", "Authorization: ******"),
        ("sent Bearer abcdefgh123", "sent Bearer ******"),
        ("AWS_SECRET_ACCESS_KEY = AKIA/x+1, more", "AWS_SECRET_ACCESS_KEY = ******, more"),
        ("the token has expired", "the token has expired"),
    ],
)
def test_a_text_loses_the_values_of_what_is_called_a_secret(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
