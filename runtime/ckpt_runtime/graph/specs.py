"""Plain descriptions of each operator of a pipeline. A spec describes *what* an operator does; the operator classes in
``operators/`` and ``connectors/`` define *how*, and are built from a spec by ``task/deployed_job.py`` inside the
worker. Specs hold user functions and classes, so they never leave the process which ran the pipeline's entry point:
only the :class:`~ckpt_runtime.graph.job_graph.JobGraph` is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from ckpt_runtime.expressions.nodes import Expression
from ckpt_runtime.expressions.types import SparkType, arrow_type
from ckpt_runtime.graph.aggregates import GroupAggregate

FILE_FORMATS = frozenset({"csv", "delta", "json", "parquet", "text"})
"""Sinks that write files to the directory that option ``path`` names."""
STAGED_FORMATS = frozenset({"foreach", "foreachBatch"})
"""Sinks that stage rows in the directory that option ``path`` names, and call a function of the program with them."""

READER_SUFFIX = ".reader"
"""The suffix of the uid of a source's readers, after the uid of the source."""

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class _ConnectorSpec:
    """``format`` is a registered name or a PySpark ``DataSource`` class; ``schema`` that of the rows it handles."""

    format: str | type
    options: Mapping[str, str] = field(default_factory=dict)
    schema: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function that a sink calls with rows, None for a source.

    ``session`` is the program's session, which can be connected to Spark. ``configuration`` holds the options of Spark
    that the program set.
    """

    call: Any
    session: Any
    configuration: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceSpec(_ConnectorSpec):
    """Reads a stream. ``program`` has the session with which a source of the public protocol may reach Spark."""

    program: UserFunction | None = None


ZONE_OPTION = "spark.sql.session.timeZone"
"""The option of Spark with the time zone in which Python functions get times."""
ROWS_OPTION = "spark.sql.execution.arrow.maxRecordsPerBatch"
MOST_ROWS = 10_000
"""Maximum number of rows that a Python function gets at once, which is Spark's default."""


BYTES_OPTION = "spark.sql.execution.arrow.maxBytesPerBatch"
"""The option of Spark with the size in Arrow, in bytes, that ends a frame of ``transformWithStateInPandas``."""


def most_rows(settings: Mapping[str, str]) -> int:
    """The maximum by Spark's option among ``settings``; below 1 it means no limit."""
    rows = int(settings.get(ROWS_OPTION, MOST_ROWS))
    return rows if rows > 0 else sys.maxsize


@dataclass(frozen=True, slots=True)
class SparkForm:
    """How Spark hands rows to a Python function and takes its results: with their types as structs, and its options.

    ``in_pandas``: the function takes and gives pandas frames.
    """

    given: SparkType
    made: SparkType
    settings: Mapping[str, str]
    in_pandas: bool = False


@dataclass(frozen=True, slots=True)
class MapInArrowSpec:
    """Applies ``func(iterator of batches) -> iterator of batches``, once per buffer.

    Without ``form`` it gets the engine's batches unchanged.
    """

    func: ArrowFunction
    schema: pa.Schema
    form: SparkForm | None = None


@dataclass(frozen=True, slots=True)
class ConditionSpec:
    """Keeps the rows for which a typed expression of Spark's is true; null counts as false."""

    condition: Expression


@dataclass(frozen=True, slots=True)
class EvaluateSpec:
    """Computes named columns from typed expressions of Spark's; ``schema`` is theirs."""

    columns: tuple[tuple[str, Expression], ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """Repeats each row for every element that ``function``, one of Spark's generators, produces for it.

    The result has the input's columns, then the generator's. Input columns that are not ``carried`` become nulls,
    because no operator reads them.
    """

    function: Expression
    outer: bool
    carried: frozenset[int]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """A function of the author's for :class:`PythonFunctionsSpec`.

    ``chain`` holds functions each of which gets the one before's result. ``positions`` and ``named`` select the
    argument columns of the first one; ``type`` is the result type of the last one.
    """

    name: str
    chain: tuple[Callable[..., Any], ...]
    positions: tuple[int, ...]
    named: Mapping[str, int]
    type: SparkType


@dataclass(frozen=True, slots=True)
class PythonFunctionsSpec:
    """Calls Python functions of one kind and appends a column for each.

    The last input columns are the arguments, which have Spark's types ``arguments`` and are not part of the output.
    ``eval_type`` is PySpark's number of the kind; ``settings`` are options of Spark by which values are converted.
    """

    eval_type: int
    functions: tuple[PythonFunction, ...]
    arguments: tuple[SparkType, ...]
    schema: pa.Schema
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WatermarkSpec:
    """Event time: ``column`` holds timestamps; the watermark trails the greatest one seen by ``delay_ms``.

    ``by_ranges``: it advances only when a range of a stream reader ends, as it does between Spark's batches.
    ``by_batches``: ranges follow each other without a pause, and the time of one takes effect behind the next one.
    ``united``: several streams meet here, each of which has event time of the same column and delay. Their watermarks
    only say when a batch ends: event time is that of all rows, as behind Spark's unions.
    ``keeps_last``: the time of the last batch takes effect in the next run, as in Spark with the trigger ``once``, or
    without batches of no data.
    ``greatest``: where streams meet, event time is the greatest of theirs, not the least.
    """

    column: str
    delay_ms: int
    by_ranges: bool = False
    by_batches: bool = False
    united: bool = False
    keeps_last: bool = False
    greatest: bool = False


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One built-in aggregate. ``function`` is count, sum, min, max or avg; ``column`` is None for count(*)."""

    function: str
    column: str | None
    alias: str


@dataclass(frozen=True, slots=True)
class AggregateSpec:
    """Running aggregates per key; one updated row out for each row in (update mode)."""

    keys: tuple[str, ...]
    aggregates: tuple[Aggregate, ...]


@dataclass(frozen=True, slots=True)
class ExpandSpec:
    """Computes several rows from each row, one by each list of typed expressions; ``schema`` is that of the results."""

    rows: tuple[tuple[Expression, ...], ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Aggregates rows by ``keys``. ``schema`` is the input's, ``mode`` is append, update or complete.

    Like update, complete emits the changed groups, but groups never end: a :class:`TableSpec` follows, which keeps the
    result of every group. ``event_time`` is the timestamp column, a key, by which a row is late and a group ends;
    without it no group ends. In mode complete only rows of sessions are late, as in Spark.
    ``session`` names the columns, not keys, of a session's start and
    end: sessions of a key that touch become one, and the end is their event time. The result has the session's columns
    first, then the keys, then the aggregates. In mode complete :data:`REMOVED` follows for sessions: it is true in a
    row for a session that has become part of an earlier one. In mode update an aggregation without keys of its own
    (``total``) has a row even before the first row has arrived, as in SQL.
    """

    schema: pa.Schema
    keys: tuple[str, ...]
    aggregates: tuple[GroupAggregate, ...]
    mode: str
    event_time: str | None = None
    session: tuple[str, str] | None = None
    total: bool = False

    @property
    def output_schema(self) -> pa.Schema:
        grouped = [self.schema.field(name) for name in (*(self.session or ()), *self.keys)]
        removed = [pa.field(REMOVED, pa.bool_())] if self.session is not None and self.mode == "complete" else []
        results = (pa.field(aggregate.name, aggregate.result) for aggregate in self.aggregates)
        return pa.schema([*grouped, *results, *removed])


class ObservedAggregate(msgspec.Struct, frozen=True):
    """One aggregate over arguments, by their positions. Spark allows neither FILTER nor DISTINCT here."""

    function: str
    arguments: tuple[int, ...]
    type: SparkType
    ansi: bool = True
    settings: dict[str, Any] = {}


class ObserveSpec(msgspec.Struct, frozen=True):
    """Passes rows on, and computes metrics of all that pass between two checkpoints.

    ``arguments`` are expressions over the input's columns, ``results`` over the aggregates' results, by the names of
    the metrics. ``zone`` is the time zone in which timestamps are shown.
    """

    name: str
    arguments: tuple[Expression, ...]
    aggregates: tuple[ObservedAggregate, ...]
    results: tuple[tuple[str, Expression], ...]
    zone: str = "UTC"

    @property
    def group(self) -> GroupSpec:
        """The aggregation of all rows, without keys, over columns for the arguments."""
        schema = pa.schema([(f"_{at}", arrow_type(tree.type)) for at, tree in enumerate(self.arguments)])
        aggregates = tuple(
            GroupAggregate(
                each.function,
                tuple(f"_{at}" for at in each.arguments),
                f"_agg{number}",
                arrow_type(each.type),
                each.ansi,
                settings=each.settings,
            )
            for number, each in enumerate(self.aggregates)
        )
        return GroupSpec(schema, (), aggregates, "update")


REMOVED = "$removed"
"""The column of a grouping's output that marks removed sessions."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Keeps the latest row of each key, and emits all of them with each checkpoint in which one has changed.

    ``group`` is the aggregation whose rows these are. An aggregation without keys (``total``) has one row even before
    the first row has arrived, as in SQL. A session is known by its start and its key.
    """

    group: GroupSpec
    total: bool = False

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([field for field in self.group.output_schema if field.name != REMOVED])

    @property
    def keys(self) -> tuple[str, ...]:
        return (*(self.group.session or ())[:1], *self.group.keys)


@dataclass(frozen=True, slots=True)
class LatestSpec:
    """Keeps the last row of each key since the last checkpoint, and emits these rows with the next one."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SortOrder:
    """Orders rows by the input column at a position."""

    position: int
    descending: bool
    nulls_first: bool


@dataclass(frozen=True, slots=True)
class SortSpec:
    """Sorts each whole table. The input has the columns of ``schema``, then those that only the orders need."""

    orders: tuple[SortOrder, ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """Passes the first rows of each whole table, or with ``in_all`` the first ones of the whole stream."""

    rows: int
    in_all: bool = False


@dataclass(frozen=True, slots=True)
class DeduplicateSpec:
    """Passes the first row of each key. ``schema`` is that of the rows.

    ``event_time`` is the timestamp by which rows are late. A key is removed from state when the watermark reaches its
    ``forget_by``, a timestamp among the keys, or with ``within_ms`` the event time of its first row plus that delay;
    otherwise it is never removed.
    """

    schema: pa.Schema
    keys: tuple[str, ...]
    event_time: str | None = None
    forget_by: str | None = None
    within_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Hosts a PySpark ``StatefulProcessor``. Modes are PySpark's strings; time: None, ProcessingTime, EventTime.

    ``event_time_column`` is the timestamp by which late rows are dropped; None keeps all rows. ``in_pandas``: the
    processor gets and returns frames, not rows. ``in_arrow``: it is an ``ArrowStatefulProcessor``, which gets the rows
    and states of many keys. ``output_event_time`` is the event time column of its output, if it has one.
    ``initial_state`` is the file of a static table: a column for each of ``keys``, then the columns of its rows.
    ``settings`` are the options of Spark that decide the size of frames and the conversion of their columns.
    ``nested_keys`` are the names and types of the keys as the processor gets them, if one of them is a struct, an array
    or a map; ``keys`` then name the values that they are compared by. Those of nested ones are the last columns of the
    input, which the processor does not get. ``timers_wait``: timers of the clock fire behind rows only, as in Spark
    without batches of no data.
    """

    keys: tuple[str, ...]
    processor: Any
    output_schema: pa.Schema
    output_mode: str = "Append"
    time_mode: str = "None"
    event_time_column: str | None = None
    in_pandas: bool = False
    output_event_time: str | None = None
    initial_state: str | None = None
    in_arrow: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    nested_keys: tuple[tuple[str, SparkType], ...] = ()
    timers_wait: bool = False


@dataclass(frozen=True, slots=True)
class JoinSide:
    """One of the two streams of a join. ``keys`` match the other side's by position.

    ``event_time`` is the timestamp that the join's time bounds apply to, None without bounds. ``late_by`` is the
    timestamp or window by which late rows are dropped, by default ``event_time``; without both, or if it is an empty
    text, no row is late.
    ``gates`` counts the input gates of its rows, more than one after a union.
    """

    schema: pa.Schema
    keys: tuple[str, ...]
    event_time: str | None = None
    gates: int = 1
    late_by: str | None = None


NO_BOUND_US = 1 << 61
"""Stands for a missing bound: a time in microseconds that is never between two rows."""


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """Joins rows with equal keys. ``how``: inner, left_outer, right_outer, full_outer or left_semi.

    ``within_ms`` bounds the right row's event time minus the left row's, both ends included; None (inner only) sets no
    bounds, and then no row is ever removed from state. ``exact`` are the same bounds in microseconds, where these are
    not whole milliseconds; a bound of :data:`NO_BOUND_US` is none. ``condition`` is over the columns of both sides, the
    left ones first: rows match only if it is true. The left side's gates come first. ``kept_us``: how much longer than
    the lower and the upper bound say the rows of the right and the left side are kept, in microseconds.
    """

    how: str
    left: JoinSide
    right: JoinSide
    within_ms: tuple[int, int] | None = None
    exact: tuple[int, int] | None = None
    condition: Expression | None = None
    kept_us: tuple[int, int] = (0, 0)

    @property
    def sides(self) -> tuple[JoinSide, JoinSide]:
        return self.left, self.right

    def side_of_gate(self, input_index: int) -> int:
        """0 for the left side, 1 for the right one."""
        return 0 if input_index < self.left.gates else 1


@dataclass(frozen=True, slots=True)
class StaticJoinKey:
    """An equality: ``stream`` is over the stream's columns, ``table`` over the table's.

    ``nulls_match``: two nulls are equal, which they are not otherwise.
    """

    stream: Expression
    table: Expression
    nulls_match: bool = False


@dataclass(frozen=True, slots=True)
class StaticJoinSpec:
    """Joins each row of a stream with the rows of a stored table. ``how``: inner, outer, semi, anti or existence,
    which adds a column to each row of the stream that is true if it has a match.

    ``path`` is the table's file in a worker. Rows of it that fail one of ``filters`` never match. ``condition`` is over
    the ``width`` columns of the stream, then the table's. ``output`` are the positions of the result's columns among
    these; ``schema`` is that of the result.
    """

    how: str
    path: str
    keys: tuple[StaticJoinKey, ...]
    filters: tuple[Expression, ...]
    condition: Expression | None
    width: int
    output: tuple[int, ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Writes a stream. ``format`` is a registered name, a PySpark ``DataSource`` class or a class of a ``Sink``.

    ``table`` is the schema of the rows in output mode complete, where the end of a range marks the end of a whole
    result; None in other modes. ``batch`` is the schema of rows where each range of the source is a call of the
    function, also without rows.
    """

    format: str | type
    options: Mapping[str, str] = field(default_factory=dict)
    function: UserFunction | None = None
    table: pa.Schema | None = None
    batch: pa.Schema | None = None

    @property
    def output_directory(self) -> str | None:
        """The directory in which the sink keeps hidden files until their commit; None for a sink without such files."""
        if self.format not in FILE_FORMATS | STAGED_FORMATS:
            return None
        return next((value for key, value in self.options.items() if key.lower() == "path"), None)

    @property
    def single_committer(self) -> bool:
        """Whether a single committer after the sink commits what all of its subtasks have prepared."""
        if isinstance(self.format, type):
            return bool(getattr(self.format, "single_committer", True))
        return self.format in ("delta", "foreachBatch", "postgresql")


@dataclass(frozen=True, slots=True)
class CommitterSpec(_ConnectorSpec):
    """The single committer of a sink, downstream of the :class:`SinkSpec` of its writers (two-phase commit).

    ``whole``: each commit has all rows of the result (output mode complete). ``in_calls`` is as in
    :class:`EnumeratorSpec`.
    """

    function: UserFunction | None = None
    whole: bool = False
    in_calls: bool = False


@dataclass(frozen=True, slots=True)
class EnumeratorSpec(_ConnectorSpec):
    """The single finder of splits in front of the readers of a source; its :class:`RangeReaderSpec` follows.

    ``acknowledges``: it notifies the reader of the positions that completed checkpoints cover; false in a restore
    drill. ``reported``: the data source reported the schema; the pipeline declares none. ``in_step``: its ranges and
    those of other sources are Spark's batches, each of which begins when the one before has been processed.
    ``keeps_last`` is as in :class:`WatermarkSpec`. ``in_calls``: a checkpoint has to cover each range before the next
    one, so that a sink is called with each.
    """

    acknowledges: bool = True
    reported: bool = False
    program: UserFunction | None = None
    in_step: bool = False
    keeps_last: bool = False
    in_calls: bool = False


@dataclass(frozen=True, slots=True)
class RangeReaderSpec(_ConnectorSpec):
    """Reads the splits that an :class:`EnumeratorSpec` found and sent to this subtask.

    ``acknowledges``, ``reported`` and ``in_calls`` are as in :class:`EnumeratorSpec`.
    """

    acknowledges: bool = True
    reported: bool = False
    program: UserFunction | None = None
    in_calls: bool = False


@dataclass(frozen=True, slots=True)
class DrillSinkSpec:
    """Replaces a sink or its committer in a restore drill: counts rows and writes nothing."""


OperatorSpec = (
    SourceSpec
    | MapInArrowSpec
    | ConditionSpec
    | ObserveSpec
    | EvaluateSpec
    | GenerateSpec
    | PythonFunctionsSpec
    | WatermarkSpec
    | AggregateSpec
    | ExpandSpec
    | GroupSpec
    | TableSpec
    | SortSpec
    | LatestSpec
    | LimitSpec
    | DeduplicateSpec
    | ProcessSpec
    | JoinSpec
    | StaticJoinSpec
    | SinkSpec
    | CommitterSpec
    | DrillSinkSpec
    | EnumeratorSpec
    | RangeReaderSpec
)
