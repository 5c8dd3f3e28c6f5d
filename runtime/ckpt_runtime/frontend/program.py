"""Runs a pipeline's entry point and compiles what it built. Runs user code: never in the driver's own process.

The archive is a directory with the author's files. Modules beside the entry module are importable by their plain names;
modules of an archive that was loaded earlier in this process are unloaded first, so that two versions of one pipeline
never mix.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, captured_session
from ckpt_runtime.frontend.explain import explanation
from ckpt_runtime.frontend.job import DataSources, JobOptions, compiled
from ckpt_runtime.frontend.mapping import add_queries, spark_columns
from ckpt_runtime.frontend.scripts import builds_session
from ckpt_runtime.frontend.triggers import set_options
from ckpt_runtime.frontend.typed_plan import Analysis
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.logical import LogicalPlan
from ckpt_runtime.graph.plan_classes import ISOLATED_PREFIX

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
) -> CompiledPlan:
    """Imports ``entry`` (``"module:function"``, ``"module"`` or ``"file.py:function"``) and compiles its job.

    Equal arguments give an equal ``job_graph.fingerprint``. Options that the pipeline sets override ``defaults``;
    ``configuration`` overrides both. The function gets a ``SparkSession`` and ``args``; a file that makes a session
    itself runs as a script. ``analyses`` holds Spark's answers to the program's requests, and ``remembered`` answers to
    requests that it may make.

    :raises AnalysisNeeded: Spark has to answer a question of the program first
    :raises PlanError: no such module or function, or a pipeline that cannot be planned
    :raises Exception: whatever the author's code raises
    """
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
        if _is_script(directory, module_name, function_name):
            _run_script(directory, module_name, args)
        else:
            _function(_import_module(directory, module_name), module_name, function_name)(spark, *args)
    capture.require_answers()
    add_queries(capture, plan, classes.resolve)
    set_options([query.start for query in capture.queries], options)
    job = compiled(plan, options)
    graph = replace(
        job.job_graph,
        analyses=capture.used,
        tables=tuple(sorted(capture.tables)),
        explained=tuple(capture.explained),
    )
    return replace(job, job_graph=graph)


def _is_script(directory: Path, module_name: str, function_name: str) -> bool:
    """Whether a file is a script: it makes a session, and has no function of that name that takes one."""
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
    return builds_session(tree)


def _run_script(directory: Path, module_name: str, args: Sequence[str]) -> None:
    """Runs a file as Python runs a script: its name is ``__main__`` and ``sys.argv`` holds its arguments."""
    _forget_earlier_archives()
    sys.path.insert(0, str(directory))
    _loaded_directories.append(str(directory))
    importlib.invalidate_caches()
    before = sys.argv
    sys.argv = [f"{module_name}.py", *args]
    try:
        runpy.run_path(str(directory / f"{module_name}.py"), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv = before


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


def _import_module(directory: Path, name: str) -> ModuleType:
    """A top-level file is loaded under a private name, so that it never clashes with an installed module."""
    _forget_earlier_archives()
    sys.path.insert(0, str(directory))
    _loaded_directories.append(str(directory))
    # The import system caches directory listings, which may be older than this directory.
    importlib.invalidate_caches()
    file = directory / f"{name}.py"
    if "." in name or not file.is_file():
        if not _exists_in(directory, name):
            raise PlanError("entry", f"there is no module {name!r} in the archive")
        return importlib.import_module(name)
    private = ISOLATED_PREFIX + hashlib.sha256(str(directory).encode()).hexdigest()[:12] + "_" + name
    spec = importlib.util.spec_from_file_location(private, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[private]
        raise
    return module


def _exists_in(directory: Path, name: str) -> bool:
    path = directory.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


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
