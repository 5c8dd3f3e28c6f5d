"""The formats of benchmarks and exactly-once checks: the source ``numbers`` and the sink ``verify``.

``numbers`` computes its rows as the job runs. Row ``i`` (from 0) is ``h = splitmix64(i)``, ``key = h mod keys``
(unsigned), ``value = h & 1023``. With ``keyForm=scattered`` the key is its splitmix64 as a signed integer, with
``keyForm=string`` the 16 lower-case digits of that in hexadecimal; with ``sequence=true`` a row is ``(split, number
within the split)``, both int64. Rows are dealt in blocks to a fixed number of splits whose positions are the state. It
never replays prepared batches.

``verify`` counts rows, checks running counts, and reports totals in a file. Rows are updates ``(key, count[, sum])``
with keys from 0, in the ``keyForm`` of ``numbers``; the count of a key must grow by one from row to row. With
``row=<column>`` they are row numbers instead, in any order, of which a digest is kept. Each subtask writes
``<report>/subtask-<index>.json``, which is replaced as a whole at every completed checkpoint and at the end; with
``reportIntervalMs`` also with the first rows of an attempt, and with rows that arrive at least that long after the last
report.

The compiled kernels loop over arrays, without Python objects and locks. Their arithmetic is modulo 2**64 where it is
unsigned. :data:`BLOCK` and :data:`SPLITS` are part of saved positions: a change of either makes old snapshots
unreadable.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Meta

from ckpt_runtime.connectors.splits import SPLITS, Pacer, SplitPosition, assigned_splits, put_positions
from ckpt_runtime.graph.formats import sink_options, source_options, source_schema
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import SinkSpec, SourceSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output, SourceOperator, SourceStatus
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import NO_BITMAP, AnyArray, arrow_from_numpy, bytes_column, int64_column
from ckpt_runtime.state.kernels.compiler import I64, IN_I32, IN_I64, IN_U8, INT64, U64, UINT64, inlined, kernel
from ckpt_runtime.state.kernels.hash_kernels import load_word
from ckpt_runtime.state.kernels.index_kernels import key_bounds

BLOCK = 256
"""Consecutive rows that belong to one split: row ``i`` is in split ``i // BLOCK % SPLITS``."""

_CYCLE = BLOCK * SPLITS
_LOW_10_BITS = np.uint64(1023)

Int64Array = npt.NDArray[np.int64]


@inlined
def _mix(row: Any) -> Any:
    """splitmix64 of a row number."""
    z = np.uint64(row) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel((IN_I64, I64, INT64, INT64, I64))
def next_rows(splits: Int64Array, positions: Int64Array, turn: int, limit: int, rows: Int64Array) -> tuple[int, int]:
    """Fills ``rows`` with the next row numbers below ``limit``, a block of each split in turn.

    ``positions[i]`` counts the rows of ``splits[i]`` handed out, and is advanced. Returns how many rows were filled
    and whose turn is next; fewer than requested means that all splits are at their end.
    """
    filled = 0
    exhausted = 0
    while filled < rows.shape[0] and exhausted < splits.shape[0]:
        inside = positions[turn] % BLOCK
        first = positions[turn] // BLOCK * _CYCLE + splits[turn] * BLOCK + inside
        if first >= limit:
            exhausted += 1
            turn = (turn + 1) % splits.shape[0]
            continue
        exhausted = 0
        count = min(BLOCK - inside, limit - first, rows.shape[0] - filled)
        for offset in range(count):
            rows[filled + offset] = first + offset
        filled += count
        positions[turn] += count
        if inside + count == BLOCK:
            turn = (turn + 1) % splits.shape[0]
    return filled, turn


@kernel((IN_I64, UINT64, I64, I64))
def keyed_values(rows: Int64Array, keys: int, key: Int64Array, value: Int64Array) -> None:
    """``key = splitmix64(row) mod keys`` (unsigned), ``value = splitmix64(row) & 1023``."""
    for index in range(rows.shape[0]):
        mixed = _mix(rows[index])
        key[index] = np.int64(mixed % keys)
        value[index] = np.int64(mixed & _LOW_10_BITS)


@inlined
def _unmix(mixed: Any) -> Any:
    """The inverse of :func:`_mix`; the factors are the inverses of its factors modulo 2**64."""
    z = np.uint64(mixed)
    z = z ^ (z >> np.uint64(31)) ^ (z >> np.uint64(62))
    z *= np.uint64(0x319642B2D24D8EC3)
    z = z ^ (z >> np.uint64(27)) ^ (z >> np.uint64(54))
    z *= np.uint64(0x96DE1B173F119089)
    z = z ^ (z >> np.uint64(30)) ^ (z >> np.uint64(60))
    return z - np.uint64(0x9E3779B97F4A7C15)


@kernel((I64,))
def scatter_keys(keys: Int64Array) -> None:
    """Replaces each key by its splitmix64, so that keys spread over all 64-bit integers."""
    for index in range(keys.shape[0]):
        keys[index] = np.int64(_mix(keys[index]))


@kernel((IN_I64, I64))
def gathered_keys(scattered: Int64Array, keys: Int64Array) -> None:
    """The inverse of :func:`scatter_keys`."""
    for index in range(keys.shape[0]):
        keys[index] = np.int64(_unmix(scattered[index]))


@inlined
def _reversed(word: Any) -> Any:
    """The eight bytes of a word in the opposite order; compiled to one instruction."""
    result = np.uint64(0)
    for byte in range(8):
        result |= ((word >> np.uint64(8 * byte)) & np.uint64(255)) << np.uint64(56 - 8 * byte)
    return result


@inlined
def _digits(number: Any) -> Any:
    """The 32 low bits of ``number`` as eight hexadecimal digits in a word, the lowest digit in the lowest byte.

    Digits are random here: a branch for each would be mispredicted too often.
    """
    word = (number | (number << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    word = (word | (word << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    word = (word | (word << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    letters = ((word + np.uint64(0x0606060606060606)) >> np.uint64(4)) & np.uint64(0x0101010101010101)
    return word + np.uint64(0x3030303030303030) + letters * np.uint64(39)


@inlined
def _number(digits: Any) -> Any:
    """The inverse of :func:`_digits`; some number for bytes that are not such digits."""
    letters = (digits >> np.uint64(6)) & np.uint64(0x0101010101010101)
    word = (digits + letters * np.uint64(9)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    word = (word | (word >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    word = (word | (word >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (word | (word >> np.uint64(16))) & np.uint64(0xFFFFFFFF)


@kernel((IN_I64, U64))
def hex_digits(keys: Int64Array, text: Any) -> None:
    """Writes each key as 16 lower-case hexadecimal digits of its 64 bits, the highest first; two words per key."""
    for index in range(keys.shape[0]):
        bits = np.uint64(keys[index])
        text[2 * index] = _reversed(_digits(bits >> np.uint64(32)))
        text[2 * index + 1] = _reversed(_digits(bits & np.uint64(0xFFFFFFFF)))


@kernel((IN_I32, IN_U8, I64))
def keys_of_digits(offsets: Any, text: Any, keys: Int64Array) -> int:
    """The inverse of :func:`hex_digits`; returns the first row that is not such a text, or -1."""
    for index in range(keys.shape[0]):
        start = np.uint64(offsets[index])
        if offsets[index + 1] - offsets[index] != 16:
            return index
        high, low = _reversed(load_word(text, start)), _reversed(load_word(text, start + np.uint64(8)))
        high_number, low_number = _number(high), _number(low)
        if _digits(high_number) != high or _digits(low_number) != low:
            return index
        keys[index] = np.int64((high_number << np.uint64(32)) | low_number)
    return -1


@kernel((IN_I64, I64, I64))
def sequence_numbers(rows: Int64Array, split: Int64Array, number: Int64Array) -> None:
    """Each row's split, and its number within the split, from 0 without gaps."""
    for index in range(rows.shape[0]):
        row = rows[index]
        split[index] = row // BLOCK % SPLITS
        number[index] = row // _CYCLE * BLOCK + row % BLOCK


@kernel((IN_I64, IN_I64, IN_I64, I64, I64))
def check_updates(key: Int64Array, count: Int64Array, total: Int64Array, last: Int64Array, sums: Int64Array) -> int:
    """Checks that each key's count grows by one from update to update, and keeps the last count and total of each.

    ``last[2 * key]`` is the key's last count, 0 for a key not seen yet, and ``last[2 * key + 1]`` its total: side by
    side, since memory access dominates the time. A key's first update may have any count (state is older than this
    attempt). ``sums`` are the number of keys seen, and the sums of their last counts and totals: with many keys, adding
    up ``last`` for a report takes longer than the rows of a second. Returns the number of violations.
    """
    violations = 0
    totals = sums[2]
    for index in range(key.shape[0]):
        place = np.uint64(2 * key[index])
        known = last[place]
        if count[index] != known + 1 or known == 0:  # false for nearly every row, once keys are known
            violations += int(known != 0)
            sums[0] += int(known == 0)
            sums[1] += count[index] - known - 1
        totals += total[index] - last[place + np.uint64(1)]
        last[place] = count[index]
        last[place + np.uint64(1)] = total[index]
    sums[1] += key.shape[0]
    sums[2] = totals
    return violations


@kernel((IN_I64,))
def digest(rows: Int64Array) -> int:
    """The sum of ``splitmix64(row)`` modulo 2**64: equal for equal multisets in any order, hardly ever for others."""
    total = np.uint64(0)
    for index in range(rows.shape[0]):
        total += _mix(rows[index])
    return total  # type: ignore[return-value]


_NO_LIMIT = (1 << 63) - 1


class NumbersSource(SourceOperator):
    """The operator of format ``numbers``. ``rowsPerSecond`` is the rate of all subtasks together."""

    requires_final_checkpoint = False

    def __init__(self, spec: SourceSpec) -> None:
        assert isinstance(spec.format, str)
        options = source_options(spec.format, spec.options)
        self._schema = source_schema(spec.format, spec.options, spec.schema)
        self._limit = options["rows"] or _NO_LIMIT
        self._keys: Any = np.uint64(options["keys"])
        self._key_form = str(options["keyForm"])
        self._batch_rows = int(options["batchRows"])
        self._rate = float(options["rowsPerSecond"])
        self._sequence = bool(options["sequence"])
        self._turn = 0

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        splits = assigned_splits(context, SplitPosition)
        self._splits = read_only(np.array(list(splits), dtype=np.int64))
        self._positions = np.array([0 if item is None else item.position for item in splits.values()], dtype=np.int64)
        self._pacer = Pacer(self._rate * len(splits) / SPLITS, context.monotonic_ms)
        _hex_digits(self._columns(np.empty(0, dtype=np.int64))[0])

    def poll(self) -> SourceStatus:
        wanted = min(self._batch_rows, self.most_rows, self._pacer.allowance())
        if wanted <= 0:
            return SourceStatus.NOTHING_AVAILABLE
        rows = _new_column(wanted)
        filled, self._turn = next_rows(self._splits, self._positions, self._turn, self._limit, rows)
        if filled == 0:
            return SourceStatus.END_OF_INPUT
        self._pacer.spend(filled)
        columns = self._columns(rows[:filled])
        arrays = [arrow_from_numpy(pa.int64(), column) for column in columns]
        if self._key_form == "string":
            arrays[0] = _hex_digits(columns[0])
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        return SourceStatus.MORE_AVAILABLE

    def idle_ms(self) -> int:
        return self._pacer.idle_ms()

    def snapshot(self, checkpoint_id: int) -> None:
        positions = zip(self._splits.tolist(), self._positions.tolist(), strict=True)
        put_positions(
            self.context.operator_state,
            ({"split": split, "position": position} for split, position in positions),
        )

    def _columns(self, rows: Int64Array) -> list[Int64Array]:
        """The output columns of some rows, in fresh memory."""
        first, second = _new_column(len(rows)), _new_column(len(rows))
        if self._sequence:
            sequence_numbers(read_only(rows), first, second)
            return [first, second]
        keyed_values(read_only(rows), self._keys, first, second)
        if self._key_form != "int":
            scatter_keys(first)
        return [first, second, rows][: len(self._schema)]


def _hex_digits(keys: Int64Array) -> pa.Array:
    text = pa.allocate_buffer(16 * len(keys))
    hex_digits(read_only(keys), np.frombuffer(memoryview(text), dtype=np.uint64))
    offsets = np.arange(0, 16 * len(keys) + 1, 16, dtype=np.int32)
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), text)


def _new_column(rows: int) -> Int64Array:
    """Allocates from Arrow's pool, which reuses pages; a plain allocation would fault them in again for every batch."""
    return np.frombuffer(memoryview(pa.allocate_buffer(rows * 8)), dtype=np.int64)


MAX_KEY = 1 << 27
_ROWS = "rows"
_DIGEST = "digest"
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{1,16}$")]
_MODULUS = 1 << 64
_NO_BYTES = read_only(np.empty(0, dtype=np.uint8))


class VerifySink(Operator):
    """The operator of format ``verify``.

    The report holds ``rows`` (over all attempts, as the state counts them), ``violations``, ``keys`` seen,
    ``count_total`` and ``sum_total`` over the last update of each key, ``attempt``, ``first_ms`` and ``last_ms`` of the
    batches of this attempt, and ``finished``. With ``row`` it holds ``digest`` instead of the fields about keys: the
    digest of :func:`digest` in hexadecimal, over the same rows as ``rows``; those of
    the subtasks add up modulo 2**64.
    """

    requires_final_checkpoint = False

    def __init__(self, spec: SinkSpec) -> None:
        assert isinstance(spec.format, str)
        options = sink_options(spec.format, spec.options)
        self._key, self._count, self._sum = options["key"], options["count"], options["sum"]
        self._row = options["row"]
        self._key_form = options["keyForm"]
        self._digest = 0
        self._directory = Path(options["report"])
        self._interval_ms = int(options["reportIntervalMs"])
        self._report_at_ms = 0
        self._last = np.zeros(2 * 1024, dtype=np.int64)
        self._sums = np.zeros(3, dtype=np.int64)
        self._violations = 0
        self._first_ms: int | None = None
        self._last_ms: int | None = None
        self._finished = False

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._rows = sum(context.operator_state.restored(_ROWS, NonNegative))
        self._digest = sum(int(text, 16) for text in context.operator_state.restored(_DIGEST, _Digest)) % _MODULUS
        self._directory.mkdir(parents=True, exist_ok=True)
        empty = read_only(np.empty(0, dtype=np.int64))
        check_updates(empty, empty, empty, self._last, self._sums)
        digest(empty)
        if self._key_form != "int":
            keys_of_digits(read_only(np.zeros(1, dtype=np.int32)), _NO_BYTES, empty.copy())
            gathered_keys(empty, empty.copy())

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._row:
            self._digest = (self._digest + int(digest(self._column(batch, self._row)))) % _MODULUS
        else:
            self._check_updates(batch)
        self._rows += batch.num_rows
        self._last_ms = self.context.now_ms()
        self._first_ms = self._last_ms if self._first_ms is None else self._first_ms
        if self._interval_ms and self._last_ms >= self._report_at_ms:
            self._report_at_ms = self._last_ms + self._interval_ms
            self._report()

    def _check_updates(self, batch: pa.RecordBatch) -> None:
        key = self._keys(batch)
        count = self._column(batch, self._count)
        total = self._column(batch, self._sum) if self._sum else count
        self._make_room(key)
        self._violations += check_updates(key, count, total, self._last, self._sums)

    def process_watermark(self, timestamp_ms: int) -> None:
        """Drops the watermark: a sink has no output."""

    def snapshot(self, checkpoint_id: int) -> None:
        self.context.operator_state.put(_ROWS, [self._rows])
        if self._row:
            self.context.operator_state.put(_DIGEST, [f"{self._digest:016x}"])

    def notify_complete(self, checkpoint_id: int) -> None:
        self._report()

    def finish(self) -> None:
        self._finished = True
        self._report()

    def close(self) -> None:
        if self._first_ms is not None:
            self._report()

    def _column(self, batch: pa.RecordBatch, name: str) -> AnyArray:
        column = int64_column(batch.column(name))
        if column.bitmap.size:
            raise ValueError(f"sink {self.context.uid!r}: column {name!r} contains nulls, but updates have none")
        return column.values

    def _keys(self, batch: pa.RecordBatch) -> AnyArray:
        """The numbers of the keys, from 0."""
        if self._key_form == "int":
            return self._column(batch, self._key)
        keys = np.empty(batch.num_rows, dtype=np.int64)
        if self._key_form == "scattered":
            gathered_keys(self._column(batch, self._key), keys)
            return read_only(keys)
        scattered, text = np.empty(batch.num_rows, dtype=np.int64), bytes_column(batch.column(self._key))
        if text.bitmap.size or keys_of_digits(text.offsets, text.data, scattered) >= 0:
            raise ValueError(
                f"sink {self.context.uid!r}: column {self._key!r} contains texts that are not 16 hexadecimal digits"
            )
        gathered_keys(read_only(scattered), keys)
        return read_only(keys)

    def _make_room(self, key: AnyArray) -> None:
        least, greatest = key_bounds(key, NO_BITMAP, 0)
        if least < 0 or greatest >= MAX_KEY:
            wrong = least if least < 0 else greatest
            raise ValueError(f"sink {self.context.uid!r}: key {wrong} is not between 0 and {MAX_KEY - 1}")
        if 2 * greatest >= len(self._last):
            larger = np.zeros(2 << (greatest + 1).bit_length(), dtype=np.int64)
            larger[: len(self._last)] = self._last
            self._last = larger

    def _report(self) -> None:
        document: dict[str, Any] = {
            "subtask": self.context.subtask_index,
            "attempt": self.context.attempt,
            "rows": self._rows,
            "first_ms": self._first_ms,
            "last_ms": self._last_ms,
            "finished": self._finished,
        }
        if self._row:
            document["digest"] = f"{self._digest:016x}"
        else:
            keys, count_total, sum_total = self._sums.tolist()
            document |= {
                "violations": self._violations,
                "keys": keys,
                "count_total": count_total,
                "sum_total": sum_total if self._sum else None,
            }
        target = self._directory / f"subtask-{self.context.subtask_index}.json"
        partial = target.with_suffix(f".{self.context.attempt}.partial")
        partial.write_text(json.dumps(document))
        os.replace(partial, target)
