"""Errors that operators raise about user code and input; each names the operator's uid and the value.

Errors raised by a StatefulProcessor's handle and states are also PySpark errors, so user code can catch them as in
Spark.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.errors import PySparkRuntimeError

from ckpt_runtime.state.errors import StateSchemaError, schema_text


class OperatorError(Exception):
    """Base class of the errors that operators raise on purpose."""


class UserFunctionError(OperatorError, TypeError):
    """A user function returned something that violates its contract."""


class OutputSchemaError(OperatorError, TypeError):
    """A user function's output does not have the declared schema."""


class LateResultError(OperatorError, ValueError):
    """A StatefulProcessor returned a row whose event time the downstream watermark has already reached."""


class ProcessorUsageError(PySparkRuntimeError, OperatorError, ValueError):
    """A StatefulProcessor used its handle in a way that its life cycle or time mode does not allow."""


class ProcessorValueError(PySparkRuntimeError, OperatorError, ValueError):
    """A StatefulProcessor wrote a value that does not fit the state's schema."""


class ProcessorTypeError(PySparkRuntimeError, OperatorError, TypeError):
    """A StatefulProcessor wrote a value of a type that the state's schema does not take."""


class ProcessorSchemaError(PySparkRuntimeError, OperatorError, StateSchemaError):
    """A StatefulProcessor requested a state whose schema cannot be parsed, stored, or restored from the snapshot."""


def output_schema_error(uid: str, actual: pa.Schema, declared: pa.Schema) -> OutputSchemaError:
    """Builds the error that names uid and both schemas."""
    return OutputSchemaError(
        f"operator {uid!r} returned a batch with columns [{schema_text(actual)}], but [{schema_text(declared)}] are "
        "declared"
    )
