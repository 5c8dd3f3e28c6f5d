"""What Spark SQL takes for an interval, beside its own tests in ``tests/differential``."""

from __future__ import annotations

import pytest

from ckpt_runtime.api.intervals import parse_interval, parse_offset


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("5 min", 300_000),
        ("10s", 10_000),
        ("250", 250),
        ("1 d", 86_400_000),
        ("interval 2 hours 1 microsecond", 7_200_000),
        ("1 month", 31 * 86_400_000),
        ("1 year -1 day", (12 * 31 - 1) * 86_400_000),
    ],
)
def test_durations_of_options_and_intervals(text: str, millis: int) -> None:
    assert parse_interval(text) == millis


@pytest.mark.parametrize(
    "text", ["", "interval", "minutes", "1 fortnight", "-1 month", "-1 second", "1.5 minutes", "1 second x", "1 s 2 s"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="one or more numbers with a unit"):
        parse_interval(text)


@pytest.mark.parametrize(
    ("text", "millis"),
    [("-5 min", -300_000), (" -1 hour 30 minutes", -1_800_000), ("-10s", -10_000), ("1 hour 30 minutes", 5_400_000)],
)
def test_offsets_may_be_negative(text: str, millis: int) -> None:
    assert parse_offset(text) == millis


@pytest.mark.parametrize("text", ["-", "- ", "1 month", "1 microsecond", "-1.0005 seconds", "--1 s"])
def test_what_is_no_offset(text: str) -> None:
    with pytest.raises(ValueError, match=r"one or more numbers with a unit .*, in whole milliseconds"):
        parse_offset(text)
