"""Creates operators from specs: the one place that maps specs to operator classes."""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.connectors.registry import create_connector
from ckpt_runtime.graph.specs import (
    AggregateSpec,
    ConditionSpec,
    EvaluateSpec,
    FilterSpec,
    GenerateSpec,
    JoinSpec,
    MapInArrowSpec,
    OperatorSpec,
    ProcessSpec,
    ProjectSpec,
    PythonFunctionsSpec,
    WatermarkSpec,
)
from ckpt_runtime.operators.aggregate import AggregateOperator
from ckpt_runtime.operators.expressions import FilterOperator, ProjectOperator
from ckpt_runtime.operators.generate import GenerateOperator
from ckpt_runtime.operators.join import JoinOperator
from ckpt_runtime.operators.map_in_arrow import MapInArrowOperator
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.operators.python_functions import PythonFunctionsOperator
from ckpt_runtime.operators.stateful_processor import StatefulProcessorOperator
from ckpt_runtime.operators.typed_expressions import ConditionOperator, EvaluateOperator
from ckpt_runtime.operators.watermark import WatermarkOperator


def create_operator(spec: OperatorSpec, input_schema: pa.Schema | None) -> Operator:
    """A new operator, not opened yet. ``input_schema`` is None for sources."""
    match spec:
        case FilterSpec():
            return FilterOperator(spec)
        case ProjectSpec():
            return ProjectOperator(spec)
        case ConditionSpec():
            return ConditionOperator(spec)
        case EvaluateSpec():
            return EvaluateOperator(spec)
        case GenerateSpec():
            return GenerateOperator(spec)
        case PythonFunctionsSpec():
            return PythonFunctionsOperator(spec)
        case MapInArrowSpec():
            return MapInArrowOperator(spec)
        case WatermarkSpec():
            return WatermarkOperator(spec)
        case AggregateSpec():
            return AggregateOperator(spec, input_schema)
        case JoinSpec():
            return JoinOperator(spec)
        case ProcessSpec():
            return StatefulProcessorOperator(spec, input_schema)
        case _:
            return create_connector(spec)


def is_keyed(spec: OperatorSpec) -> bool:
    """Whether the operator keeps state per key, and so needs a keyed backend."""
    return isinstance(spec, AggregateSpec | ProcessSpec | JoinSpec)
