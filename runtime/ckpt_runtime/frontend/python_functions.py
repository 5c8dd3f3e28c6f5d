"""Python functions in typed plans: how a program's function objects are found, and the operators that call them.

A plan identifies a function by a number: its position in the order in which the program's plans first mention
functions. PySpark would include the pickled function instead. Every process that runs the program has the function
object itself, so nothing is ever unpickled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, rewritten
from ckpt_runtime.expressions.types import SparkType, arrow_type
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.specs import PythonFunction, PythonFunctionsSpec

FUNCTION = "PythonUDF"
"""The name of Spark's expression class, and so of the call in a typed tree."""
_NAMED = "NamedArgumentExpression"


@runtime_checkable
class ArrowFunction(Protocol):
    """A function of the engine over an Arrow array, which represents one of Spark's functions in a plan."""

    name: str
    result: SparkType
    """The Spark type of what it returns."""

    def check(self, argument: SparkType) -> None:
        """Raises PlanError for an argument of a type that it does not take."""

    def __call__(self, values: pa.Array) -> pa.Array: ...


@dataclass(slots=True)
class CapturedFunctions:
    """The Python functions of a program by their numbers."""

    _functions: list[Callable[..., Any]] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def number_of(self, function: Callable[..., Any]) -> int:
        """Returns the number of a function, which becomes the next one if no plan has mentioned it before."""
        number = self._numbers.get(id(function))
        if number is None:
            number = self._numbers[id(function)] = len(self._functions)
            self._functions.append(function)
        return number

    def replace_call(self, expression: Any, function: ArrowFunction) -> None:
        """Replaces a call of one of Spark's functions, in place, by that of a function of its first argument."""
        from pyspark.sql.connect.types import pyspark_types_to_proto_types
        from pyspark.sql.types import _parse_datatype_json_value
        from pyspark.util import PythonEvalType

        argument = type(expression)()
        argument.CopyFrom(getattr(expression, expression.WhichOneof("expr_type")).arguments[0])
        replaced = expression.common_inline_user_defined_function
        replaced.function_name, replaced.deterministic = function.name, True
        replaced.arguments.append(argument)
        python = replaced.python_udf
        python.output_type.CopyFrom(pyspark_types_to_proto_types(_parse_datatype_json_value(function.result)))
        python.eval_type = PythonEvalType.SQL_SCALAR_ARROW_UDF
        python.command = str(self.number_of(function)).encode()
        python.python_ver = f"{sys.version_info.major}.{sys.version_info.minor}"

    def of_number(self, number: int) -> Callable[..., Any]:
        """Returns a function. Raises PlanError for a number that this program's plans did not assign."""
        if number >= len(self._functions):
            raise PlanError("udf", "only a submitted program can define Python functions")
        return self._functions[number]

    @contextmanager
    def named_in_plans(self) -> Iterator[None]:
        """Makes PySpark put the numbers of functions into plans of this thread, in place of pickled functions."""
        from pyspark.sql.connect import expressions

        module: Any = expressions
        serializer, thread, functions = module.CloudPickleSerializer, threading.get_ident(), self

        class Numbers:
            def dumps(self, command: Any) -> bytes:
                if threading.get_ident() != thread:
                    return bytes(serializer().dumps(command))
                return str(functions.number_of(command[0])).encode()

        module.CloudPickleSerializer = Numbers
        try:
            yield
        finally:
            module.CloudPickleSerializer = serializer


@dataclass(slots=True)
class Step:
    """Functions that are called together. ``arguments`` are expressions over the columns that precede their results."""

    eval_type: int
    arguments: list[Expression] = field(default_factory=list)
    functions: list[PythonFunction] = field(default_factory=list)


def separated(
    trees: Sequence[Expression], width: int, functions: CapturedFunctions
) -> tuple[list[Step], list[Expression]]:
    """Extracts the calls of Python functions from expressions over ``width`` columns.

    Returns the steps, each of which appends a column for each of its functions, and the expressions over all columns.
    As in Spark, functions are called for every row, also within a branch that is not taken; a function whose only
    argument is another function of its kind gets the result of that one unchanged.
    """
    steps: list[Step] = []
    remaining = list(trees)
    while calls := _innermost(remaining):
        columns: dict[int, Column] = {}
        for eval_type, together in _groups(calls):
            step = Step(eval_type)
            for call in together:
                step.functions.append(_function(call, step.arguments, functions))
                columns[id(call)] = Column(width, call.type)
                width += 1
            steps.append(step)
        replace = partial(_column_for, calls=calls, columns=columns)
        remaining = [rewritten(tree, replace) for tree in remaining]
    return steps, remaining


def _groups(calls: Sequence[Call]) -> list[tuple[int, list[Call]]]:
    """Returns the calls that are run together: all of a kind, but functions of iterators one by one."""
    from pyspark.util import PythonEvalType

    alone = (PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)
    groups: list[tuple[int, list[Call]]] = []
    for call in calls:
        kind = int(call.settings["eval_type"])
        group = next((each for known, each in groups if known == kind and kind not in alone), None)
        if group is None:
            groups.append((kind, [call]))
        else:
            group.append(call)
    return groups


def _column_for(node: Expression, calls: Sequence[Call], columns: dict[int, Column]) -> Expression | None:
    """Returns the column that replaces a call; each call of a non-deterministic function has its own column."""
    if not isinstance(node, Call) or node.function != FUNCTION:
        return None
    for call in calls:
        if call is node or (call == node and call.settings["deterministic"]):
            return columns[id(call)]
    return None


def _innermost(trees: Sequence[Expression]) -> list[Call]:
    """Returns the calls whose arguments need no other function first, each deterministic one once."""
    found: list[Call] = []
    todo = list(reversed(trees))
    while todo:
        tree = todo.pop()
        if isinstance(tree, Lambda) and calls_python(tree.body):
            raise PlanError("udf", "a Python function cannot be called in the lambda of transform or filter")
        if not isinstance(tree, Call):
            continue
        if tree.function == FUNCTION and not any(map(calls_python, _chain(tree)[0].arguments)):
            if not any(tree is call or (tree == call and call.settings["deterministic"]) for call in found):
                found.append(tree)
        else:
            todo.extend(reversed(tree.arguments))
    return found


def _chain(call: Call) -> list[Call]:
    """Returns calls that PySpark runs as one, the first to be called first."""
    chain = [call]
    while len(chain[0].arguments) == 1:
        below = chain[0].arguments[0]
        if not isinstance(below, Call) or below.function != FUNCTION:
            break
        if below.settings["eval_type"] != call.settings["eval_type"]:
            break
        chain.insert(0, below)
    return chain


def calls_python(tree: Expression) -> bool:
    """Returns whether an expression calls a Python function."""
    if isinstance(tree, Lambda):
        return calls_python(tree.body)
    return isinstance(tree, Call) and (tree.function == FUNCTION or any(map(calls_python, tree.arguments)))


def _function(call: Call, arguments: list[Expression], functions: CapturedFunctions) -> PythonFunction:
    positions: list[int] = []
    named: dict[str, int] = {}
    chain = _chain(call)
    for argument in chain[0].arguments:
        given = argument
        if isinstance(argument, Call) and argument.function == _NAMED:
            given = argument.arguments[0]
        if given not in arguments:
            arguments.append(given)
        if given is argument:
            positions.append(arguments.index(given))
        else:
            assert isinstance(argument, Call)
            named[argument.settings["key"]] = arguments.index(given)
    objects = tuple(functions.of_number(each.settings["number"]) for each in chain)
    for at, each in enumerate(objects):
        if isinstance(each, ArrowFunction):
            each.check(chain[at - 1].type if at else arguments[positions[0]].type)
    return PythonFunction(call.settings["name"], objects, tuple(positions), named, call.type)


def functions_spec(
    step: Step, columns: Sequence[tuple[str, pa.DataType]], settings: dict[str, str]
) -> tuple[PythonFunctionsSpec, list[tuple[str, Expression]]]:
    """Returns the operator of a step, and the expressions that the projection before it has to compute after
    ``columns``.
    """
    arguments = [(f"_argument{at}", argument) for at, argument in enumerate(step.arguments)]
    results = [(f"_result{len(columns)}_{at}", arrow_type(function.type)) for at, function in enumerate(step.functions)]
    types = tuple(argument.type for argument in step.arguments)
    schema = pa.schema([*columns, *results])
    return PythonFunctionsSpec(step.eval_type, tuple(step.functions), types, schema, settings), arguments
