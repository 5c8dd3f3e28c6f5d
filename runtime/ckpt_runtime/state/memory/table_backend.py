"""The base of backends whose states are tables by key (``keyed_state.py``): each state is made once, for one schema."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import pyarrow as pa

from ckpt_runtime.state import values
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.state.errors import StateSchemaError, schema_mismatch
from ckpt_runtime.state.hashing import check_key_types
from ckpt_runtime.state.memory.keyed_state import MemoryState
from ckpt_runtime.state.memory.keyed_states import ListStateTable, MapStateTable, TimerQueue, ValueStateTable
from ckpt_runtime.state.memory.row_buffer import check_same_keys, stored_schema
from ckpt_runtime.state.states import RowBufferSpec, TimeToLive

S = TypeVar("S", bound=MemoryState)


class _State(Protocol):
    def stored_schema(self) -> pa.Schema: ...


class TableBackend(KeyedStateBackend):
    """See the module docstring. The class attributes name the class of each kind of state."""

    values_class: ClassVar[type[ValueStateTable]] = ValueStateTable
    lists_class: ClassVar[type[ListStateTable]] = ListStateTable
    maps_class: ClassVar[type[MapStateTable]] = MapStateTable
    timers_class: ClassVar[type[TimerQueue]] = TimerQueue
    uid: str

    @property
    @abstractmethod
    def states(self) -> Mapping[str, _State]:
        """The states that are in use, by name."""

    @abstractmethod
    def open_state(self, state: MemoryState) -> None:
        """Loads the restored content into a new state, if there is any, and adds the state to :attr:`states`.

        Raises StateSchemaError when that content has another kind, or a schema that does not evolve into this one.
        """

    def value_state(
        self, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> ValueStateTable:
        return self._keyed(self.values_class, name, key_schema, value_schema, ttl)

    def list_state(
        self, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> ListStateTable:
        return self._keyed(self.lists_class, name, key_schema, value_schema, ttl)

    def map_state(
        self,
        name: str,
        key_schema: pa.Schema,
        user_key_schema: pa.Schema,
        value_schema: pa.Schema,
        ttl: TimeToLive | None = None,
    ) -> MapStateTable:
        return self._keyed(self.maps_class, name, key_schema, user_key_schema, value_schema, ttl)

    def timers(self, name: str, key_schema: pa.Schema) -> TimerQueue:
        return self._keyed(self.timers_class, name, key_schema)

    def _keyed(self, make: Callable[..., S], name: str, key_schema: pa.Schema, *arguments: Any) -> S:
        check_key_types(key_schema, key_schema.names)
        for schema in (key_schema, *(a for a in arguments if isinstance(a, pa.Schema))):
            if len(schema) == 0:
                raise StateSchemaError(f"state {name!r} of operator {self.uid!r}: a schema without fields")
            values.check_supported(schema, f"state {name!r} of operator {self.uid!r}")
        state = make(self.uid, name, key_schema, *arguments)
        known = self.states.get(name)
        if known is None:
            self.open_state(state)
            return state
        wanted = state.stored_schema()
        if type(known) is not type(state) or not known.stored_schema().equals(wanted):
            raise schema_mismatch(self.uid, name, "it is in use for something else", known.stored_schema(), wanted)
        return known

    def check_rows(self, specs: Sequence[RowBufferSpec]) -> None:
        """Raises StateSchemaError unless the sides' keys have equal types and none of these states is in use."""
        check_same_keys(self.uid, specs)
        for spec in specs:
            if (known := self.states.get(spec.name)) is not None:
                raise schema_mismatch(self.uid, spec.name, "it is in use", known.stored_schema(), stored_schema(spec))
