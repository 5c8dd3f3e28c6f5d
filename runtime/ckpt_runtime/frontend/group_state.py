"""``applyInPandasWithState`` as a processor of pandas frames: PySpark's ``GroupState`` over a state and a timer.

As in Spark, each call of the function clears the timeout that an earlier call set; a timeout expires when time has
passed it, not when time has reached it; and the function then gets one frame without rows.
"""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyspark.errors import PySparkTypeError
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

STATE = "state"


class GroupStateProcessor(StatefulProcessor):
    """Calls ``function(key, frames, state)`` for each key with rows, and for each key whose timeout has expired."""

    def __init__(
        self, function: Callable[..., Any], state: StructType, timeout: str, columns: list[str], watermark: bool
    ) -> None:
        self._function = function
        self._schema = state
        self._timeout = timeout
        self._columns = columns
        self._watermark = watermark

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._state = handle.getValueState(STATE, self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        if self._timeout != GroupStateTimeout.NoTimeout:
            for time in list(self._handle.listTimers()):
                self._handle.deleteTimer(time)
        return self._called(key, rows, timerValues, timed_out=False)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        import pandas as pd

        return self._called(tuple(key), iter([pd.DataFrame(columns=self._columns)]), timerValues, timed_out=True)

    def close(self) -> None:
        """Does nothing: the function holds nothing."""

    def _called(self, key: Any, frames: Iterator[Any], times: Any, *, timed_out: bool) -> Iterator[Any]:
        value = self._state.get() if self._state.exists() else None
        state = GroupState(
            optionalValue=value,  # type: ignore[arg-type]
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs(),
            eventTimeWatermarkMs=times.getCurrentWatermarkInMs() if self._watermark else GroupState.NO_TIMESTAMP,
            timeoutConf=self._timeout,
            hasTimedOut=timed_out,
            watermarkPresent=self._watermark,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._schema,
        )
        results = self._function(key, frames, state)
        if hasattr(results, "columns"):
            raise PySparkTypeError(
                errorClass="UDF_RETURN_TYPE",
                messageParameters={"expected": "iterable of pandas.DataFrame", "actual": type(results).__name__},
            )
        yield from results
        # PySpark's class has no public access to the changes that the function made.
        if state._removed:
            self._state.clear()
        elif state._updated:
            self._state.update(tuple(state._value))
        if state._timeout_timestamp != GroupState.NO_TIMESTAMP:
            self._handle.registerTimer(int(state._timeout_timestamp) + 1)
