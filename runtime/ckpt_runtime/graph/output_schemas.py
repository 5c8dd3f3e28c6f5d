"""Output schemas of the built-in operators, derived from their input schemas before anything runs.

The plan is checked against these schemas, and the operators guarantee them. Raises :class:`SchemaDerivationError`
naming the column, its type and the allowed types.
"""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.graph.specs import Aggregate, AggregateSpec, JoinSide, JoinSpec

AGGREGATE_FUNCTIONS = ("count", "sum", "min", "max", "avg")
JOIN_TYPES = ("inner", "left_outer", "right_outer", "full_outer", "left_semi")
_MOST = 1 << 62
_UNITS_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}


class SchemaDerivationError(ValueError):
    """An operator's spec does not fit the schema of its input."""


def aggregate_output_schema(input_schema: pa.Schema, spec: AggregateSpec) -> pa.Schema:
    """The key columns, then one column per aggregate."""
    if not spec.keys:
        raise SchemaDerivationError("an aggregation needs at least one key column")
    if not spec.aggregates:
        raise SchemaDerivationError("an aggregation needs at least one aggregate")
    fields = [_field(input_schema, key, "key") for key in spec.keys]
    for aggregate in spec.aggregates:
        _check_storable(aggregate, spec)
        nullable = aggregate.function != "count"
        fields.append(pa.field(aggregate.alias, aggregate_type(input_schema, aggregate), nullable=nullable))
    _check_unique([field.name for field in fields], "aggregation")
    return pa.schema(fields)


def _check_storable(aggregate: Aggregate, spec: AggregateSpec) -> None:
    """Checks names for state, which recognizes key columns by name prefix and keeps an average in two columns."""
    if aggregate.alias.startswith("key."):
        raise SchemaDerivationError(
            f"aggregate {aggregate.alias!r}: names that begin with 'key.' are reserved for keys in state; use another "
            "alias"
        )
    averages = (other.alias for other in spec.aggregates if other.function == "avg")
    parts = {f"{name}#{part}" for name in averages for part in ("sum", "count")}
    if aggregate.alias in parts:
        raise SchemaDerivationError(
            f"aggregate {aggregate.alias!r}: state uses this name for a part of an average; use another alias"
        )


def aggregate_type(input_schema: pa.Schema, aggregate: Aggregate) -> pa.DataType:
    """The type of one aggregate's result."""
    function = aggregate.function
    if function not in AGGREGATE_FUNCTIONS:
        raise SchemaDerivationError(
            f"aggregate {aggregate.alias!r}: function {function!r} is unknown, allowed are {list(AGGREGATE_FUNCTIONS)}"
        )
    if aggregate.column is None:
        if function != "count":
            raise SchemaDerivationError(f"aggregate {aggregate.alias!r}: {function} needs a column, only count takes *")
        return pa.int64()
    kind = _value_type(_field(input_schema, aggregate.column, "aggregated").type)
    if function == "count":
        return pa.int64()
    if function in ("min", "max"):
        if not _is_ordered(kind):
            raise _unsupported(
                aggregate, kind, "numbers except decimals, booleans, dates, times, timestamps and strings"
            )
        return kind
    if function == "avg":
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise _unsupported(aggregate, kind, "integers and floats")
        return pa.float64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if not pa.types.is_integer(kind) or pa.types.is_uint64(kind):
        raise _unsupported(aggregate, kind, "integers that fit int64, and floats; cast the column first")
    return pa.int64()


def join_output_schema(spec: JoinSpec) -> pa.Schema:
    """The shared keys, the left side's other columns and, except for a semi join, the right side's other columns.

    A side that may be missing has nullable columns.
    """
    if spec.how not in JOIN_TYPES:
        raise SchemaDerivationError(f"join type {spec.how!r} is unknown, allowed are {list(JOIN_TYPES)}")
    _check_join_keys(spec)
    _check_join_times(spec)
    shared = shared_join_keys(spec)
    key_side = spec.right if spec.how == "right_outer" else spec.left
    fields = [_field(key_side.schema, key, "key") for key in shared]
    if spec.how == "full_outer":  # a key may come from the right side
        nulls = [_field(spec.right.schema, key, "key").nullable for key in shared]
        fields = [field.with_nullable(field.nullable or null) for field, null in zip(fields, nulls, strict=True)]
    sides = [(spec.left, spec.how in ("right_outer", "full_outer"))]
    if spec.how != "left_semi":
        sides.append((spec.right, spec.how in ("left_outer", "full_outer")))
    for side, nullable in sides:
        own = [field for field in side.schema if field.name not in shared]
        fields += [field.with_nullable(True) if nullable else field for field in own]
    names = [field.name for field in fields]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SchemaDerivationError(f"both sides have columns {repeated}; rename them on one side")
    return pa.schema(fields)


def shared_join_keys(spec: JoinSpec) -> list[str]:
    """Key columns that have one name on both sides: the result has them once."""
    return [left for left, right in zip(spec.left.keys, spec.right.keys, strict=True) if left == right]


def join_bounds(spec: JoinSpec) -> tuple[int, int]:
    """``within_ms`` in the unit of the event time columns: the whole units between the bounds."""
    assert spec.within_ms is not None
    assert spec.left.event_time is not None
    if spec.exact is not None:
        return spec.exact
    lower, upper = spec.within_ms
    unit = spec.left.schema.field(spec.left.event_time).type.unit
    if unit == "s":
        return -(-lower // 1000), upper // 1000
    return lower * _UNITS_PER_MS[unit], upper * _UNITS_PER_MS[unit]


def _check_join_keys(spec: JoinSpec) -> None:
    if not spec.left.keys or len(spec.left.keys) != len(spec.right.keys):
        raise SchemaDerivationError("a join needs at least one key column, and as many on the right as on the left")
    for left, right in zip(spec.left.keys, spec.right.keys, strict=True):
        left_type = _field(spec.left.schema, left, "left key").type
        right_type = _field(spec.right.schema, right, "right key").type
        if pa.types.is_nested(left_type) or pa.types.is_nested(right_type):
            raise SchemaDerivationError(f"key column {left!r} is nested and cannot be a key")
        if left_type != right_type:
            raise SchemaDerivationError(
                f"key column {left!r} is {left_type} on the left and {right!r} is {right_type} on the right; "
                "both must have the same type: cast one with .withColumn(...)"
            )
    for side in spec.sides:
        _check_unique(list(side.keys), "join")


def _check_join_times(spec: JoinSpec) -> None:
    if spec.within_ms is None:
        if spec.how != "inner":
            raise SchemaDerivationError(
                f"join type {spec.how!r} needs within=(lower, upper) and a watermark on both sides; without bounds it "
                "is never certain that no match will arrive"
            )
        return
    left, right = (_event_time_type(side, name) for side, name in zip(spec.sides, ("left", "right"), strict=True))
    if left.unit != right.unit or (left.tz is None) != (right.tz is None):
        raise SchemaDerivationError(
            f"event time column {spec.left.event_time!r} is {left} on the left and {spec.right.event_time!r} is "
            f"{right} on the right; both must have one unit, and both a time zone or neither"
        )
    lower, upper = join_bounds(spec)
    if lower > upper or max(abs(lower), abs(upper)) > _MOST:
        raise SchemaDerivationError(
            f"time bounds {spec.within_ms[0]} ms to {spec.within_ms[1]} ms cannot be represented in columns of type "
            f"{left}"
        )


def _event_time_type(side: JoinSide, name: str) -> pa.DataType:
    if side.event_time is None:
        raise SchemaDerivationError(
            f"within needs event time on both sides, but the {name} one has none; call .withWatermark(column, delay) "
            "on it (again after mapInArrow), or name its column in eventTimeColumnName of transformWithState"
        )
    kind = _field(side.schema, side.event_time, "event time").type
    if not pa.types.is_timestamp(kind):
        raise SchemaDerivationError(f"event time column {side.event_time!r} has type {kind}, allowed is timestamp")
    return kind


def _field(schema: pa.Schema, name: str, role: str) -> pa.Field:
    found = schema.get_all_field_indices(name)
    if len(found) != 1:
        problem = "is missing from" if not found else "occurs more than once in"
        given = ", ".join(f"{field.name}: {field.type}" for field in schema)
        raise SchemaDerivationError(f"{role} column {name!r} {problem} [{given}]")
    return schema.field(found[0])


def _value_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _value_type(kind.value_type)
    return kind


def _is_ordered(kind: pa.DataType) -> bool:
    of = pa.types
    tests = (of.is_integer, of.is_floating, of.is_boolean, of.is_temporal, of.is_string, of.is_large_string)
    return any(test(kind) for test in (*tests, of.is_binary, of.is_large_binary)) and not of.is_interval(kind)


def _unsupported(aggregate: Aggregate, kind: pa.DataType, allowed: str) -> SchemaDerivationError:
    return SchemaDerivationError(
        f"aggregate {aggregate.alias!r}: {aggregate.function} of column {aggregate.column!r} with type {kind} "
        f"is not supported, allowed are {allowed}"
    )


def _check_unique(names: list[str], what: str) -> None:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise SchemaDerivationError(f"{what} names columns more than once: {duplicates}")
