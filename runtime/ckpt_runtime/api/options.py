"""``format`` and options of readers and writers in PySpark's style. Collects them; checks nothing against data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from ckpt_runtime.api.checks import checked_text
from ckpt_runtime.graph.errors import PlanError

Resolve = Callable[[str | type], str | type]
"""Resolves a registered name to its class."""


def option_text(key: str, value: object) -> str:
    """Returns an option's value as text, as PySpark writes it (``true`` and ``false`` for booleans)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise PlanError(f"option {key!r}", f"expected a text, a number or a boolean, not {type(value).__name__}")


class WithOptions:
    """``format``, ``option`` and ``options``; names of options are case-insensitive, the last one given wins."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._format: str | type | None = None
        self._options: dict[str, str] = {}

    def format(self, source: str | type) -> Self:
        """Takes a built-in format's name, a registered ``DataSource``'s name, or a ``DataSource`` class.

        :param source: which of them.
        :raises PlanError: neither a name nor such a class
        """
        self._format = self._resolve(source)
        return self

    def option(self, key: str, value: str | int | float | bool | None) -> Self:
        """Sets one option; None removes it.

        :param key: the option's name.
        :param value: a text, a number or a boolean.
        :raises PlanError: a value of another type
        """
        checked_text("option", key)
        for known in [known for known in self._options if known.lower() == key.lower()]:
            del self._options[known]
        if value is not None:
            self._options[key] = option_text(key, value)
        return self

    def options(self, **options: str | int | float | bool | None) -> Self:
        """Sets several options.

        :param options: names and values, as of :meth:`option`.
        :raises PlanError: a value of another type
        """
        for key, value in options.items():
            self.option(key, value)
        return self

    def _chosen_format(self, method: str, path: str | None) -> str | type:
        """Ends the description. ``path`` is short for ``option("path", path)``."""
        if self._format is None:
            raise PlanError("format", f"not given; call .format(name or DataSource class) before .{method}()")
        if path is not None:
            self.option("path", path)
        return self._format
