"""The typed plan of a query: what Spark's analyzer made of a captured program, in a form that is stored and sent.

Nodes are listed after their inputs, and name them by position. ``plan_id`` is the id of the captured relation of a
node; where one relation becomes several nodes, the last of them has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias
from typing import Literal as OneOf

import msgspec

from ckpt_runtime.expressions.nodes import Expression, Mode
from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.graph.specs import ObserveSpec


class TypedColumn(msgspec.Struct, frozen=True):
    """One column of a node's output."""

    name: str
    type: SparkType
    nullable: bool = True


class _Node(msgspec.Struct, frozen=True, tag_field="node", kw_only=True):
    columns: tuple[TypedColumn, ...]
    inputs: tuple[int, ...] = ()
    plan_id: int | None = None


PLACEHOLDER_FILES = "file:/*.no-file-of-a-stream"
"""A pattern without a file: the path of the stream of files that stands for one whose hidden column is read."""


class Source(_Node, frozen=True, tag="source", kw_only=True):
    """Reads the stream that the captured relation describes."""


class StaticTable(_Node, frozen=True, tag="static_table", kw_only=True):
    """Rows that Spark has computed while the program was planned: any part of a plan without a stream.

    ``digest`` names the stored rows; it is empty in the answer to a request for types only.
    """

    digest: str = ""


class Project(_Node, frozen=True, tag="project", kw_only=True):
    """Computes each output column from its input's columns."""

    expressions: tuple[Expression, ...]


class Filter(_Node, frozen=True, tag="filter", kw_only=True):
    """Keeps the rows for which a condition is true."""

    condition: Expression


class Watermark(_Node, frozen=True, tag="watermark", kw_only=True):
    """Event time: the watermark trails the greatest value of a column by ``delay_ms``."""

    column: int
    delay_ms: int


class Union(_Node, frozen=True, tag="union", kw_only=True):
    """The rows of all inputs, which have the same types by position."""


class Repartition(_Node, frozen=True, tag="repartition", kw_only=True):
    """The same rows, sent in turn to the subtasks of what reads them."""


class TypedAggregate(msgspec.Struct, frozen=True):
    """An aggregate function over input columns. ``function`` is the name of Spark's class.

    With ``filtered`` the last argument is a condition, and rows for which it is not true do not count.
    """

    function: str
    arguments: tuple[int, ...]
    type: SparkType
    mode: Mode = "ansi"
    filtered: bool = False
    settings: dict[str, Any] = {}


class Aggregate(_Node, frozen=True, tag="aggregate", kw_only=True):
    """Groups by input columns; its output is the keys, then the results of the aggregates.

    ``event_time`` is the key by which groups end, ``session`` the key that is a session window.
    """

    keys: tuple[int, ...]
    aggregates: tuple[TypedAggregate, ...]
    event_time: int | None = None
    session: int | None = None


class SortKey(msgspec.Struct, frozen=True):
    """One expression that rows are ordered by."""

    expression: Expression
    descending: bool
    nulls_first: bool


class Sort(_Node, frozen=True, tag="sort", kw_only=True):
    """Orders the result of an aggregation (output mode complete)."""

    orders: tuple[SortKey, ...]


class Limit(_Node, frozen=True, tag="limit", kw_only=True):
    """The first rows of the result of an aggregation (output mode complete)."""

    rows: int


class Generate(_Node, frozen=True, tag="generate", kw_only=True):
    """The input's columns, then those that a generator such as ``explode`` makes: one row for each of its elements.

    ``outer`` keeps rows without an element, with nulls.
    """

    function: Expression
    outer: bool


class MapPartitions(_Node, frozen=True, tag="map_partitions", kw_only=True):
    """``mapInPandas`` or ``mapInArrow`` with the program's Python function of that number."""

    function: int
    in_pandas: bool


class StatefulFunction(_Node, frozen=True, tag="stateful_function", kw_only=True):
    """``transformWithState`` (of rows or of pandas frames) or ``applyInPandasWithState`` (of a group's state).

    A second input is the initial state, whose first columns are its keys.
    Rows are grouped by the input columns ``keys``. ``time`` is Spark's name of the time mode or timeout, ``state`` the
    type of a group's state, and ``event_time`` the output column that is event time for what follows.
    """

    function: int
    kind: OneOf["rows", "pandas", "group_state"]
    keys: tuple[int, ...]
    output_mode: str
    time: str
    state: SparkType = "void"
    event_time: int | None = None


class Join(_Node, frozen=True, tag="join", kw_only=True):
    """Joins two inputs; ``how`` is Spark's name. The condition is over the left columns, then the right ones.

    ``windows`` are the columns of the left and of the right input that are windows of event time, if one has some.
    ``late`` are the columns of both inputs by which Spark drops late rows, for joins of streams.
    """

    how: str
    condition: Expression | None
    windows: tuple[int | None, int | None] | msgspec.UnsetType = msgspec.UNSET
    late: tuple[int | None, int | None] | msgspec.UnsetType = msgspec.UNSET


class Expand(_Node, frozen=True, tag="expand", kw_only=True):
    """Computes several rows from each row: one for each of its windows, or one for each set of grouping keys."""

    rows: tuple[tuple[Expression, ...], ...]


class Observe(_Node, frozen=True, tag="observe", kw_only=True):
    """Passes the rows on, and computes metrics of them for reports of progress."""

    spec: ObserveSpec


class Deduplicate(_Node, frozen=True, tag="deduplicate", kw_only=True):
    """Passes the first row of each key. ``event_time`` is the column by which rows are late.

    With ``within_ms`` a key is removed from state that long after its first row, otherwise with its own event time.
    """

    keys: tuple[int, ...]
    event_time: int | None = None
    within_ms: int | None = None


PlanNode: TypeAlias = (
    Source
    | StaticTable
    | Project
    | Filter
    | Watermark
    | Union
    | Repartition
    | Aggregate
    | Sort
    | Limit
    | Expand
    | Deduplicate
    | Observe
    | Generate
    | MapPartitions
    | StatefulFunction
    | Join
)


def joins_streams(node: Join, nodes: Sequence[PlanNode]) -> bool:
    """Whether both inputs of a join of ``nodes`` are streams: it then keeps their rows in state."""
    return not any(isinstance(nodes[at], StaticTable) for at in node.inputs)


def watermark_of_all_rows(at: int, nodes: Sequence[PlanNode]) -> int | None:
    """Returns the watermark in front of one with moved filters between them (``frontend/moved_filters.py``).

    Both have the relation of the author's only one. None for other nodes.
    """
    node = nodes[at]
    if not isinstance(node, Watermark) or node.plan_id is None:
        return None
    [at] = node.inputs
    while isinstance(nodes[at], Filter | Project | Join):
        at = nodes[at].inputs[0]
    below = nodes[at]
    return at if isinstance(below, Watermark) and below.plan_id == node.plan_id else None


IGNORED_FILES = ("spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles")
"""Options of Spark from which streams of files take the option that has the last part of the name."""
CONFIGURED = frozenset(
    {
        *IGNORED_FILES,
        *("spark.sql.ansi.enabled", "spark.sql.session.timeZone", "spark.sql.caseSensitive"),
        "spark.sql.sources.partitionColumnTypeInference.enabled",
    }
)
"""The Spark options whose values the analyzer takes from the program. Other options can make Spark load classes."""
EMPTY_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"
WATERMARK_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
EVENT_TIME_OPTIONS = (EMPTY_BATCHES, WATERMARK_POLICY)
"""Options of Spark that decide when event time advances."""


MOST_QUESTIONS = 50
"""Maximum number of requests in a list."""


class TableRequest(msgspec.Struct, frozen=True):
    """Asks for a table of Spark's catalog that a stream reads, or writes if there is a ``format``.

    ``path`` is the location of a table that is not in Spark's warehouse.
    """

    name: str
    format: str = ""
    path: str = ""
    partitioned_by: tuple[str, ...] = ()


class CatalogTable(msgspec.Struct, frozen=True):
    """A table of Spark's catalog: its full name, where its files are, and its columns as the JSON of a StructType.

    ``options`` are those of its format.
    """

    name: str
    format: str
    location: str
    schema: str
    partitioned_by: tuple[str, ...] = ()
    options: dict[str, str] = {}


class CreatedView(msgspec.Struct, frozen=True):
    """A temporary view that a statement of SQL creates: its name, its query, and the names of its columns if given.

    ``replaces`` and ``keeps`` say whether it takes the place of an existing view of that name, or leaves that one.
    """

    name: str
    query: str
    columns: tuple[str, ...]
    replaces: bool
    keeps: bool


class Shown(msgspec.Struct, frozen=True, tag_field="form"):
    """Asks for the text of ``show``: how many rows it has, to how many characters values are cut (0: none is cut)."""

    rows: int
    truncate: int
    vertical: bool


class Files(msgspec.Struct, frozen=True, tag_field="form"):
    """Asks for the files that ``df.write`` makes of the rows. ``mode`` is that of the writer, such as ``append``.

    They are at ``path``, or those of the ``table`` of Spark's catalog.
    """

    format: str
    path: str
    mode: str
    options: dict[str, str] = {}
    partitioned_by: tuple[str, ...] = ()
    table: str = ""


class AnalysisRequest(msgspec.Struct, frozen=True):
    """A request to Spark: the types of a relation (protobuf), a table, a text in DDL, or a statement that creates.

    The relation may name ``views`` and registered Python ``functions``, which are relations and functions in protobuf.
    With ``with_rows`` Spark also computes the rows of static tables. A ``table`` that is written gets the rows of the
    relation. ``declarations`` are statements that declare variables and functions of SQL, in their order.
    ``collected`` asks for the rows of a relation that reads no stream, for their text, or for files of them.
    ``changes`` is how often the program has changed files or tables before, after which equal requests may have other
    answers.
    """

    relation: bytes = b""
    views: dict[str, bytes] = {}
    functions: dict[str, bytes] = {}
    configuration: dict[str, str] = {}
    ddl: str = ""
    with_rows: bool | msgspec.UnsetType = msgspec.UNSET
    table: TableRequest | msgspec.UnsetType = msgspec.UNSET
    statement: str | msgspec.UnsetType = msgspec.UNSET
    declarations: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    collected: bool | Shown | Files | msgspec.UnsetType = msgspec.UNSET
    changes: int | msgspec.UnsetType = msgspec.UNSET


class Analysis(msgspec.Struct, frozen=True):
    """Spark's answer: the plan's nodes, the last of which is the query's result; or why it refuses the query.

    ``parsed`` is the type that a text in DDL stands for, ``table`` the table that was asked for, and ``view`` what a
    statement creates; a statement that is a declaration creates none. ``places`` has the author's file and line for
    functions that the engine may lack, by the names of Spark's classes. ``unsupported`` is true if the engine refuses
    the query but Spark accepts it. ``rows`` are those that were collected, as a stream of Arrow's IPC format.
    ``ran`` is true for a statement that has changed Spark's catalog or a table of it.
    """

    columns: tuple[TypedColumn, ...] = ()
    nodes: tuple[PlanNode, ...] = ()
    parsed: SparkType = "void"
    places: dict[str, str] = {}
    error: str = ""
    unsupported: str = ""
    table: CatalogTable | msgspec.UnsetType = msgspec.UNSET
    view: CreatedView | msgspec.UnsetType = msgspec.UNSET
    rows: bytes | msgspec.UnsetType = msgspec.UNSET
    ran: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def lasts(self) -> bool:
        """Whether the same Spark would answer so at any time: errors, tables, and rows of tables may change."""
        tables = self.table is not msgspec.UNSET or any(isinstance(node, StaticTable) for node in self.nodes)
        return not (tables or self.error or self.unsupported or self.ran is True)


class AnalysisNeeded(BaseException):
    """Spark has to answer the list of requests ``text`` first. Not an ``Exception``, so that no program catches it."""

    def __init__(self, text: str) -> None:
        super().__init__("Spark has not analyzed this plan yet")
        self.text = text
