"""``stream.writeStream``: describes a sink. Writes nothing."""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from typing import Any, Self

import pyarrow as pa

from ckpt_runtime.api import pyspark_names
from ckpt_runtime.api.checks import chosen
from ckpt_runtime.api.operator_settings import OperatorSettings
from ckpt_runtime.api.options import Resolve, WithOptions
from ckpt_runtime.api.pyspark_names import NamesOfPySpark
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import check_sink
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import SinkSpec

_OUTPUT_MODES = {"append": "append", "update": "update"}


class Sink(NamesOfPySpark, OperatorSettings):
    """A sink of the plan; :meth:`StreamWriter.start` returns it, so that it can be named."""

    _missing = pyspark_names.SINK

    def __init__(self, node: LogicalNode) -> None:
        self._node = node

    def _operator(self, method: str) -> LogicalNode:
        return self._node


class StreamWriter(NamesOfPySpark, WithOptions):
    """Builds one sink, on the conventions of PySpark's ``DataStreamWriter``."""

    _missing = pyspark_names.WRITER

    def __init__(
        self,
        plan: LogicalPlan,
        resolve: Resolve,
        inputs: tuple[LogicalInput, ...],
        schema: pa.Schema,
    ) -> None:
        super().__init__(resolve)
        self._plan = plan
        self._inputs = inputs
        self._schema = schema
        self._uid: str | None = None
        self._name: str | None = None

    def outputMode(self, outputMode: str) -> Self:
        """Takes ``append`` or ``update``: rows are written as they are produced, so both write the same.

        :param outputMode: which of them.
        :raises PlanError: ``complete``: there is no end of a batch at which a whole result could be written
        """
        chosen("outputMode", outputMode, _OUTPUT_MODES)
        return self

    def uid(self, uid: str) -> Self:
        """Sets the sink's uid; see :meth:`OperatorSettings.uid`.

        :param uid: unique in the job.
        """
        self._uid = uid
        return self

    def queryName(self, queryName: str) -> Self:
        """Sets the sink's name on pages and in metrics.

        :param queryName: that name.
        """
        self._name = queryName
        return self

    def start(
        self,
        path: str | None = None,
        format: str | type | None = None,
        outputMode: str | None = None,
        partitionBy: Any = None,
        queryName: str | None = None,
        **options: str | int | float | bool | None,
    ) -> Sink:
        """Adds the sink to the plan.

        :param path: short for ``option("path", path)``.
        :param format: short for ``format(...)``.
        :param outputMode: short for ``outputMode(...)``.
        :param partitionBy: must be omitted: add a sink for each part.
        :param queryName: short for ``queryName(...)``.
        :param options: short for ``options(...)``.
        :raises PlanError: no format, an unknown one, or an option that does not fit the stream.
        """
        if format is not None:
            self.format(format)
        if outputMode is not None:
            self.outputMode(outputMode)
        if partitionBy is not None:
            raise PlanError("partitionBy", "not supported; add a sink for each part")
        if queryName is not None:
            self.queryName(queryName)
        self.options(**options)
        target = self._chosen_format("start", path)
        check_sink(target, self._options, self._schema)
        node = self._plan.add(LogicalNode(SinkSpec(target, dict(self._options)), self._inputs, None))
        sink = Sink(node)
        if self._uid is not None:
            sink.uid(self._uid)
        if self._name is not None:
            sink.name(self._name)
        return sink
