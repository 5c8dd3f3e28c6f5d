"""How a bug is planted: a named patch of the cores, of the shell or of what is simulated, kept in one list."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True)
class PlantedBug:
    """``like`` names where something like it happened, or the rule that it breaks.

    Few schedules show some of them: ``seed`` is one that did when it was written here, where the search begins.
    """

    name: str
    like: str
    patches: Callable[[], Patches]
    seed: int = 0


BUGS: list[PlantedBug] = []


def bug(
    name: str, like: str, owner: Any = None, attribute: str = "", *, bugs: list[PlantedBug] = BUGS, seed: int = 0
) -> Callable[[Any], Any]:
    """Adds a bug to a list; by default that of the protocols.

    What is decorated takes the place of an owner's attribute, which it gets first if it has a parameter ``original``.
    Without an owner it is a function that returns the patches, where there are several.
    """

    def add(planted: Any) -> Any:
        patches = planted if owner is None else lambda: [(owner, attribute, _in_place_of(owner, attribute, planted))]
        bugs.append(PlantedBug(name, like, patches, seed))
        return planted

    return add


def _in_place_of(owner: Any, attribute: str, planted: Any) -> Any:
    if not inspect.isfunction(planted) or next(iter(inspect.signature(planted).parameters), "") != "original":
        return planted
    original = getattr(owner, attribute)
    return lambda *arguments, **more: planted(original, *arguments, **more)


def also(owner: Any, name: str, extra: Callable[..., None]) -> tuple[Any, str, Any]:
    """After the original."""
    original = getattr(owner, name)

    def patched(self, *arguments, **more):
        result = original(self, *arguments, **more)
        extra(self, *arguments, **more)
        return result

    return owner, name, patched


def nothing(self, *arguments, **more):
    return None
