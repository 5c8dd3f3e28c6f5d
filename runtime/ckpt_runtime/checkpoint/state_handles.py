"""Handles: where each piece of a snapshot lies. The metadata model that acknowledgements and ``_metadata`` carry.

Pure data with a JSON form. Paths are relative to the snapshot's directory, or absolute URLs for files elsewhere.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ckpt_runtime.graph.key_groups import KeyGroupRange


class OperatorStateMode(StrEnum):
    """How a list state is spread when the parallelism changes (Flink's SPLIT_DISTRIBUTE, UNION, BROADCAST)."""

    SPLIT = "SPLIT"
    UNION = "UNION"
    BROADCAST = "BROADCAST"


@dataclass(frozen=True, slots=True)
class StateFile:
    """One file of a snapshot, or its bytes when it is small enough to lie inside the metadata.

    ``path`` is empty when ``inline`` holds the content. ``checksum`` is ``"algorithm:hex"`` over the whole content.
    """

    path: str
    length: int
    checksum: str
    inline: bytes | None = None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"path": self.path, "length": self.length, "checksum": self.checksum}
        if self.inline is not None:
            document["inline"] = b64encode(self.inline).decode()
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> StateFile:
        inline = document.get("inline")
        return cls(
            document["path"], document["length"], document["checksum"], None if inline is None else b64decode(inline)
        )


@dataclass(frozen=True, slots=True)
class KeyedSection:
    """One named keyed state inside a file: a run of Arrow IPC record batches per key group, in key-group order.

    ``key_group_offsets`` holds ``(key_group, offset, length)`` of every non-empty key group; offsets count from the
    file's start. ``descriptor`` describes the state (kind, key and value schemas, aggregate columns) as JSON.
    """

    name: str
    descriptor: dict[str, Any]
    key_group_offsets: tuple[tuple[int, int, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "descriptor": self.descriptor,
            "key_group_offsets": [list(entry) for entry in self.key_group_offsets],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> KeyedSection:
        offsets = tuple((int(group), int(offset), int(size)) for group, offset, size in document["key_group_offsets"])
        return cls(document["name"], document["descriptor"], offsets)


@dataclass(frozen=True, slots=True)
class KeyedStateHandle:
    """The keyed state of one operator in one subtask."""

    key_groups: KeyGroupRange
    file: StateFile
    sections: tuple[KeyedSection, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "key_groups": [self.key_groups.first, self.key_groups.last],
            "file": self.file.to_json(),
            "sections": [section.to_json() for section in self.sections],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> KeyedStateHandle:
        return cls(
            KeyGroupRange(*document["key_groups"]),
            StateFile.from_json(document["file"]),
            tuple(KeyedSection.from_json(section) for section in document["sections"]),
        )


@dataclass(frozen=True, slots=True)
class OperatorListState:
    """A named list state of one operator in one subtask; the items are JSON values."""

    name: str
    mode: OperatorStateMode
    items: tuple[Any, ...]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "mode": self.mode.value, "items": list(self.items)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> OperatorListState:
        return cls(document["name"], OperatorStateMode(document["mode"]), tuple(document["items"]))


@dataclass(frozen=True, slots=True)
class OperatorSubtaskState:
    """Everything that one operator keeps in one subtask."""

    keyed: tuple[KeyedStateHandle, ...] = ()
    lists: tuple[OperatorListState, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"keyed": [k.to_json() for k in self.keyed], "lists": [s.to_json() for s in self.lists]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> OperatorSubtaskState:
        return cls(
            tuple(KeyedStateHandle.from_json(handle) for handle in document["keyed"]),
            tuple(OperatorListState.from_json(state) for state in document["lists"]),
        )


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """What one subtask acknowledges: the state of its operators by uid. ``bytes`` is what this snapshot holds."""

    operators: dict[str, OperatorSubtaskState] = field(default_factory=dict)
    bytes: int = 0

    def files(self) -> list[StateFile]:
        """Files written for this state (inline content has none), in a stable order, each once."""
        found: dict[str, StateFile] = {}
        for operator in self.operators.values():
            for handle in operator.keyed:
                if handle.file.inline is None:
                    found[handle.file.path] = handle.file
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        return {"operators": {uid: s.to_json() for uid, s in self.operators.items()}, "bytes": self.bytes}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> SubtaskState:
        return cls(
            {uid: OperatorSubtaskState.from_json(state) for uid, state in document["operators"].items()},
            document["bytes"],
        )
