"""The files of a snapshot as a state backend reads them when it restores one: each is verified before it is used."""

from __future__ import annotations

from contextlib import closing

from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.state_file_reader import StateFileReader

_CHUNK_BYTES = 4 << 20


class StoredFiles:
    """The :class:`~ckpt_runtime.state.snapshots.SnapshotReader` of the snapshot in ``directory`` (URL).

    Each file is opened and verified once. One thread, but for :meth:`fetch`; close it after use.
    """

    def __init__(self, directory: str, *, owned: bool = False) -> None:
        """Files of a snapshot that the job owns may be linked: nobody else writes to them."""
        self._directory = resolve(directory)
        self._owned = owned
        self._open: dict[StateFile, StateFileReader] = {}

    def read(self, file: StateFile, offset: int, length: int) -> bytes | memoryview:
        return self._reader(file).read(offset, length)

    def fetch(self, file: StateFile, path: str, *, read_only: bool = False) -> None:
        with closing(StateFileReader(self._directory, file)) as reader:
            reader.verify()
            if self._owned and read_only and reader.link_to(path):
                return
            with open(path, "xb") as target:
                for offset in range(0, file.length, _CHUNK_BYTES):
                    target.write(reader.read(offset, min(_CHUNK_BYTES, file.length - offset)))

    def _reader(self, file: StateFile) -> StateFileReader:
        reader = self._open.get(file)
        if reader is None:
            reader = self._open[file] = StateFileReader(self._directory, file)
        return reader

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()
