"""``session.readStream``: describes a source. Opens only what is needed to find out its schema."""

from __future__ import annotations

from typing import Any, Self

import pyarrow as pa

from ckpt_runtime.api import pyspark_names
from ckpt_runtime.api.options import Resolve, WithOptions
from ckpt_runtime.api.pyspark_names import NamesOfPySpark
from ckpt_runtime.api.stream import Stream
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.formats import source_schema
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import SourceSpec


class StreamReader(NamesOfPySpark, WithOptions):
    """Builds one source, on the conventions of PySpark's ``DataStreamReader``."""

    _missing = pyspark_names.READER

    def __init__(self, plan: LogicalPlan, resolve: Resolve) -> None:
        super().__init__(resolve)
        self._plan = plan
        self._schema: pa.Schema | None = None

    def schema(self, schema: Any) -> Self:
        """Sets the schema to read with: an Arrow schema, a DDL string or a PySpark ``StructType``.

        :param schema: that schema.
        :raises PlanError: a schema that cannot be understood
        """
        self._schema = to_arrow_schema(schema)
        return self

    def load(
        self,
        path: str | None = None,
        format: str | type | None = None,
        schema: Any = None,
        **options: str | int | float | bool | None,
    ) -> Stream:
        """Adds the source to the plan.

        :param path: short for ``option("path", path)``.
        :param format: short for ``format(...)``.
        :param schema: short for ``schema(...)``.
        :param options: short for ``options(...)``.
        :raises PlanError: no format, an unknown one, a bad option, or a source whose schema cannot be determined.
        """
        if format is not None:
            self.format(format)
        if schema is not None:
            self.schema(schema)
        self.options(**options)
        source = self._chosen_format("load", path)
        schema = source_schema(source, self._options, self._schema)
        spec = SourceSpec(source, dict(self._options), self._schema)
        node = self._plan.add(LogicalNode(spec, (), schema))
        return Stream(self._plan, self._resolve, (LogicalInput(node),), schema)
