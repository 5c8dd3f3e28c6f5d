"""Checks of plain arguments, shared by the classes that a pipeline author calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.key_groups import UPPER_BOUND_MAX_PARALLELISM

_MAX_TEXT = 255


def checked_text(field: str, value: object) -> str:
    """Returns a name as it is. :raises PlanError: naming ``field``, for anything but a text of 1 to 255 characters."""
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT:
        raise PlanError(field, f"{value!r} is not a text of 1 to {_MAX_TEXT} characters")
    return value


def checked_parallelism(field: str, value: object) -> int:
    """Returns a number of subtasks or key groups as it is. :raises PlanError: naming ``field``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= UPPER_BOUND_MAX_PARALLELISM:
        raise PlanError(field, f"{value!r} is not a whole number from 1 to {UPPER_BOUND_MAX_PARALLELISM}")
    return value


def flattened(given: Sequence[Any]) -> list[Any]:
    """Returns arguments given one by one or as one list, as PySpark accepts column names."""
    if len(given) == 1 and isinstance(given[0], list | tuple):
        return list(given[0])
    return list(given)


def chosen(field: str, value: object, allowed: dict[str, str]) -> str:
    """Returns the entry of ``allowed`` for a text in any case. :raises PlanError: naming ``field``."""
    found = allowed.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise PlanError(field, f"{value!r} is not one of {', '.join(allowed.values())}")
    return found
