"""Creates the operator of a connector spec: the one place that knows all connectors; imports them lazily."""

from __future__ import annotations

from ckpt_runtime.graph.formats import options_of_source, strict_options
from ckpt_runtime.graph.specs import (
    FILE_FORMATS,
    STAGED_FORMATS,
    CommitterSpec,
    DrillSinkSpec,
    EnumeratorSpec,
    OperatorSpec,
    RangeReaderSpec,
    SinkSpec,
    SourceSpec,
)
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.sinks import Sink, is_sink
from ckpt_runtime.sources import Source, is_source


def create_connector(spec: OperatorSpec) -> Operator:
    """Returns a source, reader, sink or committer, not opened yet. Raises ValueError for an unknown spec or format."""
    match spec:
        case EnumeratorSpec() | RangeReaderSpec() if isinstance(spec.format, str) or is_source(spec.format):
            return _create_split_operator(spec)
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
            return _create_committer(spec)
        case SinkSpec():
            return _create_sink(spec)
        case DrillSinkSpec():
            from ckpt_runtime.connectors.noop_sink import DrillSink

            return DrillSink(spec)
    raise ValueError(f"no connector implements {type(spec).__name__}, format {getattr(spec, 'format', None)!r}")


def _create_split_operator(spec: EnumeratorSpec | RangeReaderSpec) -> Operator:
    from ckpt_runtime.connectors.split_source import SplitEnumeratorOperator, SplitReaderOperator

    source = _source_of(spec.format, options_of_source(strict_options(spec.format, spec.options)))
    assert spec.schema is not None
    if isinstance(spec, EnumeratorSpec):
        return SplitEnumeratorOperator(spec, source, spec.schema)
    return SplitReaderOperator(spec, source, spec.schema)


def _source_of(format_: str | type, options: dict[str, str]) -> Source:
    match format_:
        case "rate" | "rate-micro-batch":
            from ckpt_runtime.connectors.rate_source import RateSource

            return RateSource(format_, options)
        case "kafka":
            from ckpt_runtime.connectors.kafka_source import KafkaSource

            return KafkaSource(format_, options)
        case "delta":
            from ckpt_runtime.connectors.delta_source import DeltaSource

            return DeltaSource(format_, options)
        case "postgresql":
            from ckpt_runtime.connectors.postgres_source import PostgresSource

            return PostgresSource(format_, options)
        case "socket":
            from ckpt_runtime.connectors.socket_source import SocketSource

            return SocketSource(format_, options)
        case "csv" | "json" | "parquet" | "orc" | "text":
            from ckpt_runtime.connectors.file_source import FileSource

            return FileSource(format_, options)
    assert isinstance(format_, type)
    return format_(options)  # type: ignore[no-any-return]


def _create_sink(spec: SinkSpec) -> Operator:
    match spec:
        case SinkSpec(format="noop"):
            from ckpt_runtime.connectors.noop_sink import NoopSink

            return NoopSink(spec)
        case SinkSpec(format="verify"):
            from ckpt_runtime.connectors.numbers import VerifySink

            return VerifySink(spec)
    from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator, PreparingSinkOperator
    from ckpt_runtime.connectors.waiting_batches import WaitingWriterOperator

    sink = sink_of(spec)
    if spec.format == "foreachBatch":
        return WaitingWriterOperator(sink, spec.table, spec.batch)
    kind = PreparingSinkOperator if spec.single_committer else CommittingSinkOperator
    return kind(sink, spec.table)


def _create_committer(spec: CommitterSpec) -> Operator:
    from ckpt_runtime.connectors.sink_operators import CommitterOperator
    from ckpt_runtime.connectors.waiting_batches import WaitingCommitterOperator

    assert spec.schema is not None
    if spec.format == "foreachBatch":
        # A whole result replaces that of an aborted checkpoint.
        return WaitingCommitterOperator(sink_of(spec), spec.schema, joins=spec.in_calls and not spec.whole)
    return CommitterOperator(sink_of(spec), spec.schema)


def sink_of(spec: SinkSpec | CommitterSpec) -> Sink:
    """Returns a sink of the public protocol. Raises ValueError for a format that has none."""
    if is_sink(spec.format):
        return spec.format(spec.options)  # type: ignore[operator, no-any-return]
    if isinstance(spec.format, type):
        from ckpt_runtime.connectors.datasource_writer import DataSourceSink

        whole = spec.table is not None if isinstance(spec, SinkSpec) else spec.whole
        return DataSourceSink(spec.format, spec.options, overwrites=whole)
    if spec.format in STAGED_FORMATS:
        from ckpt_runtime.connectors.staged_sinks import staged_sink

        return staged_sink(spec)
    if spec.format == "kafka":
        from ckpt_runtime.connectors.kafka_sink import KafkaSink

        return KafkaSink(spec.options)
    if spec.format == "postgresql":
        from ckpt_runtime.connectors.postgres_sink import PostgresSink

        return PostgresSink(spec.options)
    if spec.format == "delta":
        from ckpt_runtime.connectors.delta_sink import DeltaSink

        return DeltaSink(spec.options, overwrites=isinstance(spec, CommitterSpec) and spec.whole)
    if spec.format in FILE_FORMATS:
        from ckpt_runtime.connectors.file_sink import FileSink

        return FileSink(spec.format, spec.options)
    raise ValueError(f"no sink for format {spec.format!r}")
