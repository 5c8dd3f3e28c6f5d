"""Creates operators from specs: the one place that maps specs to operator classes."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from ckpt_runtime.connectors.registry import create_connector
from ckpt_runtime.graph.specs import (
    AggregateSpec,
    ConditionSpec,
    DeduplicateSpec,
    EvaluateSpec,
    ExpandSpec,
    GenerateSpec,
    GroupSpec,
    JoinSpec,
    LimitSpec,
    MapInArrowSpec,
    OperatorSpec,
    ProcessSpec,
    PythonFunctionsSpec,
    SortSpec,
    StaticJoinSpec,
    TableSpec,
    WatermarkSpec,
)
from ckpt_runtime.operators.aggregate import AggregateOperator
from ckpt_runtime.operators.deduplicate import DeduplicateOperator
from ckpt_runtime.operators.generate import GenerateOperator
from ckpt_runtime.operators.groups import GroupOperator
from ckpt_runtime.operators.join import JoinOperator
from ckpt_runtime.operators.map_in_arrow import MapInArrowOperator
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.operators.python_functions import PythonFunctionsOperator
from ckpt_runtime.operators.result_table import LimitOperator, ResultTableOperator, SortOperator
from ckpt_runtime.operators.sessions import SessionOperator
from ckpt_runtime.operators.stateful_processor import StatefulProcessorOperator
from ckpt_runtime.operators.static_join import StaticJoinOperator
from ckpt_runtime.operators.typed_expressions import ConditionOperator, EvaluateOperator, ExpandOperator
from ckpt_runtime.operators.watermark import WatermarkOperator

_OF_SPEC: dict[type, Callable[..., Operator]] = {
    ConditionSpec: ConditionOperator,
    EvaluateSpec: EvaluateOperator,
    ExpandSpec: ExpandOperator,
    GenerateSpec: GenerateOperator,
    PythonFunctionsSpec: PythonFunctionsOperator,
    MapInArrowSpec: MapInArrowOperator,
    WatermarkSpec: WatermarkOperator,
    TableSpec: ResultTableOperator,
    SortSpec: SortOperator,
    LimitSpec: LimitOperator,
    DeduplicateSpec: DeduplicateOperator,
    JoinSpec: JoinOperator,
    StaticJoinSpec: StaticJoinOperator,
}
"""Operators that are made from their spec alone."""


def create_operator(spec: OperatorSpec, input_schema: pa.Schema | None) -> Operator:
    """A new operator, not opened yet. ``input_schema`` is None for sources."""
    make = _OF_SPEC.get(type(spec))
    if make is not None:
        return make(spec)
    match spec:
        case AggregateSpec():
            return AggregateOperator(spec, input_schema)
        case GroupSpec():
            return GroupOperator(spec) if spec.session is None else SessionOperator(spec)
        case ProcessSpec():
            return StatefulProcessorOperator(spec, input_schema)
        case _:
            return create_connector(spec)


def is_keyed(spec: OperatorSpec) -> bool:
    """Whether the operator keeps state per key, and so needs a keyed backend."""
    return isinstance(spec, AggregateSpec | GroupSpec | TableSpec | DeduplicateSpec | ProcessSpec | JoinSpec)
