"""Sums and means of vectors, which are arrays of floats. They are computed as Spark does: in order, with 32 bits."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import AggregateFailedError, GroupAccumulator, Rows
from ckpt_runtime.state import columns
from ckpt_runtime.state.columns import AnyArray


class Vectors(GroupAccumulator):
    """The sum or the mean of vectors of one length, element by element; arrays with a null in them do not count.

    A mean is kept with the number of its vectors. A vector moves it by its share of the difference between both, as in
    Spark; the means of merged sessions are weighted by their numbers.
    """

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._is_mean = aggregate.function == "VectorAvg"
        if self._is_mean:
            self.stored = [*self.stored, self.field("count", pa.int64())]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        numbers, arrays, weights = new.groups, columns.plain(new.columns[0]), np.ones(len(new.groups), dtype=np.int64)
        merged = np.zeros(len(numbers), dtype=np.bool_)
        if len(old.groups):
            numbers = np.concatenate([old.groups, numbers])
            arrays = pa.concat_arrays([old.columns[0].cast(arrays.type), arrays])
            known = old.columns[1].fill_null(0).to_numpy() if self._is_mean else np.ones(len(old.groups), np.int64)
            weights, merged = np.concatenate([known, weights]), np.arange(len(numbers)) < len(old.groups)
        counting = _without_nulls(arrays)
        numbers, weights, merged = numbers[counting], weights[counting], merged[counting]
        arrays = arrays.filter(pa.array(counting))
        lengths = arrays.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        present, firsts = np.unique(numbers, return_index=True)
        sizes, counts = np.zeros(groups, dtype=np.int64), np.zeros(groups, dtype=np.int64)
        sizes[present] = lengths[firsts]
        differ = np.flatnonzero(lengths != sizes[numbers])
        if len(differ):
            found, size = lengths[differ[0]], sizes[numbers[differ[0]]]
            raise AggregateFailedError(
                f"{self.aggregate.name}: a vector has {found} elements, one before it has {size}"
            )
        np.add.at(counts, numbers, weights)
        ends = np.cumsum(sizes)
        elements = arrays.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        places = _spread(ends[numbers] - sizes[numbers], lengths)
        with np.errstate(all="ignore"):
            if self._is_mean:
                results = _means(numbers, weights, merged, lengths, elements, places)
            else:
                results = np.full(int(sizes.sum()), -0.0, dtype=np.float32)
                np.add.at(results, places, elements)
        offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        vectors = pa.ListArray.from_arrays(offsets, pa.array(results), mask=pa.array(counts == 0))
        kept = [vectors.cast(self.stored[0].type)]
        return [*kept, columns.arrow_from_numpy(pa.int64(), counts)] if self._is_mean else kept


def _without_nulls(arrays: pa.Array) -> AnyArray:
    """Which arrays are not null and have no null in them."""
    counting: AnyArray = np.array(arrays.is_valid())
    nulls = np.asarray(arrays.flatten().is_null())
    if nulls.any():
        lengths = pc.fill_null(arrays.value_lengths(), 0).to_numpy(zero_copy_only=False)
        counting[np.repeat(np.arange(len(arrays)), lengths)[nulls]] = False
    return counting


def _spread(starts: AnyArray, lengths: AnyArray) -> AnyArray:
    """Returns the positions from each start on, as many as its length says."""
    before = np.cumsum(lengths) - lengths
    result: AnyArray = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return result


def _means(
    numbers: AnyArray, weights: AnyArray, merged: AnyArray, lengths: AnyArray, elements: AnyArray, places: AnyArray
) -> AnyArray:
    """Returns the means of groups, from vectors and means of merged sessions. One of each group is added at a time."""
    means = np.zeros(int(places.max(initial=-1)) + 1, dtype=np.float32)
    order = np.argsort(numbers, kind="stable")
    _, firsts, sizes = np.unique(numbers[order], return_index=True, return_counts=True)
    turns = np.empty(len(numbers), dtype=np.int64)
    turns[order] = np.arange(len(numbers)) - np.repeat(firsts, sizes)
    by_turn = np.argsort(turns, kind="stable")
    counts = np.zeros(int(numbers.max(initial=0)) + 1, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    for rows in np.split(by_turn, np.cumsum(np.bincount(turns))[:-1]):
        groups, size = numbers[rows], lengths[rows]
        before = counts[groups]
        counts[groups] = before + weights[rows]
        now, share = counts[groups].astype(np.float32), weights[rows].astype(np.float32)
        given = _spread(starts[rows], size)
        vector, mean = elements[given], means[places[given]]
        moved = mean + (vector - mean) * np.repeat(np.float32(1) / now, size)
        weighted = mean * np.repeat(before.astype(np.float32) / now, size) + vector * np.repeat(share / now, size)
        later = np.where(np.repeat(merged[rows], size), weighted, moved)
        means[places[given]] = np.where(np.repeat(before == 0, size), vector, later)
    return means
