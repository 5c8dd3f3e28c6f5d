"""Structs, arrays and maps: making them, taking elements, and functions over their elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.evaluation import (
    Evaluator,
    Frame,
    Value,
    broadcast,
    by_row,
    compile_expression,
    function,
    strict,
    struct_child,
)
from ckpt_runtime.expressions.functions.mathematics import generator_of
from ckpt_runtime.expressions.functions.predicates import sort_key
from ckpt_runtime.expressions.nodes import Call, Lambda
from ckpt_runtime.expressions.rows import as_list, per_row, with_elements, with_entries
from ckpt_runtime.expressions.types import EvaluationError, arrow_type


@function("CreateNamedStruct")
def _struct(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """Arguments: name, value, name, value, …; the names are constants."""
    kind = arrow_type(call.type)
    values = arguments[1::2]

    def run(frame: Frame) -> Value:
        children = [
            broadcast(value(frame), frame.length).cast(field.type) for value, field in zip(values, kind, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind))

    return run


@strict("GetStructField")
def _field(call: Call) -> Callable[..., Value]:
    position = int(call.settings["ordinal"])

    def run(value: Value) -> Value:
        if isinstance(value, pa.Scalar):
            return pc.struct_field(value, [position])
        return struct_child(value, position)

    return run


@strict("GetArrayStructFields")
def _fields(call: Call) -> Callable[..., Value]:
    """A field of the structs in an array, which is null where the struct is."""
    position, kind = int(call.settings["ordinal"]), arrow_type(call.type)

    def run(value: Value) -> Value:
        array = broadcast(value, 1) if isinstance(value, pa.Scalar) else value
        found = with_elements(array, struct_child(array.flatten(), position), kind)
        return found[0] if isinstance(value, pa.Scalar) else found

    return run


@function("CreateArray")
def _array(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    kind = arrow_type(call.type)
    width = len(arguments)

    def run(frame: Frame) -> Value:
        length = frame.length
        if width == 0:
            return pa.array([[]] * length, kind)
        columns = [broadcast(argument(frame), length).cast(kind.value_type) for argument in arguments]
        # Row by row: the k-th element of row i is at position k * length + i of the concatenated columns.
        order = pa.array([k * length + i for i in range(length) for k in range(width)], pa.int64())
        values = pa.concat_arrays(columns).take(order)
        offsets = pa.array(range(0, (length + 1) * width, width), pa.int32())
        return pa.ListArray.from_arrays(offsets, values).cast(kind)

    return run


def checked_map(entries: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns the entries of a new map. Raises EvaluationError for a null key or a repeated one."""
    seen = set()
    for key, _ in entries:
        if key is None:
            raise EvaluationError("NULL_MAP_KEY", "a key of a map is null")
        marker = sort_key(key)
        if marker in seen:
            raise EvaluationError("DUPLICATED_MAP_KEY", f"the map contains the key {key!r} twice")
        seen.add(marker)
    return list(entries)


by_row("CreateMap", nulls=True)(lambda *row: checked_map(list(zip(row[0::2], row[1::2], strict=True))))
by_row("MapConcat")(lambda *maps: _map_of_entries([entry for map_ in maps for entry in map_]))


def _map_of_entries(entries: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns a new map. As in Spark, a key of negative zero becomes positive if the entries come one by one."""
    return checked_map([(abs(key) if isinstance(key, float) and key == 0 else key, item) for key, item in entries])


@by_row("MapFromArrays")
def _map_from_arrays(keys: list[Any], values: list[Any]) -> list[tuple[Any, Any]]:
    if len(keys) != len(values):
        raise EvaluationError("_LEGACY_ERROR_TEMP_2128", "the arrays of keys and values have different lengths")
    return checked_map(list(zip(keys, values, strict=True)))


@by_row("MapFromEntries")
def _map_from_entries(entries: list[dict[str, Any] | None]) -> list[tuple[Any, Any]] | None:
    if None in entries:
        return None
    return _map_of_entries([tuple(entry.values()) for entry in entries if entry is not None])


by_row("MapContainsKey")(lambda map_, key: any(sort_key(k) == sort_key(key) for k, _ in map_))
by_row("MapKeys")(lambda map_: [key for key, _ in map_])
by_row("MapValues")(lambda map_: [value for _, value in map_])


@strict("MapEntries")
def _map_entries(call: Call) -> Callable[..., Value]:
    result = arrow_type(call.type)
    names = [field.name for field in result.value_type]
    return per_row(lambda map_: [dict(zip(names, entry, strict=True)) for entry in map_], result)


@strict("Size", "ArraySize")
def _size(call: Call) -> Callable[..., Value]:
    count = per_row(len, pa.int32())
    if call.settings.get("legacySizeOfNull"):
        return lambda value: pc.fill_null(count(value), pa.scalar(-1, pa.int32()))
    return count


@strict("GetArrayItem", "Get", "ElementAt", "TryElementAt", "GetMapValue")
def _element(call: Call) -> Callable[..., Value]:
    collection = call.arguments[0].type
    result = arrow_type(call.type)
    is_map = isinstance(collection, dict) and collection["type"] == "map"
    fails = call.mode == "ansi" and call.function in ("GetArrayItem", "ElementAt")
    from_one = call.function in ("ElementAt", "TryElementAt")

    def of_map(entries: list[tuple[Any, Any]], key: Any) -> Any:
        wanted = sort_key(key)
        return next((value for k, value in entries if sort_key(k) == wanted), None)

    def of_array(elements: list[Any], index: int) -> Any:
        if from_one and index == 0:
            raise EvaluationError("INVALID_INDEX_OF_ZERO", "the index 0 is invalid; the first element has index 1")
        at = (index - 1 if index > 0 else len(elements) + index) if from_one else index
        if 0 <= at < len(elements):
            return elements[at]
        if fails:
            raise EvaluationError(
                "INVALID_ARRAY_INDEX_IN_ELEMENT_AT" if from_one else "INVALID_ARRAY_INDEX",
                f"the index {index} is outside of an array of {len(elements)} elements",
            )
        return None

    return per_row(of_map if is_map else of_array, result)


def _same(left: Any, right: Any) -> bool:
    return bool(sort_key(left) == sort_key(right))


@by_row("ArrayContains")
def _contains(elements: list[Any], wanted: Any) -> bool | None:
    if any(element is not None and _same(element, wanted) for element in elements):
        return True
    return None if None in elements else False


@by_row("ArrayPosition")
def _position(elements: list[Any], wanted: Any) -> int:
    return next((at for at, element in enumerate(elements, 1) if element is not None and _same(element, wanted)), 0)


def _distinct(elements: Sequence[Any]) -> list[Any]:
    seen: set[Any] = set()
    return [x for x in elements if (key := sort_key(x)) not in seen and not seen.add(key)]  # type: ignore[func-returns-value]


def _keys(elements: Sequence[Any]) -> set[Any]:
    return {sort_key(element) for element in elements}


@by_row("ArraysOverlap")
def _overlap(left: list[Any], right: list[Any]) -> bool | None:
    if (_keys(left) & _keys(right)) - {(0,)}:
        return True
    return None if left and right and (None in left or None in right) else False


@by_row("Slice")
def _slice(elements: list[Any], start: int, length: int) -> list[Any]:
    if start == 0:
        raise EvaluationError("INVALID_PARAMETER_VALUE.START", "slice starts at 1, or at -1 from the end")
    if length < 0:
        raise EvaluationError("INVALID_PARAMETER_VALUE.LENGTH", "the length of a slice is not negative")
    at = start - 1 if start > 0 else len(elements) + start
    return elements[at : at + length] if at >= 0 else []


@by_row("ArrayInsert", nulls=True)
def _insert(elements: list[Any] | None, position: int | None, item: Any) -> list[Any] | None:
    if elements is None or position is None:
        return None
    if position == 0:
        raise EvaluationError("INVALID_INDEX_OF_ZERO", "the index 0 is invalid; the first element has index 1")
    size = len(elements)
    if position > 0:
        padded = elements + [None] * max(0, position - 1 - size)
        return [*padded[: position - 1], item, *padded[position - 1 :]]
    at = size + position + 1
    if at < 0:
        return [item, *[None] * -at, *elements]
    return [*elements[:at], item, *elements[at:]]


by_row("ArrayDistinct")(_distinct)
by_row("ArrayUnion")(lambda a, b: _distinct([*a, *b]))
by_row("ArrayIntersect")(lambda a, b: [x for x in _distinct(a) if sort_key(x) in _keys(b)])
by_row("ArrayExcept")(lambda a, b: [x for x in _distinct(a) if sort_key(x) not in _keys(b)])
by_row("ArrayRemove")(lambda a, wanted: [x for x in a if x is None or not _same(x, wanted)])
by_row("ArrayCompact")(lambda a: [x for x in a if x is not None])
by_row("ArrayMax")(lambda a: max((x for x in a if x is not None), key=sort_key, default=None))
by_row("ArrayMin")(lambda a: min((x for x in a if x is not None), key=sort_key, default=None))
by_row("Flatten")(lambda arrays: None if None in arrays else [element for array in arrays for element in array])
by_row("SortArray")(lambda elements, ascending: sorted(elements, key=sort_key, reverse=not ascending))
by_row("Reverse")(lambda value: value[::-1])
by_row("ArrayAppend", nulls=True)(lambda a, x: None if a is None else [*a, x])
by_row("ArrayPrepend", nulls=True)(lambda a, x: None if a is None else [x, *a])
by_row("ArrayRepeat", nulls=True)(lambda x, n: None if n is None else [x] * max(0, n))


@by_row("ArrayJoin")
def _array_join(elements: list[str | None], separator: str, missing: str | None = None) -> str:
    texts = (missing if element is None else element for element in elements)
    return separator.join(text for text in texts if text is not None)


@strict("ArraysZip")
def _zip(call: Call) -> Callable[..., Value]:
    result = arrow_type(call.type)
    names = [field.name for field in result.value_type]

    def run(*arrays: list[Any]) -> list[dict[str, Any]]:
        length = max(map(len, arrays), default=0)
        return [
            {name: array[at] if at < len(array) else None for name, array in zip(names, arrays, strict=True)}
            for at in range(length)
        ]

    return per_row(run, result)


def _compiled(call: Call, position: int) -> tuple[Lambda, Evaluator]:
    body = call.arguments[position]
    assert isinstance(body, Lambda)
    return body, compile_expression(body.body)


def _elements(value: Value, frame: Frame) -> tuple[pa.Array, pa.Array, Frame]:
    """Returns an array column, the row of each of its elements, and the frame that has a row for each element."""
    array = as_list(broadcast(value, frame.length))
    rows = pc.list_parent_indices(array)
    columns = [column.take(rows) for column in frame.columns]
    variables = {id_: held if isinstance(held, pa.Scalar) else held.take(rows) for id_, held in frame.variables.items()}
    return array, rows, Frame(columns, len(rows), variables, frame.moment, frame.random_bytes)


@function("ArrayTransform", "ArrayFilter", "ArrayExists", "ArrayForAll")
def _over_elements(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    body, evaluator = _compiled(call, 1)
    kind = arrow_type(call.type)
    three_valued = bool(call.settings.get("followThreeValuedLogic", True))

    def run(frame: Frame) -> Value:
        array, _, inner = _elements(arguments[0](frame), frame)
        flat = array.flatten()
        values: dict[int, Value] = {body.parameters[0].id: flat}
        if len(body.parameters) > 1:
            lengths = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
            values[body.parameters[1].id] = pa.array([at for length in lengths for at in range(length)], pa.int32())
        results = broadcast(evaluator(inner.with_variables(values)), inner.length)
        if call.function == "ArrayTransform":
            return with_elements(array, results, kind)
        lists = with_elements(array, results, pa.list_(pa.bool_())).to_pylist()
        if call.function == "ArrayFilter":
            kept = [
                None if flags is None else [x for x, flag in zip(row, flags, strict=True) if flag]
                for row, flags in zip(array.to_pylist(), lists, strict=True)
            ]
            return pa.array(kept, kind)
        exists = call.function == "ArrayExists"
        decided = [None if flags is None else _decided(flags, decisive=exists) for flags in lists]
        if exists and not three_valued:
            decided = [None if flags is None else bool(known) for flags, known in zip(lists, decided, strict=True)]
        return pa.array(decided, pa.bool_())

    return run


def _decided(flags: list[bool | None], *, decisive: bool) -> bool | None:
    """Returns ``decisive`` if a flag is, null if one is null, and the opposite otherwise."""
    if decisive in flags:
        return decisive
    return None if None in flags else not decisive


@function("ArrayAggregate")
def _aggregate(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """Folds the arrays of all rows at once: the k-th step takes the k-th element of each array that has one."""
    merge, merge_step = _compiled(call, 2)
    finish, finish_step = _compiled(call, 3)
    result = arrow_type(call.type)
    held = arrow_type(merge.body.type)

    def run(frame: Frame) -> Value:
        lists = broadcast(arguments[0](frame), frame.length)
        state = broadcast(arguments[1](frame), frame.length).cast(held)
        rows = lists.to_pylist()
        for step in range(max((len(row) for row in rows if row is not None), default=0)):
            active = pa.array([row is not None and step < len(row) for row in rows])
            element = pa.array(
                [row[step] for row in rows if row is not None and step < len(row)], lists.type.value_type
            )
            part = frame.part(active)
            values = {merge.parameters[0].id: state.filter(active), merge.parameters[1].id: element}
            merged = broadcast(merge_step(part.with_variables(values)), part.length).cast(held)
            state = pc.replace_with_mask(state, active, merged)
        done = broadcast(finish_step(frame.with_variables({finish.parameters[0].id: state})), frame.length)
        return pc.if_else(lists.is_valid(), done.cast(result), pa.scalar(None, result))

    return run


@function("TransformKeys", "TransformValues", "MapFilter")
def _over_entries(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    body, evaluator = _compiled(call, 1)
    kind = arrow_type(call.type)

    def run(frame: Frame) -> Value:
        array, _, inner = _elements(arguments[0](frame), frame)
        flat = array.flatten()
        values = {body.parameters[0].id: flat.field(0), body.parameters[1].id: flat.field(1)}
        results = broadcast(evaluator(inner.with_variables(values)), inner.length)
        entries = with_elements(array, results, pa.list_(results.type)).to_pylist()
        rows: list[list[tuple[Any, Any]] | None] = []
        for row, made in zip(array.to_pylist(), entries, strict=True):
            if row is None:
                rows.append(None)
                continue
            pairs = [(entry["key"], entry["value"], new) for entry, new in zip(row, made, strict=True)]
            if call.function == "TransformKeys":
                rows.append(checked_map([(new, value) for _, value, new in pairs]))
            elif call.function == "TransformValues":
                rows.append([(key, new) for key, _, new in pairs])
            else:
                rows.append([(key, value) for key, value, keep in pairs if keep])
        return pa.array(rows, kind)

    return run


@function("ZipWith")
def _zip_with(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    body, evaluator = _compiled(call, 2)
    kind = arrow_type(call.type)

    def run(frame: Frame) -> Value:
        left, right = (broadcast(argument(frame), frame.length) for argument in arguments)
        pairs: list[list[tuple[Any, Any]] | None] = []
        for a, b in zip(left.to_pylist(), right.to_pylist(), strict=True):
            if a is None or b is None:
                pairs.append(None)
                continue
            size = max(len(a), len(b))
            pairs.append([*zip(a + [None] * (size - len(a)), b + [None] * (size - len(b)), strict=True)])
        entry = pa.struct([("key", left.type.value_type), ("value", right.type.value_type)])
        rows = [None if row is None else [{"key": a, "value": b} for a, b in row] for row in pairs]
        array, _, inner = _elements(pa.array(rows, pa.list_(entry)), frame)
        flat = array.flatten()
        values = {body.parameters[0].id: flat.field(0), body.parameters[1].id: flat.field(1)}
        return with_elements(array, broadcast(evaluator(inner.with_variables(values)), inner.length), kind)

    return run


@function("ArraySort")
def _array_sort(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """Sorts by a comparison that is evaluated for all pairs of the elements of each array at once."""
    body, evaluator = _compiled(call, 1)
    kind = arrow_type(call.type)

    def run(frame: Frame) -> Value:
        array, rows, _ = _elements(arguments[0](frame), frame)
        flat = array.flatten()
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
        pairs: list[tuple[int, int]] = []
        start = 0
        for length in lengths:
            pairs += [(start + a, start + b) for a in range(length) for b in range(length) if a != b]
            start += length
        left = pa.array([a for a, _ in pairs], pa.int64())
        right = pa.array([b for _, b in pairs], pa.int64())
        of_row = rows.take(left)
        variables = {id_: v if isinstance(v, pa.Scalar) else v.take(of_row) for id_, v in frame.variables.items()}
        columns = [column.take(of_row) for column in frame.columns]
        inner = Frame(columns, len(pairs), variables, frame.moment, frame.random_bytes)
        values = {body.parameters[0].id: flat.take(left), body.parameters[1].id: flat.take(right)}
        orders = broadcast(evaluator(inner.with_variables(values)), len(pairs)).to_pylist()
        if None in orders:
            raise EvaluationError("COMPARATOR_RETURNS_NULL", "the comparison of array_sort gives null for two elements")
        known: dict[tuple[int, int], int] = dict(zip(pairs, orders, strict=True))

        def compare(first: int, second: int) -> int:
            return known[first, second] if first != second else 0

        by_comparison = functools.cmp_to_key(compare)
        positions: list[int] = []
        start = 0
        for length in lengths:
            positions += sorted(range(start, start + length), key=by_comparison)
            start += length
        return with_elements(array, flat.take(pa.array(positions, pa.int64())), kind)

    return run


@function("MapZipWith")
def _map_zip_with(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """The keys of the first map, then those of the second one that the first lacks, with the values of both."""
    body, evaluator = _compiled(call, 2)
    kind = arrow_type(call.type)

    def run(frame: Frame) -> Value:
        left, right = (broadcast(argument(frame), frame.length) for argument in arguments)
        merged: list[list[dict[str, Any]] | None] = []
        for a, b in zip(left.to_pylist(), right.to_pylist(), strict=True):
            if a is None or b is None:
                merged.append(None)
                continue
            entries: dict[Any, dict[str, Any]] = {}
            for name, map_ in (("left", a), ("right", b)):
                for key, value in map_:
                    entry = entries.setdefault(sort_key(key), {"key": key, "left": None, "right": None})
                    entry[name] = value
            merged.append(list(entries.values()))
        entry_type = pa.struct(
            [("key", left.type.key_type), ("left", left.type.item_type), ("right", right.type.item_type)]
        )
        array, _, inner = _elements(pa.array(merged, pa.list_(entry_type)), frame)
        flat = array.flatten()
        values = {parameter.id: flat.field(at) for at, parameter in enumerate(body.parameters)}
        results = broadcast(evaluator(inner.with_variables(values)), inner.length)
        return with_entries(array, flat.field(0), results, kind)

    return run


@function("Shuffle")
def _shuffle(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """The elements of each array in a random order."""
    [array] = arguments

    def run(frame: Frame) -> Value:
        lists = broadcast(array(frame), frame.length)
        parents = pc.list_parent_indices(lists).to_numpy()
        order = np.lexsort((generator_of(frame).random(len(parents)), parents))
        return with_elements(lists, pc.list_flatten(lists).take(pa.array(order)), arrow_type(call.type))

    return run
