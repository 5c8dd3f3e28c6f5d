"""Creates the operator of a connector spec: the one place that knows all connectors; imports them lazily."""

from __future__ import annotations

from ckpt_runtime.graph.specs import (
    CommitterSpec,
    DrillSinkSpec,
    EnumeratorSpec,
    OperatorSpec,
    RangeReaderSpec,
    SinkSpec,
    SourceSpec,
)
from ckpt_runtime.operators.operator import Operator


def create_connector(spec: OperatorSpec) -> Operator:
    """A new source, reader, sink or committer, not opened yet. Raises ValueError for any other spec, or format."""
    match spec:
        case EnumeratorSpec():
            from ckpt_runtime.connectors.datasource_reader import EnumeratorOperator

            return EnumeratorOperator(spec)
        case RangeReaderSpec():
            from ckpt_runtime.connectors.range_reader import RangeReaderOperator

            return RangeReaderOperator(spec)
        case SourceSpec(format="replay"):
            from ckpt_runtime.connectors.replay import ReplaySource

            return ReplaySource(spec)
        case SourceSpec(format="numbers"):
            from ckpt_runtime.connectors.numbers import NumbersSource

            return NumbersSource(spec)
        case CommitterSpec():
            from ckpt_runtime.connectors.datasource_writer import CommitterOperator

            return CommitterOperator(spec)
        case SinkSpec():
            return _create_sink(spec)
        case DrillSinkSpec():
            from ckpt_runtime.connectors.drill_sink import DrillSink

            return DrillSink(spec)
    raise ValueError(f"no connector carries out {type(spec).__name__}, format {getattr(spec, 'format', None)!r}")


def _create_sink(spec: SinkSpec) -> Operator:
    match spec:
        case SinkSpec(format=type()):
            from ckpt_runtime.connectors.datasource_writer import StreamWriterOperator

            return StreamWriterOperator(spec)
        case SinkSpec(format="parquet"):
            from ckpt_runtime.connectors.parquet_sink import ParquetSink

            return ParquetSink(spec)
        case SinkSpec(format="noop"):
            from ckpt_runtime.connectors.noop_sink import NoopSink

            return NoopSink(spec)
        case SinkSpec(format="verify"):
            from ckpt_runtime.connectors.verify import VerifySink

            return VerifySink(spec)
    raise ValueError(f"no sink operator for format {spec.format!r}")
