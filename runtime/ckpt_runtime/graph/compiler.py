"""Compiles a logical plan: decides uids, parallelisms and edges, chains operators into vertices, checks the result.

The outcome is deterministic: two runs of one pipeline function give equal job graphs. Never opens a connector; user
code has run before (the pipeline function) or runs later (in a worker).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import msgspec
import pyarrow as pa

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import GROUP_OPTION, alignment_of
from ckpt_runtime.graph.formats import COMMITTABLE_SCHEMA, SPLIT_SCHEMA, available_now, is_split_source
from ckpt_runtime.graph.job_graph import (
    BATCHES,
    FILTERED,
    WATERMARK,
    JobEdge,
    JobGraph,
    JobVertex,
    OperatorNode,
    Partitioning,
    vertex_id_of,
)
from ckpt_runtime.graph.kafka_columns import check_transactions, is_exactly_once, transaction_timeout_ms
from ckpt_runtime.graph.key_groups import DEFAULT_MAX_PARALLELISM, UPPER_BOUND_MAX_PARALLELISM
from ckpt_runtime.graph.logical import Chaining, LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import (
    READER_SUFFIX,
    CommitterSpec,
    ConditionSpec,
    DrillSinkSpec,
    EnumeratorSpec,
    EvaluateSpec,
    GenerateSpec,
    JoinSpec,
    MapInArrowSpec,
    ObserveSpec,
    OperatorSpec,
    PythonFunctionsSpec,
    RangeReaderSpec,
    SinkSpec,
    SourceSpec,
    StaticJoinSpec,
    TableSpec,
    WatermarkSpec,
)
from ckpt_runtime.sources import is_source

COMMITTER_SUFFIX = ".committer"


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A checked plan: ``job_graph`` is sent to other processes; ``specs``, by operator uid, stay in this process.

    ``input_schemas`` has no entry for sources, ``output_schemas`` none for sinks without a committer.
    ``own_configuration`` holds the options that the pipeline's code set; the graph's is the effective one.
    """

    job_graph: JobGraph
    specs: dict[str, OperatorSpec]
    input_schemas: dict[str, pa.Schema]
    output_schemas: dict[str, pa.Schema]
    warnings: tuple[str, ...] = ()
    own_configuration: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Operator:
    """A node with all its settings decided."""

    node: LogicalNode
    uid: str
    uid_given: bool
    parallelism: int
    inputs: list[_Edge] = field(default_factory=list)
    consumers: int = 0
    in_step: bool = False
    query: str = ""

    @property
    def chain_head(self) -> bool:
        """Whether the operator starts a vertex."""
        if len(self.inputs) != 1 or self.node.chaining is not Chaining.ALWAYS:
            return True
        edge = self.inputs[0]
        upstream = edge.source
        return (
            edge.partitioning is not Partitioning.FORWARD
            or upstream.consumers != 1
            or upstream.node.chaining is Chaining.NEVER
        )


@dataclass(frozen=True, slots=True)
class _Edge:
    source: _Operator
    partitioning: Partitioning
    keys: tuple[str, ...]


def compile_plan(plan: LogicalPlan) -> CompiledPlan:
    """Compiles ``plan``.

    Raises PlanError for a plan without source or sink, a uid given twice, a parallelism below 1 or above the maximum,
    two maximum parallelisms within one chain, and a watermark that would move within a batch of a stream reader.
    """
    nodes, warnings = _reachable(plan)
    nodes = _expand_data_sources(nodes)
    operators = _decide(plan, nodes, warnings)
    if plan.drill:
        _replace_what_is_seen_outside(operators)
    _connect(operators)
    _move_event_time_by_ranges(operators)
    _keep_batches_in_step(operators)
    _separate_calls(operators)
    chains = _chain(plan, operators)
    graph = _job_graph(plan, chains)
    configuration = Configuration(graph.configuration)
    _check_alignment(chains)
    paced = [each.uid for each in operators if each.node.kind == "enumerator" and _is_paced(each.node.spec)]
    _check_rates(configuration, paced)
    interval_ms = configuration.get(CheckpointingOptions.INTERVAL)
    warnings += graph.warnings(interval_ms)
    for operator in operators:
        if isinstance(operator.node.spec, SinkSpec) and operator.node.spec.format == "kafka":
            timeout_ms = configuration.get(CheckpointingOptions.TIMEOUT)
            check_transactions(operator.node.spec.options, interval_ms, timeout_ms)
    return CompiledPlan(
        job_graph=graph,
        specs={operator.uid: operator.node.spec for operator in operators},
        input_schemas={
            operator.uid: _schema_of(operator.inputs[0].source) for operator in operators if operator.inputs
        },
        output_schemas={
            operator.uid: operator.node.schema for operator in operators if operator.node.schema is not None
        },
        warnings=tuple(warnings),
    )


def _is_paced(spec: OperatorSpec) -> bool:
    """Whether ``connectors/split_source.py`` runs a source; PySpark's data sources have readers of their own."""
    return isinstance(spec, EnumeratorSpec | RangeReaderSpec) and (
        isinstance(spec.format, str) or is_source(spec.format)
    )


def _check_alignment(chains: list[list[_Operator]]) -> None:
    """Checks that a source whose watermarks are to be aligned can know its event time. Raises PlanError."""
    for chain in chains:
        spec, uid = chain[0].node.spec, chain[0].uid.removesuffix(READER_SUFFIX)
        if not isinstance(spec, RangeReaderSpec) or alignment_of(spec.options) is None:
            continue
        field = f"option {GROUP_OPTION!r}"
        if not _is_paced(spec):
            raise PlanError(field, f"source {uid!r} is a PySpark DataSource, whose readers cannot be made to wait")
        # Event time of all rows counts, also where some are filtered out before the query's own event time.
        watermarks = [each for each in chain if each.node.kind == WATERMARK and each.node.filtered_for is None]
        if len(watermarks) != 1:
            raise PlanError(
                field,
                f"source {uid!r} needs exactly one withWatermark in its own vertex, and has {len(watermarks)}: call it "
                "before the stream branches, is joined or changes its parallelism, and leave "
                "pipeline.operator-chaining.enabled at true",
            )


def _check_rates(configuration: Configuration, sources: list[str]) -> None:
    """Checks the rates of sources. Raises PlanError."""
    field = f"option {PipelineOptions.SOURCE_RATES.key!r}"
    for uid, text in (configuration.get(PipelineOptions.SOURCE_RATES) or {}).items():
        if uid not in sources:
            known = ", ".join(sources) or "none"
            problem = f"no source whose rate can be limited has the uid {uid!r}; those are: {known}"
            raise PlanError(field, problem)
        try:
            is_rate = 0 <= float(text) < float("inf")
        except ValueError:
            is_rate = False
        if not is_rate:
            raise PlanError(field, f"{text!r} of {uid!r} is not a number of rows per second, 0 or more")


def _transaction_timeout_ms(spec: OperatorSpec) -> int | None:
    """The age at which the target of a sink aborts a transaction; None for other operators."""
    if isinstance(spec, SinkSpec) and spec.format == "kafka" and is_exactly_once(spec.options):
        return transaction_timeout_ms(spec.options)
    return None


def _alignment_group(spec: OperatorSpec) -> str | None:
    """The group of sources that a reader's watermarks are aligned with; None for other operators."""
    alignment = alignment_of(spec.options) if isinstance(spec, RangeReaderSpec) else None
    return None if alignment is None else alignment.group


def _schema_of(operator: _Operator) -> pa.Schema:
    assert operator.node.schema is not None
    return operator.node.schema


def _reachable(plan: LogicalPlan) -> tuple[list[LogicalNode], list[str]]:
    """The nodes that lead to a sink, in plan order; others are omitted with a warning."""
    if not any(node.kind == "source" for node in plan.nodes):
        raise PlanError("pipeline", "it has no source; start with spark.readStream.format(...).load()")
    sinks = [node for node in plan.nodes if node.kind == "sink"]
    if not sinks:
        raise PlanError("pipeline", "it has no sink; end each branch with .writeStream.format(...).start()")
    wanted: set[LogicalNode] = set()
    todo = list(sinks)
    while todo:
        node = todo.pop()
        if node not in wanted:
            wanted.add(node)
            todo.extend(edge.node for edge in node.inputs)
    warnings = [
        f"operator {node.label!r} is not connected to a sink and is not part of the job"
        for node in plan.nodes
        if node not in wanted
    ]
    return [node for node in plan.nodes if node in wanted], warnings


def _expand_data_sources(nodes: list[LogicalNode]) -> list[LogicalNode]:
    """Replaces sources of splits by an enumerator and range readers, and appends single committers to their sinks."""
    replaced: dict[LogicalNode, LogicalNode] = {}
    expanded: list[LogicalNode] = []
    for node in nodes:
        inputs = tuple(
            LogicalInput(replaced.get(edge.node, edge.node), edge.partitioning, edge.keys) for edge in node.inputs
        )
        copy = replace(node, inputs=inputs)
        replaced[node] = copy
        spec = copy.spec
        if isinstance(spec, SourceSpec) and is_split_source(spec.format):
            enumerator, reader = _reader_pair(copy, spec)
            expanded += [enumerator, reader]
            replaced[node] = reader
        elif isinstance(spec, SinkSpec) and spec.single_committer:
            # The sink emits committables for the committer, not rows.
            copy.schema = COMMITTABLE_SCHEMA
            expanded += [copy, _committer(copy, spec)]
        else:
            expanded.append(copy)
    return expanded


def _reader_pair(node: LogicalNode, spec: SourceSpec) -> tuple[LogicalNode, LogicalNode]:
    name = node.name or _format_name(spec.format)
    enumerator = replace(
        node,
        spec=EnumeratorSpec(spec.format, spec.options, node.schema, reported=spec.schema is None, program=spec.program),
        # One subtask: PySpark's readers plan offsets in one place.
        schema=SPLIT_SCHEMA,
        name=f"{name} offsets",
        parallelism=1,
        chaining=Chaining.NEVER,
    )
    reader = replace(
        node,
        spec=RangeReaderSpec(
            spec.format, spec.options, node.schema, reported=spec.schema is None, program=spec.program
        ),
        inputs=(LogicalInput(enumerator, Partitioning.REBALANCE),),
        uid=None if node.uid is None else node.uid + READER_SUFFIX,
        name=name,
    )
    return enumerator, reader


def _committer(node: LogicalNode, spec: SinkSpec) -> LogicalNode:
    # One subtask: these sinks commit all that was prepared for a checkpoint in one call.
    return LogicalNode(
        CommitterSpec(spec.format, spec.options, node.inputs[0].node.schema, spec.function, spec.table is not None),
        (LogicalInput(node, Partitioning.REBALANCE),),
        schema=None,
        uid=None if node.uid is None else node.uid + COMMITTER_SUFFIX,
        name=f"{node.name or _format_name(spec.format)} commit",
        parallelism=1,
        chaining=Chaining.NEVER,
        starts_fresh=node.starts_fresh,
    )


def _replace_what_is_seen_outside(operators: list[_Operator]) -> None:
    """Replaces operators with external effects, for a restore drill. Uids, vertices and edges stay, so that the
    snapshot fits; the fingerprint changes."""
    for operator in operators:
        spec = operator.node.spec
        if isinstance(spec, SinkSpec | CommitterSpec):
            operator.node.spec = DrillSinkSpec()
        elif isinstance(spec, EnumeratorSpec | RangeReaderSpec):
            operator.node.spec = replace(spec, acknowledges=False)


def _format_name(format_: str | type) -> str:
    return format_ if isinstance(format_, str) else format_.__name__


def _decide(plan: LogicalPlan, nodes: list[LogicalNode], warnings: list[str]) -> list[_Operator]:
    """Gives every operator its uid and parallelism."""
    given: dict[str, LogicalNode] = {}
    for node in nodes:
        if node.uid is None:
            continue
        if node.uid in given:
            raise PlanError("uid", f"{node.uid!r} is used by two operators; each needs its own")
        given[node.uid] = node
    operators: list[_Operator] = []
    unnamed: Counter[str] = Counter()
    taken = set(given)
    uids: dict[LogicalNode, str] = {}
    position = 0
    for node in nodes:
        if node.filtered_for is not None:
            above = node.inputs[0].node
            while not isinstance(above.spec, WatermarkSpec):
                above = above.inputs[0].node
            part = "" if node.kind == WATERMARK else f".{node.kind}"
            uid = _free_uid(uids[above] + FILTERED + node.filtered_for + part, taken)
        elif node.uid is None and isinstance(node.spec, RangeReaderSpec):
            uid = uids[node.inputs[0].node] + READER_SUFFIX  # its source's rate and position are looked up by it
        else:
            uid = node.uid or _derived_uid(node, position, unnamed, taken)
        position += node.filtered_for is None  # moved filters do not change the uids of others
        uids[node] = uid
        if node.uid is None and node.stateful and node.kind not in ("range_reader", "table", "committer"):
            warnings.append(
                f"operator {node.label!r} keeps state but has no uid; {uid!r} is its number among those of its kind, "
                "and its state does not fit when one of them is added or removed: name it with hint('uid', ...), or a "
                "sink with queryName(...)"
            )
        if isinstance(node.spec, JoinSpec) and node.spec.within_ms is None:
            warnings.append(
                f"operator {uid!r} joins without time bounds: it keeps every row for ever; add bounds of event time "
                "to its condition"
            )
        parallelism = plan.default_parallelism if node.parallelism is None else node.parallelism
        if not 1 <= parallelism <= UPPER_BOUND_MAX_PARALLELISM:
            raise PlanError(
                "parallelism", f"{parallelism} of operator {uid!r} is not between 1 and {UPPER_BOUND_MAX_PARALLELISM}"
            )
        operators.append(_Operator(node, uid, node.uid is not None, parallelism))
    return operators


def _derived_uid(node: LogicalNode, position: int, unnamed: Counter[str], taken: set[str]) -> str:
    """The uid of a node without one: with state its number among those of its kind, else its position.

    As in Spark, operators without state may be added and removed in front of one with state, which keeps it. A
    watermark keeps the time that it has reached.
    """
    if node.stateful or node.kind == WATERMARK:
        position = unnamed[node.kind]
        unnamed[node.kind] += 1
    return _free_uid(f"{node.kind}-{position}", taken)


def _free_uid(uid: str, taken: set[str]) -> str:
    while uid in taken:
        uid += "-derived"
    taken.add(uid)
    return uid


def _connect(operators: list[_Operator]) -> None:
    """Turns inputs into edges; a change of parallelism turns forward into rebalance.

    Operators that share no rows belong to different queries.
    """
    by_node = {operator.node: operator for operator in operators}
    queries: dict[str, str] = {}
    for operator in operators:
        for edge in operator.node.inputs:
            source = by_node[edge.node]
            partitioning = edge.partitioning
            if partitioning is Partitioning.FORWARD and source.parallelism != operator.parallelism:
                partitioning = Partitioning.REBALANCE
            operator.inputs.append(_Edge(source, partitioning, edge.keys))
            source.consumers += 1
        joined = {queries[edge.source.uid] for edge in operator.inputs} or {operator.uid}
        queries[operator.uid] = min(joined)
        queries = {uid: min(joined) if query in joined else query for uid, query in queries.items()}
    for operator in operators:
        operator.query = queries[operator.uid]


_PASS_RANGES_ON = (
    WatermarkSpec,
    ConditionSpec,
    ObserveSpec,
    EvaluateSpec,
    GenerateSpec,
    PythonFunctionsSpec,
    MapInArrowSpec,
    StaticJoinSpec,
)
"""Operators that emit all rows of a batch before they take the next one, so that the end of a range never overtakes its
rows."""


def _move_event_time_by_ranges(operators: list[_Operator]) -> None:
    """Behind a PySpark stream reader, event time advances when a range is complete, as between Spark's batches.

    A source that ends with the present data reads one range after the other, as Spark does with ``availableNow``.
    Classes of ``ckpt_runtime.sources.Source`` are unknown to Spark: their ranges are no batches, and wait for nothing.

    An operator that cannot guarantee to forward the end of a range after its rows drops it. Raises PlanError for a
    watermark after such an operator: event time would advance within a range and make some of its rows late.
    """
    whole: dict[str, bool] = {}
    lost: dict[str, str] = {}
    united: set[str] = set()
    for operator in operators:
        uid, spec = operator.uid, operator.node.spec
        sources = [edge.source.uid for edge in operator.inputs]
        reason = next((lost[source] for source in sources if source in lost), None)
        if isinstance(spec, WatermarkSpec) and spec.united and _have_batches(operator):
            operator.node.spec = replace(spec, by_ranges=True, by_batches=True)
            lost[uid] = f"several streams meet at operator {uid!r}"
            united.add(uid)
            continue
        if not united.isdisjoint(sources) and _why_ranges_end_at(operator) is None:
            united.add(uid)  # here, too, the ends of batches follow their rows
            if isinstance(spec, WatermarkSpec) and operator.node.filtered_for is not None:
                operator.node.spec = replace(spec, by_ranges=True, by_batches=True, united=True)
                lost[uid] = lost[sources[0]]
                continue
        if reason is None and not isinstance(spec, RangeReaderSpec):
            if whole.keys().isdisjoint(sources):
                continue
            reason = _why_ranges_end_at(operator)
        if reason is None:
            if isinstance(spec, RangeReaderSpec):
                whole[uid] = available_now(spec.options) and not is_source(spec.format)
            else:
                whole[uid] = whole[sources[0]]
            if isinstance(spec, WatermarkSpec):
                operator.node.spec = replace(spec, by_ranges=True, by_batches=whole[uid])
        elif isinstance(spec, WatermarkSpec):
            raise PlanError(
                "withWatermark",
                f"operator {uid!r} cannot know when a batch of the stream reader is complete, because {reason}: event "
                "time would advance within the batch, and some of its rows would be dropped as late. Call "
                "withWatermark earlier, preferably directly after load(). For the rows of transformWithState, name "
                "their event time in eventTimeColumnName",
            )
        else:
            lost[uid] = reason


def _have_batches(operator: _Operator) -> bool:
    """Whether the event time of all inputs advances with batches."""
    below = [edge.source.node.spec for edge in operator.inputs]
    return all(isinstance(spec, WatermarkSpec) and spec.by_batches for spec in below)


def _keep_batches_in_step(operators: list[_Operator]) -> None:
    """Where streams with batches or their subtasks meet, each batch has the next range of every stream, as in Spark.

    The operators in which they meet, and those after them, notice which batches are complete; the enumerators wait.
    Queries that share no operator do not wait for each other.
    """
    sources: dict[str, str] = {}
    batches: dict[str, frozenset[str]] = {}
    waiting: frozenset[str] = frozenset()
    meeting: frozenset[str] = frozenset()
    keep_last: frozenset[str] = frozenset()
    for operator in operators:
        uid, spec, above = operator.uid, operator.node.spec, [edge.source.uid for edge in operator.inputs]
        if isinstance(spec, RangeReaderSpec):
            sources[uid] = above[0]
        elif len(above) == 1 and above[0] in sources:
            sources[uid] = sources[above[0]]
        if isinstance(spec, WatermarkSpec) and not spec.united:
            batches[uid] = frozenset([sources[uid]] if spec.by_batches else [])
            keep_last |= batches[uid] if spec.keeps_last else frozenset()
        elif not isinstance(spec, SinkSpec) and all(batches.get(source) for source in above):
            batches[uid] = frozenset().union(*(batches[source] for source in above))
            operator.in_step = len(above) > 1 or any(
                edge.source.in_step or edge.partitioning is not Partitioning.FORWARD for edge in operator.inputs
            )
            waiting |= batches[uid] if operator.in_step else frozenset()
            if len(above) > 1:
                meeting |= batches[uid]
                # Each subtask needs the times of all subtasks of a stream: the batches of two streams may have their
                # last rows in different ones, and none of these knows the times of both.
                operator.inputs = [
                    replace(edge, partitioning=Partitioning.REBALANCE)
                    if edge.partitioning is Partitioning.FORWARD
                    else edge
                    for edge in operator.inputs
                ]
    if meeting & keep_last:
        raise PlanError(
            "trigger",
            "where streams meet, the event time of the last batch cannot be left to the next run: use availableNow "
            "instead of once, and set spark.sql.streaming.noDataMicroBatches.enabled to true",
        )
    for operator in operators:
        uid, spec = operator.uid, operator.node.spec
        if uid in waiting and isinstance(spec, EnumeratorSpec):
            operator.node.spec, operator.in_step = replace(spec, in_step=True, keeps_last=uid in keep_last), True


def _separate_calls(operators: list[_Operator]) -> None:
    """A function of ``foreachBatch`` that gets the data present at the start is called with each batch of Spark. The
    batch is all of this data unless the source has a limit, which only the reader of a PySpark stream may know. The
    next range waits for a checkpoint that covers the one before, and readers take no barrier within a range.
    """
    above: dict[str, frozenset[str]] = {}
    waiting: frozenset[str] = frozenset()
    for operator in operators:
        sources: frozenset[str] = frozenset().union(*(above[edge.source.uid] for edge in operator.inputs))
        above[operator.uid] = sources or frozenset([operator.uid])
        if isinstance(operator.node.spec, SinkSpec) and operator.node.spec.format == "foreachBatch":
            specs = [each.node.spec for each in operators if each.uid in sources]
            if all(map(_has_batches, specs)):
                waiting |= sources
    for operator in operators:
        spec = operator.node.spec
        if isinstance(spec, EnumeratorSpec | RangeReaderSpec) and above[operator.uid] <= waiting:
            operator.node.spec, operator.in_step = replace(spec, in_calls=True), True
        elif isinstance(spec, CommitterSpec) and above[operator.uid] <= waiting:
            operator.node.spec = replace(spec, in_calls=True)
            writer = operator.inputs[0].source.node
            alone = len(above[operator.uid]) == 1 and not spec.whole
            if alone and isinstance(writer.spec, SinkSpec) and spec.format == "foreachBatch":
                writer.spec = replace(writer.spec, batch=spec.schema)


def _has_batches(spec: OperatorSpec) -> bool:
    """Whether a source ends with the present data, and reads it in batches that do not depend on time."""
    return isinstance(spec, EnumeratorSpec) and available_now(spec.options) and alignment_of(spec.options) is None


def _why_ranges_end_at(operator: _Operator) -> str | None:
    """Returns why an operator does not forward the end of a reader's range; None when it does."""
    if len(operator.inputs) > 1:
        return f"several streams meet at operator {operator.uid!r}"
    if not isinstance(operator.node.spec, _PASS_RANGES_ON):
        return f"operator {operator.uid!r} ({operator.node.kind}) creates rows or keeps them"
    partitioning = operator.inputs[0].partitioning
    if partitioning is not Partitioning.FORWARD:
        upstream = operator.inputs[0].source
        return (
            f"rows are distributed over other subtasks before operator {operator.uid!r} ({partitioning.value}, "
            f"parallelism {upstream.parallelism} to {operator.parallelism})"
        )
    return None


def _chain(plan: LogicalPlan, operators: list[_Operator]) -> list[list[_Operator]]:
    """The vertices as lists of operators, in topological order (heads keep plan order)."""
    chains: list[list[_Operator]] = []
    chain_of: dict[str, list[_Operator]] = {}
    of_tables: set[str] = set()
    for operator in operators:
        # A result table and its sink are one step even without chaining: there is never a barrier between its rows.
        whole = not operator.chain_head and operator.inputs[0].source.uid in of_tables
        if whole or isinstance(operator.node.spec, TableSpec):
            of_tables.add(operator.uid)
        if operator.chain_head or not (plan.chaining or whole):
            chain = [operator]
            chains.append(chain)
        else:
            chain = chain_of[operator.inputs[0].source.uid]
            chain.append(operator)
        chain_of[operator.uid] = chain
    return chains


def _max_parallelism(plan: LogicalPlan, chain: list[_Operator]) -> int:
    """The number of key groups of a vertex: what the job sets, or that of restored state, or Flink's default."""
    parallelism = chain[0].parallelism
    maximum = plan.default_max_parallelism
    if maximum is None:
        # Keyed state that is restored cannot be cut into another number of key groups.
        restored = plan.restored_max_parallelism
        maximum = next((restored[operator.uid] for operator in chain if operator.uid in restored), None)
    if maximum is None:
        # Flink's rule: one and a half times the parallelism, rounded up to a power of two, 128 at least.
        wanted = 1 << (parallelism + (parallelism + 1) // 2 - 1).bit_length()
        maximum = min(max(wanted, DEFAULT_MAX_PARALLELISM), UPPER_BOUND_MAX_PARALLELISM)
    if not 1 <= maximum <= UPPER_BOUND_MAX_PARALLELISM:
        raise PlanError(
            "maxParallelism",
            f"{maximum} of operator {chain[0].uid!r} is not between 1 and {UPPER_BOUND_MAX_PARALLELISM}",
        )
    if parallelism > maximum:
        raise PlanError(
            "parallelism", f"{parallelism} of operator {chain[0].uid!r} is above its maximum parallelism {maximum}"
        )
    return maximum


def _job_graph(plan: LogicalPlan, chains: list[list[_Operator]]) -> JobGraph:
    vertex_of: dict[str, str] = {}
    vertices: list[JobVertex] = []
    edges: list[JobEdge] = []
    for chain in chains:
        vertex_id = vertex_id_of(chain[0].uid)
        vertex_of.update({operator.uid: vertex_id for operator in chain})
        vertices.append(
            JobVertex(
                id=vertex_id,
                operators=tuple(_operator_node(operator) for operator in chain),
                parallelism=chain[0].parallelism,
                max_parallelism=_max_parallelism(plan, chain),
            )
        )
        edges.extend(
            JobEdge(vertex_of[edge.source.uid], vertex_id, edge.partitioning, edge.keys) for edge in chain[0].inputs
        )
    graph = JobGraph(plan.name, tuple(vertices), tuple(edges), dict(plan.configuration))
    # Last: chains, edges and key groups are those of the submission, at any parallelism that the job was rescaled to
    # since.
    return graph.with_parallelism(plan.vertex_parallelism) if plan.vertex_parallelism else graph


def _operator_node(operator: _Operator) -> OperatorNode:
    node = operator.node
    return OperatorNode(
        uid=operator.uid,
        name=node.name or operator.uid,
        kind=node.kind,
        stateful=node.stateful,
        uid_given=operator.uid_given,
        user_code=node.user_code,
        output_directory=node.spec.output_directory if isinstance(node.spec, SinkSpec) else None,
        transaction_timeout_ms=_transaction_timeout_ms(node.spec),
        alignment_group=BATCHES + operator.query if operator.in_step else _alignment_group(node.spec),
        observation=msgspec.json.encode(node.spec).decode() if isinstance(node.spec, ObserveSpec) else None,
        starts_fresh=node.starts_fresh,
    )
