"""Runs a pipeline's entry point and compiles what it built. Runs user code: never in the driver's own process.

The archive is a directory with the author's files. Modules beside the entry module are importable by their plain
names; modules of an archive that was loaded earlier in this process are forgotten first, so that two versions of one
pipeline never mix.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from ckpt_runtime.api.session import StreamSession
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.plan_classes import ISOLATED_PREFIX

DEFAULT_FUNCTION = "pipeline"
_ASK_FOR_SPARK = ("_invoke_function", "get_active_spark_context")
_NO_PYSPARK_FUNCTIONS = (
    "it needs Spark's JVM, and a pipeline is planned without one. Write expressions with pyarrow.compute, such as "
    "pc.field('amount') > 100, and aggregates with count, sum, min, max and avg of ckpt_runtime.api"
)
_loaded_directories: list[str] = []


def load_plan(
    archive_dir: Path,
    entry: str,
    args: Sequence[str],
    configuration: Mapping[str, str] | Configuration,
    defaults: Mapping[str, str] | Configuration | None = None,
) -> CompiledPlan:
    """Imports ``entry`` (``"module:function"``, ``"module"`` or ``"file.py:function"``) and compiles its job.

    Equal arguments give an equal ``job_graph.fingerprint``. What the pipeline sets wins over ``defaults``, and
    ``configuration`` over both.

    :raises PlanError: no such module or function, or a pipeline that cannot be planned
    :raises Exception: whatever the author's code raises
    """
    module_name, function_name = parse_entry(entry)
    try:
        module = _import_module(archive_dir.resolve(), module_name)
        function = _function(module, module_name, function_name)
        session = StreamSession(configuration, name=module_name.rsplit(".", 1)[-1], defaults=defaults)
        function(session, *args)
    except (AssertionError, RuntimeError) as error:
        called = _function_of_pyspark(error)
        if called is None:
            raise
        raise PlanError(called, _NO_PYSPARK_FUNCTIONS).with_traceback(error.__traceback__) from error
    return session.compile()


def _function_of_pyspark(error: BaseException) -> str | None:
    """Returns the ``pyspark.sql.functions`` function that raised ``error`` because it needs Spark; else None."""
    frames = [(str(frame.f_globals.get("__name__")), frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)]
    if frames[-1][1] not in _ASK_FOR_SPARK or not frames[-1][0].startswith("pyspark.sql."):
        return None
    called = [name for module, name in frames if module.startswith("pyspark.sql.functions")]
    return f"pyspark.sql.functions.{called[0]}" if called else None


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
