"""``left.join(right, on, how, within)``: checks the arguments of a join and builds its spec.

PySpark's conventions: names in ``on`` are columns of both streams and appear once, first, in the result. A condition on
two event time columns in PySpark is ``within`` here.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa

from ckpt_runtime.api.intervals import parse_offset
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import event_time_column
from ckpt_runtime.graph.expressions import check_columns
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import LogicalInput
from ckpt_runtime.graph.schemas import JOIN_TYPES, SchemaDerivationError, decoded_schema, join_output_schema
from ckpt_runtime.graph.specs import JoinSide, JoinSpec

_HOW = {
    "inner": "inner",
    "left": "left_outer",
    "leftouter": "left_outer",
    "right": "right_outer",
    "rightouter": "right_outer",
    "outer": "full_outer",
    "full": "full_outer",
    "fullouter": "full_outer",
    "semi": "left_semi",
    "leftsemi": "left_semi",
}
_ON_FORM = "expected a column name, a list of names, or of pairs (left name, right name)"
_WITHIN_FORM = 'expected (lower, upper) such as ("0 s", "1 hour") or ("-5 min", "5 min"), or two timedeltas'


def join_spec(
    left: tuple[pa.Schema, tuple[LogicalInput, ...]],
    right: tuple[pa.Schema, tuple[LogicalInput, ...]],
    on: Any,
    how: Any,
    within: Any,
) -> tuple[JoinSpec, pa.Schema]:
    """Returns the description and the schema of the result; each stream is given by its schema and inputs.

    :raises PlanError: naming the argument, its value and what is allowed.
    """
    pairs = _key_pairs(on)
    for side, (schema, _) in enumerate((left, right)):
        check_columns([pair[side] for pair in pairs], schema, f"join: on, {('left', 'right')[side]} side")
    within_ms = None if within is None else _interval(within)
    sides = [
        JoinSide(
            decoded_schema(schema),
            tuple(pair[number] for pair in pairs),
            None if within is None else event_time_column(inputs),
            len(inputs),
            late_by=event_time_column(inputs),
        )
        for number, (schema, inputs) in enumerate((left, right))
    ]
    spec = JoinSpec(_join_type(how), sides[0], sides[1], within_ms)
    try:
        return spec, join_output_schema(spec)
    except SchemaDerivationError as error:
        raise PlanError("join", str(error)) from None


def hashed(inputs: tuple[LogicalInput, ...], keys: tuple[str, ...]) -> tuple[LogicalInput, ...]:
    """Returns the inputs, with rows of equal keys going to one subtask."""
    return tuple(replace(edge, partitioning=Partitioning.HASH, keys=keys) for edge in inputs)


def _join_type(how: Any) -> str:
    kind = _HOW.get(how.lower().replace("_", "")) if isinstance(how, str) else None
    if kind is None:
        short = "left, right, outer, full, semi"
        raise PlanError("join: how", f"{how!r} is not one of {', '.join(JOIN_TYPES)} (or {short})")
    return kind


def _key_pairs(on: Any) -> list[tuple[str, str]]:
    listed = [on] if isinstance(on, str) else on
    if not isinstance(listed, list | tuple) or not listed:
        raise PlanError("join: on", f"{on!r}; {_ON_FORM}")
    pairs: list[tuple[str, str]] = []
    for entry in listed:
        names = (entry, entry) if isinstance(entry, str) else entry
        if not (isinstance(names, tuple) and len(names) == 2 and all(isinstance(name, str) for name in names)):
            raise PlanError("join: on", f"{entry!r}; {_ON_FORM}")
        pairs.append(names)
    return pairs


def _interval(within: Any) -> tuple[int, int]:
    if not isinstance(within, list | tuple) or len(within) != 2:
        raise PlanError("join: within", f"{within!r}; {_WITHIN_FORM}")
    lower, upper = (_offset(bound) for bound in within)
    if lower > upper:
        raise PlanError("join: within", f"the lower bound {within[0]!r} is above the upper bound {within[1]!r}")
    return lower, upper


def _offset(bound: Any) -> int:
    """Returns a bound in milliseconds, which may be negative."""
    if isinstance(bound, timedelta):
        millis, rest = divmod(bound, timedelta(milliseconds=1))
        if rest:
            raise PlanError("join: within", f"{bound!r} is not a whole number of milliseconds")
        return millis
    if not isinstance(bound, str):
        raise PlanError("join: within", f"bound {bound!r}; {_WITHIN_FORM}")
    try:
        return parse_offset(bound)
    except ValueError as error:
        raise PlanError("join: within", f"bound {bound!r}: {error}") from None
