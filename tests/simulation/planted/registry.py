"""How a bug is planted: a named patch of the cores or of the simulated shell, kept in one list."""

from __future__ import annotations

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
    name: str, like: str, bugs: list[PlantedBug] = BUGS, *, seed: int = 0
) -> Callable[[Callable[[], Patches]], Callable[[], Patches]]:
    """Adds it to a list; by default that of the protocols."""

    def add(patches: Callable[[], Patches]) -> Callable[[], Patches]:
        bugs.append(PlantedBug(name, like, patches, seed))
        return patches

    return add


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
