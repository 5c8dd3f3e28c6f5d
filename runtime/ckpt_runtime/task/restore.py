"""Opens the keyed state backend of one operator and loads what a snapshot assigns to this subtask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from ckpt_runtime.checkpoint.state_handles import KeyedStateHandle
from ckpt_runtime.configuration.state_options import StateBackendType
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import KeyedStateBackend, RestoreSource
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.state_file_reader import StateFileReader


class StateRestoreError(StorageError):
    """State of the restored snapshot is damaged or missing; trying again meets the same. Names operator and file."""


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
    StateRestoreError naming a file that is damaged or missing; as the storage does when it cannot be reached.
    """
    if kind is not StateBackendType.HASHMAP:
        raise UnsupportedBackendError(f"state.backend.type: {kind.value!r} is not available, use 'hashmap'")
    backend = MemoryKeyedStateBackend(key_groups, max_parallelism, uid)
    if handles:
        with naming_operator(uid, f"state from {directory}", directory):
            _restore(backend, handles, directory)
    return backend


@contextmanager
def naming_operator(uid: str, what: str, directory: str = "") -> Iterator[None]:
    """Raises StateRestoreError for what is damaged or missing, naming the operator; lets other errors pass."""
    try:
        yield
    except (CorruptFileError, NotFoundError, InvalidLocationError, CorruptStateError) as error:
        url = error.url if isinstance(error, StorageError) else directory
        message = f"operator {uid!r} cannot restore its {what}: {error}"
        raise StateRestoreError(message, url, error) from error


def _restore(backend: MemoryKeyedStateBackend, handles: Sequence[KeyedStateHandle], directory: str) -> None:
    with ExitStack() as open_files:
        location = resolve(directory)
        sources: list[RestoreSource] = []
        for handle in handles:
            reader = open_files.enter_context(closing(StateFileReader(location, handle.file)))
            sources.extend(RestoreSource(section, reader.read) for section in handle.sections)
        backend.restore(sources)
