"""Options under ``state``: the backend and how its files are stored. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import Changeability, ConfigOption
from ckpt_runtime.configuration.value_types import EnumType, MemorySizeType


class StateBackendType(StrEnum):
    """Where keyed state lives between checkpoints."""

    HASHMAP = "hashmap"
    ROCKSDB = "rocksdb"


class StateOptions:
    """The state backend."""

    BACKEND_TYPE = ConfigOption(
        "state.backend.type",
        EnumType(StateBackendType),
        StateBackendType.HASHMAP,
        "The keyed state backend. A job changes it through a canonical savepoint only.",
        changeability=Changeability.NEVER,
        fallback_keys=("state.backend",),
    )
    FS_MEMORY_THRESHOLD = ConfigOption(
        "state.storage.fs.memory-threshold",
        MemorySizeType(maximum=1 << 20),
        20 << 10,
        "State below this size lies inside the checkpoint's metadata instead of in a file of its own.",
        fallback_keys=("execution.checkpointing.data-inline-threshold",),
    )
