"""The classes of a plan: those that messages and snapshots may name. Never imports anything.

These are the classes that the author's modules hold by name once the plan is loaded: classes defined there, and library
classes imported there by name. Modules of the author are those in the folder of a data source's module, or in its
package. The standard library, PySpark and the engine have none.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from types import ModuleType

ISOLATED_PREFIX = "_ckpt_pipeline_"
"""Prefix of the name under which a pipeline's entry module is loaded; a digest of its directory and ``_`` follow."""

_ISOLATED = re.compile(ISOLATED_PREFIX + "[0-9a-f]{12}_")
_NOT_OF_A_PLAN = frozenset({"builtins", "pyspark", "py4j", "ckpt_runtime"}) | sys.stdlib_module_names
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")


class PlanClasses:
    """The classes that are reachable from the modules of ``roots`` now, and ``more`` that belong to every plan.

    Names are ``module:qualified name``; they are equal in all workers of a job and in all of its versions that keep
    the class where it is.
    """

    def __init__(self, roots: Iterable[type], more: Iterable[type] = ()) -> None:
        self._by_name: dict[str, type] = {}
        modules = _own_modules({_module_of(base) for root in roots for base in root.__mro__})
        for module in modules:
            for value in list(vars(module).values()):
                if isinstance(value, type) and may_be_of_a_plan(value):
                    self._add(value)
        for kind in more:
            self._add(kind)

    def name_of(self, kind: type) -> str | None:
        """The name of a class; None when it does not belong to the plan."""
        name = class_name(kind)
        return name if self._by_name.get(name) is kind else None

    def find(self, name: str) -> type | None:
        """The class of that name; None when the plan has none."""
        return self._by_name.get(name)

    def _add(self, kind: type) -> None:
        name = class_name(kind)
        if self._by_name.setdefault(name, kind) is not kind:
            return
        for value in list(vars(kind).values()):
            if isinstance(value, type) and may_be_of_a_plan(value) and class_name(value).startswith(name + "."):
                self._add(value)


def class_name(kind: type) -> str:
    """Returns ``module:qualified name``, with the author's own name for the entry module."""
    return f"{_ISOLATED.sub('', _module_of(kind))}:{kind.__qualname__}"


def may_be_of_a_plan(kind: type) -> bool:
    """Whether a class may belong to a plan: it is not from the standard library, PySpark or the engine."""
    module = _module_of(kind)
    return bool(module) and _package(module) not in _NOT_OF_A_PLAN


def _module_of(kind: type) -> str:
    """Returns the module name, or an empty text if ``__module__`` is not a name. Runs no code of the class."""
    module = type.__dict__["__module__"].__get__(kind)
    return module if isinstance(module, str) else ""


def _package(module: str) -> str:
    return module.partition(".")[0]


def _own_modules(names: Iterable[str]) -> list[ModuleType]:
    """The loaded modules in the folders of those named, in the order in which they were loaded."""
    loaded = {
        # A script is loaded under a private name, but its classes are those of __main__.
        vars(module).get("__name__", name) if name.startswith(ISOLATED_PREFIX) else name: module
        for name, module in list(sys.modules.items())
        if module is not None and _package(name) not in _NOT_OF_A_PLAN
    }
    packages: set[str] = set()
    folders: set[str] = set()
    for name in names:
        if name not in loaded:
            continue
        packages.add(_package(name))
        folder = os.path.dirname(_file(loaded[name]))
        if "." not in name and not hasattr(loaded[name], "__path__") and not _is_library(folder):
            folders.add(folder + os.sep)
    return [
        module
        for name, module in loaded.items()
        if _package(name) in packages or any(_lies_in(_file(module), folder) for folder in folders)
    ]


def _file(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ""


def _lies_in(file: str, folder: str) -> bool:
    """Whether a file is in a folder, but not in libraries that are installed below it."""
    return file.startswith(folder) and not _is_library(file[len(folder) :])


def _is_library(path: str) -> bool:
    return any(part in _LIBRARY_FOLDERS for part in path.split(os.sep))
