"""From a spec to the operator that carries it out: the one place that knows all connectors; imports them lazily."""

from __future__ import annotations

from ckpt_runtime.graph.specs import (
    CommitterSpec,
    EnumeratorSpec,
    OperatorSpec,
    RangeReaderSpec,
    SinkSpec,
    SourceSpec,
)
from ckpt_runtime.operators.operator import Operator, SourceOperator


def create_connector(spec: OperatorSpec) -> Operator:
    """A new source, reader, sink or committer, not opened yet. :raises ValueError: any other spec."""
    if isinstance(spec, SourceSpec | EnumeratorSpec):
        return create_source(spec)
    if isinstance(spec, RangeReaderSpec):
        return create_reader(spec)
    if isinstance(spec, SinkSpec | CommitterSpec):
        return create_sink(spec)
    raise ValueError(f"{type(spec).__name__} is no connector")


def create_source(spec: SourceSpec | EnumeratorSpec) -> SourceOperator:
    """The head of a source vertex. :raises ValueError: a format that no connector carries out."""
    if isinstance(spec, EnumeratorSpec):
        from ckpt_runtime.connectors.datasource_reader import EnumeratorOperator

        return EnumeratorOperator(spec)
    if spec.format == "replay":
        from ckpt_runtime.connectors.replay import ReplaySource

        return ReplaySource(spec)
    if spec.format == "numbers":
        from ckpt_runtime.connectors.numbers import NumbersSource

        return NumbersSource(spec)
    raise ValueError(f"no source operator for format {spec.format!r}")


def create_reader(spec: RangeReaderSpec) -> Operator:
    """The operator behind an enumerator."""
    from ckpt_runtime.connectors.range_reader import RangeReaderOperator

    return RangeReaderOperator(spec)


def create_sink(spec: SinkSpec | CommitterSpec) -> Operator:
    """A sink, or the committer behind one. :raises ValueError: a format that no connector carries out."""
    if isinstance(spec, CommitterSpec):
        from ckpt_runtime.connectors.datasource_writer import CommitterOperator

        return CommitterOperator(spec)
    if isinstance(spec.format, type):
        from ckpt_runtime.connectors.datasource_writer import StreamWriterOperator

        return StreamWriterOperator(spec)
    if spec.format == "parquet":
        from ckpt_runtime.connectors.parquet_sink import ParquetSink

        return ParquetSink(spec)
    if spec.format == "noop":
        from ckpt_runtime.connectors.blackhole import BlackholeSink

        return BlackholeSink(spec)
    if spec.format == "verify":
        from ckpt_runtime.connectors.verify import VerifySink

        return VerifySink(spec)
    raise ValueError(f"no sink operator for format {spec.format!r}")
