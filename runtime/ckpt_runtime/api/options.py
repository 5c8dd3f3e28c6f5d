"""What readers and writers share: ``format`` and options in PySpark's style. Collects; checks nothing against data."""

from __future__ import annotations

from typing import Self

from ckpt_runtime.api.checks import checked_text
from ckpt_runtime.graph.errors import PlanError


def option_text(key: str, value: object) -> str:
    """An option's value as text, as PySpark writes it (``true`` and ``false`` for booleans)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise PlanError(f"option {key!r}", f"expected a text, a number or a boolean, not {type(value).__name__}")


class WithOptions:
    """``option`` and ``options``; names are case-insensitive, the last one given wins."""

    def __init__(self) -> None:
        self._options: dict[str, str] = {}

    def option(self, key: str, value: str | int | float | bool | None) -> Self:
        """Sets one option; None removes it."""
        checked_text("option", key)
        for known in [known for known in self._options if known.lower() == key.lower()]:
            del self._options[known]
        if value is not None:
            self._options[key] = option_text(key, value)
        return self

    def options(self, **options: str | int | float | bool | None) -> Self:
        """Sets several options."""
        for key, value in options.items():
            self.option(key, value)
        return self
