"""``@task.ckpt``: a pipeline as a function of the DAG file, deployed by :class:`DeployJobOperator`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Formatter
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory
from msgspec import json

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.decorators.function_source import FunctionSource, source_of
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.deploy import DeployJobOperator
from ckpt_runtime.client.packaging import PackagingError, pack_pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context

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
            kwargs_to_upstream={
                "job_name": job_name,
                "pipeline": str(self._source.file),
                "entry": self._source.entry,
            },
            **kwargs,
        )

    def settle(self, context: Context) -> None:
        super().settle(context)
        self.args = [self._document()]
        self.job_name = self._name(context)

    def _document(self) -> str:
        """The arguments of the call as JSON."""
        given = [list(self.op_args), dict(self.op_kwargs)]
        for name, value in [*enumerate(self.op_args), *self.op_kwargs.items()]:
            if not _is_json(value):
                raise CkptArgumentInvalid(
                    f"argument {name!r} of {self._source.name}",
                    type(value).__name__,
                    "it must be a JSON value: a text, a number, true, false, None, or lists and dicts of these",
                )
        return json.encode(given, order="sorted").decode()

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
            self._content = _packed(self._source, self._files())
        return self._content

    def _files(self) -> list[str]:
        given: Any = [self.files] if isinstance(self.files, str) else self.files
        if not isinstance(given, Sequence) or not all(isinstance(item, str) and item.strip() for item in given):
            raise CkptArgumentInvalid("files", self.files, "it must be a list of paths")
        return list(given)


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
