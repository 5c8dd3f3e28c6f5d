"""Format ``verify``: a sink for benchmarks that counts rows, checks running counts, and reports totals in a file.

Rows are updates ``(key, count[, sum])`` with keys from 0, in the ``keyForm`` of format ``numbers``; the count of a key
must grow by one from row to row. With ``row=<column>`` they are row numbers instead, in any order, of which a digest is
kept. Each subtask writes ``<report>/subtask-<index>.json``, which is replaced as a whole at every completed checkpoint
and at the end; with ``reportIntervalMs`` also with the first rows of an attempt, and with rows that arrive at least
that long after the last report.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from msgspec import Meta

from ckpt_runtime.connectors import kernels
from ckpt_runtime.graph.formats import sink_options
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import SinkSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import NO_BITMAP, AnyArray, bytes_column, int64_column
from ckpt_runtime.state.kernels.index_kernels import key_bounds

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
    digest of :func:`~ckpt_runtime.connectors.kernels.digest` in hexadecimal, over the same rows as ``rows``; those of
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
        kernels.check_updates(empty, empty, empty, self._last)
        kernels.digest(empty)
        if self._key_form != "int":
            kernels.keys_of_digits(read_only(np.zeros(1, dtype=np.int32)), _NO_BYTES, empty.copy())
            kernels.gathered_keys(empty, empty.copy())

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._row:
            self._digest = (self._digest + int(kernels.digest(self._column(batch, self._row)))) % _MODULUS
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
        self._violations += kernels.check_updates(key, count, total, self._last)

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
            kernels.gathered_keys(self._column(batch, self._key), keys)
            return read_only(keys)
        scattered, text = np.empty(batch.num_rows, dtype=np.int64), bytes_column(batch.column(self._key))
        if text.bitmap.size or kernels.keys_of_digits(text.offsets, text.data, scattered) >= 0:
            raise ValueError(
                f"sink {self.context.uid!r}: column {self._key!r} contains texts that are not 16 hexadecimal digits"
            )
        kernels.gathered_keys(read_only(scattered), keys)
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
            document |= {
                "violations": self._violations,
                "keys": int(np.count_nonzero(self._last[0::2])),
                "count_total": int(self._last[0::2].sum()),
                "sum_total": int(self._last[1::2].sum()) if self._sum else None,
            }
        target = self._directory / f"subtask-{self.context.subtask_index}.json"
        partial = target.with_suffix(f".{self.context.attempt}.partial")
        partial.write_text(json.dumps(document))
        os.replace(partial, target)
