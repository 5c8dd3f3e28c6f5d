"""The reference of the provider and of the pipeline API: pages made of signatures and docstrings.

``python -m tests.support.reference_pages docs/reference`` writes them.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.support.docstrings import (
    PACKAGES,
    Parameter,
    all_parameters,
    cell,
    docstring_of,
    markdown,
    meaning_of,
    parameters_of,
)

NOTE: Final = "*Made by `make docs` from signatures and docstrings. How the parts go together: {see}.*"
_SHARED: Final = ("CkptOperator", "CkptSensor")
_DURATIONS: Final = (
    '`Duration` is a number of seconds, a text such as `"90 s"`, `"5 min"` or `"250 ms"`, or a `timedelta`. '
    "A templated parameter takes a value, a template that renders to one, or another task's output."
)
_GUIDE: Final = "[operators.md](../operators.md)"


def render() -> dict[str, str]:
    """Every page by its file name."""
    from airflow_provider_ckpt.get_provider_info import get_provider_info

    info = get_provider_info()
    modules = {kind: info[kind][0]["python-modules"] for kind in ("operators", "sensors", "hooks", "triggers")}
    pages = {
        "operators.md": _tasks(
            "Operators", modules["operators"], "CkptOperator", "airflow_provider_ckpt.operators.base"
        ),
        "sensors.md": _tasks("Sensors", modules["sensors"], "CkptSensor", "airflow_provider_ckpt.sensors.base"),
        "triggers.md": _triggers(modules["triggers"]),
        "hooks.md": _hooks(modules["hooks"]),
        "assets.md": _assets(),
        "decorators.md": _decorators(info["task-decorators"]),
        "notifiers.md": _notifiers(info["notifications"]),
        "dags.md": _dags(),
        "errors.md": _errors(),
    }
    return {name: _tidy("\n".join(lines)) for name, lines in pages.items()}


def _tidy(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def classes_of(modules: Iterable[str], ending: str = "") -> Iterator[type]:
    """Those that are for use, in the order of the modules."""
    for name in modules:
        module = import_module(name)
        for thing in vars(module).values():
            ours = inspect.isclass(thing) and thing.__module__ == name and not thing.__name__.startswith("_")
            if ours and thing.__name__.endswith(ending) and "not for use in DAGs" not in (thing.__doc__ or ""):
                yield thing


# --- what pages are made of


def _page(title: str, see: str, intro: str = "") -> list[str]:
    return [f"# {title}", "", NOTE.format(see=see), "", *([intro, ""] if intro else [])]


def _heading(thing: Any, level: str = "##") -> list[str]:
    module = thing.__module__
    path = module.replace(".", "/") + ".py"
    if module.startswith("ckpt_runtime"):
        path = f"runtime/{path}"
    return [f"{level} {thing.__name__}", "", f"`{module}.{thing.__qualname__}` ([source](../../{path}))", ""]


def _table(
    parameters: Iterable[Parameter], meaning: Callable[[str], str], templates: Iterable[str] | None
) -> list[str]:
    given = list(parameters)
    if not given:
        return []
    templated = templates is not None
    lines = ["| parameter | type | default |" + (" templated |" if templated else "") + " meaning |"]
    lines.append("|---|---|---|" + ("---|" if templated else "") + "---|")
    for each in given:
        default = f"`{cell(each.default)}`" if each.default else "required"
        marks = f" {'yes' if each.name in (templates or ()) else ''} |" if templated else ""
        text = cell(meaning(each.name.lstrip("*"))).replace(" (templated)", "")
        lines.append(f"| `{each.name}` | `{cell(each.kind)}` | {default} |{marks} {text} |")
    return [*lines, ""]


def _raised(errors: Mapping[str, str]) -> list[str]:
    if not errors:
        return []
    return ["Raises:", "", *(f"* [`{name}`](errors.md#{name.lower()}): {text}" for name, text in errors.items()), ""]


def errors_of(cls: type) -> dict[str, str]:
    """What a class and its bases say that they raise."""
    ours = [
        base
        for base in reversed(cls.__mro__)
        if "airflow_provider_ckpt" in base.__module__ and vars(base).get("__doc__")
    ]
    return {name: text for base in ours for name, text in docstring_of(base).errors.items()}


# --- tasks


def _tasks(title: str, modules: list[str], shared: str, where: str) -> list[str]:
    base = getattr(import_module(where), shared)
    lines = _page(title, _GUIDE, _DURATIONS)
    lines += [f"## All {title.lower()}", "", docstring_of(base).text.partition("\n\n")[2], ""]
    own = all_parameters(base).values()
    lines += _table(own, lambda name: meaning_of(base, name), base.template_fields)
    lines += _raised(errors_of(base))
    common = errors_of(base)
    for cls in classes_of(modules, shared.removeprefix("Ckpt")):
        lines += _task(cls, common)
    return lines


def _task(cls: Any, common: Mapping[str, str]) -> list[str]:
    said = docstring_of(cls)
    lines = [*_heading(cls), said.text, ""]
    own = _own_parameters(cls)
    lines += _table(own, lambda name: meaning_of(cls, name), cls.template_fields)
    if said.returns:
        lines += [said.returns, "", "Each key is an XCom of its own, too.", ""]
    lines += _outputs(cls)
    lines += _raised({name: text for name, text in errors_of(cls).items() if name not in common})
    links = ", ".join(f"*{link.name}*" for link in cls.operator_extra_links)
    return [*lines, *([f"Links: {links}.", ""] if links else [])]


def _own_parameters(cls: type) -> list[Parameter]:
    """Without those that all of its kind have."""
    return [each for each in all_parameters(cls).values() if getattr(each.owner, "__name__", "") not in _SHARED]


def _outputs(cls: Any) -> list[str]:
    found = inspect.getmembers(cls, lambda member: isinstance(member, property))
    ours = [(name, each.fget) for name, each in found if each.fget.__annotations__.get("return") == "XComArg"]
    named = [(name, get) for name, get in ours if get.__module__.startswith("airflow_provider_ckpt")]
    if not named:
        return []
    texts = [(name, docstring_of(get).text.replace(", for arguments of other tasks", "")) for name, get in named]
    return ["For arguments of other tasks:", "", *(f"* `.{name}`: {text}" for name, text in texts), ""]


def _triggers(modules: list[str]) -> list[str]:
    intro = "Operators, sensors and assets make them; no DAG has to name one. All of their arguments are JSON values."
    lines = _page("Triggers", _GUIDE, intro)
    for cls in classes_of(modules, "Trigger"):
        lines += [*_heading(cls), docstring_of(cls).text, ""]
        own = _own_parameters(cls)
        lines += _table(own, lambda name, cls=cls: meaning_of(cls, name), None)  # type: ignore[misc]
    return lines


# --- hooks, assets


def _hooks(modules: list[str]) -> list[str]:
    lines = _page("Hooks", _GUIDE)
    for cls in classes_of(modules, "Hook"):
        lines += [*_heading(cls), docstring_of(cls).text, ""]
        lines += _table(all_parameters(cls).values(), lambda name, cls=cls: meaning_of(cls, name), None)  # type: ignore[misc]
        lines += _methods(cls)
    return lines


def _methods(cls: type) -> list[str]:
    lines: list[str] = []
    ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in PACKAGES]
    members = {name: member for base in reversed(ours) for name, member in vars(base).items()}
    for name, method in members.items():
        if name.startswith("_"):
            continue
        if isinstance(method, property):
            lines += [f"### {cls.__name__}.{name}", "", docstring_of(method.fget).text, ""]
        elif inspect.isfunction(method):
            lines += _function(method, f"{cls.__name__}.{name}", "###")
    return lines


def _function(function: Callable[..., Any], title: str, level: str) -> list[str]:
    said, given = docstring_of(function), list(parameters_of(function))
    shown = ", ".join(each.name + (f"={each.default}" if each.default else "") for each in given)
    returned = inspect.signature(function).return_annotation
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    lines = [f"{level} {title}", "", f"`{prefix}{title}({shown})` → `{returned}`", "", said.text, ""]
    if said.returns:
        lines += [said.returns, ""]
    return lines + _table(given, lambda name: said.parameters.get(name, ""), None) + _raised_here(said.errors)


def _raised_here(errors: Mapping[str, str]) -> list[str]:
    return ["Raises:", "", *(f"* `{name}`: {text}" for name, text in errors.items()), ""] if errors else []


def _assets() -> list[str]:
    from airflow_provider_ckpt import assets

    lines = [*_page("Assets", _GUIDE), markdown(inspect.getdoc(assets) or ""), ""]
    alerts = ("no_checkpoint_for", "no_savepoint_for", "lag_above")
    for name in ("savepoints_of", "checkpoints_of", *alerts, "create_asset", "sanitize_uri"):
        lines += _function(getattr(assets, name), name, "##")
    return lines


# --- decorators, notifiers


def _decorators(entries: Iterable[Mapping[str, str]]) -> list[str]:
    """Arguments of a decorator become those of its operator, which takes more than the decorator names."""
    from airflow_provider_ckpt.decorators.ckpt import _CkptDecoratedOperator

    lines = _page("Task decorators", _GUIDE)
    for entry in entries:
        module, _, name = entry["class-name"].rpartition(".")
        said = docstring_of(getattr(import_module(module), name))
        known = all_parameters(_CkptDecoratedOperator)
        given = [known[parameter] for parameter in said.parameters if parameter in known]
        lines += [f"## @task.{entry['name']}", "", said.text, ""]
        lines += _table(given, lambda name, said=said: said.parameters[name], _CkptDecoratedOperator.template_fields)  # type: ignore[misc]
        other = "All other arguments are those of [DeployJobOperator](operators.md#deployjoboperator)"
        lines += [f"{other}, without `pipeline`, `pipeline_id`, `entry` and `args`.", ""]
    return lines


def _notifiers(paths: Iterable[str]) -> list[str]:
    lines = _page("Notifiers", _GUIDE)
    for cls in classes_of([path.rpartition(".")[0] for path in paths], "Notifier"):
        lines += [*_heading(cls), docstring_of(cls).text, ""]
        lines += _table(all_parameters(cls).values(), lambda name, cls=cls: meaning_of(cls, name), cls.template_fields)  # type: ignore[misc,attr-defined]
    return lines


# --- DAGs


def _dags() -> list[str]:
    from airflow_provider_ckpt import dags

    lines = _page("DAGs", f"{_GUIDE}, [upgrades.md](../upgrades.md), [restore-drills.md](../restore-drills.md)")
    intro = markdown(inspect.getdoc(dags) or "").partition("\n\n")[0]
    lines += [intro.replace("\n", " "), "", "`~` in a default is the home of the user that Airflow runs as.", ""]
    for name in dags.names():
        dag = getattr(dags, name)
        lines += [f"## {name}", "", markdown(dag.doc_md or dag.description or ""), ""]
        lines += ["| parameter | title | type | default | meaning |", "|---|---|---|---|---|"]
        for key in dag.params:
            lines.append(_form_field(key, dag.params.get_param(key)))
        lines += ["", "Tasks: " + ", ".join(f"`{task.task_id}`" for task in dag.topological_sort()) + ".", ""]
    return lines


def _form_field(key: str, param: Any) -> str:
    schema, value = param.schema, param.value
    kind = schema.get("type", "")
    kinds = kind if isinstance(kind, str) else " or ".join(each for each in kind if each != "null")
    if "enum" in schema:
        kinds = " or ".join(f"`{each}`" for each in schema["enum"])
    default = "" if value in (None, "") else f"`{cell(str(value))}`"
    return f"| `{key}` | {schema.get('title', '')} | {kinds} | {default} | {cell(param.description or '')} |"


# --- errors, pipelines


def _errors() -> list[str]:
    from airflow.sdk import RetryAction
    from airflow.sdk.exceptions import AirflowFailException

    from airflow_provider_ckpt import exceptions
    from airflow_provider_ckpt.retry import CkptRetryPolicy

    lines = _page(
        "Errors", _GUIDE, "What the exceptions say that end a task, and whether Airflow tries the task again."
    )
    for cls in classes_of([exceptions.__name__]):
        kind: Any = cls
        retried = "Airflow retries."
        if issubclass(cls, AirflowFailException):
            retried = "A retry cannot cure it: Airflow makes none."
        elif CkptRetryPolicy().evaluate(kind(), 1, 1).action is RetryAction.FAIL:
            retried = "The default retry policy makes no retry."
        lines += [f"## {cls.__name__}", "", f"{docstring_of(cls).text} {retried}", ""]
    return lines


def main(directory: str) -> None:
    """Writes the pages, and deletes others."""
    for name in [name for name in os.environ if name.startswith("CKPT_")]:
        del os.environ[name]
    os.environ |= {"CKPT_DATA": "~/ckpt-data", "CKPT_PIPELINES": "<this project>/pipelines"}
    pages, folder = render(), Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (folder / name).write_text(text)
    for other in set(folder.glob("*.md")) - {folder / name for name in pages}:
        other.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
