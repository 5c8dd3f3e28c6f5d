"""One RocksDB database of bytes: the only module that uses ``rocksdict`` and works around its limits.

The write-ahead log is off: changes that no checkpoint holds are made again after a failure. All databases of a process
share one block cache, to which the memory of their write buffers is charged. RocksDB has threads, so a process that
forks others must not open a database; this module is not imported before the first one is opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, starmap, takewhile
from pathlib import Path

from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompactionStyle,
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
    UniversalCompactOptions,
    WriteBatch,
    WriteBufferManager,
    WriteOptions,
)

from ckpt_runtime.configuration.state_options import CompactionStyle
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb.codec import BATCH

_LEVEL_0_FILES = 20
"""The number of small files that accumulate before they are merged.

Each checkpoint adds one. With level compaction a merge rewrites all large files with overlapping keys, which are nearly
all of a small database: with RocksDB's default of 4 files, 17 bytes are written, and uploaded, for each changed byte.
"""
_OTHERS_PERCENT = 100
"""The size of the other files, in percent of the largest run of files, at which all are merged into one."""
_JOBS = 4
"""Background threads for all databases: while one merges a whole database, others can merge new small files."""
_LEVEL_0_SLOWDOWN, _LEVEL_0_STOP = 3 * _LEVEL_0_FILES, 5 * _LEVEL_0_FILES
_BLOOM_BITS = 10
_METADATA_BLOCK = 4096
_WRONG_CONTENT = ("Corruption:", "Invalid argument:", "Not implemented:")
"""Prefixes of RocksDB's messages about damaged files. Any other message means a fault of the host."""
_IO_ERROR = "IO error:"
_MISSING = "IO error: No such file"


class StoreMemory:
    """The memory that all databases of a process share: blocks that were read, and entries not yet in a file."""

    def __init__(self, bytes_in_all: int, write_buffer_ratio: float) -> None:
        self.cache = Cache(bytes_in_all)
        size = int(bytes_in_all * write_buffer_ratio)
        self.write_buffers = WriteBufferManager.new_write_buffer_manager_with_cache(size, False, self.cache)
        # Much smaller than the total limit: one full buffer must not make each further small write a file of its own.
        self.write_buffer_size = max(size // 4, 1 << 20)


def _options(memory: StoreMemory, compaction: CompactionStyle | None) -> Options:
    table = BlockBasedOptions()
    table.set_block_cache(memory.cache)
    # Otherwise they are outside of the cache and its limit, and memory grows with the number of files.
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_bloom_filter(_BLOOM_BITS, False)
    # Partitioned: a whole index of a large file exceeds a shard of the cache, and would be read for each key.
    table.set_index_type(BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    table.set_metadata_block_size(_METADATA_BLOCK)
    table.set_pin_top_level_index_and_filter(True)
    table.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(memory.write_buffers)
    options.set_write_buffer_size(memory.write_buffer_size)
    options.set_level_zero_file_num_compaction_trigger(_LEVEL_0_FILES)
    options.set_level_zero_slowdown_writes_trigger(_LEVEL_0_SLOWDOWN)
    options.set_level_zero_stop_writes_trigger(_LEVEL_0_STOP)
    # All files stay open: reopening a file reads its footer and index again.
    options.set_max_open_files(-1)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    if compaction is None:
        options.set_disable_auto_compactions(True)
    elif compaction is CompactionStyle.UNIVERSAL:
        universal = UniversalCompactOptions()
        universal.max_size_amplification_percent = _OTHERS_PERCENT
        options.set_compaction_style(DBCompactionStyle.universal())
        options.set_universal_compaction_options(universal)
        options.set_max_background_jobs(_JOBS)
    return options


def _is_damage(answer: str) -> bool:
    """Whether a message of RocksDB proves that the files are damaged, so that no other attempt can open them either.

    RocksDB also reports Corruption when it cannot read a table that the manifest names: that is a proof only if the
    table is missing.
    """
    return answer.startswith(_WRONG_CONTENT) and answer.count(_IO_ERROR) == answer.count(_MISSING)


class Store:
    """Opens the database in ``directory``, or makes one there. Any thread may call; keys are ordered as bytes are.

    ``compaction`` determines how its files are merged, and replaces an earlier setting; None, for a database that is
    read only once, leaves them as they are. Raises :class:`CorruptStateError` for files that are not a complete
    database, and OSError when the host is at fault: a full disk, missing permissions, too many open files.
    """

    def __init__(self, directory: Path, memory: StoreMemory, compaction: CompactionStyle | None = None) -> None:
        self._options = _options(memory, compaction)
        for remembered in directory.glob("OPTIONS-*"):  # rocksdict would use these instead of the given options
            remembered.unlink()
        try:
            self._database = Rdict(str(directory), self._options)
        except Exception as error:  # rocksdict has no class of its own for RocksDB's errors
            kind = CorruptStateError if _is_damage(str(error)) else OSError
            raise kind(f"RocksDB cannot open {directory}: {error}") from error
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True
        self._database.set_write_options(self._unlogged)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, or None. Fastest for sorted keys: neighbours are in the same block."""
        found: list[bytes | None] = self._database.get(list(keys))
        return found

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        """Sets and removes entries, :data:`BATCH` at a time; a key must not be in both."""
        entries, keys = iter(puts), iter(deletes)
        while True:
            batch = WriteBatch(raw_mode=True)
            deque(starmap(batch.put, islice(entries, BATCH)), maxlen=0)  # a loop in C
            for key in islice(keys, BATCH):
                batch.delete(key)
            if batch.is_empty():
                return
            self._database.write(batch, self._unlogged)

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """The entries whose keys have the prefix, from ``start`` on, as of this call, in key order.

        RocksDB gets no upper bound: rocksdict does not keep the memory of a bound alive.
        """
        entries = self._database.items(from_key=max(prefix, start))
        return takewhile(lambda entry: entry[0].startswith(prefix), entries)

    def between(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries from the key ``begin`` to before ``end``, otherwise like :meth:`scan`."""
        return takewhile(lambda entry: entry[0] < end, self._database.items(from_key=begin))

    def keys(self, prefix: bytes, start: bytes = b"") -> Iterator[bytes]:
        """The keys of :meth:`scan`."""
        keys = self._database.keys(from_key=max(prefix, start))
        return takewhile(lambda key: key.startswith(prefix), keys)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Removes the keys from ``begin`` to before ``end`` in constant time; their space is freed gradually."""
        if begin < end:
            self._database.delete_range(begin, end, self._unlogged)

    def ingest(self, entries: Iterable[tuple[bytes, bytes]], path: Path) -> None:
        """Adds entries, which must be in key order, as a file that is made at ``path`` and moved into the database."""
        writer = SstFileWriter(self._options)
        entries = iter(entries)
        first = next(entries, None)
        if first is None:
            return
        writer.open(str(path))
        writer[first[0]] = first[1]
        deque(starmap(writer.__setitem__, entries), maxlen=0)
        writer.finish()
        moved = IngestExternalFileOptions()
        moved.set_move_files(True)
        self._database.ingest_external_file([str(path)], moved)
        path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Writes the entries in memory to files; other threads continue to run."""
        self._database.flush()

    def checkpoint(self, directory: Path) -> None:
        """Makes hard links of all files of the present content in a new directory.

        Entries in memory are written while the interpreter lock is held, so call :meth:`flush` first.
        """
        Checkpoint(self._database).create_checkpoint(str(directory))

    def figure(self, name: str) -> int | None:
        """The value of the property ``rocksdb.<name>``; None when it does not exist or the database is closed."""
        try:
            figure: int | None = self._database.property_int_value(f"rocksdb.{name}")
        except Exception:  # rocksdict has no class of its own; it is being closed by another thread
            return None
        return figure

    def close(self) -> None:
        """Closes the database. Later calls raise; a scan that has begun can continue."""
        self._database.close()
