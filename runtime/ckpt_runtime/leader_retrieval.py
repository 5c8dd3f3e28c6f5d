"""Finds a cluster's leader in its high-availability directory, for clients. Reads one file there, changes nothing.

It is outside the rooms because it joins two that do not import each other: the client and storage. Importing it loads
fsspec, which clients with a fixed address do not need.
"""

from __future__ import annotations

import time

from ckpt_runtime.client.transport import Leader, LeaderSource, LeaderUnknown, LeaderUnproven
from ckpt_runtime.storage.errors import InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, read_bytes, resolve
from ckpt_runtime.storage.leader_store import LeaderDocumentError, UnprovenDocument, opened

LEADER_DOCUMENT_NAME = "leader.json"
MAX_LEADER_BYTES = 1 << 16

DEFAULT_CLUSTER_ID = "default"
_UNSIGNED_GOOD_FOR_S = 5.0


class InvalidLeaderDirectory(ValueError):
    """The directory or the cluster's name is invalid. The message names the option and the allowed values."""


class LeaderDirectory(LeaderSource):
    """``directory`` is the session's ``high-availability.storageDir``, ``cluster_id`` its name there."""

    def __init__(self, directory: str, cluster_id: str = DEFAULT_CLUSTER_ID, *, token: str | None) -> None:
        """Does no I/O. Raises :class:`InvalidLeaderDirectory`."""
        self._file = _document(directory, cluster_id)
        self._cluster_id = cluster_id
        self._token = token
        super().__init__(self._file.url)

    def look_up(self) -> Leader:
        """Read the leader from ``leader.json`` after checking its proof."""
        begun, now = time.monotonic(), time.time()
        try:
            data = read_bytes(self._file, MAX_LEADER_BYTES)
            found = opened(data, self._token, self._cluster_id, now)
        except NotFoundError:
            raise LeaderUnknown(self.where, "no leader has published its address there yet") from None
        except UnprovenDocument as error:
            raise LeaderUnproven(f"{self.where} does not prove its leader's address: {error}") from error
        except (StorageError, LeaderDocumentError) as error:
            raise LeaderUnknown(self.where, str(error)) from error
        good_for = _UNSIGNED_GOOD_FOR_S if found.good_until is None else found.good_until - now
        return Leader(found.rest.rstrip("/"), found.epoch, begun + good_for)


def _document(directory: str, cluster_id: str) -> Location:
    try:
        return resolve(directory).child(cluster_id).child(LEADER_DOCUMENT_NAME)
    except InvalidLocationError as error:
        raise InvalidLeaderDirectory(str(error)) from error
