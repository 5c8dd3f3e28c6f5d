"""Incremental snapshots of in-memory state: which parts a snapshot keeps, and what it writes beside them.

The base is the latest checkpoint whose completion was notified. A snapshot refers to the parts of the base (a savepoint
duplicates them) and writes one new part with what has changed since: the changes of every snapshot in between, also of
those that were aborted. Restores and storage stay within bounds, because parts are written again:

* The latest eight parts are dropped when each has at most about as many keys as the new one. Their keys are added to
  it, and its rows are taken from memory. So there are few parts, and a row is written a few times.
* All is written, as one part, when too much of the parts is not needed any more, because newer ones have the same keys:
  half as many keys as the state has, or as many bytes. So storage holds at most about twice the state. Rows that are
  only added are never the reason for that.

The subtask's thread takes snapshots and reports outcomes; other threads write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from operator import is_
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from msgspec import Struct

from ckpt_runtime.checkpoint.completed_checkpoint import HASHMAP, IncrementalKeyedStateHandle, KeyedHandle, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import checked
from ckpt_runtime.state.backend import SnapshotFiles, SnapshotReader
from ckpt_runtime.state.errors import CorruptStateError, reading
from ckpt_runtime.state.memory.changes import NOTHING, Changed, SealedChanges, union
from ckpt_runtime.state.memory.parts import PartWriter, StoredPart
from ckpt_runtime.state.shared_files import SharedFiles
from ckpt_runtime.state.stored_rows import StateWriter

MOST_PARTS = 16
_AT_ONCE = 8
_MOST_SPANS = 8


class Freezable(Protocol):
    """A state as of one moment."""

    @property
    def numbers(self) -> int | None:
        """How many rows or slots have numbers, which changes consist of; None for a state whose changes are keys."""

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None: ...

    def write_part(
        self, writer: PartWriter, changed: Changed | None, owned: KeyGroupRange, max_parallelism: int
    ) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NamedState:
    """A frozen state; ``descriptor`` gives its descriptor, from any thread."""

    frozen: Freezable
    descriptor: Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """A part in storage, which counts for ``key_groups``.

    ``changed`` is what it has, by state; None if unknown. No older part has ``new`` of its ``keys``. ``numbers`` are
    those of the states when it was written.
    """

    name: str
    key_groups: KeyGroupRange
    file: StateFile
    keys: int
    bytes: int
    is_first: bool
    changed: Mapping[str, Changed | None] | None = None
    new: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)


class _Span:
    """The changes between a snapshot and the one before, by state; worked out once, by a thread that writes."""

    def __init__(self, taken: int, sealed: Mapping[str, SealedChanges | None]) -> None:
        self.taken = taken
        self._sealed = sealed
        self._changed: dict[str, Changed | None] | None = None

    @classmethod
    def joined(cls, before: _Span, after: _Span) -> _Span:
        """Both, as of the later one."""
        span = cls(after.taken, {})
        span._changed = _joined([before.changed(), after.changed()])
        return span

    def changed(self) -> dict[str, Changed | None]:
        changed = self._changed
        if changed is None:
            changed = {name: None if sealed is None else sealed() for name, sealed in self._sealed.items()}
            self._changed, self._sealed = changed, {}
        return changed


class Increments(SharedFiles):
    """The parts of checkpoints of one backend, and the changes of its states since the base."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, Part] = {}
        self._spans: list[_Span] = []

    def continues(self, parts: Sequence[Part]) -> None:
        """The job owns the snapshot that it was restored from, which consists of these parts."""
        self._parts = {part.name: part for part in parts}
        self.restored({part.name: part.file for part in parts})
        if len(self._base) < len(parts):
            self._base = {}

    def sealed(self, checkpoint_id: int, changes: Mapping[str, SealedChanges | None]) -> None:
        """A snapshot is taken; these are the changes since the one before. Comes before :meth:`begun`."""
        with self._lock:
            if not self._base and not self._pending:
                self._spans.clear()  # the next checkpoint writes everything
            self._spans.append(_Span(checkpoint_id, changes))

    def since_base(self, checkpoint_id: int) -> tuple[list[Part], dict[str, StateFile], dict[str, Changed | None]]:
        """The parts of the base, the files of it that a checkpoint may refer to, and what has changed since.

        There are no parts when there is no base: then everything has to be written.
        """
        with self._lock:
            if self._completed >= checkpoint_id:
                return [], {}, {}
            parts = [self._parts[name] for name in self._base]
            usable = self.reusable(checkpoint_id)
            spans = [span for span in self._spans if span.taken <= checkpoint_id]
        changed = _joined([span.changed() for span in spans])
        if len(spans) > _MOST_SPANS:
            self._join()
        return parts, usable, changed

    def _join(self) -> None:
        """Joins spans between which no checkpoint was taken that may still become the base."""
        with self._lock:
            spans, ends = list(self._spans), set(self._pending)
        joined: list[_Span] = []
        for span in spans:
            if joined and joined[-1].taken not in ends:
                joined[-1] = _Span.joined(joined[-1], span)
            else:
                joined.append(span)
        with self._lock:
            if len(self._spans) >= len(spans) and all(map(is_, self._spans, spans)):
                self._spans[: len(spans)] = joined

    def stored(self, checkpoint_id: int, parts: Sequence[Part]) -> None:
        """A checkpoint consists of these parts."""
        with self._lock:
            self._parts |= {part.name: part for part in parts}
            self.written(checkpoint_id, {part.name: part.file for part in parts})

    def completed(self, checkpoint_id: int) -> None:
        with self._lock:
            super().completed(checkpoint_id)
            self._spans = [span for span in self._spans if span.taken > self._completed]
            named = {name for files in (self._base, *self._pending.values()) for name in files or ()}
            self._parts = {name: part for name, part in self._parts.items() if name in named}


def _joined(found: Sequence[Mapping[str, Changed | None]]) -> dict[str, Changed | None]:
    names = {name for each in found for name in each}
    return {name: union([each.get(name, NOTHING) for each in found]) for name in names}


def _keys_in(changed: Mapping[str, Changed | None]) -> int:
    return sum(len(each) for each in changed.values() if each is not None)


def _new_in(changed: Mapping[str, Changed | None], parts: Sequence[Part]) -> int:
    """How many rows or slots have changed that none of the parts has, because they have got their numbers since."""
    known = parts[-1].numbers if parts else {}
    return sum(
        len(each) - int(np.searchsorted(each, known[name]))
        for name, each in changed.items()
        if name in known and isinstance(each, np.ndarray)
    )


def _latest_to_merge(parts: Sequence[Part], keys: int) -> int:
    """How many of the latest parts a new one with so many keys replaces."""
    known = list(takewhile(lambda part: part.changed is not None, reversed(parts)))
    small = len(list(takewhile(lambda part: part.keys <= 2 * keys, known)))
    if small >= _AT_ONCE:
        return small
    return min(len(known), _AT_ONCE) if len(parts) >= MOST_PARTS else 0


def bounded(
    parts: Sequence[Part], changed: Mapping[str, Changed | None]
) -> tuple[list[Part], Mapping[str, Changed | None]]:
    """The parts to keep, and what to write: no parts if everything has to be written."""
    kept = list(parts)
    while merged := _latest_to_merge(kept, _keys_in(changed)):
        changed = _joined([*(part.changed or {} for part in kept[-merged:]), changed])
        del kept[-merged:]
    later = [part for part in kept if not part.is_first]
    keys = sum(part.keys for part in kept) + _keys_in(changed)
    again = sum(part.keys - part.new for part in later) + _keys_in(changed) - _new_in(changed, kept)
    bytes_again = sum(part.bytes * (1 - part.new / max(1, part.keys)) for part in later)
    too_many = 3 * again > keys
    too_large = 2 * bytes_again > sum(part.bytes for part in kept)
    return ([], {}) if too_many or too_large or len(kept) >= MOST_PARTS else (kept, changed)


@dataclass
class IncrementalSnapshot:
    """The asynchronous part of one snapshot that consists of parts."""

    states: Mapping[str, NamedState]
    key_groups: KeyGroupRange
    max_parallelism: int
    increments: Increments
    checkpoint_id: int
    properties: CheckpointProperties

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Writes a part with what the parts in storage do not have."""
        if not self.states:
            return ()
        parts, changed = self._plan(files)
        if not parts or any(each is None or len(each) for name, each in changed.items() if name in self.states):
            parts.append(self._written(files, changed, parts))
        if not self.properties.is_savepoint:
            self.increments.stored(self.checkpoint_id, parts)
        listed = [[part.name, part.key_groups.first, part.key_groups.last] for part in parts]
        states = {name: state.descriptor() for name, state in self.states.items()}
        stored = {part.name: part.file for part in parts}
        return (IncrementalKeyedStateHandle(self.key_groups, HASHMAP, stored, {"states": states, "parts": listed}),)

    def _plan(self, files: SnapshotFiles) -> tuple[list[Part], Mapping[str, Changed | None]]:
        """The parts that the snapshot keeps, none if it writes everything, and what it writes beside them."""
        if not self.properties.is_incremental:
            return [], {}
        parts, usable, changed = self.increments.since_base(self.checkpoint_id)
        if self.properties.is_savepoint:
            usable = files.duplicate_all({part.name: part.file for part in parts})
        missing = [part for part in parts if part.name not in usable]
        if any(part.changed is None for part in missing):
            return [], {}
        # What they have is written again. Newer parts have newer rows of the same keys, which are written, too.
        changed = _joined([*(part.changed or {} for part in missing), changed])
        parts = [replace(part, file=usable[part.name]) for part in parts if part.name in usable]
        return (parts, changed) if self.properties.is_savepoint else bounded(parts, changed)

    def _written(self, files: SnapshotFiles, changed: Mapping[str, Changed | None], parts: Sequence[Part]) -> Part:
        """The part that follows ``parts``."""
        is_first = not parts
        with files.shared() as file:
            writer = PartWriter(file.stream)
            for name, state in self.states.items():
                own = None if is_first else changed.get(name, NOTHING)
                if own is None or len(own):
                    writer.begin(name, whole=own is None)
                    state.frozen.write_part(writer, own, self.key_groups, self.max_parallelism)
            writer.end()
            stored = file.finish()
        keys = writer.footer.keys + writer.footer.removed
        known = None if is_first else changed
        numbers = {name: each for name, state in self.states.items() if (each := state.frozen.numbers) is not None}
        new = _new_in(changed, parts)
        return Part(uuid4().hex, self.key_groups, stored, keys, stored.length, is_first, known, new, numbers)

    def release(self) -> None:
        for state in self.states.values():
            state.frozen.release()
        self.states = {}


class _Description(Struct):
    """What a handle says: the descriptors of all states, and the parts with their key groups, oldest first."""

    states: dict[str, dict[str, Any]]
    parts: list[tuple[str, int, int]]


def described(uid: str, description: dict[str, Any]) -> _Description:
    """Raises CorruptStateError."""
    with reading(f"the description of the state of operator {uid!r}"):
        return checked(description, _Description)


def opened_parts(
    uid: str, handle: IncrementalKeyedStateHandle, reader: SnapshotReader, owned: KeyGroupRange
) -> list[tuple[Part, StoredPart]]:
    """The parts of a handle that have key groups in ``owned``, oldest first."""
    found = []
    for name, first, last in described(uid, handle.description).parts:
        if name not in handle.files:
            raise CorruptStateError(f"operator {uid!r}: the snapshot has no file of its part {name!r}")
        groups = KeyGroupRange(first, last).intersection(handle.key_groups).intersection(owned)
        if not len(groups):
            continue
        file = handle.files[name]
        stored = StoredPart.opened(name, groups, file.length, partial(reader.read, file))
        share = stored.share_of(groups)
        keys = round(share * (stored.footer.keys + stored.footer.removed))
        is_first = all(section.whole for section in stored.footer.sections)
        found.append((Part(name, groups, file, keys, round(share * file.length), is_first), stored))
    return found
