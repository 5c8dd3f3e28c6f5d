"""The options of a source that align its watermarks with others', by the names that Flink SQL has for them.

``scheduler/watermark_alignment.py`` decides what they mean while a job runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import duration_ms

GROUP_OPTION = "scan.watermark.alignment.group"
MAX_DRIFT_OPTION = "scan.watermark.alignment.max-drift"
UPDATE_INTERVAL_OPTION = "scan.watermark.alignment.update-interval"
IDLE_TIMEOUT_OPTION = "scan.watermark.idle-timeout"
ALIGNMENT_OPTIONS = (GROUP_OPTION, MAX_DRIFT_OPTION, UPDATE_INTERVAL_OPTION, IDLE_TIMEOUT_OPTION)
"""Reader options of every source that is read in splits, handled by the engine."""

_LEAST_INTERVAL_MS = 10


class Alignment(NamedTuple):
    """Durations in ms. ``idle_timeout_ms`` None stands for that of the job."""

    group: str
    max_drift_ms: int
    update_interval_ms: int
    idle_timeout_ms: int | None


def alignment_of(options: Mapping[str, str]) -> Alignment | None:
    """What the options of a reader say about alignment; None if they do not. Raises PlanError for a bad one."""
    given = {key.lower(): str(value) for key, value in options.items()}
    values = {key: given[key] for key in ALIGNMENT_OPTIONS if key in given}
    if not values:
        return None
    for key, other in ((GROUP_OPTION, MAX_DRIFT_OPTION), (MAX_DRIFT_OPTION, GROUP_OPTION)):
        if not values.get(key, "").strip():
            raise PlanError(f"option {key!r}", f"alignment of watermarks needs it, together with {other}")
    durations = {key: int(duration_ms(key, text, "ms")) for key, text in values.items() if key != GROUP_OPTION}
    interval_ms = durations.get(UPDATE_INTERVAL_OPTION, 1_000)
    if interval_ms < _LEAST_INTERVAL_MS:
        problem = f"{values[UPDATE_INTERVAL_OPTION]!r} is less than {_LEAST_INTERVAL_MS} ms"
        raise PlanError(f"option {UPDATE_INTERVAL_OPTION!r}", problem)
    return Alignment(values[GROUP_OPTION], durations[MAX_DRIFT_OPTION], interval_ms, durations.get(IDLE_TIMEOUT_OPTION))
