"""Decides whether a Spark Connect request concerns streams, which the engine handles; all others go to Spark.

Nothing here unpickles: plans that contain Python functions are recognized by their message types only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

_CODE = frozenset(
    {
        *("common_inline_user_defined_function", "common_inline_user_defined_table_function", "map_partitions"),
        *("group_map", "co_group_map", "apply_in_pandas_with_state", "typed_aggregate"),
        *("common_inline_user_defined_data_source", "foreach_writer", "foreach_batch", "transform_with_state_info"),
    }
)
"""Fields of Spark Connect's messages that carry serialized code."""


def reads_stream(message: Any, views: Collection[str]) -> bool:
    """Returns whether a plan reads a stream, through a reader or through one of the given views of streams."""
    names = "|".join(re.escape(view) for view in views)
    pattern = re.compile(rf"(?<![\w`]){'`?'}(?:{names}){'`?'}(?![\w`])", re.IGNORECASE) if views else None
    for name, part in _parts(message):
        if name == "read":
            table = part.named_table.unparsed_identifier.strip("`")
            if part.is_streaming or table.lower() in {view.lower() for view in views}:
                return True
        elif name == "sql" and pattern is not None and pattern.search(part.query):
            return True
    return False


def code_in(message: Any) -> str:
    """Returns the name of the first field that carries serialized code, or an empty text."""
    return next((name for name, _ in _parts(message) if name in _CODE), "")


def _parts(message: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names of all fields that are set, with each message in them, at any depth."""
    todo = [message]
    while todo:
        for descriptor, value in todo.pop().ListFields():
            if descriptor.message_type is None:
                continue
            is_map = descriptor.message_type.GetOptions().map_entry
            several = value.values() if is_map else value if descriptor.is_repeated else (value,)
            for element in several:
                if hasattr(element, "ListFields"):
                    yield descriptor.name, element
                    todo.append(element)
