"""Options under ``state``: the backend and how its files are stored. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import (
    BOOLEAN,
    Changeability,
    ConfigOption,
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
        "The keyed state backend. A job can only change it through a canonical savepoint.",
        changeability=Changeability.NEVER,
        fallback_keys=("state.backend",),
        fixed_because="checkpoints have the backend's own format; submit the job again from a canonical savepoint",
    )
    FS_MEMORY_THRESHOLD = ConfigOption(
        "state.storage.fs.memory-threshold",
        MemorySizeType(maximum=1 << 20),
        20 << 10,
        "State below this size is stored in the checkpoint's metadata instead of in a separate file.",
        fallback_keys=("execution.checkpointing.data-inline-threshold",),
    )
    FROM_LOCAL = ConfigOption(
        "execution.state-recovery.from-local",
        BOOLEAN,
        False,
        "Workers also keep the files of the last checkpoint on their own disks, as hard links. A restart on the same "
        "workers uses those whose length and checksum are right, and reads only the others from the checkpoint. Has "
        "an effect only with RocksDB.",
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
        "RocksDB's memory in one slot, for all operators together: cached blocks, and changes that are not yet in a "
        "file.",
    )
    WRITE_BUFFER_RATIO = ConfigOption(
        "state.backend.rocksdb.memory.write-buffer-ratio",
        FloatType(0.05, 0.95),
        0.5,
        "The part of this memory that changes may take.",
    )
    CACHE_KEYS = ConfigOption(
        "state.backend.rocksdb.cache.max-keys",
        IntegerType(minimum=1),
        100_000,
        "Number of keys of each state that are cached in memory in front of RocksDB, with their values; changes are "
        "written to RocksDB with checkpoints, or when there are more keys.",
    )
    CACHE_ROWS = ConfigOption(
        "state.backend.rocksdb.cache.max-rows",
        IntegerType(minimum=1),
        500_000,
        "Number of rows of a join, or gathered for a trigger, that stay in memory in each subtask; beyond it, the "
        "rows of keys that were not used recently are moved to RocksDB.",
    )
    LOCAL_DIRECTORY: ConfigOption[str | None] = ConfigOption(
        "state.backend.rocksdb.localdir",
        DirectoryType(),
        None,
        "Directory on the workers' disks for the files of databases; it is created if it does not exist. Not set: "
        "the worker's temporary directory.",
    )
    TRANSFER_THREADS = ConfigOption(
        "state.backend.rocksdb.checkpoint.transfer.thread.num",
        IntegerType(minimum=1, maximum=64),
        4,
        "Number of files that each operator's database transfers to or from the storage at the same time.",
    )
    COMPACTION_STYLE = ConfigOption(
        "state.backend.rocksdb.compaction.style",
        EnumType(CompactionStyle),
        CompactionStyle.UNIVERSAL,
        "How small files are merged into large ones. UNIVERSAL merges files of about the same size, and all of them "
        "when the others together are as large as the largest: it writes, and incremental checkpoints upload, the "
        "least. LEVEL merges small files with the large ones whose keys overlap, and needs less disk space. Unlike "
        "in Flink, UNIVERSAL is the default.",
    )
    BLOCK_CACHE_USAGE = _metric("block-cache-usage", "bytes in the block cache that all databases of a worker share")
    BLOCK_CACHE_PINNED = _metric("block-cache-pinned-usage", "bytes of these that cannot be evicted now")
    MEM_TABLES = _metric("cur-size-all-mem-tables", "bytes of changes that are not yet in a file")
    FLUSHES = _metric("num-running-flushes", "writes of such changes to files that are in progress")
    COMPACTIONS = _metric("num-running-compactions", "compactions that are in progress")
    COMPACTION_PENDING = _metric("compaction-pending", "1 when a compaction is due, else 0")
    KEYS = _metric("estimate-num-keys", "estimated number of entries; too high after ranges of keys were dropped")
    SST_FILES = _metric("total-sst-files-size", "bytes of its table files, including those kept for snapshots")
    ERRORS = _metric("background-errors", "flushes and compactions that have failed")


def rocksdb_metrics() -> dict[str, ConfigOption[bool]]:
    """The options for metrics, by RocksDB's metric names."""
    options = vars(RocksDBOptions).values()
    return {
        option.key.removeprefix(_METRICS): option
        for option in options
        if isinstance(option, ConfigOption) and option.key.startswith(_METRICS)
    }
