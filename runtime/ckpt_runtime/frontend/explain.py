"""The text of ``explain()``: the operators of a frame or a query, their inputs, and how they work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_runtime.expressions.evaluation import FUNCTIONS
from ckpt_runtime.expressions.nodes import Call, Expression, Lambda
from ckpt_runtime.expressions.rows import noted_kernels
from ckpt_runtime.frontend.batch_writers import Console, MemoryTable, SparkWrite
from ckpt_runtime.frontend.capture import Capture, CapturedQuery
from ckpt_runtime.frontend.mapping import QueryMapper, Resolve, Shared
from ckpt_runtime.frontend.query_operators import expressions_of
from ckpt_runtime.frontend.typed_plan import Analysis, StaticTable
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan

_MODES = ("append", "update", "complete")


def explanation(
    capture: Capture, of: Analysis | CapturedQuery, resolve: Resolve, parallelism: int, *, extended: bool
) -> str:
    """Returns the plan of a frame, or of a query with its sink, as text.

    ``parallelism`` is that of operators without a hint. With ``extended`` each operator's columns are listed. A frame
    is planned for the first output mode that it allows. Raises PlanError for operators that the engine does not have.
    """
    if isinstance(of, CapturedQuery):
        plan = LogicalPlan("explained")
        mode = _mapper(capture, plan, resolve).add(of, of.start.query_name)
        named = f"query {of.start.query_name!r}" if of.start.query_name else "query"
    elif isinstance(of.nodes[-1], StaticTable):
        return "== Plan of a static table ==\nSpark computes its rows while the program is planned."
    else:
        plan, mode = _frame(capture, of, resolve)
        named = "frame"
    numbers = {node: number for number, node in enumerate(plan.nodes, 1)}
    lines = [f"== Plan of the {named}, output mode {mode} =="]
    for node, number in numbers.items():
        lines += _operator(node, number, numbers, parallelism, extended=extended)
    return "\n".join(lines)


def _mapper(capture: Capture, plan: LogicalPlan, resolve: Resolve) -> QueryMapper:
    """A mapper that leaves the capture unchanged, because its program continues after this."""
    sources = {id_: replace(source, options=dict(source.options)) for id_, source in capture.sources.items()}
    return QueryMapper(replace(capture, sources=sources, tables=set()), plan, resolve, Shared())


def _frame(capture: Capture, analysis: Analysis, resolve: Resolve) -> tuple[LogicalPlan, str]:
    refused = []
    for mode in _MODES:
        plan = LogicalPlan("explained")
        try:
            _mapper(capture, plan, resolve).add_frame(analysis, mode)
        except PlanError as error:
            refused.append(error)
        else:
            return plan, mode
    raise refused[0]


def _operator(
    node: LogicalNode, number: int, numbers: dict[LogicalNode, int], parallelism: int, *, extended: bool
) -> Iterator[str]:
    own = node.parallelism or parallelism
    uid = f"uid {node.uid}" if node.uid else "no uid"
    yield f"({number}) {_title(node)}, {uid}, parallelism {own}"
    for edge in node.inputs:
        yield f"    input: ({numbers[edge.node]}) {_partitioning(edge, own, parallelism)}"
    yield f"    {'keeps state; ' if node.stateful else ''}{_way(node.spec)}"
    if extended and node.schema is not None:
        yield "    columns: " + ", ".join(f"{field.name} {field.type}" for field in node.schema)


def _title(node: LogicalNode) -> str:
    given = getattr(node.spec, "format", None)
    if given is None:
        return node.kind
    return f"{node.kind} {given if isinstance(given, str) else given.__name__}"


def _partitioning(edge: LogicalInput, own: int, default: int) -> str:
    """How rows are spread over subtasks; as in the compiled job, a change of the parallelism spreads them evenly.

    The compiled job also spreads rows evenly where streams with batches meet.
    """
    if edge.partitioning is Partitioning.FORWARD and (edge.node.parallelism or default) != own:
        return Partitioning.REBALANCE.value
    return f"{edge.partitioning.value}{' by ' if edge.keys else ''}{', '.join(edge.keys)}"


def _way(spec: specs.OperatorSpec) -> str:
    """Returns whether an operator works on batches, or how it calls Python."""
    match spec:
        case specs.PythonFunctionsSpec():
            names = ", ".join(function.name for function in spec.functions)
            return f"calls Python {_python_calls(spec.eval_type)}: {names}"
        case specs.MapInArrowSpec():
            return "calls Python once for each batch"
        case specs.ProcessSpec(in_arrow=True):
            return "calls Python once for each batch, with the states of its keys as columns"
        case specs.ProcessSpec():
            return f"calls Python for each key with its {'pandas frames' if spec.in_pandas else 'rows one by one'}"
        case specs.SinkSpec(function=function) if function is not None:
            if isinstance(function.call, SparkWrite | Console | MemoryTable):
                return "Spark gets the rows of each checkpoint"
            return "calls Python " + ("row by row" if spec.format == "foreach" else "once for each checkpoint")
        case specs.SourceSpec() | specs.SinkSpec() if isinstance(spec.format, type):
            return f"calls the Python class {spec.format.__name__}"
    trees = [spec.function] if isinstance(spec, specs.GenerateSpec) else expressions_of(spec)
    single = sorted(set(_computed_in_python(trees)))
    return "vectorised" + (f", but Python computes values of {', '.join(single)} one by one" if single else "")


def _python_calls(eval_type: int) -> str:
    from pyspark.util import PythonEvalType

    by_row = (PythonEvalType.SQL_BATCHED_UDF, PythonEvalType.SQL_ARROW_BATCHED_UDF)
    return "row by row" if eval_type in by_row else "once for each batch"


def _computed_in_python(trees: Sequence[Expression]) -> Iterator[str]:
    """Yields the functions for which Arrow has no kernel, or none for all of their values."""
    todo = list(trees)
    while todo:
        tree = todo.pop()
        if isinstance(tree, Lambda):
            todo.append(tree.body)
        if not isinstance(tree, Call):
            continue
        todo += tree.arguments
        if tree.function == "JsonTuple":
            yield tree.function
        builder = FUNCTIONS.get(tree.function)
        if builder is None:
            continue  # a generator, which repeats rows
        with noted_kernels() as noted:
            builder(tree, [lambda frame: frame.columns[0] for each in tree.arguments if not isinstance(each, Lambda)])
        if noted:
            yield tree.function
