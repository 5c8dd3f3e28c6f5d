"""What one operator keeps, restored into a state backend as a task does it, and written again in another form.

No operator asks for its states, and such states go into the next snapshot as they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import KeyedHandle
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.held_directory import HeldDirectory
from ckpt_runtime.snapshots.new_files import UnsharedFiles
from ckpt_runtime.snapshots.snapshot import Snapshot
from ckpt_runtime.snapshots.stored_files import StoredFiles
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.registry import create_backend


def rewrite(
    snapshot: Snapshot,
    backend: str,
    operator: tuple[str, KeyGroupRange, int],
    handles: Sequence[KeyedHandle],
    properties: CheckpointProperties,
    files: UnsharedFiles,
) -> Sequence[KeyedHandle]:
    """New handles of what these hold of an operator: its uid, key groups out of how many.

    Raises StateError and StorageError for what cannot be read.
    """
    with HeldDirectory("ckpt-rewrite-") as scratch:
        restored = create_backend(backend, BackendParameters(*operator, partial(tempfile.mkdtemp, dir=scratch)))
        with closing(restored), closing(StoredFiles(snapshot.directory.url)) as reader:
            restored.restore(handles, reader, owned=False)
            frozen = restored.snapshot(snapshot.metadata.id, properties)
            try:
                return frozen.write(files)
            finally:
                frozen.release()
