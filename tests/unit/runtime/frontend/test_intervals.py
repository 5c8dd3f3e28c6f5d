"""What Spark SQL takes for an interval, beside its own tests in ``tests/differential``."""

from __future__ import annotations

import pytest

from ckpt_runtime.frontend.program import parse_interval


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("5 min", 300_000),
        ("10s", 10_000),
        ("250", 250),
        ("1 d", 86_400_000),
        ("interval 2 hours 1 microsecond", 7_200_000),
        ("1 week -1 day", 6 * 86_400_000),
    ],
)
def test_durations_of_options_and_intervals(text: str, millis: int) -> None:
    assert parse_interval(text) == millis


@pytest.mark.parametrize(
    "text",
    [
        "",
        "interval",
        "minutes",
        "1 fortnight",
        "1 month",
        "1 year",
        "-1 second",
        "1.5 minutes",
        "1 second x",
        "1 s 2 s",
    ],
)
def test_text_that_is_not_an_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="one or more numbers with a unit"):
        parse_interval(text)
