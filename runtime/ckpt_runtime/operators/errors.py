"""Errors that operators raise about user code and input; each names the operator's uid and what it got."""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.state.errors import schema_text


class OperatorError(Exception):
    """Base of what operators raise on purpose."""


class UserFunctionError(OperatorError, TypeError):
    """A user function returned something else than its contract says."""


class OutputSchemaError(OperatorError, TypeError):
    """A user function's output does not have the declared schema."""


class ProcessorUsageError(OperatorError, ValueError):
    """A StatefulProcessor used its handle in a way that its life cycle or time mode does not allow."""


def output_schema_error(uid: str, actual: pa.Schema, declared: pa.Schema) -> OutputSchemaError:
    """Builds the error that names uid and both schemas."""
    return OutputSchemaError(
        f"operator {uid!r} gave a batch with columns [{schema_text(actual)}], declared are [{schema_text(declared)}]"
    )
