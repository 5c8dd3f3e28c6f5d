"""Plain PySpark scripts, which start their queries when they are run: how to recognize one, and how it sees time."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def uses_session(module: ast.Module) -> bool:
    """Returns whether running a module uses a session, in its own statements or in a function that they may call.

    It builds one, or gets one from another module and reads or writes a stream. A file with functions that do so is a
    script only if it has statements for ``__main__``; otherwise it is a module that others import.
    """
    own = [statement for statement in module.body if not isinstance(statement, _DEFINITIONS)]
    return _names_session(own) or (_names_main(own) and _names_session(module.body))


def _names_session(statements: Sequence[ast.stmt]) -> bool:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and node.attr in ("readStream", "writeStream"):
                return True
            if isinstance(node, ast.Attribute) and node.attr == "builder":
                value = node.value
                if (value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")) == "SparkSession":
                    return True
    return False


def _names_main(statements: Sequence[ast.stmt]) -> bool:
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    return any(isinstance(node, ast.Constant) and node.value == "__main__" for test in tests for node in ast.walk(test))


_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_KNOWN = frozenset({"pyspark", "pandas", "numpy", "pyarrow", "delta", "ckpt_runtime"})
"""Packages that start no queries by themselves, beside Python's own."""
_MODULE = "<module>"


def may_start_behind(files: Mapping[str, ast.Module], stack: Sequence[tuple[str, str, int]]) -> str:
    """Returns the place in a program that may start a query behind the present line; an empty text if none can.

    ``files`` are all of the program's, by their names. ``stack`` has a file, a function (``<module>`` outside of all)
    and a line for each call, the last one innermost. A place is safe if it ran before, in a call of the stack, and
    cannot run again.
    """
    calls = {(file, function): (depth, line) for depth, (file, function, line) in enumerate(stack)}
    for name, module in files.items():
        for line, function, again in _starts(module, files):
            depth, present = calls.get((name, function), (-1, 0))
            called_again = depth > 0 and (
                not _is_called_once(function, files.values())
                or any(_is_in_loop(files[file], at) for file, _, at in stack[:depth])
            )
            if depth < 0 or again or line >= present or called_again:
                return f"line {line} of {name}"
    return ""


def _starts(module: ast.Module, files: Mapping[str, ast.Module]) -> Iterator[tuple[int, str, bool]]:
    """Yields the lines that may start queries, with the function that has them, and whether they may do so again: in a
    loop, or in a package that is not the program's."""
    todo: list[tuple[ast.AST, str, bool]] = [(module, _MODULE, False)]
    while todo:
        node, function, in_loop = todo.pop()
        if _may_start(node, files):
            yield getattr(node, "lineno", 0), function, in_loop or isinstance(node, ast.Import | ast.ImportFrom)
        if isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            function, in_loop = getattr(node, "name", "<lambda>"), False
        in_loop = in_loop or isinstance(node, _LOOPS)
        todo.extend((child, function, in_loop) for child in ast.iter_child_nodes(node))


def _may_start(node: ast.AST, files: Mapping[str, ast.Module]) -> bool:
    """Whether it makes or starts a writer, or names code that is not the program's own and may do so."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("start", "toTable")
    if isinstance(node, ast.Import):
        return not all(_is_known(each.name, files) for each in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and not _is_known(node.module or "", files)
    name = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
    return isinstance(name, str) and name in ("writeStream", "exec", "eval")


def _is_known(module: str, files: Mapping[str, ast.Module]) -> bool:
    package = module.partition(".")[0]
    own = f"{package}.py" in files or any(name.startswith(f"{package}/") for name in files)
    return own or package in _KNOWN or package in sys.stdlib_module_names


def _is_called_once(function: str, modules: Iterable[ast.Module]) -> bool:
    names = [
        getattr(node, "id", getattr(node, "attr", getattr(node, "name", "")))
        for each in modules
        for node in ast.walk(each)
    ]
    return names.count(function) == 2  # its definition and its call


def _is_in_loop(module: ast.Module, line: int) -> bool:
    loops = (node for node in ast.walk(module) if isinstance(node, _LOOPS))
    return any(loop.lineno <= line <= (loop.end_lineno or line) for loop in loops)


MOST_WAITS = 500
"""How often a script may wait for its queries with a limit of time."""


class ScriptEndedError(BaseException):
    """Ends a program behind the start of its queries, at what it cannot do while it is planned; the text says what.

    Not an ``Exception``, so that no program catches it.
    """


@dataclass(slots=True)
class ScriptClock:
    """The time of a script: its waits for queries return at once and are added up, because its job does not run yet.

    A query is known by its number, in the order of their starts. ``now_s`` is infinite when the script has waited until
    its queries end. ``stops`` are the times at which it has stopped queries.
    """

    now_s: float = 0.0
    stops: dict[int, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    processed: set[int] = field(default_factory=set)
    """The queries that were to process the data that is there."""
    terminated: bool = False
    """Whether a query has ended since the last ``resetTerminated``."""
    over: bool = False
    """Whether the program has ended at an action on rows: what it stops then, it stops at a time that is not known."""
    _end_themselves: list[bool] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)
    _waits: int = 0

    def started(self, *, ends: bool) -> None:
        """A query is started; whether it ends with the data that is there."""
        self._end_themselves.append(ends)

    def is_active(self, query: int) -> bool:
        """Whether a query has not ended for the script."""
        return self.now_s < math.inf and query not in self.stops and query not in self._ended

    @property
    def active(self) -> list[int]:
        return [query for query in range(len(self._end_themselves)) if self.is_active(query)]

    def wait(self, seconds: float | None) -> None:
        """Passes time, or all of it without ``seconds``.

        The last of :data:`MOST_WAITS` passes all of it, too, because the script waits in a loop. If the loop does not
        end then, ScriptEndedError ends the script.
        """
        self._waits += 1
        if self._waits > 2 * MOST_WAITS:
            raise ScriptEndedError("waits for its queries again and again")
        if not self.active:
            return
        if self._waits >= MOST_WAITS:
            self.warnings.append(
                f"the program has waited {MOST_WAITS} times for its queries: the job runs without a limit of time"
            )
            seconds = None
        self.now_s += math.inf if seconds is None else seconds

    def await_query(self, query: int, seconds: float | None) -> bool:
        """Waits for a query; returns whether it has ended. One that ends with its data does so at once."""
        if self.is_active(query):
            if self._end_themselves[query]:
                self._ended.add(query)
                self.terminated = True
            else:
                self.wait(seconds)
        return not self.is_active(query)

    def await_any(self, seconds: float | None) -> bool:
        """Waits unless a query has ended; returns whether one has."""
        if not self.terminated and (active := self.active):
            self.await_query(next((query for query in active if self._end_themselves[query]), active[0]), seconds)
        return self.terminated or not self.active

    def stop(self, query: int) -> None:
        """Stops a query now, unless it has ended. One that ends with its data does so, and is not cut short."""
        if self.is_active(query) and not self.over:
            if self._end_themselves[query]:
                self._ended.add(query)
            else:
                self.stops[query] = self.now_s
            self.terminated = True

    def end(self) -> list[int]:
        """Ends the program. Returns the queries that end with the data that is there, which it has waited for."""
        self.over = True
        return [] if self.now_s else [query for query in self.active if query in self.processed]

    def stop_session(self) -> None:
        """Stops all queries, as the end of a session in Spark, if the script has waited for them."""
        if self.now_s:
            for query in self.active:
                self.stop(query)

    def ends_with_data(self, query: int) -> bool:
        """Whether a query was stopped as soon as it had processed the data that is there."""
        return query in self.processed and self.stops.get(query) == 0
