"""The source of a function of the DAG file as a program that runs without that file.

Only text is taken: nothing is pickled, and the function is never called here. Names that the program would lack are
found in the text when the DAG file is parsed.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid

ENTRY: Final = "run_with_arguments"
_OF_EVERY_MODULE: Final = frozenset({"__file__", "__name__"})
_CALL: Final = '''


def {entry}(spark, document):
    """Calls the function with the task's arguments."""
    import json

    arguments, keywords = json.loads(document)
    {function}(spark, *arguments, **keywords)
'''


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function as a program. ``file`` is the DAG file, ``parameters`` are those that a call gives."""

    name: str
    file: Path
    text: str
    parameters: tuple[str, ...]

    @property
    def entry(self) -> str:
        """The program's entry point."""
        return f"{self.name}:{ENTRY}"


def source_of(function: Callable[..., Any]) -> FunctionSource:
    """Check a function and return its program.

    :raises CkptArgumentInvalid: naming the function and what a program cannot have.
    """
    name = getattr(function, "__name__", repr(function))

    def refused(allowed: str) -> CkptArgumentInvalid:
        return CkptArgumentInvalid("the function of @task.ckpt", name, allowed)

    if not inspect.isfunction(function) or not name.isidentifier() or name == ENTRY:
        raise refused("it must be a function with a name, defined with def")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise refused("it must be a plain function, not a coroutine or generator")
    if hasattr(function, "__wrapped__"):
        raise refused("it must have no decorator below @task.ckpt, because the program does not have it")
    try:
        lines, first_line = inspect.getsourcelines(function)
        text, node, before = _definition("".join(lines), name)
        names = _globals_used(text, name)
    except (OSError, SyntaxError) as error:
        raise refused(f"its source cannot be read: {error}") from error
    if _first_parameter(node) != "spark":
        raise refused("its first parameter must be named spark")
    parameters = inspect.signature(function).parameters
    known = [parameter for parameter in parameters if parameter in KNOWN_CONTEXT_KEYS]
    if known:
        raise refused(
            f"it must have no parameter {known[0]!r}: the job does not know the run. Pass the value in another "
            f"parameter, such as {{{{ {known[0]} }}}}; a value that differs in each run makes each run another version"
        )
    for used, line in names:
        if used not in dir(builtins) or used in function.__globals__:
            raise refused(
                f"it uses {used!r} of the DAG file (line {first_line + before + line - 1}), which the program does not "
                "have: import or define it inside the function, or pass its value as an argument"
            )
    file = Path(inspect.getsourcefile(function) or "")
    return FunctionSource(name, file, text + _CALL.format(entry=ENTRY, function=name), tuple(parameters)[1:])


def _definition(source: str, name: str) -> tuple[str, ast.FunctionDef, int]:
    """The text of the definition without decorators and annotations, its node, and the number of lines cut off before.

    An indented definition stays as it is, below ``if True:``, since the lines of texts in it must not change. The
    annotations of parameters name what the DAG file imports for its type checker.
    """
    indented = source[:1].isspace()
    lines = (("if True:\n" if indented else "") + source).splitlines(keepends=True)
    tree = ast.parse("".join(lines))
    node = next(item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef) and item.name == name)
    parts = [part.encode() for part in lines]
    for start, end in sorted(_annotations(node, parts), reverse=True):
        (row, column), (last_row, last_column) = start, end
        parts[row - 1 : last_row] = [parts[row - 1][:column] + parts[last_row - 1][last_column:]]
    kept = b"".join([*(parts[:1] if indented else []), *parts[node.lineno - 1 :]])
    return kept.decode(), node, node.lineno - (3 if indented else 1)


def _annotations(node: ast.FunctionDef, lines: list[bytes]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where the annotations of the signature begin and end, with their colons and arrows, as rows and columns."""
    found = node.args
    every = [*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg]
    for argument in every:
        if argument is not None and argument.annotation is not None:
            begin = (argument.lineno, argument.col_offset + len(argument.arg.encode()))
            yield begin, _end(argument.annotation)
    if node.returns is not None:
        arrow = lines[node.returns.lineno - 1][: node.returns.col_offset].rfind(b"->")
        if arrow >= 0:
            yield (node.returns.lineno, arrow), _end(node.returns)


def _end(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _first_parameter(node: ast.FunctionDef) -> str | None:
    named = [*node.args.posonlyargs, *node.args.args]
    return named[0].arg if named else None


def _globals_used(text: str, name: str) -> list[tuple[str, int]]:
    """The names that the function, or a function or class in it, takes from its module; with their lines."""
    module = symtable.symtable(text, name, "exec")
    found: set[str] = set()
    tables = [table for table in module.get_children() if table.get_name() == name]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    # Defaults are computed where the function is defined.
    found |= {
        symbol.get_name() for symbol in module.get_symbols() if symbol.is_referenced() and symbol.get_name() != name
    }
    lines: dict[str, int] = {}
    for item in ast.walk(ast.parse(text)):
        if isinstance(item, ast.Name):
            lines.setdefault(item.id, item.lineno)
    used = ((lines.get(each, 1), each) for each in found - _OF_EVERY_MODULE - {name})
    return [(each, line) for line, each in sorted(used)]
