"""``stream.writeStream``: describes a sink. Writes nothing."""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pyarrow as pa

from ckpt_runtime.api.checks import chosen
from ckpt_runtime.api.operator_settings import OperatorSettings
from ckpt_runtime.api.options import WithOptions
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import check_sink
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import SinkSpec

_OUTPUT_MODES = {"append": "append", "update": "update"}


class Sink(OperatorSettings):
    """A sink of the plan; what :meth:`StreamWriter.start` returns, to name it."""

    def __init__(self, node: LogicalNode) -> None:
        self._node = node

    def _operator(self, method: str) -> LogicalNode:
        return self._node


class StreamWriter(WithOptions):
    """Builds one sink, on the conventions of PySpark's ``DataStreamWriter``."""

    def __init__(
        self,
        plan: LogicalPlan,
        resolve: Callable[[str | type], str | type],
        inputs: tuple[LogicalInput, ...],
        schema: pa.Schema,
    ) -> None:
        super().__init__()
        self._plan = plan
        self._resolve = resolve
        self._inputs = inputs
        self._schema = schema
        self._format: str | type | None = None
        self._uid: str | None = None
        self._name: str | None = None

    def format(self, source: str | type) -> Self:
        """A built-in format's name, a registered ``DataSource``'s name, or a ``DataSource`` class."""
        self._format = self._resolve(source)
        return self

    def outputMode(self, outputMode: str) -> Self:
        """``append`` or ``update``: rows are written as they are produced, so both write the same.

        Raises PlanError for ``complete``: there is no end of a batch at which a whole result could be written.
        """
        chosen("outputMode", outputMode, _OUTPUT_MODES)
        return self

    def uid(self, uid: str) -> Self:
        """The sink's uid; see :meth:`OperatorSettings.uid`."""
        self._uid = uid
        return self

    def queryName(self, queryName: str) -> Self:
        """The sink's name on pages and in metrics."""
        self._name = queryName
        return self

    def start(self, path: str | None = None) -> Sink:
        """Adds the sink to the plan. ``path`` is short for ``option("path", path)``.

        :raises PlanError: no format, an unknown one, or an option that does not fit the stream.
        """
        if self._format is None:
            raise PlanError("format", "not given; call .format(name or DataSource class) before .start()")
        if path is not None:
            self.option("path", path)
        check_sink(self._format, self._options, self._schema)
        node = self._plan.add(LogicalNode(SinkSpec(self._format, dict(self._options)), self._inputs, None))
        sink = Sink(node)
        if self._uid is not None:
            sink.uid(self._uid)
        if self._name is not None:
            sink.name(self._name)
        return sink
