"""Log lines as plain text or as JSON objects, with the ids of the jobs, tasks and so on that they concern.

Fields are set for the process (:func:`log_of_process`), for the current work of a thread or asyncio task
(:func:`about`), or for a single line (:func:`fields`); they apply to lines of any logger. If a field is set more than
once, the most specific value wins. Plain lines show only the message.

The last lines of a logging process are kept in memory (:func:`recent_lines`), because its log file may be on a machine
that the reader cannot reach. A worker also keeps its last lines in its directory, where its agent finds them after the
worker's death (:func:`keep_lines_in`, :func:`kept_lines`).

The module is outside the rooms because all of them log. It changes only the logging of processes that request it.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ckpt_runtime.configuration.cluster_options import LogFormat
from ckpt_runtime.failure_report import printable
from ckpt_runtime.secret_keys import without_secrets

_FORMAT_VARIABLE, _SESSION_VARIABLE = "CKPT_LOG_FORMAT", "CKPT_LOG_SESSION"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = "ckpt_fields"
MAX_RECENT_CHARS = 1 << 20
_MAX_LINE_CHARS = 32_768
MAX_KEPT_BYTES = 64 << 10
_KEPT_FILES = (".ckpt-worker.log.1", ".ckpt-worker.log")

_process: dict[str, Any] = {}
_present: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039 -- it is never changed


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The log settings that all processes of a session share. ``session`` is the id of its Spark application."""

    format: LogFormat = LogFormat.TEXT
    session: str = ""

    @classmethod
    def of_environment(cls) -> LogSettings:
        """The settings that the parent process has passed with :meth:`for_children`."""
        known = os.environ.get(_FORMAT_VARIABLE)
        chosen = LogFormat(known) if known in tuple(LogFormat) else LogFormat.TEXT
        return cls(chosen, os.environ.get(_SESSION_VARIABLE, ""))

    def for_children(self) -> None:
        """Pass the settings to the processes that this one starts from now on."""
        os.environ[_FORMAT_VARIABLE] = self.format.value
        os.environ[_SESSION_VARIABLE] = self.session


PLAIN = LogSettings()
"""Plain text lines, without a session."""


def start_logging(settings: LogSettings, process: str, **known: Any) -> None:
    """Send log lines to standard error from now on; ``process`` is the kind of this process. May be called again.

    Python's warnings become log lines, too.
    """
    log_of_process(process=process, session=settings.session or None, **known)
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.INFO, format=_TEXT)
    root = logging.getLogger()
    if _recent not in root.handlers:
        _recent.setFormatter(logging.Formatter(_TEXT))
        root.addHandler(_recent)
    if settings.format is LogFormat.JSON:
        for handler in root.handlers:
            handler.setFormatter(JsonLines())


def log_of_process(**known: Any) -> None:
    """Set fields of every line of this process from now on; None removes a field."""
    _process.update(known)
    for name in [name for name, value in _process.items() if value is None]:
        del _process[name]


@contextmanager
def about(**known: Any) -> Generator[None]:
    """Set fields of every line of this thread or task in the block; tasks and callbacks begun in it keep them."""
    token = _present.set({**_present.get(), **known})
    try:
        yield
    finally:
        _present.reset(token)


def fields(**known: Any) -> dict[str, Any]:
    """Fields of one line: ``logger.warning(..., extra=fields(checkpoint_id=7))``."""
    return {_FIELDS: known}


class RecentLines(logging.Handler):
    """Keeps the last lines, :data:`MAX_RECENT_CHARS` of them at most."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque()
        self._chars = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock."""
        try:
            line = printable(self.format(record), _MAX_LINE_CHARS) + "\n"
        except Exception:
            self.handleError(record)
            return
        self._lines.append(line)
        self._chars += len(line)
        while self._chars > MAX_RECENT_CHARS:
            self._chars -= len(self._lines.popleft())

    def text(self) -> str:
        """The lines, oldest first, without recognisable secrets."""
        self.acquire()
        try:
            lines = list(self._lines)
        finally:
            self.release()
        return without_secrets("".join(lines))


_recent = RecentLines()


def recent_lines() -> str:
    """The last lines of this process's log, oldest first; empty in a process that has not started logging."""
    return _recent.text()


class _BoundedLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), _MAX_LINE_CHARS)


class _KeptLines(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- the name in the base class
        """Ignore a full disk: the line has other handlers, which report their errors."""


def keep_lines_in(directory: str) -> None:
    """Write the lines of this process from now on to two files of :data:`MAX_KEPT_BYTES`, of which one is older."""
    handler = _KeptLines(
        Path(directory, _KEPT_FILES[-1]), maxBytes=MAX_KEPT_BYTES, backupCount=1, encoding="utf-8", delay=True
    )
    handler.setFormatter(_BoundedLines(_TEXT))
    logging.getLogger().addHandler(handler)


def kept_lines(directory: str) -> str:
    """The last lines of a process that has called :func:`keep_lines_in`, at most :data:`MAX_KEPT_BYTES` of them.

    The process may be dead. Its user code may have replaced the files: only regular files are read. Recognisable
    secrets are masked.
    """
    content = b""
    for name in _KEPT_FILES:
        try:
            descriptor = os.open(Path(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode):
                file.seek(max(0, found.st_size - MAX_KEPT_BYTES))
                content += file.read(MAX_KEPT_BYTES)
    return without_secrets(content[-MAX_KEPT_BYTES:].decode("utf-8", "replace"))


class JsonLines(logging.Formatter):
    """Formats a line as one JSON object; output of user code is always text in it."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            "pid": record.process,
            **_process,
            **_present.get(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # user code logged arguments that do not fit: the line must not be lost
        return f"{record.msg} {record.args}"
