"""Opens the keyed state backend of one operator and loads the state that a snapshot assigns to this subtask."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from ckpt_runtime.checkpoint.state_handles import KeyedHandle
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions, SavepointDuplication
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.snapshots.snapshot_files import StoredFiles
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, StorageError


class StateRestoreError(StorageError):
    """State of the restored snapshot is certainly damaged, so a retry would fail as well. Names operator and file."""


class StateUnavailableError(StorageError):
    """State of the restored snapshot cannot be restored now: its storage or this host fails. Names operator and file.

    The storage may be unavailable or the local disk full. A missing file does not prove damage: on a host that has
    lost its mount all files are missing.
    """


_DAMAGED = (CorruptFileError, InvalidLocationError, CorruptStateError)
"""Errors that every retry on every host would meet: checksum, length, version, or an invalid handle."""


def create_keyed_backend(
    name: str, parameters: BackendParameters, handles: Sequence[KeyedHandle], directory: str, *, owned: bool
) -> KeyedStateBackend:
    """The backend that ``state.backend.type`` names. ``directory`` is the restored snapshot's (URL), which
    the job owns or not.

    Each subtask gets whole handles, and the backend clips them. Raises UnsupportedBackendError, StateSchemaError,
    StateRestoreError naming what is damaged, and StateUnavailableError naming what is missing or cannot be read or
    written.
    """
    backend = create_backend(name, parameters)
    if handles:
        duplication = Configuration(parameters.configuration).get(CheckpointingOptions.SAVEPOINT_DUPLICATION)
        copies_only = duplication is SavepointDuplication.COPY
        named = naming_operator(parameters.uid, f"state from {directory}", directory)
        with named, closing(StoredFiles(directory, copies_only=copies_only)) as reader:
            try:
                backend.restore(handles, reader, owned=owned)
            except BaseException:
                backend.close()
                raise
    return backend


@contextmanager
def naming_operator(uid: str, what: str, directory: str = "") -> Iterator[None]:
    """Names the operator in errors: StateRestoreError for damage, StateUnavailableError for other failures."""
    try:
        yield
    except (OSError, CorruptStateError) as error:
        url = error.url if isinstance(error, StorageError) else directory
        kind = StateRestoreError if _is_damage(error) else StateUnavailableError
        raise kind(f"operator {uid!r} cannot restore its {what}: {error}", url, error) from error


def _is_damage(error: OSError | CorruptStateError) -> bool:
    """A directory where a file is expected does not count as a missing file."""
    return isinstance(error, _DAMAGED) or (isinstance(error, StorageError) and error.errno == errno.EISDIR)
