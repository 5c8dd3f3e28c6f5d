"""The rotation of each aircraft: what it flew before each flight, as a PySpark ``StatefulProcessor``.

Shared by both versions of the pipeline; runs unchanged under Spark's ``transformWithState``.
"""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

OUTPUT_SCHEMA = (
    "row_id BIGINT, tailnum STRING, carrier STRING, origin STRING, dest STRING, leg BIGINT, previous_dest STRING, "
    "ground_minutes BIGINT, visits_of_dest BIGINT, legs_in_24h BIGINT"
)
_MINUTE_MS = 60 * 1000
_DAY_MS = 24 * 60 * _MINUTE_MS
_IDLE_MS = 7 * _DAY_MS


class RotationTracker(StatefulProcessor):
    """One row out per flight of an aircraft, in the order of the flights.

    ``leg`` counts the aircraft's flights from 1; ``previous_dest`` and ``ground_minutes`` (from the last known arrival
    to this departure, null if either flight did not happen) look back one flight; ``visits_of_dest`` counts flights to
    this destination so far, this one included; ``legs_in_24h`` the flights scheduled in the 24 hours up to this one,
    this one included. Results depend on the aircraft's flights alone: the timer, about a week ahead in event time, only
    frees the list of an aircraft that no longer flies, whose entries are too old to count by then.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._last = handle.getValueState("last", "leg BIGINT, dest STRING, arrival_ms BIGINT, timer_ms BIGINT")
        self._recent = handle.getListState("recent", "scheduled_ms BIGINT")
        self._visits = handle.getMapState("visits", "dest STRING", "visits BIGINT")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        last = self._last.get()
        leg, previous_dest, previous_arrival_ms, timer_ms = last if last is not None else (0, None, None, None)
        recent = [scheduled_ms for (scheduled_ms,) in self._recent.get()]
        scheduled_ms: int | None = None
        for row in rows:
            leg += 1
            scheduled_ms = int(row.event_time.timestamp() * 1000)
            recent = [earlier_ms for earlier_ms in recent if earlier_ms > scheduled_ms - _DAY_MS] + [scheduled_ms]
            visited = self._visits.getValue((row.dest,))
            visits = 1 if visited is None else visited[0] + 1
            self._visits.updateValue((row.dest,), (visits,))
            departure_ms, arrival_ms = _flown(row, scheduled_ms)
            yield Row(
                row_id=row.row_id,
                tailnum=key[0],
                carrier=row.carrier,
                origin=row.origin,
                dest=row.dest,
                leg=leg,
                previous_dest=previous_dest,
                ground_minutes=(
                    None
                    if previous_arrival_ms is None or departure_ms is None
                    else (departure_ms - previous_arrival_ms) // _MINUTE_MS
                ),
                visits_of_dest=visits,
                legs_in_24h=len(recent),
            )
            previous_dest, previous_arrival_ms = row.dest, arrival_ms
        if scheduled_ms is None:
            return
        self._last.update((leg, previous_dest, previous_arrival_ms, self._armed(timer_ms, scheduled_ms)))
        self._recent.put([(recent_ms,) for recent_ms in recent])

    def handleExpiredTimer(self, key: tuple[Any, ...], timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self._recent.clear()
        last = self._last.get()
        if last is not None:
            self._last.update((*last[:3], None))
        return iter(())

    def close(self) -> None:
        pass

    def _armed(self, timer_ms: int | None, scheduled_ms: int) -> int:
        """The aircraft's one timer: moved to a week ahead, once it is less than six days ahead."""
        if timer_ms is not None:
            if timer_ms >= scheduled_ms + _IDLE_MS - _DAY_MS:
                return timer_ms
            self._handle.deleteTimer(timer_ms)
        self._handle.registerTimer(scheduled_ms + _IDLE_MS)
        return scheduled_ms + _IDLE_MS


def _flown(row: Row, scheduled_ms: int) -> tuple[int | None, int | None]:
    """Actual departure and arrival in ms since the epoch; None for what did not happen."""
    if row.dep_delay is None:
        return None, None
    departure_ms = scheduled_ms + int(row.dep_delay * _MINUTE_MS)
    if row.air_time is None:
        return departure_ms, None
    return departure_ms, departure_ms + int(row.air_time * _MINUTE_MS)
