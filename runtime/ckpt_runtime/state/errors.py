"""Errors of the state package. Every message names the state, the field or the value at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa


class StateError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedBackendError(StateError, ValueError):
    """The configured state backend does not exist in this version."""


class SharedFileError(StateError, RuntimeError):
    """A snapshot that must be self-contained would refer to files of other snapshots."""


class UnsupportedKeyTypeError(StateError, TypeError):
    """A key column has a type without a stable hash (lists, maps, unions, structs)."""


class UnsupportedAggregateError(StateError, TypeError):
    """An aggregate function is unknown or cannot be applied to its column's type."""


class AggregateOverflowError(StateError, ArithmeticError):
    """A running 64-bit sum has overflowed; it never wraps around silently."""


class CorruptStateError(StateError, ValueError):
    """Stored rows do not match their descriptor."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises CorruptStateError for any Arrow error about content that is in memory and cannot be read.

    MemoryError proves nothing about the content and is raised unchanged.
    """
    try:
        yield
    except (CorruptStateError, MemoryError):
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError, OverflowError) as error:
        raise CorruptStateError(f"{what} cannot be read: {error}") from error


class StateSchemaError(StateError, TypeError):
    """A state was requested, or restored, with a schema that is incompatible with its own."""


def schema_text(schema: pa.Schema) -> str:
    """``name: type`` pairs on one line, for messages."""
    return ", ".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema)


def schema_mismatch(uid: str, state: str, reason: str, stored: object, wanted: object) -> StateSchemaError:
    """Builds the error that names operator uid, state and both schemas."""

    def text(schema: object) -> str:
        return schema_text(schema) if isinstance(schema, pa.Schema) else str(schema)

    return StateSchemaError(
        f"state {state!r} of operator {uid!r}: {reason}; it has [{text(stored)}], but [{text(wanted)}] was requested"
    )


class StateValueTypeError(StateError, TypeError):
    """A value written to a state has a type that its field does not take and that is not converted silently."""


class StateValueError(StateError, ValueError):
    """A value written to a state is out of its field's range, null where it may not be, or has other fields."""
