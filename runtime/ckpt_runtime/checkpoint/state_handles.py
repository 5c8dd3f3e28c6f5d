"""Handles: where each piece of a snapshot lies. The metadata model that acknowledgements and ``_metadata`` carry.

Pure data with a JSON form. Paths are relative to the snapshot's directory, or absolute URLs for files elsewhere.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import NonNegative


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
    length: NonNegative
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
    key_group_offsets: tuple[tuple[NonNegative, NonNegative, NonNegative], ...]

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


NO_PEER = -1
"""``peer`` of in-flight data whose channel the job has no more, since it was rescaled."""


@dataclass(frozen=True, slots=True)
class ChannelStateSegment:
    """Consecutive in-flight elements of one channel: a run of whole frames inside a channel state file (FLIP-76).

    ``key_groups`` says which rows of it are meant; the others belong to another subtask. None means all rows.
    """

    file: StateFile
    offset: NonNegative
    length: NonNegative
    key_groups: KeyGroupRange | None = None

    def to_json(self) -> dict[str, Any]:
        groups = None if self.key_groups is None else [self.key_groups.first, self.key_groups.last]
        return {"file": self.file.to_json(), "offset": self.offset, "length": self.length, "key_groups": groups}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ChannelStateSegment:
        groups = document["key_groups"]
        return cls(
            StateFile.from_json(document["file"]),
            document["offset"],
            document["length"],
            None if groups is None else KeyGroupRange(*groups),
        )


@dataclass(frozen=True, slots=True)
class ChannelStateStream:
    """The in-flight elements of one channel, in the order in which they have to be processed.

    ``edge`` is the position of the job edge among the vertex's inputs (of an output stream: among its outputs),
    ``peer`` the index of the subtask at the channel's other end, or :data:`NO_PEER`. ``schema`` is the rows' Arrow IPC
    schema message in base64, empty when the stream has no rows.
    """

    edge: NonNegative
    peer: int
    schema: str
    segments: tuple[ChannelStateSegment, ...]

    @property
    def bytes(self) -> int:
        return sum(segment.length for segment in self.segments)

    def to_json(self) -> dict[str, Any]:
        return {
            "edge": self.edge,
            "peer": self.peer,
            "schema": self.schema,
            "segments": [segment.to_json() for segment in self.segments],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ChannelStateStream:
        return cls(
            document["edge"],
            document["peer"],
            document["schema"],
            tuple(ChannelStateSegment.from_json(segment) for segment in document["segments"]),
        )


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """What one subtask acknowledges: the state of its operators by uid. ``bytes`` is what this snapshot holds.

    ``inputs`` and ``outputs`` are in-flight data of an unaligned checkpoint: what the barrier overtook in the subtask's
    input channels and in its output queues. Several streams may have the same edge and peer; they go in this order.
    ``bytes`` includes them.
    """

    operators: dict[str, OperatorSubtaskState] = field(default_factory=dict)
    bytes: NonNegative = 0
    inputs: tuple[ChannelStateStream, ...] = ()
    outputs: tuple[ChannelStateStream, ...] = ()

    @property
    def has_channel_state(self) -> bool:
        return bool(self.inputs or self.outputs)

    @property
    def in_flight_bytes(self) -> int:
        return sum(stream.bytes for stream in (*self.inputs, *self.outputs))

    def files(self) -> list[StateFile]:
        """Files that this state refers to (inline content has none), in a stable order, each once."""
        found: dict[str, StateFile] = {}
        for operator in self.operators.values():
            for handle in operator.keyed:
                if handle.file.inline is None:
                    found[handle.file.path] = handle.file
        for stream in (*self.inputs, *self.outputs):
            for segment in stream.segments:
                if segment.file.inline is None:
                    found[segment.file.path] = segment.file
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "operators": {uid: s.to_json() for uid, s in self.operators.items()},
            "bytes": self.bytes,
            "inputs": [stream.to_json() for stream in self.inputs],
            "outputs": [stream.to_json() for stream in self.outputs],
        }

    @classmethod
    def of_checked(cls, document: dict[str, Any]) -> SubtaskState:
        """Of a document that :mod:`ckpt_runtime.checkpoint.documents` has checked."""
        return cls(
            {uid: OperatorSubtaskState.from_json(state) for uid, state in document["operators"].items()},
            document["bytes"],
            tuple(ChannelStateStream.from_json(stream) for stream in document.get("inputs", [])),
            tuple(ChannelStateStream.from_json(stream) for stream in document.get("outputs", [])),
        )
