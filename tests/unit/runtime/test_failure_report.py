"""Exceptions that do not want to be printed."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any, NoReturn

import orjson
import pytest

from ckpt_runtime.failure_report import (
    MAX_MESSAGE_CHARS,
    MAX_TRACE_CHARS,
    FailureCause,
    log_failure,
    printable,
    report_of,
    summary_of,
)


class RaisesInStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class ExitsInStr(Exception):
    def __str__(self) -> str:  # noqa: PLE0307 -- the point
        sys.exit(3)


_NOT_TEXT: Any = 5


class GivesNoText(Exception):
    def __str__(self) -> Any:
        return _NOT_TEXT


class TextThatRaises(str):
    __slots__ = ()

    def __getitem__(self, key: Any) -> NoReturn:
        raise RuntimeError("no part")

    def __len__(self) -> NoReturn:
        raise RuntimeError("no length")

    def replace(self, *arguments: Any) -> NoReturn:
        raise RuntimeError("no copy")


class GivesOddText(Exception):
    def __str__(self) -> str:
        return TextThatRaises("odd")


class OddClass(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no module")


class OfOddClass(Exception, metaclass=OddClass):
    pass


class WithoutCause(Exception):
    @property
    def __cause__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no cause")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def nested(levels: int) -> BaseException:
    error: BaseException = ValueError("innermost")
    for level in range(levels):
        outer = ValueError(f"level {level} {'x' * 100}")
        outer.__cause__ = error
        error = outer
    return error


UNPRINTABLE: list[BaseException] = [
    RaisesInStr(),
    ExitsInStr(),
    GivesNoText(),
    GivesOddText(),
    OfOddClass("text"),
    WithoutCause("text"),
    ValueError("half a pair \ud800"),
    ValueError("x" * 100_000_000),
    ValueError("\x1b[2J\x00\x07"),
    ExceptionGroup("many", [ValueError("y" * 50_000) for _ in range(100)]),
    SyntaxError("bad", ("file\ud800", 1, 1, "x" * 1_000_000)),
    nested(2_000),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", UNPRINTABLE, ids=lambda error: f"{type.__repr__(type(error))}")
def test_every_exception_gives_a_bounded_report_that_can_be_sent(error: BaseException) -> None:
    report = report_of(raised(error))
    assert type.__dict__["__name__"].__get__(type(error)) in report.exception
    assert report.stack_trace.startswith(report.exception)
    assert len(report.message) < MAX_MESSAGE_CHARS + 100
    assert len(report.stack_trace) < MAX_MESSAGE_CHARS + MAX_TRACE_CHARS + 1_000
    for text in (report.message, report.stack_trace, summary_of(error)):
        assert json.loads(orjson.dumps(text)) == text
        assert not set(text) & {"\x00", "\x07", "\x1b"}
    assert "\n" not in summary_of(error)
    assert len(summary_of(error)) < 700


def test_a_plain_exception_is_reported_in_full() -> None:
    report = report_of(raised(ValueError("broken")))
    assert (report.exception, report.message) == ("ValueError", "broken")
    assert report.stack_trace.startswith("ValueError: broken\nTraceback (most recent call last):\n")
    assert "in raised" in report.stack_trace
    assert report.stack_trace.endswith("ValueError: broken\n")
    assert summary_of(ValueError("bro\nken")) == "ValueError: bro ken"
    assert report_of(json.JSONDecodeError("x", "", 0)).exception == "json.decoder.JSONDecodeError"


def test_a_message_that_fails_says_what_its_text_raised() -> None:
    assert "RuntimeError" in report_of(RaisesInStr()).message
    assert "SystemExit" in summary_of(ExitsInStr())


def test_a_cut_text_says_how_much_is_missing() -> None:
    assert printable("abcdef", 4) == "abcd... (2 more characters)"
    assert printable("abcd", 4) == "abcd"
    assert printable("a\ud800\tb\r", 9) == "a\\ud800\tb\\x0d"


def test_a_long_trace_keeps_its_first_cause_and_its_last_exception() -> None:
    trace = report_of(nested(1_000)).stack_trace
    assert "ValueError: innermost" in trace
    assert "lines left out" in trace
    assert trace.endswith(f"level 999 {'x' * 100}\n")


def test_a_log_gets_the_same_bounded_text() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("here.alone")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(stream))
    log_failure(logger, logging.ERROR, "subtask s failed", raised(ValueError("z" * 1_000_000)))
    assert stream.getvalue().startswith("subtask s failed: ValueError: zzz")
    assert len(stream.getvalue()) < 30_000


def test_reports_are_values() -> None:
    assert report_of(ValueError("a")) == FailureCause("ValueError", "a", "ValueError: a\nValueError: a\n")
