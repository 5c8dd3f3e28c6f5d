"""Output schemas of the built-in operators, derived from the input's: usable before anything runs.

Pure derivation: the plan is checked with it and the operators promise it. Raises :class:`SchemaDerivationError` naming
the column, its type and what is allowed.
"""

from __future__ import annotations

import pyarrow as pa
from pyarrow import acero

from ckpt_runtime.graph.specs import Aggregate, AggregateSpec, FilterSpec, ProjectSpec, WatermarkSpec

AGGREGATE_FUNCTIONS = ("count", "sum", "min", "max", "avg")


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
        nullable = aggregate.function != "count"
        fields.append(pa.field(aggregate.alias, aggregate_type(input_schema, aggregate), nullable=nullable))
    _check_unique([field.name for field in fields], "aggregation")
    return pa.schema(fields)


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
            raise _unsupported(aggregate, kind, "numbers but decimals, booleans, dates, times, timestamps and strings")
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


def project_output_schema(input_schema: pa.Schema, spec: ProjectSpec) -> pa.Schema:
    """One column per expression."""
    if not spec.columns:
        raise SchemaDerivationError("a projection needs at least one column")
    names = [name for name, _ in spec.columns]
    _check_unique(names, "projection")
    options = acero.ProjectNodeOptions([expression for _, expression in spec.columns], names)
    try:
        return _bind(input_schema, acero.Declaration("project", options))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise SchemaDerivationError(
            f"projection to {names} does not fit columns [{_text(input_schema)}]: {error}"
        ) from error


def filter_output_schema(input_schema: pa.Schema, spec: FilterSpec) -> pa.Schema:
    """The input's schema, after checking that the predicate fits it."""
    try:
        _bind(input_schema, acero.Declaration("filter", acero.FilterNodeOptions(spec.predicate)))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise SchemaDerivationError(
            f"predicate {spec.predicate} does not fit columns [{_text(input_schema)}]: {error}"
        ) from error
    return input_schema


def watermark_output_schema(input_schema: pa.Schema, spec: WatermarkSpec) -> pa.Schema:
    """The input's schema, after checking that the event time column is a timestamp."""
    kind = _field(input_schema, spec.column, "event time").type
    if not pa.types.is_timestamp(kind):
        raise SchemaDerivationError(f"event time column {spec.column!r} has type {kind}, allowed is timestamp")
    if spec.delay_ms < 0:
        raise SchemaDerivationError(f"watermark delay of column {spec.column!r} is {spec.delay_ms} ms, allowed is >= 0")
    return input_schema


def _bind(input_schema: pa.Schema, node: acero.Declaration) -> pa.Schema:
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(input_schema.empty_table()))
    return acero.Declaration.from_sequence([source, node]).to_table(use_threads=False).schema


def _field(schema: pa.Schema, name: str, role: str) -> pa.Field:
    found = schema.get_all_field_indices(name)
    if len(found) != 1:
        problem = "is missing from" if not found else "occurs more than once in"
        raise SchemaDerivationError(f"{role} column {name!r} {problem} [{_text(schema)}]")
    return schema.field(found[0])


def _value_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _value_type(kind.value_type)
    return kind


def _is_ordered(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_temporal(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ) and not pa.types.is_interval(kind)


def _unsupported(aggregate: Aggregate, kind: pa.DataType, allowed: str) -> SchemaDerivationError:
    return SchemaDerivationError(
        f"aggregate {aggregate.alias!r}: {aggregate.function} of column {aggregate.column!r} with type {kind} "
        f"is not supported, allowed are {allowed}"
    )


def _check_unique(names: list[str], what: str) -> None:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise SchemaDerivationError(f"{what} names columns more than once: {duplicates}")


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
