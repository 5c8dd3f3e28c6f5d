"""Runs one Acero node over one batch: the cheapest public way to evaluate Arrow expressions (about 0.1 ms a batch).

Single-threaded on purpose: the other slots of the machine use the other cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyarrow import acero


def apply_node(batch: pa.RecordBatch, node: acero.Declaration) -> Iterator[pa.RecordBatch]:
    """The non-empty batches that ``node`` makes of ``batch``; rows keep their order."""
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch])))
    result = acero.Declaration.from_sequence([source, node]).to_table(use_threads=False)
    return (part for part in result.to_batches() if part.num_rows)
