"""A job while its program is planned: its options, the classes that it reads and writes with, and its compilation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from ckpt_runtime.configuration.checkpointing_options import StateRecoveryOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import InvalidOptionError, OptionScope
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.configuration.registry import (
    RESTORE_DRILL,
    RESTORED_MAX_PARALLELISM,
    VERTEX_PARALLELISM,
    find_option,
    options_of,
)
from ckpt_runtime.configuration.validation import problem_of
from ckpt_runtime.graph.compiler import CompiledPlan, compile_plan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import SINK_FORMATS, SOURCE_FORMATS, is_data_source
from ckpt_runtime.graph.logical import LogicalPlan
from ckpt_runtime.sinks import is_sink
from ckpt_runtime.sources import is_source

DRILL_NAME = "restore drill of "
"""Prefix of the job's name, because a real job may use that name at the same time."""


class JobOptions:
    """Options that a program sets for its job.

    They override the cluster's (``defaults``); options given at submission override both.
    """

    def __init__(
        self, submitted: Mapping[str, str] | Configuration, defaults: Mapping[str, str] | Configuration | None = None
    ) -> None:
        self._defaults = Configuration(defaults)
        self._submitted = Configuration(submitted)
        self._own = Configuration()

    def get(self, key: str, default: str | None = None) -> str | None:
        """Returns the effective text of an option, or ``default``.

        :param key: the option's name.
        :param default: the text to return when neither the option nor a default of it is set.
        """
        return self.effective.get_text(key, default)

    def set(self, key: str, value: str | int | float | bool) -> None:
        """Sets an option for this job.

        :param key: the option's name.
        :param value: a text as in a configuration file, a number or a boolean.
        :raises InvalidOptionError: a value that the option cannot take, or an option that code cannot set
        :raises UnknownOptionError: a key of the system's that no option has
        """
        option = Configuration.from_values({key: value})
        for canonical in option:
            problem = problem_of(option, canonical, OptionScope.JOB)
            if problem is not None:
                raise problem
            if find_option(canonical) in options_of(StateRecoveryOptions):
                raise InvalidOptionError(key, value, "only at submission, not in a pipeline's code")
        self._own = Configuration.merge(self._own, option)

    def sets(self, key: str) -> bool:
        """Returns whether the pipeline or its submission sets an option, as opposed to only the cluster.

        :param key: the option's name.
        """
        return Configuration.merge(self._own, self._submitted).get_text(key) is not None

    @property
    def own(self) -> Configuration:
        """Returns what the pipeline has set."""
        return self._own

    @property
    def effective(self) -> Configuration:
        """Returns the cluster's options, overridden by the pipeline's own and then by those given at submission."""
        return Configuration.merge(self._defaults, self._own, self._submitted)


class DataSources:
    """The classes of a program that read and write: PySpark's ``DataSource``, and the engine's own kinds."""

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}

    def register(self, data_source: type) -> None:
        """Registers a class under its ``name()``, upper or lower case; a later class of that name replaces it.

        :param data_source: a subclass of PySpark's ``DataSource``, ``ckpt_runtime.sources.Source`` or
            ``ckpt_runtime.sinks.Sink``.
        :raises PlanError: no such class, or the name of a built-in format
        """
        if not is_data_source(data_source) and not is_sink(data_source) and not is_source(data_source):
            wanted = "a subclass of PySpark's DataSource, of ckpt_runtime.sources.Source, or of ckpt_runtime.sinks.Sink"
            raise PlanError("dataSource", f"expected {wanted}, not {data_source!r}")
        name = data_source.name().lower()  # type: ignore[attr-defined]
        if name in SOURCE_FORMATS or name in SINK_FORMATS:
            raise PlanError("dataSource", f"{name!r} is the name of a built-in format; override name()")
        self._classes[name] = data_source

    def resolve(self, format_: str | type) -> str | type:
        """Returns the class that a name stands for, or the name of a built-in format as it is.

        :param format_: a name, or a class.
        :raises PlanError: neither a name nor such a class
        """
        if isinstance(format_, str):
            return self._classes.get(format_.lower()) or _built_in(format_)
        if is_data_source(format_) or is_sink(format_) or is_source(format_):
            return format_
        raise PlanError("format", f"expected a name or a DataSource class, not {format_!r}")


def _built_in(name: str) -> str:
    """Returns the canonical name of a built-in format, and any other name as it is."""
    lower = name.lower()
    return lower if lower in SOURCE_FORMATS or lower in SINK_FORMATS else name


def compiled(plan: LogicalPlan, options: JobOptions) -> CompiledPlan:
    """Checks a plan and returns the job that it describes.

    Raises PlanError, see :func:`ckpt_runtime.graph.compiler.compile_plan`, and InvalidOptionError for an option that
    the plan depends on with a value that it cannot take.
    """
    configuration = options.effective
    maximum = configuration.get(PipelineOptions.MAX_PARALLELISM)
    if maximum == 0:
        raise PlanError(PipelineOptions.MAX_PARALLELISM.key, "0 is not a number of key groups; give 1 to 32768")
    drill = configuration.get_text(RESTORE_DRILL) == "true"
    name = configuration.get(PipelineOptions.NAME) or plan.name
    job = compile_plan(
        LogicalPlan(
            name=f"{DRILL_NAME}{name}" if drill else name,
            configuration=configuration.to_dict(),
            nodes=plan.nodes,
            default_parallelism=configuration.get(PipelineOptions.PARALLELISM),
            default_max_parallelism=None if maximum < 0 else maximum,
            restored_max_parallelism=json.loads(configuration.get_text(RESTORED_MAX_PARALLELISM) or "{}"),
            vertex_parallelism=json.loads(configuration.get_text(VERTEX_PARALLELISM) or "{}"),
            chaining=configuration.get(PipelineOptions.OPERATOR_CHAINING),
            drill=drill,
        )
    )
    return replace(job, own_configuration=options.own.to_dict())
