"""The ``StatefulProcessorHandle`` that a hosted processor gets in ``init``.

State variables can be requested in ``init`` only, each name once, as in Spark. Schemas are DDL strings or
``StructType``. The base class's constructor is not called, as it needs a socket to a JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ListState, MapState, StatefulProcessorHandle, ValueState
from pyspark.sql.types import StructType

from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.operators.errors import ProcessorSchemaError, ProcessorUsageError
from ckpt_runtime.operators.processor_states import (
    HostedListState,
    HostedMapState,
    HostedState,
    HostedValueState,
    KeyCursor,
)
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.state.errors import StateSchemaError
from ckpt_runtime.state.states import KeyedTimers, TimeToLive

RESERVED_PREFIX = "$"
TIMERS = "$timers"

V = TypeVar("V", bound=HostedState)


def arrow_schema(schema: StructType | str, state: str) -> pa.Schema:
    """The Arrow schema of a state variable; timestamps with a zone are UTC. Raises PlanError for an invalid schema."""
    return to_arrow_schema(schema, f"schema of state {state!r}")


@contextmanager
def _schema_errors() -> Iterator[None]:
    """Turns schema errors of the plan and of the state into PySpark's error."""
    try:
        yield
    except (PlanError, StateSchemaError) as error:
        raise ProcessorSchemaError(str(error)) from error


def _holds_map(kind: pa.DataType) -> bool:
    fields = [kind.field(index) for index in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    return bool(pa.types.is_map(kind)) or any(_holds_map(field.type) for field in fields)


class HostedHandle(StatefulProcessorHandle):
    """See the module docstring. ``timers`` is None when the time mode is None."""

    def __init__(
        self,
        uid: str,
        backend: KeyedStateBackend,
        key_schema: pa.Schema,
        cursor: KeyCursor,
        time_mode: str,
        now_ms: Callable[[], int],
    ) -> None:
        self._uid = uid
        self._backend = backend
        self._key_schema = key_schema
        self._cursor = cursor
        self._time_mode = time_mode
        self._now_ms = now_ms
        self._names: set[str] = set()
        self._variables: dict[str, HostedState] = {}
        self._initialising = True
        self.timers: KeyedTimers | None = None
        if time_mode != "none":
            self.timers = backend.timers(TIMERS, key_schema)

    def end_of_init(self) -> None:
        """Forbids requests for further state variables from now on."""
        self._initialising = False

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        ttl = self._declare(stateName, ttlDurationMs)
        with _schema_errors():
            table = self._backend.value_state(stateName, self._key_schema, arrow_schema(schema, stateName), ttl)
        return self._handed_out(HostedValueState(self._cursor, table))

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        ttl = self._declare(stateName, ttlDurationMs)
        with _schema_errors():
            table = self._backend.list_state(stateName, self._key_schema, arrow_schema(schema, stateName), ttl)
        return self._handed_out(HostedListState(self._cursor, table))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        ttl = self._declare(stateName, ttlDurationMs)
        with _schema_errors():
            user_key_schema = arrow_schema(userKeySchema, stateName)
            if any(_holds_map(field.type) for field in user_key_schema):
                raise StateSchemaError(f"state {stateName!r}: map keys cannot contain maps, but are {userKeySchema!r}")
            value_schema = arrow_schema(valueSchema, stateName)
            table = self._backend.map_state(stateName, self._key_schema, user_key_schema, value_schema, ttl)
        return self._handed_out(HostedMapState(self._cursor, table))

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._timers("registerTimer").register(self._cursor.require(), self._time("registerTimer", expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._timers("deleteTimer").delete(self._cursor.require(), self._time("deleteTimer", expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        return iter(self._timers("listTimers").times_of(self._cursor.require()))

    def deleteIfExists(self, stateName: str) -> None:
        """Deletes the state of this name for all keys; using its state variable afterwards is an error, as in Spark."""
        self._check_initialising("deleteIfExists", stateName)
        self._backend.drop_state(stateName)
        variable = self._variables.get(stateName)
        if variable is not None:
            variable.delete()

    def _handed_out(self, variable: V) -> V:
        self._variables[variable.name] = variable
        return variable

    def _declare(self, name: str, ttl_ms: int | None) -> TimeToLive | None:
        self._check_initialising("asking for a state", name)
        if name in self._names:
            raise ProcessorUsageError(f"operator {self._uid!r}: state {name!r} was requested twice")
        if name.startswith(RESERVED_PREFIX):
            raise ProcessorUsageError(f"operator {self._uid!r}: state name {name!r} must not start with '$'")
        time_to_live = self._time_to_live(name, ttl_ms)
        self._names.add(name)
        return time_to_live

    def _time_to_live(self, name: str, ttl_ms: int | None) -> TimeToLive | None:
        """None, like 0, means that values never expire."""
        if ttl_ms is None:
            return None
        if not isinstance(ttl_ms, int) or isinstance(ttl_ms, bool) or ttl_ms < 0:
            raise ProcessorUsageError(
                f"operator {self._uid!r}, state {name!r}: ttlDurationMs is {ttl_ms!r}, allowed is an integer >= 0"
            )
        if ttl_ms == 0:
            return None
        if self._time_mode != "processingtime":
            raise ProcessorUsageError(f"operator {self._uid!r}, state {name!r}: a TTL needs timeMode ProcessingTime")
        return TimeToLive(ttl_ms, self._now_ms)

    def _check_initialising(self, what: str, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ProcessorUsageError(f"operator {self._uid!r}: {name!r} is not a state name")
        if not self._initialising:
            raise ProcessorUsageError(f"operator {self._uid!r}, state {name!r}: {what} is only possible in init()")

    def _timers(self, what: str) -> KeyedTimers:
        if self.timers is None:
            raise ProcessorUsageError(f"operator {self._uid!r}: {what} needs timeMode ProcessingTime or EventTime")
        return self.timers

    def _time(self, what: str, value: Any) -> int:
        if hasattr(value, "__index__") and not isinstance(value, (int, bool)):
            value = value.__index__()  # NumPy's integers
        if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
            raise ProcessorUsageError(f"operator {self._uid!r}: {what}({value!r}), allowed is a 64-bit integer (ms)")
        return int(value)
