"""The states that a database holds: their ids, and the schemas in which entries may have been written. Pure.

The catalog is part of every snapshot, as JSON in the handle. Ids ascend, and are valid in one database only: when
several are merged, each has its own catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from msgspec import Meta, Struct

from ckpt_runtime.readable_types import ready
from ckpt_runtime.state.errors import CorruptStateError, schema_mismatch
from ckpt_runtime.state.stored_rows import check_descriptor, schema_from_json, schema_to_json

_REMOVED = "\0removed"
_Id = Annotated[int, Meta(ge=0, lt=1 << 16)]


class StateEntry(Struct):
    """One state: ``descriptors`` by the ids of their schemas; ``current`` is the id of the present one."""

    id: _Id
    descriptors: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=(1 << 16) - 1)]
    current: _Id = 0

    @property
    def descriptor(self) -> dict[str, Any]:
        return self.descriptors[self.current]

    @property
    def kind(self) -> str:
        return str(self.descriptor["kind"])

    def schemas(self) -> dict[int, pa.Schema]:
        """The schemas of stored rows, by their ids."""
        return {number: schema_from_json(entry.get("schema")) for number, entry in enumerate(self.descriptors)}

    def schema_id(self, descriptor: dict[str, Any]) -> int:
        """The id of this descriptor, which is added if it is new."""
        if descriptor not in self.descriptors:
            self.descriptors.append(descriptor)
        return self.descriptors.index(descriptor)

    def make_current(self, descriptor: dict[str, Any]) -> None:
        """Makes this descriptor the one for writing. Fields that it lacks are removed from all others for good.

        Entries are not rewritten for that: a removed field gets a name that no schema has, so that a field of the same
        name that is added later does not show the old values.
        """
        names = set(schema_from_json(descriptor.get("schema")).names)
        self.descriptors = [_without(entry, names) for entry in self.descriptors]
        self.current = self.schema_id(descriptor)


def _without(descriptor: dict[str, Any], kept: set[str]) -> dict[str, Any]:
    schema = schema_from_json(descriptor.get("schema"))
    if kept.issuperset(schema.names):
        return descriptor
    fields = [f if f.name in kept or f.name.endswith(_REMOVED) else f.with_name(f.name + _REMOVED) for f in schema]
    left = {**descriptor, "schema": schema_to_json(pa.schema(fields))}
    if "aggregates" in left:
        there = kept.intersection(schema.names)
        left["aggregates"] = [entry for entry in left["aggregates"] if there.issuperset(entry["stored"])]
    return left


class Catalog:
    """States by name."""

    def __init__(self, uid: str, states: dict[str, StateEntry] | None = None) -> None:
        self._uid = uid
        self._states: dict[str, StateEntry] = states or {}

    @classmethod
    def from_json(cls, uid: str, description: dict[str, Any]) -> Catalog:
        """The inverse of :meth:`to_json`. Raises CorruptStateError for what this version cannot read."""
        try:
            states = msgspec.convert(description.get("states"), ready(dict[str, StateEntry]))
        except msgspec.ValidationError as error:
            raise CorruptStateError(f"operator {uid!r}: its state's description is damaged: {error}") from error
        if len({entry.id for entry in states.values()}) < len(states):
            raise CorruptStateError(f"operator {uid!r}: two of its states have the same id")
        for name, entry in states.items():
            if entry.current >= len(entry.descriptors):
                raise CorruptStateError(f"state {name!r} of operator {uid!r} has no schema {entry.current}")
            for descriptor in entry.descriptors:
                check_descriptor(name, descriptor)
                if descriptor["kind"] != entry.kind:
                    raise CorruptStateError(f"state {name!r} of operator {uid!r} has schemas of several kinds")
        return cls(uid, states)

    def to_json(self) -> dict[str, Any]:
        """The description for a handle; later changes do not affect it."""
        document: dict[str, Any] = msgspec.to_builtins(self._states)
        return {"states": document}

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def __getitem__(self, name: str) -> StateEntry:
        return self._states[name]

    def add(self, name: str, descriptor: dict[str, Any]) -> StateEntry:
        """The state, made if there is none, with this descriptor as the present one. Its kind must be the same."""
        entry = self._states.get(name)
        if entry is None:
            number = 1 + max((known.id for known in self._states.values()), default=-1)
            entry = self._states[name] = StateEntry(number, [descriptor])
        elif entry.kind != descriptor["kind"]:
            reason = "the snapshot has another kind of state"
            raise schema_mismatch(self._uid, name, reason, entry.kind, descriptor["kind"])
        entry.make_current(descriptor)
        return entry

    def remove(self, name: str) -> StateEntry | None:
        """Forgets a state."""
        return self._states.pop(name, None)

    def merge(self, other: Catalog) -> dict[int, tuple[int, list[int]]]:
        """Adds the states of another catalog; maps the id of each there to its id and the ids of its schemas here."""
        places = {}
        for name, theirs in other._states.items():
            ours = self.add(name, theirs.descriptor)
            places[theirs.id] = (ours.id, [ours.schema_id(descriptor) for descriptor in theirs.descriptors])
        return places
