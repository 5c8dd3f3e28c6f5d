"""Options under ``high-availability``: whether jobs outlive the driver, and where what is needed for it lies."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import Changeability, ConfigOption, OptionScope
from ckpt_runtime.configuration.value_types import NON_EMPTY_STRING, EnumType

_CLUSTER = OptionScope.CLUSTER
_NEVER = Changeability.NEVER


class HighAvailabilityType(StrEnum):
    """Where a session keeps what its successor needs."""

    NONE = "none"
    FILESYSTEM = "filesystem"


class HighAvailabilityOptions:
    """What outlives the driver. A new session with the same directory and cluster id goes on with all jobs."""

    TYPE = ConfigOption(
        "high-availability.type",
        EnumType(HighAvailabilityType),
        HighAvailabilityType.NONE,
        "filesystem keeps jobs, their changes, pointers to their checkpoints and their results in a directory.",
        _CLUSTER,
        _NEVER,
    )
    STORAGE_DIRECTORY = ConfigOption(
        "high-availability.storageDir",
        NON_EMPTY_STRING,
        None,
        "Directory (path or URL) that every driver of this cluster reaches. Needed by type filesystem.",
        _CLUSTER,
        _NEVER,
    )
    CLUSTER_ID = ConfigOption(
        "high-availability.cluster-id",
        NON_EMPTY_STRING,
        "default",
        "Name of the cluster below the directory. Sessions of the same name take over from each other.",
        _CLUSTER,
        _NEVER,
    )
