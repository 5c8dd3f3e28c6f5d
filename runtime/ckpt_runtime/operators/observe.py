"""``observe``: aggregates all rows that pass between two checkpoints, without changing them. Never blocks.

A row for which an argument of an aggregate fails is bad: if bad rows are left out, it is so here too.

Each subtask keeps one row of stored columns, as an aggregation keeps them for a group. Its snapshot gives this row to
the driver, as an Arrow stream, and begins again without rows. The driver combines the rows of all subtasks.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate
from ckpt_runtime.expressions.types import arrow_type
from ckpt_runtime.graph.schema import DocumentError
from ckpt_runtime.graph.specs import ObserveSpec
from ckpt_runtime.operators.aggregates.accumulator import Rows
from ckpt_runtime.operators.bad_rows import LeavesOutBadRows
from ckpt_runtime.operators.groups import GroupAggregates
from ckpt_runtime.state.arrays import read_only


class Observation:
    """The aggregates of one ``observe``: from rows to the stored row, and from stored rows to results."""

    def __init__(self, spec: ObserveSpec) -> None:
        self._aggregates = GroupAggregates(spec.group)
        self._schema = pa.schema(self._aggregates.stored)
        self._arguments = [(compile_expression(tree), arrow_type(tree.type)) for tree in spec.arguments]
        self._results = [(name, compile_expression(tree), arrow_type(tree.type)) for name, tree in spec.results]
        self._zone = ZoneInfo(spec.zone)

    def arguments(self, rows: Frame) -> Rows:
        """The values of rows that are aggregated. Raises EvaluationError for a row that has none."""
        columns = [evaluate(argument, rows, kind) for argument, kind in self._arguments]
        return Rows(_of_one_group(rows.length), columns)

    def added(self, stored: list[pa.Array], new: Rows) -> list[pa.Array]:
        """The stored row after more rows; an empty list stands for no rows."""
        return self._aggregates.combined(1, Rows(_of_one_group(1), stored), new) if stored else self._of_rows(new)

    def _of_rows(self, rows: Rows) -> list[pa.Array]:
        return self._aggregates.of_rows(1, rows)

    def encoded(self, stored: list[pa.Array]) -> bytes:
        """A stored row as it is sent."""
        if not stored:
            return b""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema) as stream:
            stream.write_batch(pa.RecordBatch.from_arrays(stored, schema=self._schema))
        return bytes(sink.getvalue().to_pybytes())

    def combined(self, parts: Sequence[bytes]) -> list[pa.Array]:
        """The stored row that sent rows make together. Raises DocumentError for what is no sent row."""
        rows = [self._decoded(part) for part in parts if part]
        if not rows:
            return self._of_rows(Rows(_of_one_group(0), [pa.nulls(0, kind) for _, kind in self._arguments]))
        stored = rows[0]
        for more in rows[1:]:
            one = _of_one_group(1)
            stored = self._aggregates.merged(1, Rows(one, stored), Rows(one, more))
        return stored

    def _decoded(self, part: bytes) -> list[pa.Array]:
        try:
            with pa.ipc.open_stream(part) as stream:
                table = stream.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise DocumentError(f"an observed row is not an Arrow stream: {error}") from error
        if table.schema != self._schema or table.num_rows != 1:
            raise DocumentError(f"an observed row has {table.num_rows} rows of {table.schema.names}")
        return [column.combine_chunks() for column in table.columns]

    def results(self, parts: Sequence[bytes]) -> dict[str, Any]:
        """The metrics of sent rows by their names, as Spark's reports of progress have them in JSON."""
        frame = Frame(self._aggregates.results(self.combined(parts)), 1)
        values = {name: evaluate(result, frame, kind)[0].as_py() for name, result, kind in self._results}
        return {name: self._json(value) for name, value in values.items()}

    def _json(self, value: Any) -> Any:
        match value:
            case bytes():
                return b64encode(value).decode()
            case datetime():
                local = value if value.tzinfo is None else value.astimezone(self._zone)
                return local.strftime("%Y-%m-%d %H:%M:%S")
            case date() | timedelta():
                return str(value)
            case Decimal():
                return float(value) if value % 1 else int(value)
            case float() if not isfinite(value):
                return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
            case Mapping():
                return {name: self._json(part) for name, part in value.items()}
            case list():
                return [self._json(part) for part in value]
        return value


def _of_one_group(rows: int) -> Any:
    return read_only(np.zeros(rows, dtype=np.uint32))


class ObserveOperator(LeavesOutBadRows):
    """Built from an :class:`ObserveSpec`."""

    requires_final_checkpoint = False

    def __init__(self, spec: ObserveSpec) -> None:
        self._observation = Observation(spec)
        self._stored: list[pa.Array] = []

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        moment = self.context.now_ms() * 1000

        def arguments(rows: pa.RecordBatch) -> Rows:
            return self._observation.arguments(Frame(rows.columns, rows.num_rows, moment=moment))

        for part, rows in self._parts(batch, arguments):
            self._stored = self._observation.added(self._stored, rows)
            self.output.emit(part)

    def measured(self) -> OperatorMeasures:
        stored, self._stored = self._stored, []
        return replace(super().measured(), observed=self._observation.encoded(stored))

    def combined(self, observed: Sequence[bytes]) -> bytes:
        return self._observation.encoded(self._observation.combined(observed))
