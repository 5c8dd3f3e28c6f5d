"""Derives options of a job from the triggers of the program's queries: the checkpoint interval, the end of event time.

Spark's ``trigger`` says how often results become visible. Here that is the checkpoint interval. All queries of a
program are one job, so the shortest interval counts. A checkpoint interval that the program or its submission sets
takes precedence.

Durations are in PySpark's notation: ``"10 minutes"``, ``"1 minute 30 seconds"``, ``"1 week"``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.configuration.value_types import parse_duration
from ckpt_runtime.frontend.job import JobOptions
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.kafka_columns import is_exactly_once

INTERVAL_FORM = 'one or more numbers with a unit (week, day, hour, minute, second, millisecond), such as "10 minutes"'

_PART = re.compile(r"\s*([+-]?)\s*([0-9]{1,18})(\.[0-9]{0,9})?\s*([a-z]+)")
_MILLIS = {
    "week": Decimal(604_800_000),
    "day": Decimal(86_400_000),
    "hour": Decimal(3_600_000),
    "minute": Decimal(60_000),
    "second": Decimal(1_000),
    "millisecond": Decimal(1),
    "microsecond": Decimal("0.001"),
}


def parse_interval(text: str) -> int:
    """Parses a Spark SQL interval, or a duration in the form of options, to milliseconds, rounded down.

    Months and years are refused, as in Spark's triggers. Raises ValueError saying what is allowed.
    """
    try:
        return parse_duration(text)
    except ValueError:
        millis = _spark_interval(text.strip().lower())
    if millis is None or millis < 0:
        raise ValueError(f"{INTERVAL_FORM}, not negative")
    return int(millis)


def _spark_interval(text: str) -> Decimal | None:
    """Returns None for a text that is not an interval."""
    text = re.sub(r"^interval(?=[\s+-])", "", text)
    total, position = Decimal(0), 0
    if not text:
        return None
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        sign, whole, fraction, plural = part.groups()
        unit = plural.removesuffix("s")
        factor = _MILLIS.get(unit)
        if factor is None or (fraction is not None and unit != "second"):
            return None
        total += (-1 if sign == "-" else 1) * Decimal(whole + (fraction or "")) * factor
        position = part.end()
    return total


_FIELDS = {
    "processing_time_interval": "processingTime",
    "continuous_checkpoint_interval": "continuous",
    "real_time_batch_duration": "realTime",
}
"""Fields of Spark's request that hold an interval, with the arguments of ``trigger`` that set them."""


def set_options(starts: Sequence[Any], options: JobOptions) -> None:
    """Sets the checkpoint interval to that of the triggers, unless program or submission set one.

    If all triggers end with the data that is there, event time does not end with it, as in Spark: rows and timers that
    the watermark has not reached stay in state.

    ``starts`` are Spark's requests. Raises PlanError for an interval that Spark refuses, or that the engine cannot
    keep.
    """
    intervals = [found for start in starts if (found := _interval_ms(start))]
    key = CheckpointingOptions.INTERVAL.key
    if intervals and not options.sets(key):
        options.set(key, f"{min(intervals)} ms")
    ends = ExecutionOptions.EVENT_TIME_ENDS.key
    if starts and all(start.available_now or start.once for start in starts) and not options.sets(ends):
        options.set(ends, False)


def _interval_ms(start: Any) -> int | None:
    """The interval of a query in milliseconds; None for a trigger without one, or of zero: as soon as possible."""
    field = start.WhichOneof("trigger")
    if field not in _FIELDS:
        return None
    text, name = getattr(start, field), _FIELDS[field]
    if name == "realTime" and not _is_visible_at_once(start):
        raise PlanError(
            "trigger",
            "realTime needs a sink whose rows are visible at once, which is kafka with option "
            "deliveryGuarantee=at-least-once; rows of others become visible with checkpoints: use processingTime",
        )
    try:
        return parse_interval(text)
    except ValueError:
        raise PlanError("trigger", f"{name}={text!r} is not an interval: expected {INTERVAL_FORM}") from None


def _is_visible_at_once(start: Any) -> bool:
    """Whether the rows of a query's sink become visible without waiting for a checkpoint."""
    sink = (start.format or "parquet").lower()
    return sink == "noop" or (sink == "kafka" and not is_exactly_once(dict(start.options)))
