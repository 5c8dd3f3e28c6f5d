"""Aggregates that build, unite and intersect sketches. State has the bytes of a group's sketch, as Spark writes it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.functions.sketches import HllForm, KllForm, ThetaForm
from ckpt_runtime.expressions.types import EvaluationError
from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import AggregateFailedError, GroupAccumulator, Rows
from ckpt_runtime.state import columns
from ckpt_runtime.state.columns import arrow_from_numpy

_DEFAULT_HLL_SIZE = 12
_DEFAULT_K = 200


class _Sketched(GroupAccumulator):
    """A group without values has no sketch, and the result is an empty one."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self.stored = [self.field("sketch", pa.binary())]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        known: list[list[bytes]] = [[] for _ in range(groups)]
        for number, data in zip(old.groups.tolist(), old.columns[0].to_pylist(), strict=True):
            if data is not None:
                known[number].append(data)
        values, has = columns.plain(new.columns[0]), np.asarray(new.columns[0].is_valid())
        rows = np.argsort(new.groups, kind="stable")
        rows = rows[has[rows]]
        ends = np.cumsum(np.bincount(new.groups[rows], minlength=groups))
        added = values.take(arrow_from_numpy(pa.int64(), rows)).to_pylist()
        try:
            sketches = [
                self._merged(parts, added[start:end]) if parts or end > start else None
                for parts, (start, end) in zip(known, pairwise([0, *ends.tolist()]), strict=True)
            ]
        except EvaluationError as error:
            raise AggregateFailedError(f"aggregate {self.aggregate.name!r}: {error}") from None
        return [pa.array(sketches, pa.binary())]

    def result(self, stored: list[pa.Array]) -> pa.Array:
        return pc.fill_null(stored[0], self._empty()) if stored[0].null_count else stored[0]

    def _merged(self, known: list[bytes], values: list[Any]) -> bytes:
        """The sketch of those in state, which are several if sessions merge, and of values, which are not null."""
        raise NotImplementedError

    def _empty(self) -> bytes:
        raise NotImplementedError


class HllSketches(_Sketched):
    """HyperLogLog sketches: of values, or unions of sketches, which have the size of the first one."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._form = HllForm(aggregate.function)
        self._size = int(aggregate.settings.get("size", _DEFAULT_HLL_SIZE))

    def _merged(self, known: list[bytes], values: list[Any]) -> bytes:
        unites = self.aggregate.function == "HllUnionAgg"
        sketches = [self._form.read(data) for data in (*known, *(values if unites else ()))]
        sketch = sketches[0] if sketches else self._form.library.hll_sketch(self._size)
        if unites or len(sketches) > 1:
            mixed = bool(self.aggregate.settings.get("mixed"))
            sketch = self._form.union(sketches, mixed=mixed, size=sketch.lg_config_k)
        if not unites:
            for value in values:
                sketch.update(value)
        return bytes(sketch.serialize_updatable())

    def _empty(self) -> bytes:
        return bytes(self._form.library.hll_sketch(self._size).serialize_updatable())


class ThetaSketches(_Sketched):
    """Theta sketches: of values, or unions or intersections of sketches."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._form = ThetaForm(aggregate.function)

    def _merged(self, known: list[bytes], values: list[Any]) -> bytes:
        form, function = self._form, self.aggregate.function
        if function == "ThetaIntersectionAgg":
            return form.written(form.intersection([form.read(data) for data in (*known, *values)]))
        size = int(self.aggregate.settings["size"])
        if function == "ThetaUnionAgg":
            return form.written(form.union([form.read(data) for data in (*known, *values)], size))
        sketch = form.library.update_theta_sketch(size)
        for value in values:
            sketch.update(value)
        sketch.trim()
        own = sketch.compact()
        return form.written(form.union([*map(form.read, known), own], size) if known else own)

    def _empty(self) -> bytes:
        return self._form.written(self._form.library.update_theta_sketch().compact())  # its bytes have no size


class KllSketches(_Sketched):
    """KLL sketches: of values, or merged ones, which have the size of the first one unless another is set."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._form = KllForm(aggregate.function)
        self._merges = aggregate.function.startswith("KllMergeAgg")
        self._k: int | None = aggregate.settings.get("size")

    def _merged(self, known: list[bytes], values: list[Any]) -> bytes:
        form = self._form
        sketches = [form.read(data) for data in (*known, *(values if self._merges else ()))]
        if not known:
            first = sketches[0].k if sketches else _DEFAULT_K
            sketches.insert(0, form.empty(first if self._k is None else self._k))
        sketch, *others = sketches
        for other in others:
            sketch.merge(other)
        if not self._merges:
            for value in values:
                sketch.update(value)
        return form.written(sketch)

    def _empty(self) -> bytes:
        return self._form.written(self._form.empty(_DEFAULT_K if self._k is None else self._k))
