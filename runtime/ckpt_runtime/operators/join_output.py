"""Builds a join's result rows: the columns of both sides, with nulls for a side that has no match."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ckpt_runtime.graph.schemas import join_output_schema, shared_join_keys
from ckpt_runtime.graph.specs import JoinSpec

LEFT, RIGHT = 0, 1


class JoinOutput:
    """Knows the origin of each result column. ``needed`` lists the columns of each side that a joined row uses."""

    def __init__(self, spec: JoinSpec) -> None:
        self.schema = join_output_schema(spec)
        self._sources = _sources(spec)
        self.needed = tuple([index for side, index, _ in self._sources if side == wanted] for wanted in (LEFT, RIGHT))

    def joined(self, left: Sequence[pa.Array], right: Sequence[pa.Array]) -> pa.RecordBatch:
        """Rows of the needed columns of both sides."""
        columns = (iter(left), iter(right))
        arrays = [next(columns[side]) for side, _, _ in self._sources]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def unmatched(self, side: int, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """Result rows for unmatched rows of one side, given with all its columns; the other side's columns are null."""
        rows = len(columns[0])
        arrays = []
        for field, (source, index, other_index) in zip(self.schema, self._sources, strict=True):
            own = index if source == side else other_index
            arrays.append(pa.nulls(rows, field.type) if own is None else columns[own])
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _sources(spec: JoinSpec) -> list[tuple[int, int, int | None]]:
    """Returns side and position of each result column, and for a shared key also its position on the other side."""
    shared = shared_join_keys(spec)
    first = RIGHT if spec.how == "right_outer" else LEFT
    names = [side.schema.names for side in spec.sides]
    sources: list[tuple[int, int, int | None]] = [
        (first, names[first].index(key), names[1 - first].index(key)) for key in shared
    ]
    for side in (LEFT,) if spec.how == "left_semi" else (LEFT, RIGHT):
        sources += [(side, index, None) for index, name in enumerate(names[side]) if name not in shared]
    return sources
