"""Options under ``state``: the backend and how its files are stored. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import Changeability, ConfigOption
from ckpt_runtime.configuration.value_types import (
    BOOLEAN,
    DirectoryType,
    EnumType,
    FloatType,
    IntegerType,
    MemorySizeType,
)


class StateBackendType(StrEnum):
    """Where keyed state lives between checkpoints."""

    HASHMAP = "hashmap"
    ROCKSDB = "rocksdb"


class CompactionStyle(StrEnum):
    """Which files of a database are merged with which, and when."""

    UNIVERSAL = "UNIVERSAL"
    LEVEL = "LEVEL"


class StateOptions:
    """The state backend."""

    BACKEND_TYPE = ConfigOption(
        "state.backend.type",
        EnumType(StateBackendType),
        StateBackendType.HASHMAP,
        "The keyed state backend. A job changes it through a canonical savepoint only.",
        changeability=Changeability.NEVER,
        fallback_keys=("state.backend",),
        fixed_because="checkpoints have the backend's own form; submit it again from a canonical savepoint",
    )
    FS_MEMORY_THRESHOLD = ConfigOption(
        "state.storage.fs.memory-threshold",
        MemorySizeType(maximum=1 << 20),
        20 << 10,
        "State below this size lies inside the checkpoint's metadata instead of in a file of its own.",
        fallback_keys=("execution.checkpointing.data-inline-threshold",),
    )
    FROM_LOCAL = ConfigOption(
        "execution.state-recovery.from-local",
        BOOLEAN,
        False,
        "Workers keep the files of the last checkpoint on their own disks too, as hard links. A restart on the same "
        "workers takes from there what proves to be the same by its length and checksum, and reads only the rest from "
        "the checkpoint. Has an effect with RocksDB.",
        fallback_keys=("state.backend.local-recovery",),
    )


_METRICS = "state.backend.rocksdb.metrics."


def _metric(name: str, description: str) -> ConfigOption[bool]:
    return ConfigOption(_METRICS + name, BOOLEAN, False, f"A metric of each operator's database: {description}.")


class RocksDBOptions:
    """The backend that keeps state on the workers' disks."""

    MEMORY = ConfigOption(
        "state.backend.rocksdb.memory.fixed-per-slot",
        MemorySizeType(minimum=4 << 20),
        128 << 20,
        "Memory of RocksDB in one slot: blocks that were read, and changes that are in no file yet, of all operators "
        "together.",
    )
    WRITE_BUFFER_RATIO = ConfigOption(
        "state.backend.rocksdb.memory.write-buffer-ratio",
        FloatType(0.05, 0.95),
        0.5,
        "How much of that memory changes may take.",
    )
    CACHE_KEYS = ConfigOption(
        "state.backend.rocksdb.cache.max-keys",
        IntegerType(minimum=1),
        100_000,
        "Keys of each state that stay in memory in front of RocksDB, with what is kept for them; changes reach RocksDB "
        "with checkpoints, or when there are more.",
    )
    CACHE_ROWS = ConfigOption(
        "state.backend.rocksdb.cache.max-rows",
        IntegerType(minimum=1),
        500_000,
        "Rows of a join, or gathered for a trigger, that stay in memory in each subtask; when there are more, those of "
        "keys that have not come lately go to RocksDB.",
    )
    LOCAL_DIRECTORY: ConfigOption[str | None] = ConfigOption(
        "state.backend.rocksdb.localdir",
        DirectoryType(),
        None,
        "Directory on the workers' disks for the files of databases, made if need be. Without it they lie in the "
        "worker's temporary directory.",
    )
    TRANSFER_THREADS = ConfigOption(
        "state.backend.rocksdb.checkpoint.transfer.thread.num",
        IntegerType(minimum=1, maximum=64),
        4,
        "Files that each operator's database sends to the storage, or fetches from there, at the same time.",
    )
    COMPACTION_STYLE = ConfigOption(
        "state.backend.rocksdb.compaction.style",
        EnumType(CompactionStyle),
        CompactionStyle.UNIVERSAL,
        "How small files become large ones. UNIVERSAL merges files of about the same size, and all of them when the "
        "others have become as large as the largest: it writes, and incremental checkpoints send, the least. LEVEL "
        "merges small files with the large ones that have keys in between, which takes less of the disk. Unlike in "
        "Flink, UNIVERSAL is the default.",
    )
    BLOCK_CACHE_USAGE = _metric("block-cache-usage", "bytes in the block cache that all databases of a worker share")
    BLOCK_CACHE_PINNED = _metric("block-cache-pinned-usage", "bytes of these that cannot be evicted now")
    MEM_TABLES = _metric("cur-size-all-mem-tables", "bytes of changes that are in no file yet")
    FLUSHES = _metric("num-running-flushes", "writes of such changes to files that are under way")
    COMPACTIONS = _metric("num-running-compactions", "compactions that are under way")
    COMPACTION_PENDING = _metric("compaction-pending", "1 when a compaction is due, else 0")
    KEYS = _metric("estimate-num-keys", "about how many entries it has; too many after ranges of keys were given up")
    SST_FILES = _metric("total-sst-files-size", "bytes of its table files, those kept for snapshots included")
    ERRORS = _metric("background-errors", "flushes and compactions that have failed")


def rocksdb_metrics() -> dict[str, ConfigOption[bool]]:
    """The options for metrics, by RocksDB's metric names."""
    options = vars(RocksDBOptions).values()
    return {
        option.key.removeprefix(_METRICS): option
        for option in options
        if isinstance(option, ConfigOption) and option.key.startswith(_METRICS)
    }
