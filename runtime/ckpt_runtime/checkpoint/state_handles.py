"""Handles: the location of each piece of a snapshot, as in acknowledgements and the ``_metadata`` file.

Pure data, which ``msgspec`` writes and reads; :func:`check_state` checks what a schema cannot describe. Paths are
relative to the snapshot's directory, or absolute URLs for files elsewhere. Handles of keyed state record their kind and
version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, to_builtins

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import NonNegative, check_values

_Version1 = Annotated[int, Meta(ge=1, le=1)]
_FileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\Z")]
"""Restricted, because a backend creates local files of these names from metadata of untrusted origin."""


class OperatorStateMode(StrEnum):
    """How a list state is spread when the parallelism changes (Flink's SPLIT_DISTRIBUTE, UNION, BROADCAST).

    An operator with UNION state loses the items of finished subtasks: a snapshot does not wait for them (FLIP-147).
    """

    SPLIT = "SPLIT"
    UNION = "UNION"
    BROADCAST = "BROADCAST"


class StateFile(Struct, frozen=True, omit_defaults=True):
    """One file of a snapshot, or its bytes if it is small enough to be stored in the metadata.

    ``path`` is empty when ``inline`` holds the content. ``checksum`` is ``"algorithm:hex"`` over the whole content.
    """

    path: str
    length: NonNegative
    checksum: str
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeyedSection:
    """One named keyed state inside a file: a run of Arrow IPC record batches per key group, in key-group order.

    ``key_group_offsets`` holds ``(key_group, offset, length)`` of every non-empty key group; offsets count from the
    file's start. ``descriptor`` describes the state (kind, key and value schemas, aggregate columns) as JSON.
    """

    name: str
    descriptor: dict[str, Any]
    key_group_offsets: tuple[tuple[NonNegative, NonNegative, NonNegative], ...]


class KeyedStateHandle(Struct, frozen=True, tag_field="kind", tag="key_groups"):
    """The keyed state of one operator in one subtask: one file in key-group order (Flink's KeyGroupsStateHandle)."""

    key_groups: KeyGroupRange
    file: StateFile
    sections: tuple[KeyedSection, ...]
    version: _Version1 = 1

    def state_files(self) -> Iterable[StateFile]:
        return (self.file,)


class IncrementalKeyedStateHandle(Struct, frozen=True, tag_field="kind", tag="incremental"):
    """The keyed state of one operator in one subtask, as files in the backend's own format, by the backend's names.

    Some files may be shared with other checkpoints. ``description`` is the backend's own, as JSON.
    """

    key_groups: KeyGroupRange
    backend: str
    files: dict[_FileName, StateFile]
    description: dict[str, Any] = {}
    version: _Version1 = 1

    def state_files(self) -> Iterable[StateFile]:
        return self.files.values()


class RowGroup(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The number of rows in a part of a file, and the key groups they belong to."""

    rows: NonNegative
    key_groups: KeyGroupRange


class CanonicalKeyedStateHandle(Struct, frozen=True, tag_field="kind", tag="canonical"):
    """One named keyed state of one operator in one subtask, as a file that every backend can read (FLIP-203).

    ``descriptor`` describes the state as in :class:`KeyedSection`; the file contains it too. ``row_groups`` are the
    file's row groups in order.
    """

    key_groups: KeyGroupRange
    name: str
    descriptor: dict[str, Any]
    row_groups: tuple[RowGroup, ...]
    file: StateFile
    version: _Version1 = 1

    def state_files(self) -> Iterable[StateFile]:
        return (self.file,)


KeyedHandle: TypeAlias = KeyedStateHandle | IncrementalKeyedStateHandle | CanonicalKeyedStateHandle


@dataclass(frozen=True, slots=True)
class OperatorListState:
    """A named list state of one operator in one subtask; the items are JSON values."""

    name: str
    mode: OperatorStateMode
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OperatorSubtaskState:
    """Everything that one operator keeps in one subtask."""

    keyed: tuple[KeyedHandle, ...] = ()
    lists: tuple[OperatorListState, ...] = ()


NO_PEER = -1
"""``peer`` of in-flight data whose channel no longer exists because the job was rescaled."""


@dataclass(frozen=True, slots=True)
class ChannelStateSegment:
    """Consecutive in-flight elements of one channel: a run of whole frames inside a channel state file (FLIP-76).

    ``key_groups`` selects the rows to read; the other rows belong to another subtask. None means all rows.
    """

    file: StateFile
    offset: NonNegative
    length: NonNegative
    key_groups: KeyGroupRange | None = None


@dataclass(frozen=True, slots=True)
class ChannelStateStream:
    """The in-flight elements of one channel, in the order in which they have to be processed.

    ``edge`` is the position of the job edge among the vertex's inputs (of an output stream: among its outputs),
    ``peer`` the index of the subtask at the channel's other end, or :data:`NO_PEER`. ``schema`` is the rows' Arrow IPC
    schema message in base64, empty when the stream has no rows.
    """

    edge: NonNegative
    peer: Annotated[int, Meta(ge=NO_PEER)]
    schema: str
    segments: tuple[ChannelStateSegment, ...]

    @property
    def bytes(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """What one subtask acknowledges: its operators' state by uid. ``bytes`` is the size of this snapshot.

    ``inputs`` and ``outputs`` are in-flight data of an unaligned checkpoint: the data that the barrier overtook in the
    subtask's input channels and output queues. Streams with the same edge and peer are processed in this order.
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
        handles = (handle for operator in self.operators.values() for handle in operator.keyed)
        files = [file for handle in handles for file in handle.state_files()]
        files += [segment.file for stream in (*self.inputs, *self.outputs) for segment in stream.segments]
        return list({file.path: file for file in files if file.inline is None}.values())

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_builtins(self)
        return document


def check_state(state: SubtaskState, where: str) -> None:
    """Raises :class:`DocumentError` for values in ``state`` that are not valid in a document."""
    for operator in state.operators.values():
        for handle in operator.keyed:
            match handle:
                case KeyedStateHandle():
                    for section in handle.sections:
                        check_values(section.descriptor, f"{where}: a descriptor")
                case CanonicalKeyedStateHandle():
                    check_values(handle.descriptor, f"{where}: a descriptor")
                case IncrementalKeyedStateHandle():
                    check_values(handle.description, f"{where}: a description")
        for listed in operator.lists:
            check_values(listed.items, f"{where}: a list state")
