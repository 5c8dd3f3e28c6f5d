"""Opens the keyed state backend of one operator and loads what a snapshot assigns to this subtask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from ckpt_runtime.checkpoint.state_handles import KeyedStateHandle
from ckpt_runtime.configuration.state_options import StateBackendType
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import KeyedStateBackend, RestoreSource
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.state_file_reader import StateFileReader


class UnsupportedBackendError(ValueError):
    """The configured state backend does not exist in this version."""


def create_keyed_backend(
    kind: StateBackendType,
    uid: str,
    key_groups: KeyGroupRange,
    max_parallelism: int,
    handles: Sequence[KeyedStateHandle],
    directory: str,
) -> KeyedStateBackend:
    """``uid`` names the operator in errors. ``directory`` is the restored snapshot's (URL).

    Handles go whole to each subtask; the backend clips. Raises UnsupportedBackendError, StateSchemaError, and
    CorruptFileError naming a damaged file.
    """
    if kind is not StateBackendType.HASHMAP:
        raise UnsupportedBackendError(f"state.backend.type: {kind.value!r} is not available, use 'hashmap'")
    backend = MemoryKeyedStateBackend(key_groups, max_parallelism, uid)
    if handles:
        with ExitStack() as open_files:
            location = resolve(directory)
            sources: list[RestoreSource] = []
            for handle in handles:
                reader = open_files.enter_context(closing(StateFileReader(location, handle.file)))
                sources.extend(RestoreSource(section, reader.read) for section in handle.sections)
            backend.restore(sources)
    return backend
