"""The operators of one query, which the mapping of its typed plan adds to the job's plan one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import compile_expression
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal, rewritten
from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type
from ckpt_runtime.frontend.capture import Capture
from ckpt_runtime.frontend.typed_plan import TypedColumn
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import Chaining, LogicalInput, LogicalNode, LogicalPlan

Inputs = tuple[LogicalInput, ...]
"""Where the rows of a relation come from."""
_DEEPEST = 50
"""Maximum depth of the expressions of projections that are merged."""


class QueryOperators:
    """Adds operators of a query to a plan."""

    def __init__(self, capture: Capture, plan: LogicalPlan, places: Mapping[str, str], output_mode: str) -> None:
        """``places`` has the author's file and line for functions that the engine may lack."""
        self.capture = capture
        self._plan = plan
        self._places = places
        self.output_mode = output_mode
        self.emits_latest = False
        """Whether the sink gets one row of each group that has changed between two checkpoints."""
        self.has_empty_batches = capture.has_empty_batches
        """Whether the event time of the last batch takes effect in a batch without data behind it."""
        self.whole = False
        """Whether operators that are added now follow the result table of an aggregation, and so have one subtask."""

    def apply(self, spec: specs.OperatorSpec, inputs: Inputs, schema: pa.Schema, plan_id: int | None) -> Inputs:
        """Adds an operator with the hints of the relation ``plan_id``. A projection of a projection becomes one."""
        hints = self.capture.hints.get(plan_id, {}) if plan_id is not None else {}
        if isinstance(spec, specs.EvaluateSpec) and len(inputs) == 1:
            spec, inputs = self._merged(spec, inputs)
            if not hints and _changes_nothing(spec, inputs):
                return inputs
        _check_expressions(spec, self._places)
        node = self.add(LogicalNode(spec, inputs, schema))
        node.uid = hints.get("uid")
        if "parallelism" in hints:
            node.parallelism = int(hints["parallelism"])
        if self.whole:
            if node.parallelism not in (None, 1):
                raise PlanError(
                    "parallelism", "after an aggregation in output mode complete the parallelism is 1; remove the hint"
                )
            node.parallelism = 1
        return (LogicalInput(node),)

    def known(self, spec: specs.OperatorSpec, inputs: Inputs, plan_id: int | None) -> Inputs | None:
        """Returns the rows of an operator that the plan has and that would be the same, None without one.

        Optimized plans differ in the columns that are read from one aggregation, so that their nodes are not equal. The
        projection in front of the new operator is removed. Operators with hints are not shared.
        """
        if self.whole or (plan_id is not None and self.capture.hints.get(plan_id)):
            return None
        for other in self._plan.nodes:
            if (other.uid, other.parallelism) == (None, None) and other.spec == spec and _same(other.inputs, inputs):
                read = [edge.node for node in self._plan.nodes for edge in node.inputs]
                for given in inputs:
                    if given.node not in read:
                        self._plan.nodes.remove(given.node)
                return (LogicalInput(other),)
        return None

    def apart(self, edge: LogicalInput) -> Inputs:
        """Returns the streams that meet in a union below an edge, each through operators of its own."""
        node = edge.node
        stateless = isinstance(node.spec, specs.EvaluateSpec | specs.ConditionSpec | specs.GenerateSpec)
        if not stateless or node.uid or node.parallelism or node.schema is None:
            return (edge,)
        below = [each for given in node.inputs for each in self.apart(given)]
        if len(below) == 1:
            return (edge,)
        if node in self._plan.nodes and not any(node is read.node for each in self._plan.nodes for read in each.inputs):
            self._plan.nodes.remove(node)
        return tuple(made for each in below for made in self.apply(node.spec, (each,), node.schema, None))

    def _merged(self, spec: specs.EvaluateSpec, inputs: Inputs) -> tuple[specs.EvaluateSpec, Inputs]:
        """Returns a projection over the input of the projection before it, if no row is computed twice by that."""
        [edge] = inputs
        below = edge.node
        if (
            not isinstance(below.spec, specs.EvaluateSpec)
            or edge.partitioning is not Partitioning.FORWARD
            or below.uid is not None
            or below.parallelism is not None
            or any(known.node is below for node in self._plan.nodes for known in node.inputs)
        ):
            return spec, inputs
        trees = _composed([tree for _, tree in spec.columns], [tree for _, tree in below.spec.columns])
        if trees is None:
            return spec, inputs
        if below in self._plan.nodes:
            self._plan.nodes.remove(below)
        names = [name for name, _ in spec.columns]
        return specs.EvaluateSpec(tuple(zip(names, trees, strict=True)), spec.schema), below.inputs

    def apply_latest(self, keys: tuple[str, ...], inputs: Inputs, schema: pa.Schema) -> Inputs:
        """Adds the operator that makes one row of those that an aggregation emits for a group, in its subtasks."""
        latest = self.apply(specs.LatestSpec(keys), inputs, schema, None)
        latest[0].node.parallelism = inputs[0].node.parallelism
        return latest

    def apply_table(self, spec: specs.TableSpec, inputs: Inputs) -> Inputs:
        """Adds the operator that keeps the result of an aggregation; all later operators get whole results."""
        self.whole = True
        by_key = tuple(LogicalInput(edge.node, Partitioning.HASH, spec.keys) for edge in inputs)
        table = self.apply(spec, by_key, spec.schema, None)
        above = inputs[0].node.uid
        table[0].node.uid = None if above is None else f"{above}.table"
        table[0].node.chaining = Chaining.HEAD
        return table

    def add(self, node: LogicalNode) -> LogicalNode:
        """Adds a node to the plan, and its input if that was merged into a projection of another query."""
        for edge in node.inputs:
            if edge.node not in self._plan.nodes:
                self._plan.nodes.append(edge.node)
        return self._plan.add(node)


def _same(inputs: Inputs, others: Inputs) -> bool:
    """Returns whether inputs bring the same rows: from one node, or from equal projections of one node."""
    if len(inputs) != len(others):
        return False
    for edge, other in zip(inputs, others, strict=True):
        one, two = edge.node, other.node
        equal = isinstance(one.spec, specs.EvaluateSpec) and one.spec == two.spec and one.inputs == two.inputs
        if not (one is two or equal) or (edge.partitioning, edge.keys) != (other.partitioning, other.keys):
            return False
    return True


def _changes_nothing(spec: specs.EvaluateSpec, inputs: Inputs) -> bool:
    """Returns whether a projection gives the columns of its only input as they are."""
    same = all(isinstance(tree, Column) and tree.index == at for at, (_, tree) in enumerate(spec.columns))
    return same and len(inputs) == 1 and spec.schema.equals(inputs[0].node.schema)


def _composed(trees: Sequence[Expression], below: Sequence[Expression]) -> list[Expression] | None:
    """Returns expressions over the columns of a projection as expressions over that projection's input.

    None if a value would be computed more often than before, or if a tree became too deep to evaluate by recursion.
    """
    uses = Counter(_read(trees, inside_lambda=False))
    if any(uses[at] > 1 for at, tree in enumerate(below) if not isinstance(tree, Column | Literal)):
        return None
    if max(map(_depth, trees), default=0) + max(map(_depth, below), default=0) > _DEEPEST:
        return None
    return over_input(trees, below)


def over_input(trees: Sequence[Expression], projected: Sequence[Expression]) -> list[Expression]:
    """Returns expressions over the columns of a projection as expressions over its input's columns."""
    return [rewritten(tree, lambda node: projected[node.index] if isinstance(node, Column) else None) for tree in trees]


def _read(trees: Iterable[Expression], *, inside_lambda: bool) -> Iterator[int]:
    """Yields the positions of the columns that trees read; twice in a lambda, which is evaluated again and again."""
    for tree in trees:
        match tree:
            case Column():
                yield from (tree.index,) * (1 + inside_lambda)
            case Lambda():
                yield from _read([tree.body], inside_lambda=True)
            case Call():
                yield from _read(tree.arguments, inside_lambda=inside_lambda)


def _depth(tree: Expression) -> int:
    if isinstance(tree, Lambda):
        return 1 + _depth(tree.body)
    return 1 + max(map(_depth, tree.arguments), default=0) if isinstance(tree, Call) else 0


def _check_expressions(spec: specs.OperatorSpec, places: Mapping[str, str]) -> None:
    """Raises PlanError for an expression that no worker could evaluate."""
    for tree in expressions_of(spec):
        try:
            compile_expression(tree)
        except UnsupportedExpressionError as error:
            place = places.get(error.what.rpartition(" ")[2], "")
            raise PlanError("expression", str(error.called_in(place))) from error


def expressions_of(spec: specs.OperatorSpec) -> list[Expression]:
    """Returns the typed expressions that an operator evaluates, a generator's excepted."""
    trees = [spec.condition] if isinstance(spec, specs.ConditionSpec) else []
    if isinstance(spec, specs.EvaluateSpec):
        trees = [tree for _, tree in spec.columns]
    if isinstance(spec, specs.ObserveSpec):
        trees = [*spec.arguments, *(tree for _, tree in spec.results)]
    if isinstance(spec, specs.ExpandSpec):
        trees = [tree for row in spec.rows for tree in row]
    if isinstance(spec, specs.JoinSpec) and spec.condition is not None:
        trees = [spec.condition]
    if isinstance(spec, specs.StaticJoinSpec):
        trees = [tree for key in spec.keys for tree in (key.stream, key.table)]
        trees += [*spec.filters, *([] if spec.condition is None else [spec.condition])]
    return trees


def arrow_schema(columns: tuple[TypedColumn, ...]) -> pa.Schema:
    """Returns the Arrow schema of typed columns."""
    return pa.schema([(column.name, arrow_type(column.type)) for column in columns])
