"""A keyed state backend for tests whose state lies in local files, and whose checkpoints share files, as RocksDB's do.

Live state is in the tables of the in-memory backend, as it is in a cache in front of a database. A snapshot writes it
as *segments*: one local file per state and run of key groups, named by its content, so that what has not changed is the
same file. An incremental checkpoint refers to segments that lie in storage already; a list of segments is its private
file. Pipelines register it by themselves; workers find it because they run the pipeline's module.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Self, cast

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedSection,
    KeyedStateHandle,
    StateFile,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, SavepointFormat
from ckpt_runtime.state.backend import BackendParameters, KeyedSnapshot, SnapshotFiles, SnapshotReader
from ckpt_runtime.state.errors import UnsupportedBackendError
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.shared_files import SharedFiles

NAME = "files"
SEGMENTS = "SEGMENTS"
SEGMENT_GROUPS = 8
"""Key groups of one segment."""


class FileKeyedStateBackend(MemoryKeyedStateBackend):
    """One operator's, in a directory of its own."""

    def __init__(self, parameters: BackendParameters) -> None:
        super().__init__(parameters.key_groups, parameters.max_parallelism, parameters.uid)
        self.directory = Path(parameters.make_directory())
        self.shared = SharedFiles()

    def restore(self, handles: Sequence[KeyedHandle], reader: SnapshotReader, *, owned: bool) -> None:
        if all(isinstance(handle, CanonicalKeyedStateHandle) for handle in handles):
            return super().restore(handles, reader, owned=owned)
        segments: list[KeyedHandle] = []
        found: dict[str, StateFile] = {}
        for handle in handles:
            if not isinstance(handle, IncrementalKeyedStateHandle) or handle.backend != NAME:
                raise UnsupportedBackendError(f"operator {self.uid!r}: its state was not written by {NAME!r}")
            segments += self._fetched(handle, reader)
            found |= {name: file for name, file in handle.files.items() if name != SEGMENTS}
        super().restore(segments, _LocalReader(self.directory), owned=owned)
        return self.shared.restored(found) if owned else None

    def _fetched(self, handle: IncrementalKeyedStateHandle, reader: SnapshotReader) -> list[KeyedStateHandle]:
        """The segments with key groups of this subtask, as local files."""
        listing = handle.files[SEGMENTS]
        found = []
        for segment in json.loads(bytes(reader.read(listing, 0, listing.length))):
            if any(group in self.key_groups for group, _, _ in segment["places"]):
                name, state = segment["file"], segment["state"]
                path = self.directory / name
                if not path.exists():
                    reader.fetch(handle.files[name], str(path))
                places = tuple((group, start, length) for group, start, length in segment["places"])
                section = KeyedSection(state, handle.description["states"][state], places)
                local = StateFile(name, path.stat().st_size, "")
                found.append(KeyedStateHandle(handle.key_groups, local, (section,)))
        return found

    def snapshot(self, checkpoint_id: int, properties: CheckpointProperties) -> KeyedSnapshot:
        if properties.savepoint_format is SavepointFormat.CANONICAL:
            return super().snapshot(checkpoint_id, properties)
        if not properties.is_savepoint:
            self.shared.begun(checkpoint_id)
        return _SegmentSnapshot(self, super().snapshot(checkpoint_id, properties), checkpoint_id, properties)

    def notify_complete(self, checkpoint_id: int) -> None:
        self.shared.completed(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        self.shared.aborted(checkpoint_id)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.directory)


class _SegmentSnapshot:
    def __init__(
        self,
        backend: FileKeyedStateBackend,
        frozen: KeyedSnapshot,
        checkpoint_id: int,
        properties: CheckpointProperties,
    ) -> None:
        self._backend = backend
        self._frozen = frozen
        self._id = checkpoint_id
        self._properties = properties

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        shared = self._backend.shared
        listing: list[dict[str, Any]] = []
        contents: dict[str, bytes] = {}
        states: dict[str, Any] = {}
        for whole in self._frozen.write(cast(Any, _MemoryFiles())):
            assert isinstance(whole, KeyedStateHandle)
            for section in whole.sections:
                states[section.name] = section.descriptor
                for segment, content in _segments(section, whole.file.inline or b""):
                    listing.append(segment)
                    contents[segment["file"]] = content
        written = self._known(files, contents.keys())
        for name in contents.keys() - written.keys():
            written[name] = self._new(files, name, contents[name])
        if not self._properties.is_savepoint:
            shared.written(self._id, written)
        if not states:
            return ()
        with files.private() as file:
            file.stream.write(json.dumps(listing).encode())
            written[SEGMENTS] = file.finish()
        return (IncrementalKeyedStateHandle(self._backend.key_groups, NAME, written, {"states": states}),)

    def _known(self, files: SnapshotFiles, wanted: Set[str]) -> dict[str, StateFile]:
        """What lies in storage already."""
        if not self._properties.is_incremental:
            return {}
        shared, is_savepoint = self._backend.shared, self._properties.is_savepoint
        known = shared.duplicable() if is_savepoint else shared.reusable(self._id)
        known = {name: file for name, file in known.items() if name in wanted}
        return files.duplicate_all(known) if is_savepoint else known

    def _new(self, files: SnapshotFiles, name: str, content: bytes) -> StateFile:
        """A local file first, as a database has it."""
        path = self._backend.directory / name
        if self._backend.directory.exists():  # a snapshot may be written behind the end of its operator
            path.write_bytes(content)
            content = path.read_bytes()
        with files.shared() as file:
            file.stream.write(content)
            return file.finish()

    def release(self) -> None:
        self._frozen.release()


def _segments(section: KeyedSection, content: bytes) -> list[tuple[dict[str, Any], bytes]]:
    runs: dict[int, list[tuple[int, bytes]]] = {}
    for group, start, length in section.key_group_offsets:
        runs.setdefault(group // SEGMENT_GROUPS, []).append((group, content[start : start + length]))
    found = []
    for blocks in runs.values():
        places, end = [], 0
        for group, block in blocks:
            places.append((group, end, len(block)))
            end += len(block)
        body = b"".join(block for _, block in blocks)
        name = f"{hashlib.sha256(body).hexdigest()[:32]}.segment"
        found.append(({"file": name, "state": section.name, "places": places}, body))
    return found


class _LocalReader:
    """Reads segments that have been fetched."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, file: StateFile, offset: int, length: int) -> bytes:
        with (self._directory / file.path).open("rb") as stream:
            stream.seek(offset)
            return stream.read(length)

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        raise NotImplementedError

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        return False


class _MemoryFile:
    def __init__(self) -> None:
        self.stream = io.BytesIO()

    def finish(self) -> StateFile:
        content = self.stream.getvalue()
        return StateFile("", len(content), "", content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _MemoryFiles:
    def private(self) -> _MemoryFile:
        return _MemoryFile()

    shared = private
