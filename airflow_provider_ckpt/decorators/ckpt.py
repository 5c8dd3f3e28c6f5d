"""``@task.ckpt``: a pipeline as a function of the DAG file, deployed by :class:`DeployJobOperator`.

The source of the function becomes a program that runs without the DAG file. Only text is taken: nothing is pickled, and
the function is never called here. Names that the program would lack are found in the text when the DAG file is parsed.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import shutil
import symtable
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Formatter
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Final

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS
from msgspec import json

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.deploy import DeployJobOperator
from ckpt_runtime.client.packaging import PackagingError, pack_pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context


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


_CACHES = shutil.ignore_patterns("__pycache__", ".*")


class _CkptDecoratedOperator(DecoratedOperator, DeployJobOperator):
    """The operator behind :func:`ckpt_task`, which describes its arguments."""

    custom_operator_name = "@task.ckpt"
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(
            name
            for name in DeployJobOperator.template_fields
            if name not in ("pipeline", "pipeline_id", "entry", "args")
        ),
        "files",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **DeployJobOperator.template_fields_renderers,
    }

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        job_name: Templated[str] | None = None,
        files: Templated[Sequence[str]] = (),
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._source = source_of(python_callable)
        self.files = files
        super().__init__(
            # Airflow checks the arguments against the signature, and the first one is not the DAG author's.
            python_callable=partial(python_callable, None),
            op_args=op_args,
            op_kwargs=op_kwargs,
            kwargs_to_upstream={"job_name": job_name, "pipeline": str(self._source.file), "entry": self._source.entry},
            **kwargs,
        )

    def settle(self, context: Context) -> None:
        super().settle(context)
        given = [list(self.op_args), dict(self.op_kwargs)]
        for name, value in [*enumerate(self.op_args), *self.op_kwargs.items()]:
            if not _is_json(value):
                raise CkptArgumentInvalid(
                    f"argument {name!r} of {self._source.name}",
                    type(value).__name__,
                    "it must be a JSON value: a text, a number, true, false, None, or lists and dicts of these",
                )
        self.args = [json.encode(given, order="sorted").decode()]
        self.job_name = self._name(context)

    def _name(self, context: Context) -> str:
        """The job's name, in which ``{parameter}`` is replaced by the argument of that name."""
        given = arguments.optional_text("job_name", self.job_name)
        instance: Any = context["ti"]
        if given is None:
            if getattr(instance, "map_index", -1) >= 0:
                allowed = "a mapped task needs one that its arguments make unique, such as job_name='orders-{country}'"
                raise CkptArgumentInvalid("job_name", given, allowed)
            return f"{instance.dag_id}.{instance.task_id}"
        called = dict(zip(self._source.parameters, self.op_args, strict=False)) | dict(self.op_kwargs)
        try:
            return "".join(
                before + ("" if name is None else str(called[name])) for before, name, _, _ in Formatter().parse(given)
            )
        except (KeyError, ValueError) as error:
            allowed = (
                f"in braces it may contain names of arguments that the task passes: {', '.join(called) or 'none here'}"
            )
            raise CkptArgumentInvalid("job_name", given, allowed) from error

    def packed(self) -> tuple[str, bytes]:
        """The program: only the function's source, or a reproducible archive with the additional files."""
        if self._content is None:
            given: Any = [self.files] if isinstance(self.files, str) else self.files
            if not isinstance(given, Sequence) or not all(isinstance(item, str) and item.strip() for item in given):
                raise CkptArgumentInvalid("files", self.files, "it must be a list of paths")
            self._content = _packed(self._source, list(given))
        return self._content


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))


def _packed(source: FunctionSource, files: Sequence[str]) -> tuple[str, bytes]:
    if not files:
        return f"{source.name}.py", source.text.encode()
    beside = source.file.absolute().parent
    with TemporaryDirectory(prefix="ckpt-program-") as directory:
        root = Path(directory) / source.name
        root.mkdir()
        (root / f"{source.name}.py").write_text(source.text, encoding="utf-8")
        for name in files:
            path = beside / name
            target = root / (path.relative_to(beside) if path.is_relative_to(beside) else path.name)
            if ".." in target.parts:
                target = root / path.name
            if target.exists():
                raise CkptArgumentInvalid("files", name, f"the program already has {target.relative_to(root)}")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                if path.is_dir():
                    shutil.copytree(path, target, ignore=_CACHES)
                else:
                    shutil.copy(path, target)
            except (OSError, shutil.Error) as error:
                allowed = f"it must be a file or directory, relative to {beside}: {error}"
                raise CkptArgumentInvalid("files", name, allowed) from error
        try:
            return pack_pipeline(root)
        except PackagingError as error:
            raise CkptArgumentInvalid("files", list(files), str(error)) from error


def ckpt_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Make a task of a function that builds a pipeline: a job runs it, which the task starts, finds or upgrades.

    The function's source is the program. Everything that it uses is therefore imported or defined inside it, given as
    an argument, or in one of ``files``. Its first parameter is called ``spark``, and is not given in the call.
    Arguments of the call are JSON values, and may be templates.

    The task is a :class:`~airflow_provider_ckpt.operators.deploy.DeployJobOperator`, whose arguments it takes, and
    gives the same result.

    :param python_callable: the function.
    :param multiple_outputs: whether each field of the result is an XCom of its own; default true.
    :param job_name: the job's name, default ``<dag>.<task>``; ``{parameter}`` in it is replaced by an argument of the
        call. Mapped tasks need one. (templated)
    :param files: further files and directories that the program needs: modules that it imports, data that it reads
        below ``Path(__file__).parent``. Paths start at the folder of the DAG file. (templated)
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=True if multiple_outputs is None else multiple_outputs,
        decorated_operator_class=_CkptDecoratedOperator,
        **kwargs,
    )
