"""The session: where a pipeline function starts. Collects operators into a logical plan; runs nothing.

def pipeline(session: StreamSession, *args: str) -> None:
    lines = session.readStream.format("replay").option("path", args[0]).load().uid("source")
    lines.groupBy("word").agg(count()).uid("counts").writeStream.format("parquet").start(args[1]).uid("sink")
"""

# Names are PySpark's.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Mapping

from ckpt_runtime.api import pyspark_names
from ckpt_runtime.api.pyspark_names import NamesOfPySpark
from ckpt_runtime.api.reader import StreamReader
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.frontend.job import DataSources, JobOptions, compiled
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.logical import LogicalPlan


class StreamSession(NamesOfPySpark):
    """Builds one job. ``name`` is its default name.

    ``configuration`` holds the options given at submission, ``defaults`` those of the cluster.
    """

    _missing = pyspark_names.SESSION

    def __init__(
        self,
        configuration: Mapping[str, str] | Configuration | None = None,
        name: str = "pipeline",
        defaults: Mapping[str, str] | Configuration | None = None,
    ) -> None:
        self.conf = JobOptions(configuration or {}, defaults)
        self.dataSource = DataSources()
        self.plan = LogicalPlan(name)

    @property
    def readStream(self) -> StreamReader:
        """A new reader, as ``spark.readStream``."""
        return StreamReader(self.plan, self.dataSource.resolve)

    def compile(self) -> CompiledPlan:
        """Checks and returns the plan of everything started so far.

        :raises PlanError: see :func:`ckpt_runtime.graph.compiler.compile_plan`
        :raises InvalidOptionError: an option that the plan depends on has a value that it cannot take
        """
        return compiled(self.plan, self.conf)
