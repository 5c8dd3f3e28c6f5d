"""Runs a pipeline's entry point and compiles what it built. Runs user code: never in the driver's own process.

The archive is a directory with the author's files. Modules beside the entry module are importable by their plain names;
modules of an archive that was loaded earlier in this process are unloaded first, so that two versions of one pipeline
never mix.

Spark's ``trigger`` determines how often results become visible. In the engine that is the checkpoint interval. All
queries of a program are one job, so the shortest interval counts. A checkpoint interval that the program or its
submission sets takes precedence.

Durations are in PySpark's notation: ``"10 minutes"``, ``"1 minute 30 seconds"``, ``"1 week"``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any
from warnings import filterwarnings

from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import parse_duration
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions, PipelineOptions, ProcessorTrigger
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, CapturedSource
from ckpt_runtime.frontend.explain import explanation
from ckpt_runtime.frontend.job import DataSources, JobOptions, compiled
from ckpt_runtime.frontend.mapping import add_queries, check_paths, delivered, location_of, spark_columns
from ckpt_runtime.frontend.scripts import ScriptEndedError, may_start_behind, uses_session
from ckpt_runtime.frontend.typed_plan import Analysis
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import BATCH_LIMITS
from ckpt_runtime.graph.kafka_columns import is_exactly_once
from ckpt_runtime.graph.logical import LogicalPlan
from ckpt_runtime.graph.plan_classes import ISOLATED_PREFIX
from ckpt_runtime.graph.specs import ProcessSpec

INTERVAL_FORM = 'one or more numbers with a unit (week, day, hour, minute, second, millisecond), such as "10 minutes"'

_PART = re.compile(r"\s*([+-]?)\s*([0-9]{1,18})(\.[0-9]{0,9})?\s*([a-z]+)")
_MILLIS = {
    "week": Decimal(604_800_000),
    "day": Decimal(86_400_000),
    "hour": Decimal(3_600_000),
    "minute": Decimal(60_000),
    "second": Decimal(1_000),
    "millisecond": Decimal(1),
    "microsecond": Decimal("0.001"),
}


def parse_interval(text: str) -> int:
    """Parses a Spark SQL interval, or a duration in the form of options, to milliseconds, rounded down.

    Months and years are refused, as in Spark's triggers. Raises ValueError saying what is allowed.
    """
    try:
        return parse_duration(text)
    except ValueError:
        millis = _spark_interval(text.strip().lower())
    if millis is None or millis < 0:
        raise ValueError(f"{INTERVAL_FORM}, not negative")
    return int(millis)


def _spark_interval(text: str) -> Decimal | None:
    """Returns None for a text that is not an interval."""
    text = re.sub(r"^interval(?=[\s+-])", "", text)
    total, position = Decimal(0), 0
    if not text:
        return None
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        sign, whole, fraction, plural = part.groups()
        unit = plural.removesuffix("s")
        factor = _MILLIS.get(unit)
        if factor is None or (fraction is not None and unit != "second"):
            return None
        total += (-1 if sign == "-" else 1) * Decimal(whole + (fraction or "")) * factor
        position = part.end()
    return total


def stop_in_time(capture: Capture, options: JobOptions) -> list[str]:
    """Sets when the job stops, if the program has stopped its queries, and no option says so. Returns warnings.

    All queries are one job, which ends with the query that is stopped last.
    """
    clock, key = capture.clock, ExecutionOptions.STOP_AFTER.key
    stopped = [time for at, time in clock.stops.items() if not clock.ends_with_data(at)]
    if not stopped or options.sets(key):
        return []
    if len(stopped) < len(capture.queries):
        return ["query.stop() has no effect: the program's queries are one job, and it does not stop all of them"]
    options.set(key, f"{round(max(stopped) * 1000)} ms")
    if min(stopped) < max(stopped):
        return [f"the program's queries are one job: all of them run until the last one is stopped, {max(stopped)} s"]
    return []


_FIELDS = {
    "processing_time_interval": "processingTime",
    "continuous_checkpoint_interval": "continuous",
    "real_time_batch_duration": "realTime",
}
"""Fields of Spark's request that hold an interval, with the arguments of ``trigger`` that set them."""


def set_options(starts: Sequence[Any], options: JobOptions) -> None:
    """Sets the checkpoint interval to that of the triggers, unless program or submission set one.

    If all triggers end with the data that is there, event time does not end with it, as in Spark: rows and timers that
    the watermark has not reached stay in state.

    Such a program also continues where its last run ended, if queries have a ``checkpointLocation``.

    ``starts`` are Spark's requests. Raises PlanError for an interval that Spark refuses, or that the engine cannot
    keep, and for locations with which a program cannot continue.
    """
    intervals = [found for start in starts if (found := _interval_ms(start))]
    key = CheckpointingOptions.INTERVAL.key
    if intervals and not options.sets(key):
        options.set(key, f"{min(intervals)} ms")
    if not starts or not all(start.available_now or start.once for start in starts):
        return
    ends = ExecutionOptions.EVENT_TIME_ENDS.key
    if not options.sets(ends):
        options.set(ends, False)
    location = _location(starts)
    if location is not None:
        for option, value in (
            (CheckpointingOptions.CONTINUE_IN, location),
            (CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH, False),
        ):
            if not options.sets(option.key):
                options.set(option.key, value)


def gather_batch(starts: Sequence[Any], sources: Iterable[CapturedSource], options: JobOptions) -> None:
    """Has functions with state called once for each key if all that is there is one batch of Spark.

    It is if all triggers end with the data that is there, and no source limits the batches of ``availableNow``.
    """
    key = ExecutionOptions.PROCESSOR_TRIGGER.key
    limited = any(option.lower() in BATCH_LIMITS for source in sources for option in source.options)
    if all(start.once or (start.available_now and not limited) for start in starts) and not options.sets(key):
        options.set(key, ProcessorTrigger.CHECKPOINT)


def _location(starts: Sequence[Any]) -> str | None:
    """The directory in which the runs of a program continue each other: the first ``checkpointLocation`` of a query.

    None if no query has one. As in Spark, those to some sinks may lack one.
    """
    given = [str(location) for start in starts if (location := location_of(start, {}))]
    if not given:
        return None
    for start in starts:
        if not location_of(start, {}) and not _may_start_fresh(start):
            name = start.query_name or start.format or "parquet"
            raise PlanError(
                "option 'checkpointLocation'",
                f"query {name!r} has none, and others have one: set it for this query, too; only queries to "
                f"{', '.join(sorted(_FRESH_FORMATS))}, foreach and foreachBatch start from the beginning with each run",
            )
    for location in given:
        if given.count(location) > 1:
            raise PlanError("option 'checkpointLocation'", f"{location!r} is that of two queries; give each its own")
    return given[0]


_FRESH_FORMATS = frozenset({"console", "memory", "noop"})
"""Formats for which Spark itself makes a location that ends with the query."""


def _may_start_fresh(start: Any) -> bool:
    return start.HasField("foreach_batch") or start.HasField("foreach_writer") or start.format.lower() in _FRESH_FORMATS


def fresh_queries(starts: Sequence[Any]) -> list[int]:
    """The numbers of the queries that start from the beginning with each run, while others of the program continue."""
    located = [bool(location_of(start, {})) for start in starts]
    if not all(start.available_now or start.once for start in starts) or not any(located):
        return []
    return [at for at, has_location in enumerate(located) if not has_location]


def locations_without_use(starts: Sequence[Any], options: JobOptions) -> list[str]:
    """Warns about a ``checkpointLocation`` from which, unlike in Spark, no later run continues."""
    if options.sets(CheckpointingOptions.CONTINUE_IN.key) or not any(location_of(start, {}) for start in starts):
        return []
    warning = (
        "the next run does not continue from the option checkpointLocation, because not every trigger is availableNow "
        "or once: it reads everything again unless it starts from a checkpoint or savepoint (ckpt run -s)"
    )
    return [warning]


def _interval_ms(start: Any) -> int | None:
    """The interval of a query in milliseconds; None for a trigger without one, or of zero: as soon as possible."""
    field = start.WhichOneof("trigger")
    if field not in _FIELDS:
        return None
    text, name = getattr(start, field), _FIELDS[field]
    if name == "realTime" and not _runs_in_real_time(start):
        raise PlanError(
            "trigger",
            "realTime needs the sink kafka, without the option deliveryGuarantee=exactly-once, or console; rows of "
            "others become visible with checkpoints: use processingTime",
        )
    try:
        return parse_interval(text)
    except ValueError:
        raise PlanError("trigger", f"{name}={text!r} is not an interval: expected {INTERVAL_FORM}") from None


def _runs_in_real_time(start: Any) -> bool:
    """Whether the rows of a query's sink become visible when Spark would show them: at once, or with the console."""
    sink = (start.format or "parquet").lower()
    return sink in ("noop", "console") or (sink == "kafka" and not is_exactly_once(delivered(start)))


DEFAULT_FUNCTION = "pipeline"
_loaded_directories: list[str] = []


def load_plan(
    archive_dir: Path,
    entry: str,
    args: Sequence[str],
    configuration: Mapping[str, str] | Configuration,
    defaults: Mapping[str, str] | Configuration | None = None,
    *,
    analyses: Mapping[str, str] | None = None,
    remembered: Mapping[str, str] | None = None,
    submitted: bool = False,
) -> CompiledPlan:
    """Imports ``entry`` (``"module:function"``, ``"module"`` or ``"file.py:function"``) and compiles its job.

    Equal arguments give an equal ``job_graph.fingerprint``. Options that the pipeline sets override ``defaults``;
    ``configuration`` overrides both. The function gets a ``SparkSession`` and ``args``; a file that makes a session
    itself runs as a script. ``analyses`` holds Spark's answers to the program's requests, and ``remembered`` answers to
    requests that it may make. With ``submitted`` a new job begins, for which the paths of its files have to exist.

    :raises AnalysisNeeded: Spark has to answer a question of the program first
    :raises PlanError: no such module or function, or a pipeline that cannot be planned
    :raises Exception: whatever the author's code raises
    """
    # PySpark's client takes half a second to import: only a process that plans a program does.
    filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    from ckpt_runtime.frontend.captured_session import captured_session

    module_name, function_name = parse_entry(entry)
    directory = archive_dir.resolve()
    name = module_name.rsplit(".", 1)[-1]
    options, plan, classes = JobOptions(configuration, defaults), LogicalPlan(name), DataSources()

    def explain(capture: Capture, of: Analysis | CapturedQuery, extended: bool) -> str:
        parallelism = options.effective.get(PipelineOptions.PARALLELISM)
        return explanation(capture, of, classes.resolve, parallelism, extended=extended)

    capture = Capture(
        analyses or {},
        lambda source: spark_columns(source, classes.resolve),
        options.set,
        option=options.get,
        directory=str(directory),
        explain=explain,
        remembered=remembered or {},
    )
    with captured_session(capture, classes.register) as spark:
        try:
            if _is_script(directory, module_name, function_name):
                run_script(directory, module_name, args)
            else:
                _function(_import_module(directory, module_name), module_name, function_name)(spark, *args)
        except ScriptEndedError as end:
            capture.clock.warnings.append(_cut_off(directory, end))
    capture.require_answers()
    starts = [query.start for query in capture.queries]
    set_options(starts, options)
    add_queries(capture, plan, classes.resolve, fresh_queries(starts))
    if any(isinstance(node.spec, ProcessSpec) for node in plan.nodes):
        gather_batch(starts, capture.sources.values(), options)
    if submitted:
        check_paths(starts, plan)
    warnings = [*capture.clock.warnings, *stop_in_time(capture, options), *locations_without_use(starts, options)]
    job = compiled(plan, options)
    graph = replace(
        job.job_graph, analyses=capture.used, tables=tuple(sorted(capture.tables)), explained=tuple(capture.explained)
    )
    return replace(job, job_graph=graph, warnings=(*job.warnings, *warnings))


def _cut_off(directory: Path, end: ScriptEndedError) -> str:
    """Returns the warning about a program that ends early. Raises PlanError unless no query can start behind it."""
    root = f"{directory}{os.sep}"
    frames = [frame for frame in extract_tb(end.__traceback__) if frame.filename.startswith(root)]
    stack = [(frame.filename.removeprefix(root), frame.name, frame.lineno or 0) for frame in frames]
    files = {str(path.relative_to(directory)): ast.parse(path.read_bytes()) for path in directory.rglob("*.py")}
    place = f"line {stack[-1][2]} of {stack[-1][0]}" if stack else "a line outside of its files"
    if start := may_start_behind(files, stack):
        raise PlanError(
            place,
            f"it {end}, where the program ends while it is planned, and {start} may start a query later, which would "
            "be lost: start all queries first, or run the script by `ckpt run --client`, whose calls wait for queries",
        )
    return (
        f"the program is run up to {place}, which {end}: while it is planned, its job has neither rows nor progress; "
        "read them when the job has ended, or run the script by `ckpt run --client`"
    )


def _is_script(directory: Path, module_name: str, function_name: str) -> bool:
    """Whether a file is a script: it uses a session, and has no function of that name that takes one."""
    file = directory / f"{module_name}.py"
    if "." in module_name or not file.is_file():
        return False
    try:
        tree = ast.parse(file.read_bytes(), file.name)
    except (SyntaxError, ValueError):
        return False  # the import will show the author where the error is
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function_name:
            parameters = node.args.posonlyargs + node.args.args
            if parameters and parameters[0].arg == "spark":
                return False
    return uses_session(tree)


def run_script(directory: Path, module_name: str, args: Sequence[str]) -> None:
    """Runs a file as Python runs a script: its name is ``__main__`` and ``sys.argv`` holds its arguments."""
    before = sys.argv, sys.modules["__main__"]
    sys.argv = [f"{module_name}.py", *args]
    try:
        _import_module(directory, module_name, "__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.modules["__main__"] = before


def parse_entry(entry: str) -> tuple[str, str]:
    """Splits an entry point into module and function. :raises PlanError: anything but identifiers, so no paths."""
    module, _, function = entry.partition(":")
    module = module.removesuffix(".py")
    function = function or DEFAULT_FUNCTION
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise PlanError("entry", f"{entry!r} is not of the form 'module:function'")
    return module, function


def _function(module: ModuleType, module_name: str, name: str) -> Callable[..., None]:
    function = getattr(module, name, None)
    if not callable(function):
        raise PlanError("entry", f"module {module_name!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _import_module(directory: Path, name: str, called: str = "") -> ModuleType:
    """Loads a module of an archive, whose own name is ``called``, if this is given.

    A top-level file is loaded under a private name, so that it never clashes with an installed module.
    """
    _forget_earlier_archives()
    sys.path.insert(0, str(directory))
    _loaded_directories.append(str(directory))
    # The import system caches directory listings, which may be older than this directory.
    importlib.invalidate_caches()
    file = directory / f"{name}.py"
    if "." in name or not file.is_file():
        path = directory.joinpath(*name.split("."))
        if not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
            raise PlanError("entry", f"there is no module {name!r} in the archive")
        return importlib.import_module(name)
    private = ISOLATED_PREFIX + hashlib.sha256(str(directory).encode()).hexdigest()[:12] + "_" + name
    spec = importlib.util.spec_from_file_location(called or private, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:  # the SystemExit of a script ends it, and its classes stay
        del sys.modules[private]
        raise
    return module


def _forget_earlier_archives() -> None:
    while _loaded_directories:
        directory = _loaded_directories.pop()
        if directory in sys.path:
            sys.path.remove(directory)
        inside = os.path.join(directory, "")
        for name, module in list(sys.modules.items()):
            # Compared as strings for speed: there are thousands of modules, and restarts with a new plan wait for this.
            if str(getattr(module, "__file__", None) or "").startswith(inside):
                del sys.modules[name]
