"""Snapshots of keyed state without storage: handles that hold their content, in the form in which they are stored."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import convert, to_builtins

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.state.backend import KeyedSnapshot, KeyedStateBackend, SnapshotFile

CHECKPOINT = CheckpointProperties()
CANONICAL = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.CANONICAL)


class InlineFile(SnapshotFile):
    """Content that becomes no file."""

    def __init__(self) -> None:
        self._content = io.BytesIO()
        self.stream = self._content

    def finish(self) -> StateFile:
        content = self._content.getvalue()
        return StateFile("", len(content), "", content)

    def __exit__(self, *_: object) -> None:
        pass


class InlineFiles:
    """Of one snapshot."""

    def private(self, suffix: str = "") -> InlineFile:
        return InlineFile()

    shared = private

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        return dict(files)

    def shared_from(self, path: Path) -> StateFile:
        content = path.read_bytes()
        return StateFile("", len(content), "", content)


class InlineReader:
    """Reads what :class:`InlineFiles` has written."""

    def read(self, file: StateFile, offset: int, length: int) -> bytes:
        assert file.inline is not None
        return file.inline[offset : offset + length]

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        assert file.inline is not None
        with open(path, "xb") as target:
            target.write(file.inline)

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        return False


def written(snapshot: KeyedSnapshot) -> list[KeyedHandle]:
    """What the snapshot holds. It is released."""
    handles = [
        convert(json.loads(json.dumps(to_builtins(handle))), KeyedHandle)
        for handle in snapshot.write(cast(Any, InlineFiles()))
    ]
    snapshot.release()
    return handles


def handles_of(
    backends: Iterable[KeyedStateBackend], properties: CheckpointProperties = CHECKPOINT, number: int = 1
) -> list[KeyedHandle]:
    """What all of them hold."""
    return [handle for backend in backends for handle in written(backend.snapshot(number, properties))]


def restore(backend: KeyedStateBackend, handles: Sequence[KeyedHandle], *, owned: bool = True) -> None:
    """Loads what there is."""
    backend.restore(handles, InlineReader(), owned=owned)
