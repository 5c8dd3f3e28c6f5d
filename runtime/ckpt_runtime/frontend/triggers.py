"""Derives a job's checkpoint interval, at which rows become visible, from the triggers of the program's queries.

Spark's ``trigger`` says how often results become visible. Here that is the checkpoint interval. All queries of a
program are one job, so the shortest interval counts. A checkpoint interval that the program or its submission sets
takes precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.frontend.intervals import INTERVAL_FORM, parse_interval
from ckpt_runtime.frontend.job import JobOptions
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.kafka_columns import is_exactly_once

_FIELDS = {
    "processing_time_interval": "processingTime",
    "continuous_checkpoint_interval": "continuous",
    "real_time_batch_duration": "realTime",
}
"""Fields of Spark's request that hold an interval, with the arguments of ``trigger`` that set them."""


def set_interval(starts: Sequence[Any], options: JobOptions) -> None:
    """Sets the checkpoint interval to that of the triggers, unless program or submission set one.

    ``starts`` are Spark's requests. Raises PlanError for an interval that Spark refuses, or that the engine cannot
    keep.
    """
    intervals = [found for start in starts if (found := _interval_ms(start))]
    key = CheckpointingOptions.INTERVAL.key
    if intervals and not options.sets(key):
        options.set(key, f"{min(intervals)} ms")


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
