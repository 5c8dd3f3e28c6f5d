"""Options under ``high-availability``: whether jobs outlive the driver, and where the data for that is stored."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import cluster_option
from ckpt_runtime.configuration.value_types import NON_EMPTY_STRING, EnumType


class HighAvailabilityType(StrEnum):
    """Where a session stores the data that its successor needs."""

    NONE = "none"
    FILESYSTEM = "filesystem"


class HighAvailabilityOptions:
    """Data that outlives the driver. A new session with the same directory and cluster id continues all jobs."""

    TYPE = cluster_option(
        "high-availability.type",
        EnumType(HighAvailabilityType),
        HighAvailabilityType.NONE,
        "filesystem keeps jobs, their changes, pointers to their checkpoints and their results in a directory.",
    )
    STORAGE_DIRECTORY = cluster_option(
        "high-availability.storageDir",
        NON_EMPTY_STRING,
        None,
        "Directory (path or URL) that every driver of this cluster reaches. Needed by type filesystem.",
    )
    CLUSTER_ID = cluster_option(
        "high-availability.cluster-id",
        NON_EMPTY_STRING,
        "default",
        "Name of the cluster below the directory. Sessions of the same name take over from each other.",
    )
