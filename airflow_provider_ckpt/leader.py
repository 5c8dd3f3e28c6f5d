"""The leader of a connection that names a high-availability directory instead of an address.

The only place of the provider that imports more of the runtime than its client, and only when such a connection is
used: reading the directory takes fsspec, and what fsspec needs for its kind of storage.
"""

from __future__ import annotations

from functools import lru_cache

from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from ckpt_runtime.client.leader import LeaderSource


def leader_of(conn_id: str, directory: str, cluster_id: str, token: str | None) -> LeaderSource:
    """One for all tasks of a process that mean the same: they look up together. May load libraries; opens nothing.

    :raises CkptConnectionInvalid: for a directory or a name that cannot be one.
    """
    try:
        return _known(directory, cluster_id, token)
    except (ImportError, OSError, ValueError) as error:
        raise CkptConnectionInvalid(
            f"connection {conn_id!r}, ha_dir: {directory!r} (cluster {cluster_id!r}) is not acceptable, {error}"
        ) from error


@lru_cache(maxsize=32)
def _known(directory: str, cluster_id: str, token: str | None) -> LeaderSource:
    from ckpt_runtime.leader_retrieval import LeaderDirectory

    return LeaderDirectory(directory, cluster_id, token=token)
