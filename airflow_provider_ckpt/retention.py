"""Which savepoints are kept. Pure: from what lies in a directory to what goes, and why the rest stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAVEPOINT_KINDS = ("SAVEPOINT", "SYNC_SAVEPOINT")


@dataclass(frozen=True, slots=True)
class StoredSavepoint:
    """A savepoint that can be read; ``completed_ms`` is when it was completed."""

    path: str
    completed_ms: int


@dataclass(frozen=True, slots=True)
class Decision:
    """``kept`` says of each why; ``deleted`` is in the order to delete in, the oldest first."""

    kept: Mapping[str, str]
    deleted: Sequence[str]


def savepoints_of(documents: Sequence[Mapping[str, Any]]) -> list[StoredSavepoint]:
    """The readable savepoints of ``ckpt snapshot list``, the newest first. Checkpoints belong to their job."""
    found = [
        StoredSavepoint(str(item["location"]), int(item["completion_timestamp"]))
        for item in documents
        if item.get("kind") in SAVEPOINT_KINDS
    ]
    return sorted(found, key=lambda item: (-item.completed_ms, item.path))


def decide(found: Sequence[StoredSavepoint], *, keep: int | None, keep_for_ms: int | None, now_ms: int) -> Decision:
    """``keep`` so many of the newest, and all that are younger than ``keep_for_ms``; one of the two is given."""
    kept: dict[str, str] = {}
    deleted: list[str] = []
    for number, item in enumerate(found):
        age = now_ms - item.completed_ms
        if number < (keep or 0):
            kept[item.path] = f"one of the newest {keep}"
        elif keep_for_ms is not None and age < keep_for_ms:
            kept[item.path] = f"{max(age, 0) // 1000} s old"
        else:
            deleted.insert(0, item.path)
    return Decision(kept, deleted)


def spared(decision: Decision, path: str, reason: str) -> Decision:
    """The same, but that one stays."""
    return Decision({**decision.kept, path: reason}, [other for other in decision.deleted if other != path])
