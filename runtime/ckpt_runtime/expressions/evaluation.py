"""Compiles a typed expression to calls of Arrow kernels, once per operator, and evaluates it once per batch.

``compile_expression(tree)`` returns a function from a :class:`Frame` to a column. A function's builder gets its node
and the compiled arguments; most builders are made by :func:`strict`, which evaluates all arguments and calls one
kernel. Those that must not evaluate an argument for every row (``CASE``, ``AND``, ``coalesce``) evaluate it over a
part of the frame.

A value is an Arrow array of the frame's length, or an Arrow scalar where it is the same for each row.
"""

from __future__ import annotations

import decimal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.dictionaries import OneColumn, OverDictionary, decoded, plain_type
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal, Variable
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import (
    EvaluationError,
    UnsupportedExpressionError,
    is_fractional,
    is_integral,
    is_year_month,
    value_type,
)


def literal_scalar(literal: Literal) -> pa.Scalar:
    """Returns the Arrow scalar of a constant.

    Dates are days and timestamps microseconds since 1970, as texts of integers. Raises UnsupportedExpressionError for a
    constant array, map or struct.
    """
    kind = value_type(literal.type)
    value = literal.value
    if value is None or isinstance(value, bool) or pa.types.is_string(kind):
        return pa.scalar(value, kind)
    if is_integral(literal.type) or is_year_month(literal.type):
        return pa.scalar(int(value), kind)
    if is_fractional(literal.type):
        return pa.scalar(float(value), kind)
    if pa.types.is_boolean(kind):
        return pa.scalar(value == "true", kind)
    if pa.types.is_decimal(kind):
        return pa.scalar(decimal.Decimal(value), kind)
    if pa.types.is_binary(kind):
        return pa.scalar(bytes.fromhex(value), kind)
    if pa.types.is_date32(kind):
        return pa.scalar(int(value), pa.int32()).cast(kind)
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return pa.scalar(int(value), pa.int64()).cast(kind)
    if literal.type == "interval":
        months, days, micros = map(int, str(value).split(","))
        return pa.scalar({"months": months, "days": days, "micros": micros}, kind)
    raise UnsupportedExpressionError(f"a constant of type {literal.type}")


Value: TypeAlias = "pa.Array | pa.Scalar"


class _KeptRows(Sequence[pa.Array]):
    """The rows of columns for which a mask is true. A column, or a field of one, is copied when it is first read.

    Filtering by the mask is fast where long runs of rows are kept or left out. In other masks, rows are taken by their
    numbers from the second column on: for columns of numbers, that costs a fourth.
    """

    def __init__(self, columns: Sequence[pa.Array], mask: pa.Array) -> None:
        self._columns = columns
        self._mask = mask
        self._is_mixed = len(mask) < 8 * mask.true_count < 7 * len(mask)
        self._rows: pa.Array | None = None
        self._kept: dict[int, pa.Array] = {}
        self._fields: dict[tuple[int, int], pa.Array] = {}
        self._present: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: Any) -> Any:
        found = self._kept.get(index)
        if found is None:
            found = self._kept[index] = self._taken(self._columns[index])
        return found

    def _taken(self, column: pa.Array) -> pa.Array:
        if not (self._is_mixed and (self._kept or self._fields)):
            return column.filter(self._mask)
        if self._rows is None:
            self._rows = pa.array(np.flatnonzero(np.asarray(pc.fill_null(self._mask, False))))
        return pc.take(column, self._rows, boundscheck=False)

    def field(self, index: int, ordinal: int) -> pa.Array:
        """A field of a column of structs: the other fields are not filtered for it."""
        found = self._fields.get((index, ordinal))
        if found is None:
            whole = not isinstance(self._columns, _KeptRows | OneColumn) and self._has_no_null(index)
            # Without the nulls of structs that are left out, a field is taken faster.
            child = self._columns[index].field(ordinal) if whole else field_of(self._columns, index, ordinal)
            found = self._fields[index, ordinal] = self._taken(child)
        return found

    def _has_no_null(self, index: int) -> bool:
        """Whether no struct that is kept is null."""
        found = self._present.get(index)
        if found is None:
            kept = pc.and_(self._columns[index].is_valid(), self._mask)
            found = self._present[index] = kept.true_count == self._mask.true_count
        return found


def field_of(columns: Sequence[pa.Array], index: int, ordinal: int) -> pa.Array:
    """The values of a field of a column of structs; null where the struct is."""
    if isinstance(columns, _KeptRows | OneColumn):
        return columns.field(index, ordinal)
    return struct_child(columns[index], ordinal)


def struct_child(structs: pa.Array, ordinal: int) -> pa.Array:
    """The values of a field of structs; null where the struct is. Values are shared with the structs if possible."""
    child = structs.field(ordinal)
    if structs.null_count == 0:
        return child
    kind = child.type
    simple = pa.types.is_primitive(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)
    if simple and child.null_count == 0 and child.offset == structs.offset:
        buffers = [structs.buffers()[0], *child.buffers()[1:]]
        return pa.Array.from_buffers(kind, len(child), buffers, structs.null_count, child.offset)
    if pa.types.is_dictionary(kind):
        indices = pc.if_else(structs.is_valid(), child.indices, pa.scalar(None, kind.index_type))
        return pa.DictionaryArray.from_arrays(indices, child.dictionary, safe=False)
    return pc.if_else(structs.is_valid(), child, pa.scalar(None, kind))


class Frame:
    """The rows that an expression is evaluated over: columns of one length, and the arguments of enclosing lambdas.

    ``moment`` is the current time for these rows, in microseconds since 1970. ``random_bytes`` returns a number of
    bytes for the random functions. ``memo`` has the values of parts that several expressions share, by the numbers that
    :func:`compile_all` gave them.
    """

    def __init__(
        self,
        columns: Sequence[pa.Array],
        length: int,
        variables: Mapping[int, Value] | None = None,
        moment: int | None = None,
        random_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self.columns = columns
        self.length = length
        self.variables = variables or {}
        self.moment = moment
        self.random_bytes = random_bytes
        self.memo: dict[int, Value] = {}

    def part(self, mask: pa.Array) -> Frame:
        """Returns the rows for which ``mask`` is true."""
        if mask.true_count == self.length:
            return self
        variables = {
            id_: (value if isinstance(value, pa.Scalar) else value.filter(mask))
            for id_, value in self.variables.items()
        }
        return Frame(_KeptRows(self.columns, mask), mask.true_count, variables, self.moment, self.random_bytes)

    def with_variables(self, values: Mapping[int, Value]) -> Frame:
        """Returns the same rows with the arguments of one more lambda."""
        return Frame(self.columns, self.length, {**self.variables, **values}, self.moment, self.random_bytes)


Evaluator: TypeAlias = "Callable[[Frame], Value]"
Builder: TypeAlias = "Callable[[Call, Sequence[Evaluator]], Evaluator]"

FUNCTIONS: dict[str, Builder] = {}
"""The builder of each function, by the name of Spark's expression class."""


_NO_PARTITIONS = (
    "rows of a stream do not have Spark's partitions or files; write the value into a column when the rows are created"
)
_NO_JVM = "the engine cannot run Java classes; call a Python function"
_REFUSED = {
    **dict.fromkeys(("MonotonicallyIncreasingID", "SparkPartitionID"), _NO_PARTITIONS),
    **dict.fromkeys(("InputFileName", "InputFileBlockStart", "InputFileBlockLength"), _NO_PARTITIONS),
    **dict.fromkeys(("CallMethodViaReflection", "Invoke", "StaticInvoke"), _NO_JVM),
    **dict.fromkeys(("Collate", "ResolvedCollation"), "the engine compares text by its bytes; use lower(...)"),
}


def refusal(name: str) -> UnsupportedExpressionError:
    """Returns the error for a function that the engine lacks, with an alternative if one is known."""
    why = _REFUSED.get(name)
    what = f"the function {name}"
    return UnsupportedExpressionError(what) if why is None else UnsupportedExpressionError(what, why)


def function(*names: str) -> Callable[[Builder], Builder]:
    """Registers a builder under the names of Spark's expression classes."""

    def register(builder: Builder) -> Builder:
        for name in names:
            FUNCTIONS[name] = builder
        return builder

    return register


def strict(*names: str) -> Callable[[Callable[[Call], Callable[..., Value]]], None]:
    """Registers functions all of whose arguments are evaluated for each row.

    The decorated builder is called once with the node and returns the kernel, which is called per batch with values.
    """

    def register(choose_kernel: Callable[[Call], Callable[..., Value]]) -> None:
        def build(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
            kernel = choose_kernel(call)
            if len(arguments) == 1:
                only = arguments[0]
                return lambda frame: kernel(only(frame))
            step = -1 if call.function in _FROM_RIGHT_TO_LEFT else 1
            if call.function not in _TAKES_NULLS and any(map(may_fail, call.arguments[::step][1:])):
                kinds = [value_type(argument.type) for argument in call.arguments[::step]]
                return lambda frame: kernel(*_in_turn(arguments[::step], kinds, frame)[::step])
            if len(arguments) == 2:
                left, right = arguments
                return lambda frame: kernel(left(frame), right(frame))
            return lambda frame: kernel(*[argument(frame) for argument in arguments])

        function(*names)(build)

    return register


def by_row(*names: str, nulls: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers functions that Python computes from the values of a row, by :func:`per_row`."""

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        strict(*names)(lambda call: per_row(compute, value_type(call.type), nulls=nulls))
        return compute

    return register


_TAKES_NULLS = frozenset(
    {
        *("EqualNullSafe", "Greatest", "Least", "StringLocate", "Mask", "ConcatWs", "CreateMap", "FormatString"),
        *("ArrayAppend", "ArrayPrepend", "ArrayInsert", "ArrayRepeat", "NullIfResult"),
        "AtLeastNNonNulls",
    }
)
"""Functions for which Spark evaluates every argument, even where another one is null."""


_FROM_RIGHT_TO_LEFT = frozenset({"Divide", "IntegralDivide", "Remainder", "Pmod"})
"""Functions whose last argument Spark evaluates first."""


def _in_turn(arguments: Sequence[Evaluator], kinds: Sequence[pa.DataType], frame: Frame) -> Sequence[Value]:
    """Returns the values of arguments. As in Spark, an error does not count where an earlier argument is null."""
    try:
        return [argument(frame) for argument in arguments]
    except EvaluationError:
        values: list[Value] = []
        open_ = pa.repeat(pa.scalar(True), frame.length)
        for argument, kind in zip(arguments, kinds, strict=True):
            values.append(scattered(argument, frame, open_, kind))
            open_ = pc.and_(open_, pc.is_valid(values[-1]))
        return values


def scattered(evaluator: Evaluator, frame: Frame, mask: pa.Array, type_: pa.DataType) -> pa.Array:
    """Evaluates only the rows of a mask without nulls; the others are null."""
    part = frame.part(mask)
    if part.length == 0:
        return pa.nulls(frame.length, type_)
    values = broadcast(evaluator(part), part.length).cast(type_)
    if part.length == frame.length:
        return values
    positions = pc.subtract(pc.cumulative_sum(mask.cast(pa.int64())), 1)
    return values.take(pc.if_else(mask, positions, pa.scalar(None, pa.int64())))


def kernel_of(name: str, options: Any = None) -> Callable[..., Value]:
    """Returns an Arrow kernel by its name, looked up once: half the cost of ``pyarrow.compute``'s wrapper."""
    call = pc.get_function(name).call
    if options is None:
        return lambda *values: call(values)
    return lambda *values: call(values, options)


class _SharedParts:
    """The calls that occur more than once in some trees, except random ones and those over arguments of lambdas."""

    def __init__(self, trees: Sequence[Expression]) -> None:
        self._numbers: dict[object, int] = {}
        self._of_node: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._local: set[int] = set()
        for tree in trees:
            self._number(tree)

    def number(self, call: Call) -> int | None:
        """The number of a call that occurs more than once, the same for equal calls; None for any other call."""
        number = self._of_node.get(id(call))
        return None if number is None or self._counts[number] < 2 or number in self._local else number

    def _number(self, tree: Expression) -> int:
        if not isinstance(tree, Call):
            number = self._numbers.setdefault(repr(tree), len(self._numbers))
            if isinstance(tree, Lambda | Variable):
                self._local.add(number)
            return number
        arguments = tuple(map(self._number, tree.arguments))
        key = (tree.function, arguments, repr(tree.type), tree.mode, repr(tree.settings))
        number = self._numbers.setdefault(key, len(self._numbers))
        self._counts[number] += 1
        self._of_node[id(tree)] = number
        if tree.function in RANDOM or not self._local.isdisjoint(arguments):
            self._local.add(number)
        return number


def compile_all(trees: Sequence[Expression]) -> list[Evaluator]:
    """Compiles trees that are evaluated over the same frames: a call that occurs in them twice is evaluated once.

    Raises as :func:`compile_expression`.
    """
    shared = _SharedParts(trees)
    return [compile_expression(tree, shared) for tree in trees]


def _remembered(number: int, evaluator: Evaluator) -> Evaluator:
    def run(frame: Frame) -> Value:
        found = frame.memo.get(number)
        if found is None:
            found = frame.memo[number] = evaluator(frame)
        return found

    return run


def is_read(tree: Expression) -> bool:
    """Whether a tree is a column, or a field of a column of structs."""
    match tree:
        case Column() | Call(function="GetStructField", arguments=(Column(), *_)):
            return True
    return False


def _reader(tree: Expression) -> Evaluator:
    """Returns the function that reads a column or a field as it is encoded."""
    if isinstance(tree, Column):
        index = tree.index
        return lambda frame: frame.columns[index]
    assert isinstance(tree, Call)
    (structs,), ordinal = tree.arguments, int(tree.settings["ordinal"])
    assert isinstance(structs, Column)
    of = structs.index
    return lambda frame: field_of(frame.columns, of, ordinal)


def _decoding(tree: Expression) -> Evaluator:
    read = _reader(tree)
    return lambda frame: decoded(read(frame))


RANDOM = frozenset({"Rand", "Randn", "RandStr", "Shuffle", "Uuid"})
"""Functions of random values. Each call and each batch of rows has values of its own, as in Spark's streams."""
_OF_THE_MOMENT = RANDOM | {
    *("CurrentTimestamp", "Now", "CurrentDate", "LocalTimestamp", "RaiseError", "TryEval", "AesEncrypt"),
}


def text_read_by(tree: Call) -> Expression | None:
    """The only column or field that a tree reads, if it is text and the value of the tree depends on nothing else."""
    found: list[Expression] = []

    def reads_one(part: Expression) -> bool:
        if is_read(part):
            found.append(part)
            return part == found[0]
        if isinstance(part, Call):
            return part.function not in _OF_THE_MOMENT and all(map(reads_one, part.arguments))
        return isinstance(part, Literal)

    return found[0] if reads_one(tree) and found and found[0].type in ("string", "binary") else None


def compile_encoded(trees: Sequence[Expression]) -> list[Evaluator]:
    """As :func:`compile_all`; columns and values of text may be dictionaries, and then keep this encoding."""
    return [
        _reader(tree) if is_read(tree) else evaluator.encoded if isinstance(evaluator, OverDictionary) else evaluator
        for tree, evaluator in zip(trees, compile_all(trees), strict=True)
    ]


def compile_expression(tree: Expression, shared: _SharedParts | None = None, *, inside: bool = False) -> Evaluator:
    """Returns the function that evaluates a tree over a frame. ``inside`` an expression over a dictionary is none.

    Raises UnsupportedExpressionError for a function or a type that the engine does not have.
    """
    match tree:
        case Column():
            return _decoding(tree)
        case Literal():
            scalar = literal_scalar(tree)
            return lambda frame: scalar
        case Variable(id=id_):
            return lambda frame: frame.variables[id_]
        case Lambda():
            raise UnsupportedExpressionError("a lambda function", "it is used outside of a higher-order function")
    builder = FUNCTIONS.get(tree.function)
    if builder is None:
        raise refusal(tree.function)
    value_type(tree.type)
    if is_read(tree):
        return _decoding(tree)
    source = None if inside else text_read_by(tree)
    if source is not None:
        over_values = compile_expression(tree, inside=True)
        over_rows = compile_expression(tree, shared, inside=True)
        return OverDictionary(
            _reader(source), over_rows, lambda values: over_values(Frame(OneColumn(values), len(values)))
        )
    plain = [argument for argument in tree.arguments if not isinstance(argument, Lambda)]
    evaluator = builder(tree, [compile_expression(argument, shared, inside=inside) for argument in plain])
    number = None if shared is None else shared.number(tree)
    return evaluator if number is None else _remembered(number, evaluator)


def evaluate(evaluator: Evaluator, frame: Frame, type_: pa.DataType) -> pa.Array:
    """Returns the values of a compiled expression as an array of the frame's length and of exactly ``type_``."""
    value = evaluator(frame)
    array = broadcast(value, frame.length)
    return array if array.type == type_ else array.cast(type_)


def evaluate_encoded(evaluator: Evaluator, frame: Frame, type_: pa.DataType) -> pa.Array:
    """As :func:`evaluate`; the values may be dictionaries."""
    array = broadcast(evaluator(frame), frame.length)
    kind = array.type
    return array if kind == type_ or plain_type(kind) == type_ else array.cast(type_)


def broadcast(value: Value, length: int) -> pa.Array:
    """Returns an array of ``length`` values."""
    return pa.repeat(value, length) if isinstance(value, pa.Scalar) else value


def may_fail(tree: Expression) -> bool:
    """Returns whether a row may cause an error: a branch must then be evaluated for its own rows only."""
    match tree:
        case Call():
            return tree.function not in _NEVER_FAIL or any(may_fail(argument) for argument in tree.arguments)
        case Lambda():
            return may_fail(tree.body)
    return False


_NEVER_FAIL = frozenset(
    {
        *("And", "Or", "Not", "IsNull", "IsNotNull", "IsNaN", "EqualTo", "EqualNullSafe", "In", "If", "CaseWhen"),
        *("LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Coalesce", "NaNvl", "GetStructField"),
        *("Upper", "Lower", "Length", "Concat", "StartsWith", "EndsWith", "Contains", "CreateNamedStruct"),
        "AtLeastNNonNulls",
    }
)
