"""Which columns of its source a query reads for certain. Spark's optimizer prunes the others out of the reader."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_runtime.frontend.capture import CapturedSource
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Deduplicate,
    Expand,
    Filter,
    Generate,
    Join,
    MapPartitions,
    PlanNode,
    Project,
    Sort,
    StatefulFunction,
    Watermark,
)
from ckpt_runtime.graph.bad_rows import reader_policy
from ckpt_runtime.graph.errors import PlanError

_CORRUPT = "columnNameOfCorruptRecord"


def check_pruned(source: CapturedSource, at: int, nodes: Sequence[PlanNode]) -> None:
    """Checks that Spark finds the same bad records as the engine, for the source of a query at position ``at``.

    Spark looks only at columns that the query reads, and JSON has no option for that, as CSV has. Raises PlanError for
    a source of JSON that handles bad records, and a query that leaves out columns of it.
    """
    options = {key.lower(): value for key, value in source.options.items()}
    names = [column.name for column in nodes[at].columns]
    corrupt = options.get(_CORRUPT.lower(), "_corrupt_record")
    mode = options.get("mode", "PERMISSIVE").upper()
    if source.format.lower() != "json" or (mode == "PERMISSIVE" and corrupt not in names):
        return
    if reader_policy(source.options) is not None:
        return  # an option of the engine's, for which all columns count
    read = _read_columns(nodes)[at]
    left_out = [name for place, name in enumerate(names) if place not in read and name != corrupt]
    if left_out:
        what = f"mode {mode}" if mode != "PERMISSIVE" else f"the column of bad records, {corrupt!r}"
        raise PlanError(
            "format 'json'",
            f"{what}: in Spark, the columns that the query reads decide which records are bad, and it does not read "
            f"{', '.join(left_out)}: remove them from the schema, or read format 'text' and call from_json",
        )


def _read_columns(nodes: Sequence[PlanNode]) -> list[set[int]]:
    """The columns of each node that later nodes read for certain; the result of the query has all of its columns."""
    read: list[set[int]] = [set() for _ in nodes]
    read[-1] = set(range(len(nodes[-1].columns)))
    for at in reversed(range(len(nodes))):
        node = nodes[at]
        widths = [len(nodes[place].columns) for place in node.inputs]
        for place, columns in zip(node.inputs, _read_of_inputs(node, read[at], widths), strict=True):
            read[place] |= columns
    return read


def _read_of_inputs(node: PlanNode, wanted: set[int], widths: list[int]) -> list[set[int]]:
    """The columns that a node needs of each of its inputs for the ``wanted`` ones of its own."""
    match node:
        case Project():
            return [set(columns_of([node.expressions[place] for place in wanted]))]
        case Aggregate():
            computed = [each for place, each in enumerate(node.aggregates, len(node.keys)) if place in wanted]
            return [{*node.keys, *(argument for each in computed for argument in each.arguments)}]
        case Expand():
            return [set(columns_of([row[place] for row in node.rows for place in wanted]))]
        case Generate():
            return [{place for place in wanted if place < widths[0]} | columns_of([node.function])]
        case MapPartitions() | StatefulFunction():
            return [set(range(width)) for width in widths]
        case Join():
            both = wanted | (set() if node.condition is None else columns_of([node.condition]))
            left = widths[0]
            return [{place for place in both if place < left}, {place - left for place in both if place >= left}]
    # What is left passes columns on by position.
    return [wanted | _read_by_itself(node) for _ in widths]


def _read_by_itself(node: PlanNode) -> set[int]:
    """The columns that a node reads whatever is wanted of it."""
    match node:
        case Filter():
            return set(columns_of([node.condition]))
        case Watermark():
            return {node.column}
        case Deduplicate():
            return set(node.keys)
        case Sort():
            return set(columns_of([order.expression for order in node.orders]))
    return set()
