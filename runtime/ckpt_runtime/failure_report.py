"""Exceptions as readable text: bounded, and valid for every encoder. No function here raises, for any exception.

Exceptions of user code may fail to print, hold text that is not valid Unicode, or be as large as memory. Everything
that reports one (a worker, the driver, the plan process, a log) uses :func:`report_of` or :func:`summary_of`.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

MAX_MESSAGE_CHARS = 4_096
MAX_TRACE_CHARS = 16_384
_MAX_NAME_CHARS = 256
_MAX_SUMMARY_CHARS = 512
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


@dataclass(frozen=True, slots=True)
class FailureCause:
    """``exception`` is a class name; ``stack_trace`` begins with the line that clients show."""

    exception: str
    message: str
    stack_trace: str


def report_of(error: BaseException) -> FailureCause:
    """Class, message and trace of an exception, each of bounded length."""
    name = _name_of(type(error))
    message = _message_of(error)
    return FailureCause(name, message, _joined([f"{name}: {message}\n", *_trace_of(error)]))


def failure_reason(failure: FailureCause | None) -> str | None:
    """Class and first line of the message, for lists; None without a failure."""
    if failure is None:
        return None
    return printable(f"{failure.exception}: {failure.message}".splitlines()[0], _MAX_SUMMARY_CHARS)


def summary_of(error: BaseException) -> str:
    """Class and message in one short line, for logs and for reasons."""
    return printable(f"{_name_of(type(error))}: {_message_of(error)}".replace("\n", " "), _MAX_SUMMARY_CHARS)


def printable(text: str, most: int) -> str:
    """The text in about ``most`` characters at most, without control characters and lone surrogates; notes any cut."""
    try:
        plain = str.__str__(text)
        cut = plain[:most]
        left = len(plain) - len(cut)
        shown = cut.encode("utf-8", "backslashreplace").decode().translate(_CONTROLS)
    except Exception:
        return "(text that cannot be shown)"
    return f"{shown}... ({left} more characters)" if left else shown


def log_failure(logger: logging.Logger, level: int, what: str, error: BaseException) -> None:
    """Log an exception with a bounded trace; the logging module itself would write the whole trace."""
    logger.log(level, "%s: %s", what, report_of(error).stack_trace)


def name_of(call: Callable[..., object]) -> str:
    """The name of a function, also of one whose arguments are bound."""
    while isinstance(call, partial):
        call = call.func
    return str(getattr(call, "__qualname__", type(call).__name__))


def _name_of(kind: type) -> str:
    try:
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    except BaseException:  # raised by a user-defined metaclass
        name = type.__dict__["__name__"].__get__(kind)
    return printable(name, _MAX_NAME_CHARS)


def _message_of(error: BaseException) -> str:
    try:
        return printable(str(error), MAX_MESSAGE_CHARS)
    except BaseException as failure:  # raised by a user-defined __str__, which may even call sys.exit()
        return f"(its message cannot be shown: __str__() raised {_name_of(type(failure))})"


def _trace_of(error: BaseException) -> list[str]:
    try:
        return _cut_in_the_middle(traceback.TracebackException.from_exception(error, compact=True).format())
    except BaseException as failure:
        return [f"(its trace cannot be shown: {_name_of(type(failure))})\n"]


def _cut_in_the_middle(lines: Iterable[str]) -> list[str]:
    """Keep the first and the last lines: Python prints the cause first and the outermost exception last."""
    first: list[str] = []
    last: deque[str] = deque()
    head = tail = left_out = 0
    for line in lines:
        shown = printable(line, MAX_MESSAGE_CHARS)
        if not last and head + len(shown) <= MAX_TRACE_CHARS // 2:
            first.append(shown)
            head += len(shown)
            continue
        last.append(shown)
        tail += len(shown)
        while tail > MAX_TRACE_CHARS // 2:
            tail -= len(last.popleft())
            left_out += 1
    return [*first, f"  ... {left_out} lines left out ...\n", *last] if left_out else [*first, *last]


def _joined(lines: list[str]) -> str:
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
