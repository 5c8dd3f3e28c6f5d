"""What the docstrings of this project say: text, ``:param``, ``:raises``; and signatures as a reader wants them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

PACKAGES: Final = ("airflow_provider_ckpt", "ckpt_runtime")
_FIELD: Final = re.compile(r":(param|raises) (\w+): (.+)")
_ROLE: Final = re.compile(r":(?:class|meth|func|mod|attr|data):`[~!]?(?:[\w.]*\.)?(\w+)`")
_TEMPLATED: Final = "Templated["


@dataclass(frozen=True)
class Docstring:
    """``text`` is Markdown, ``returns`` its paragraph on what comes back, if it has one behind the first."""

    text: str
    returns: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Parameter:
    """``owner`` is the class that takes it. ``default`` is empty for one that has to be given."""

    name: str
    kind: str
    default: str
    owner: type | None = None


def docstring_of(thing: object) -> Docstring:
    """Raises ValueError for a line that belongs nowhere."""
    text: list[str] = []
    fields: dict[str, dict[str, list[str]]] = {"param": {}, "raises": {}}
    present: list[str] | None = None
    for line in (inspect.getdoc(thing) or "").splitlines():
        found = _FIELD.fullmatch(line)
        if found is not None:
            present = fields[found[1]][found[2]] = [found[3]]
        elif present is None:
            text.append(line)
        elif line.startswith("    "):
            present.append(line.strip())
        elif line:
            raise ValueError(f"{thing}: {line!r} comes behind the parameters")
    paragraphs = [each for each in re.split(r"\n\s*\n", "\n".join(text)) if each.strip()]
    returns = [each for each in paragraphs[1:] if each.startswith(("Returns ", "Gives "))]
    others = [each for each in paragraphs if each not in returns]  # the first is what it does, however it begins
    of = {kind: {name: markdown(" ".join(lines)) for name, lines in found.items()} for kind, found in fields.items()}
    return Docstring(markdown("\n\n".join(others)), markdown("\n\n".join(returns)), of["param"], of["raises"])


def markdown(text: str) -> str:
    """From the little reStructuredText that the docstrings have."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`").replace("::\n", ":\n")


def parameters_of(function: Callable[..., Any], owner: type | None = None) -> Iterator[Parameter]:
    """Those that a caller gives by name."""
    for name, known in inspect.signature(function).parameters.items():
        if name in ("self", "cls", "kwargs"):
            continue
        annotation = (
            known.annotation if isinstance(known.annotation, str) else inspect.formatannotation(known.annotation)
        )
        default = "" if known.default is known.empty else repr(known.default)
        star = "*" if known.kind is known.VAR_POSITIONAL else "**" if known.kind is known.VAR_KEYWORD else ""
        yield Parameter(star + name, _without_templates(annotation), default, owner)


def all_parameters(cls: type) -> dict[str, Parameter]:
    """Of a class and of the bases that are ours, those of the class itself first; not those that it fixes."""
    found: dict[str, Parameter] = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in PACKAGES and "__init__" in vars(base):
            for parameter in parameters_of(vars(base)["__init__"], base):
                found.setdefault(parameter.name, parameter)
    return {name: parameter for name, parameter in found.items() if name not in getattr(cls, "fixed_parameters", ())}


def meaning_of(cls: type, parameter: str) -> str:
    """What the docstring of a class or a base says of a parameter; empty when none does."""
    described = (docstring_of(base).parameters.get(parameter, "") for base in cls.__mro__ if _is_ours(base))
    return next((each for each in described if each), "")


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in PACKAGES and "__doc__" in vars(cls) and bool(cls.__doc__)


def _without_templates(annotation: str) -> str:
    """Which of them are templates has a column of its own."""
    while _TEMPLATED in annotation:
        begin = annotation.index(_TEMPLATED)
        end, depth = begin + len(_TEMPLATED), 1
        while depth:
            depth += {"[": 1, "]": -1}.get(annotation[end], 0)
            end += 1
        annotation = annotation[:begin] + annotation[begin + len(_TEMPLATED) : end - 1] + annotation[end:]
    return annotation


def cell(text: str) -> str:
    """In a table."""
    return " ".join(text.split()).replace("|", "\\|")
