"""Descriptors of stored states that are well-formed JSON and say something else: read, or refused by a named error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.memory.aggregate_table import evolved_rows
from ckpt_runtime.state.stored_rows import check_descriptor, schema_from_json
from ckpt_runtime.storage.metadata import read_metadata
from tests.support.golden import DIRECTORY

_MISSING = object()
_VALUES = (_MISSING, None, -1, 1 << 70, "x", [], ["x"], {}, True, 1.5)


def _descriptors(document: Any) -> Iterator[dict[str, Any]]:
    if isinstance(document, dict):
        if "descriptor" in document:
            yield document["descriptor"]
        document = list(document.values())
    if isinstance(document, list):
        for inner in document:
            yield from _descriptors(inner)


def _golden() -> dict[str, dict[str, Any]]:
    """One descriptor of each kind."""
    document = read_metadata(str(DIRECTORY / "format-2" / "savepoint")).document
    return {descriptor["kind"]: descriptor for descriptor in _descriptors(json.loads(json.dumps(document)))}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _forged(descriptor: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each field of the descriptor missing, of other types, negative and huge."""
    for path in _paths(descriptor):
        for value in _VALUES:
            forged = deepcopy(descriptor)
            holder: Any = forged
            for key in path[:-1]:
                holder = holder[key]
            if value is _MISSING:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            yield forged


@pytest.mark.parametrize("kind", ["aggregate", "value", "list", "map", "timers", "rows"])
def test_a_forged_descriptor_is_refused_by_name_or_can_be_used(kind: str) -> None:
    descriptor = _golden()[kind]
    check_descriptor("s", descriptor)
    refused = 0
    for forged in _forged(descriptor):
        try:
            check_descriptor("s", forged)
        except CorruptStateError:
            refused += 1
            continue
        schema_from_json(forged["key_schema"])
        schema = schema_from_json(forged["schema"])
        if forged["kind"] == "aggregate":
            evolved_rows(forged, pa.RecordBatch.from_pylist([], schema))
    assert refused
