"""The logical plan: operators as the author wrote them, before chaining and before anything is decided for them.

Nodes refer to their inputs, so a plan is a graph in which every node follows its inputs. Nodes are filled
in while the pipeline function runs (uid, parallelism) and only read afterwards. Never runs user code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from ckpt_runtime.graph import specs
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.job_graph import Partitioning

KINDS: dict[type, str] = {
    specs.SourceSpec: "source",
    specs.EnumeratorSpec: "enumerator",
    specs.RangeReaderSpec: "range_reader",
    specs.MapInArrowSpec: "map",
    specs.ConditionSpec: "filter",
    specs.ObserveSpec: "observe",
    specs.EvaluateSpec: "project",
    specs.GenerateSpec: "generate",
    specs.PythonFunctionsSpec: "python",
    specs.WatermarkSpec: "watermark",
    specs.AggregateSpec: "aggregate",
    specs.ExpandSpec: "expand",
    specs.GroupSpec: "aggregate",
    specs.TableSpec: "table",
    specs.LatestSpec: "latest",
    specs.SortSpec: "sort",
    specs.LimitSpec: "limit",
    specs.DeduplicateSpec: "deduplicate",
    specs.ProcessSpec: "process",
    specs.JoinSpec: "join",
    specs.StaticJoinSpec: "static_join",
    specs.SinkSpec: "sink",
    specs.CommitterSpec: "committer",
    specs.DrillSinkSpec: "drill_sink",
}
STATEFUL_KINDS = frozenset(
    {
        *("source", "enumerator", "range_reader", "aggregate", "table", "deduplicate", "process"),
        "join",
        *("sink", "committer", "drill_sink"),
    }
)


class Chaining(StrEnum):
    """Whether an operator may run in one thread with its neighbours."""

    ALWAYS = "ALWAYS"
    HEAD = "HEAD"
    NEVER = "NEVER"


@dataclass(frozen=True, slots=True)
class LogicalInput:
    """The node that a node reads from, and how its output is distributed to the subtasks."""

    node: LogicalNode
    partitioning: Partitioning = Partitioning.FORWARD
    keys: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class LogicalNode:
    """One operator. ``schema`` is the schema of its output (None for sinks); None in other fields: the compiler
    decides. ``starts_fresh``: it ignores its state in the snapshot of another job. ``filtered_for`` is set for
    filters that belong to one query, which has this name, and for its own watermark behind them; another watermark is
    in front of them.
    """

    spec: specs.OperatorSpec
    inputs: tuple[LogicalInput, ...]
    schema: pa.Schema | None
    uid: str | None = None
    name: str | None = None
    parallelism: int | None = None
    chaining: Chaining = Chaining.ALWAYS
    starts_fresh: bool = False
    filtered_for: str | None = None

    @property
    def kind(self) -> str:
        return KINDS[type(self.spec)]

    @property
    def stateful(self) -> bool:
        return self.kind in STATEFUL_KINDS or (isinstance(self.spec, specs.LimitSpec) and self.spec.in_all)

    @property
    def user_code(self) -> bool:
        """Whether its operator calls the author's functions or classes while the job runs."""
        if isinstance(self.spec, specs.MapInArrowSpec | specs.PythonFunctionsSpec | specs.ProcessSpec):
            return True
        return isinstance(getattr(self.spec, "format", None), type) or getattr(self.spec, "function", None) is not None

    @property
    def label(self) -> str:
        """The name of the node in messages."""
        return self.uid or self.name or self.kind


@dataclass(slots=True)
class LogicalPlan:
    """All nodes in the order in which they were written, and the job's own settings.

    ``restored_max_parallelism``, by operator uid, is that of the snapshot that the job starts from.
    ``vertex_parallelism``, by vertex id, is set for a job that was rescaled. ``drill``: the job must have no effect
    outside.
    """

    name: str
    configuration: dict[str, str] = field(default_factory=dict)
    nodes: list[LogicalNode] = field(default_factory=list)
    default_parallelism: int = 1
    default_max_parallelism: int | None = None
    restored_max_parallelism: Mapping[str, int] = field(default_factory=dict)
    vertex_parallelism: Mapping[str, int] = field(default_factory=dict)
    chaining: bool = True
    drill: bool = False

    def add(self, node: LogicalNode) -> LogicalNode:
        """Raises PlanError for a column of views, which Arrow can neither filter nor spread over subtasks."""
        for column in node.schema or ():
            if view := _view_in(column.type):
                wanted = view.removesuffix("_view")
                raise PlanError(f"column {column.name!r}", f"type {view} is not supported; use {wanted}")
        self.nodes.append(node)
        return node


def _view_in(kind: pa.DataType) -> str | None:
    """Returns the view type (of text, bytes or lists) that a type is or contains."""
    name = str(kind).partition("<")[0]
    if name.endswith("_view"):
        return name
    return next(filter(None, (_view_in(kind.field(index).type) for index in range(kind.num_fields))), None)
