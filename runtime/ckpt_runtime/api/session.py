"""The session: where a pipeline function starts. Collects operators into a logical plan; runs nothing.

def pipeline(session: StreamSession, *args: str) -> None:
    lines = session.readStream.format("replay").option("path", args[0]).load().uid("source")
    lines.groupBy("word").agg(count()).uid("counts").writeStream.format("parquet").start(args[1]).uid("sink")
"""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Mapping

from ckpt_runtime.api.reader import StreamReader
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.graph.compiler import CompiledPlan, compile_plan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import SINK_FORMATS, SOURCE_FORMATS, is_data_source
from ckpt_runtime.graph.logical import LogicalPlan


class RuntimeConfig:
    """``session.conf``: options that the pipeline sets for itself. What was given at submission wins over them."""

    def __init__(self, submitted: Mapping[str, str] | Configuration) -> None:
        self._submitted = Configuration(submitted)
        self._own = Configuration()

    def get(self, key: str, default: str | None = None) -> str | None:
        """The effective text of an option, or ``default``."""
        return self.effective.get_text(key, default)

    def set(self, key: str, value: str | int | float | bool) -> None:
        """Sets an option for this job. Raises ``InvalidOptionError`` for a value that is no text, number or boolean."""
        self._own = Configuration.merge(self._own, Configuration.from_values({key: value}))

    @property
    def effective(self) -> Configuration:
        """The pipeline's own options, overlaid with those given at submission."""
        return Configuration.merge(self._own, self._submitted)


class DataSourceRegistration:
    """``session.dataSource``: makes PySpark ``DataSource`` classes known by their name."""

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}

    def register(self, dataSource: type) -> None:
        """Registers a class under ``dataSource.name()``; a later class of that name replaces an earlier one."""
        if not is_data_source(dataSource):
            raise PlanError("dataSource", f"expected a subclass of PySpark's DataSource, not {dataSource!r}")
        name = dataSource.name()  # type: ignore[attr-defined]
        if name in SOURCE_FORMATS or name in SINK_FORMATS:
            raise PlanError("dataSource", f"{name!r} is the name of a built-in format; override name()")
        self._classes[name] = dataSource

    def resolve(self, format_: str | type) -> str | type:
        """The class that a name stands for, or the name of a built-in format as it is."""
        if isinstance(format_, str):
            return self._classes.get(format_, format_)
        if is_data_source(format_):
            return format_
        raise PlanError("format", f"expected a name or a DataSource class, not {format_!r}")


class StreamSession:
    """Builds one job. ``configuration`` holds the options given at submission; ``name`` is the job's default name."""

    def __init__(self, configuration: Mapping[str, str] | Configuration | None = None, name: str = "pipeline") -> None:
        self.conf = RuntimeConfig(configuration or {})
        self.dataSource = DataSourceRegistration()
        self.plan = LogicalPlan(name)

    @property
    def readStream(self) -> StreamReader:
        """A new reader, as ``spark.readStream``."""
        return StreamReader(self.plan, self.dataSource.resolve)

    def compile(self) -> CompiledPlan:
        """The checked plan of everything started so far.

        :raises PlanError: see :func:`ckpt_runtime.graph.compiler.compile_plan`
        :raises InvalidOptionError: an option that the plan depends on has a value that it cannot take
        """
        configuration = self.conf.effective
        plan = self.plan
        maximum = configuration.get(PipelineOptions.MAX_PARALLELISM)
        if maximum == 0:
            raise PlanError(PipelineOptions.MAX_PARALLELISM.key, "0 is not a number of key groups; give 1 to 32768")
        return compile_plan(
            LogicalPlan(
                name=configuration.get(PipelineOptions.NAME) or plan.name,
                configuration=configuration.to_dict(),
                nodes=plan.nodes,
                default_parallelism=configuration.get(PipelineOptions.PARALLELISM),
                default_max_parallelism=None if maximum < 0 else maximum,
                chaining=configuration.get(PipelineOptions.OPERATOR_CHAINING),
            )
        )
