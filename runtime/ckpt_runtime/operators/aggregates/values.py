"""Aggregates whose state is the values themselves: a picked one, a list of all, or the distinct ones."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import (
    AggregateFailedError,
    GroupAccumulator,
    Rows,
    array_of,
    joined,
    ranks,
    taken,
)
from ckpt_runtime.operators.aggregates.numbers import picked_rows
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.kernels import group_kernels as kernels


class FirstOrLastAccumulator(GroupAccumulator):
    """The first or the last value that arrived, with or without nulls."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._later = aggregate.function == "Last"
        self._skips_nulls = bool(aggregate.settings.get("ignoreNulls"))
        self.stored = [self.field("", aggregate.result), self.field("set", pa.bool_())]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        values = columns.plain(new.columns[0])
        counts = values.is_valid() if self._skips_nulls else pa.repeat(pa.scalar(True), len(values))
        parts, given = [values], [counts]
        if len(old.groups):
            parts, given = [old.columns[0], values], [pc.fill_null(old.columns[1], False), counts]
        whole = pc.if_else(pa.concat_arrays(given), True, None)
        picked = np.full(groups, -1, dtype=np.int64)
        ranks = read_only(np.zeros(len(whole), dtype=np.int64))
        numbers = joined(old.groups, new.groups)
        kernels.pick_rows(numbers, ranks, *columns.validity(whole), self._later, picked)
        return [taken(parts, picked), pa.array(picked >= 0)]


class MinMaxByAccumulator(GroupAccumulator):
    """The value in the row with the minimum or maximum of another column; among equal rows, that of the last one."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self.stored = [self.field("", aggregate.result), self.field("by", inputs[1])]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        several = [rows for rows in (old, new) if len(rows.groups)] or [new]
        values, orders = ([columns.plain(rows.columns[at]) for rows in several] for at in (0, 1))
        greatest = self.aggregate.function == "MaxBy"
        picked = picked_rows(groups, joined(old.groups, new.groups), orders, greatest=greatest, later=True)
        return [taken(values, picked), taken(orders, picked)]


class TopAccumulator(GroupAccumulator):
    """The values in the rows with the ``k`` greatest or least ones of another column, these first.

    Rows in which the other column is null do not count. Of equal rows the earlier ones come first.
    """

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._pair = pa.struct([("value", inputs[0]), ("by", inputs[1])])
        self.stored = [self.field("values", pa.list_(self._pair))]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        numbers, [values, by] = new.groups, [columns.plain(column) for column in new.columns]
        if len(old.groups):
            lists = old.columns[0]
            [kept, known] = pc.list_flatten(lists).flatten()
            numbers = np.concatenate([old.groups[pc.list_parent_indices(lists).to_numpy()], numbers])
            values, by = pa.concat_arrays([kept, values]), pa.concat_arrays([known, by])
        counts = np.asarray(by.is_valid())
        order = ranks(by)
        rows = np.lexsort((order if self.aggregate.settings["least"] else -order, numbers))
        rows = rows[counts[rows]]
        sizes = np.bincount(numbers[rows], minlength=groups)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        most = int(self.aggregate.settings["k"])
        rows = arrow_from_numpy(pa.int64(), rows[places < most])
        offsets = np.concatenate([[0], np.cumsum(np.minimum(sizes, most))]).astype(np.int32)
        pairs = pa.StructArray.from_arrays([values.take(rows), by.take(rows)], fields=list(self._pair))
        return [pa.ListArray.from_arrays(pa.array(offsets), pairs, type=self.stored[0].type)]

    def result(self, stored: list[pa.Array]) -> pa.Array:
        lists = stored[0]
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        [values, _] = pc.list_flatten(lists).flatten()
        found = pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(lengths == 0))
        return found.cast(self.aggregate.result)


class Listed(GroupAccumulator):
    """All values that are not null, in order."""

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self.stored = [self.field("values", pa.list_(inputs[0]))]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        numbers, values = new.groups, columns.plain(new.columns[0])
        if values.null_count:
            mask = values.is_valid()
            numbers, values = numbers[np.asarray(mask)], values.filter(mask)
        if len(old.groups):
            lists = old.columns[0]
            parents = pc.list_parent_indices(lists).to_numpy()
            numbers = np.concatenate([old.groups[parents], numbers])
            values = pa.concat_arrays([pc.list_flatten(lists), values])
        order = np.argsort(numbers, kind="stable")
        return [self._lists(groups, numbers[order], values.take(arrow_from_numpy(pa.int64(), order)))]

    def _lists(self, groups: int, numbers: AnyArray, values: pa.Array) -> pa.Array:
        """Lists of values that are sorted by group."""
        offsets = np.zeros(groups + 1, dtype=np.int32)
        np.cumsum(np.bincount(numbers, minlength=groups), out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=self.stored[0].type)

    def result(self, stored: list[pa.Array]) -> pa.Array:
        return self._filled(stored[0]).cast(self.aggregate.result)

    @staticmethod
    def _filled(lists: pa.Array) -> pa.Array:
        """With empty lists for nulls."""
        if not lists.null_count:
            return lists
        return pc.if_else(lists.is_valid(), lists, pa.scalar([], lists.type))


def _codes(values: pa.Array) -> AnyArray:
    """A number for each value, the same for equal ones."""
    if pa.types.is_nested(values.type):
        return ranks(values)
    codes: AnyArray = values.dictionary_encode().indices.to_numpy()
    return codes


class Distinct(Listed):
    """The distinct values, or their number."""

    def _lists(self, groups: int, numbers: AnyArray, values: pa.Array) -> pa.Array:
        if len(values):
            if pa.types.is_floating(values.type):
                values = pc.add(values, pa.scalar(0.0, values.type))  # -0.0 and 0.0 are one value
            codes = _codes(values)
            pairs = numbers.astype(np.int64) * (int(codes.max()) + 1) + codes
            kept = np.sort(np.unique(pairs, return_index=True)[1])
            numbers, values = numbers[kept], values.take(pa.array(kept))
        return super()._lists(groups, numbers, values)

    def result(self, stored: list[pa.Array]) -> pa.Array:
        if self.aggregate.function == "CountDistinct":
            return pc.fill_null(pc.list_value_length(stored[0]), 0).cast(pa.int64())
        return super().result(stored)


class OfDistinct(Distinct):
    """An aggregate over the distinct values: ``inner`` gets them when the result is computed."""

    def __init__(self, inner: GroupAccumulator) -> None:
        super().__init__(inner.aggregate, inner.inputs)
        self._inner = inner

    def result(self, stored: list[pa.Array]) -> pa.Array:
        lists = self._filled(stored[0])
        parents = pc.list_parent_indices(lists).to_numpy().astype(np.uint32)
        nothing = Rows(np.empty(0, dtype=np.uint32), [pa.nulls(0, field.type) for field in self._inner.stored])
        values = Rows(read_only(parents), [pc.list_flatten(lists)])
        return self._inner.result(self._inner.combined(len(lists), nothing, values))


class Concatenated(Listed):
    """Texts or binaries one after the other, with a separator between them; null without any."""

    def result(self, stored: list[pa.Array]) -> pa.Array:
        lists = self._filled(stored[0])
        settings = self.aggregate.settings
        if order := settings.get("order"):
            lists = _sorted_within(lists, [_in_order(pc.list_flatten(lists), order)])
        if orders := settings.get("orders"):
            [values, *by] = pc.list_flatten(lists).flatten()
            ordered = [_in_order(each, *how) for each, how in zip(by, orders, strict=True)]
            lists = _sorted_within(lists, ordered, values)
        separator, kind = settings["separator"], lists.type.value_type
        texts = lists.cast(pa.list_(pa.string())) if pa.types.is_string(kind) else lists
        glue = pa.scalar(separator if pa.types.is_string(kind) else bytes.fromhex(separator), kind)
        whole = pc.binary_join(texts, glue)
        return pc.if_else(pc.equal(pc.list_value_length(lists), 0), None, whole).cast(self.aggregate.result)


def _in_order(values: pa.Array, direction: str, nulls: str = "") -> AnyArray:
    """Numbers that ascend in the order of Spark's ``SORT BY``. Nulls are least, unless ``nulls`` says otherwise."""
    order = ranks(values) + 1
    missing = np.asarray(values.is_null())
    order[missing] = 0
    if direction == "descending":
        order = -order
    if nulls:
        order[missing] = len(values) + 1 if nulls == "nullslast" else -len(values) - 1
    return order


def _sorted_within(lists: pa.Array, orders: list[AnyArray], values: pa.Array | None = None) -> pa.Array:
    """Lists whose elements, or these ``values`` beside them, are sorted by the first order, then by the next ones."""
    values = pc.list_flatten(lists) if values is None else values
    rows = np.lexsort((*reversed(orders), pc.list_parent_indices(lists).to_numpy()))
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values.take(pa.array(rows)))


class Percentiles(Listed):
    """Exact percentiles of numbers: one, or an array of several. They lie between values, or are one of these.

    With the setting ``weighted``, values are structs of a number and how often it counts.
    """

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        if self.aggregate.settings.get("weighted"):
            least = pc.min(columns.plain(new.columns[0]).flatten()[1]).as_py()
            if least is not None and least < 0:
                raise AggregateFailedError(f"aggregate {self.aggregate.name!r}: frequency {least} is negative")
        return super().combined(groups, old, new)

    def result(self, stored: list[pa.Array]) -> pa.Array:
        settings = self.aggregate.settings
        wanted = settings.get("percentages", 0.5)
        shares = wanted if isinstance(wanted, list) else [wanted]
        lists = self._filled(stored[0])
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
        parents = np.repeat(np.arange(len(lengths)), lengths)
        flat = pc.list_flatten(lists)
        counts: AnyArray | None = None
        if settings.get("weighted"):
            [flat, frequencies] = flat.flatten()
            counts = frequencies.cast(pa.int64()).to_numpy(zero_copy_only=False)
            lengths = np.zeros_like(lengths)
            np.add.at(lengths, parents, counts)
        duration = pa.types.is_duration(flat.type)
        values = (flat.cast(pa.int64()) if duration else flat).cast(pa.float64(), safe=False)
        values = values.to_numpy(zero_copy_only=False)
        order = np.lexsort((values, parents))
        starts = np.cumsum(lengths) - lengths
        if settings.get("descending"):
            order = order[np.repeat(2 * starts + lengths - 1, lengths) - np.arange(len(values))]
        values, ends = values[order], None if counts is None else np.cumsum(counts[order])
        exists = (lengths > 0).astype(np.uint8)
        of_share = self._chosen if self.aggregate.function == "PercentileDisc" else self._interpolated
        results = [of_share(values, ends, starts, lengths, float(share)) for share in shares]
        if duration:
            results = [each.astype(np.int64) for each in results]
        if not isinstance(wanted, list):
            return array_of(self.aggregate.result, results[0], exists)
        offsets = pa.array(np.arange(len(lengths) + 1, dtype=np.int32) * len(shares))
        flat = array_of(self.aggregate.result.value_type, np.stack(results, axis=1).reshape(-1))
        arrays = pa.ListArray.from_arrays(offsets, flat)
        return pc.if_else(pa.array(exists.astype(bool)), arrays, pa.scalar(None, arrays.type)).cast(
            self.aggregate.result
        )

    @staticmethod
    def _interpolated(
        values: AnyArray, ends: AnyArray | None, starts: AnyArray, lengths: AnyArray, share: float
    ) -> AnyArray:
        """Interpolates as Spark does: between the two nearest values, weighted by their distances to the position."""
        if not len(values):
            return np.zeros(len(starts))
        place = np.maximum(lengths - 1, 0) * share
        lower, higher = np.floor(place), np.ceil(place)
        low = _at(values, ends, starts + lower.astype(np.int64))
        high = _at(values, ends, starts + higher.astype(np.int64))
        between = (higher - place) * low + (place - lower) * high
        result: AnyArray = np.where((lower == higher) | (low == high), low, between)
        return result

    @staticmethod
    def _chosen(values: AnyArray, ends: AnyArray | None, starts: AnyArray, lengths: AnyArray, share: float) -> AnyArray:
        """The first value whose place among all values is at least their number times the share, rounded up."""
        if not len(values):
            return np.zeros(len(starts))
        places = starts + np.maximum(np.ceil(lengths * share).astype(np.int64), 1) - 1
        return _at(values, ends, places)


def _at(values: AnyArray, ends: AnyArray | None, places: AnyArray) -> AnyArray:
    """The values at places; ``ends`` are the places behind each value, if values count more than once."""
    rows = places if ends is None else np.searchsorted(ends, places, side="right")
    result: AnyArray = values[np.minimum(rows, len(values) - 1)]
    return result


class Ranked(Listed):
    """Spark's ``percentile_approx``: the values at one rank, or at several.

    Spark keeps a sample. It holds all values as long as these are not more than ``accuracy``, and then its result is
    this one. The sample of more values depends on their order; here the result is then exact.
    """

    def result(self, stored: list[pa.Array]) -> pa.Array:
        settings = self.aggregate.settings
        wanted, error = settings["percentages"], 1.0 / settings["accuracy"]
        shares = wanted if isinstance(wanted, list) else [wanted]
        lists = self._filled(stored[0])
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
        values = pc.list_flatten(lists)
        parents = np.repeat(np.arange(len(lengths)), lengths)
        values = values.take(arrow_from_numpy(pa.int64(), np.lexsort((_as_double(values, ordered=True), parents))))
        starts = np.cumsum(lengths) - lengths
        none = pa.array(lengths == 0)
        results = []
        for share in shares:
            ranks = np.ceil(share * lengths).astype(np.int64)
            if share <= error or share >= 1 - error:
                ranks = np.ones_like(lengths) if share <= error else lengths
            places = starts + np.clip(ranks, 1, np.maximum(lengths, 1)) - 1
            results.append(self._rounded(values.take(pc.if_else(none, None, pa.array(places)))))
        if not isinstance(wanted, list):
            return results[0]
        order = np.arange(len(shares) * len(lengths)).reshape(len(shares), len(lengths)).T.reshape(-1)
        flat = pa.concat_arrays(results).take(pa.array(order))
        offsets = pa.array(np.arange(len(lengths) + 1, dtype=np.int32) * len(shares))
        arrays = pa.ListArray.from_arrays(offsets, flat)
        return pc.if_else(none, pa.scalar(None, arrays.type), arrays).cast(self.aggregate.result)

    @staticmethod
    def _rounded(picked: pa.Array) -> pa.Array:
        """The values as Spark keeps them in its sample: as doubles, which have not all integers of 64 bits."""
        if not any(test(picked.type) for test in (pa.types.is_int64, pa.types.is_timestamp, pa.types.is_duration)):
            return picked
        doubles = _as_double(pc.fill_null(picked.cast(pa.int64()), 0), ordered=False)
        over = doubles >= 2.0**63
        whole = np.where(over, np.iinfo(np.int64).max, np.where(over, 0.0, doubles).astype(np.int64))
        return pa.array(whole, mask=picked.is_null().to_numpy(zero_copy_only=False)).cast(picked.type)


def _as_double(values: pa.Array, *, ordered: bool) -> AnyArray:
    """Values that are not null as doubles; ``ordered``: as integers in Java's order of doubles, NaN last."""
    kind = values.type
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_date(kind):
        values = values.cast(pa.int32())
    doubles: AnyArray = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if not ordered:
        return doubles
    bits = np.where(np.isnan(doubles), np.nan, doubles).view(np.int64)
    result: AnyArray = bits ^ ((bits >> 63) & np.iinfo(np.int64).max)
    return result


class MostFrequent(Listed):
    """The most frequent value; of equally frequent values the least, the greatest, or the one that arrived first."""

    def result(self, stored: list[pa.Array]) -> pa.Array:
        lists = self._filled(stored[0])
        bounds = np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy(zero_copy_only=False))])
        values = pc.list_flatten(lists)
        if not len(values):
            return pa.nulls(len(lists), self.aggregate.result)
        least = self.aggregate.settings.get("least")
        codes = _codes(values)
        places = np.zeros(len(values), dtype=np.int64) if least is None else ranks(values).astype(np.int64)
        picked = np.full(len(lists), -1, dtype=np.int64)
        for row, (start, end) in enumerate(pairwise(bounds.astype(np.int64).tolist())):
            if start < end:
                own = codes[start:end]
                counts = np.bincount(own)[own]
                tied = start + np.flatnonzero(counts == counts.max())
                picked[row] = tied[np.argmax(places[tied]) if least is False else np.argmin(places[tied])]
        return taken([values], picked)


_JAVA_BITS = (1 << 48) - 1
_BIN = pa.struct([("x", pa.float64()), ("y", pa.float64())])


class Histogram(GroupAccumulator):
    """Bins with the mean and the number of the values in them (Ben-Haim and Tom-Tov, JMLR 2010), as Spark makes them.

    The two bins that are closest become one. Among equally close pairs a random one does, by Java's generator, whose
    state is kept: the result is Spark's for rows that come in one micro-batch.
    """

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        super().__init__(aggregate, inputs)
        self._most = int(aggregate.settings["bins"])
        self.stored = [self.field("bins", pa.list_(_BIN)), self.field("random", pa.int64())]

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        known: list[list[list[float]]] = [[] for _ in range(groups)]
        states = [31183 ^ 0x5DEECE66D] * groups
        if len(old.groups):
            stored = (each.to_pylist() for each in old.columns)
            for number, bins, state in zip(old.groups.tolist(), *stored, strict=True):
                if bins is not None:
                    merged = [*known[number], *([each["x"], each["y"]] for each in bins)]
                    known[number] = sorted(merged, key=lambda each: each[0])
                    states[number] = self._trim(known[number], state)
        values = columns.plain(new.columns[0]).cast(pa.float64()).to_pylist()
        for number, value in zip(new.groups.tolist(), values, strict=True):
            if value is not None:
                bins = known[number]
                at = bisect_left(bins, value, key=lambda each: each[0])
                if at < len(bins) and bins[at][0] == value:
                    bins[at][1] += 1
                else:
                    bins.insert(at, [value, 1.0])
                    states[number] = self._trim(bins, states[number])
        rows = [[{"x": x, "y": y} for x, y in bins] or None for bins in known]
        return [pa.array(rows, self.stored[0].type), pa.array(states, pa.int64())]

    def _trim(self, bins: list[list[float]], state: int) -> int:
        """Merges the closest bins, in place, until there are few enough. Returns the generator's next state."""
        while len(bins) > self._most:
            least, place, count = bins[1][0] - bins[0][0], 0, 1
            for at in range(1, len(bins) - 1):
                gap = bins[at + 1][0] - bins[at][0]
                if gap < least:
                    least, place, count = gap, at, 1
                elif gap == least:
                    count += 1
                    state, number = _java_double(state)
                    place = at if number <= 1.0 / count else place
            (x, y), (later, more) = bins[place], bins.pop(place + 1)
            # In the order of Spark's operations, because the last bit of a mean depends on it.
            bins[place] = [x * (y / (y + more)) + later / (y + more) * more, y + more]
        return state

    def result(self, stored: list[pa.Array]) -> pa.Array:
        lists = stored[0]
        kind = self.aggregate.result
        means, counts = pc.list_flatten(lists).flatten()
        given = kind.value_type.field(0).type
        means = (pc.trunc(means) if pa.types.is_integer(given) else means).cast(given, safe=False)
        bins = pa.StructArray.from_arrays([means, counts], fields=list(kind.value_type))
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), bins, kind, mask=lists.is_null())


def _java_double(state: int) -> tuple[int, float]:
    """The next state of Java's generator of random numbers, and a number from 0 to 1."""
    high = (state * 0x5DEECE66D + 0xB) & _JAVA_BITS
    low = (high * 0x5DEECE66D + 0xB) & _JAVA_BITS
    return low, (((high >> 22) << 27) + (low >> 21)) * 2.0**-53
