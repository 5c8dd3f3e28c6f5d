"""Which savepoints are kept. Pure: from what lies in a directory, or is in the catalogue, to what goes and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.client.savepoint_models import Savepoint

SAVEPOINT_KINDS = ("SAVEPOINT", "SYNC_SAVEPOINT")


@dataclass(frozen=True, slots=True)
class StoredSavepoint:
    """A savepoint that can be read; ``completed_ms`` is when it was completed.

    ``problem`` is what the catalogue has against it, ``proof`` what it has for it. ``lineage`` is the same for all jobs
    that started from each other's snapshots.
    """

    path: str
    completed_ms: int
    lineage: str | None = None
    problem: str | None = None
    proof: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """``kept`` says of each why; ``deleted`` is in the order to delete in, the oldest first."""

    kept: Mapping[str, str]
    deleted: Sequence[str]


def savepoints_of(documents: Sequence[Mapping[str, Any]], job_id: str | None = None) -> list[StoredSavepoint]:
    """The readable savepoints of ``ckpt snapshot list``, the newest first. Checkpoints belong to their job."""
    found = [
        StoredSavepoint(str(item["location"]), int(item["completion_timestamp"]), _lineage_of(item))
        for item in documents
        if item.get("kind") in SAVEPOINT_KINDS and job_id in (None, item.get("job_id"))
    ]
    return _newest_first(found)


def catalogued(savepoints: Sequence[Savepoint]) -> list[StoredSavepoint]:
    """Those of the catalogue that can be read, the newest first."""
    found = [
        StoredSavepoint(
            item.location, item.completion_timestamp, item.lineage or item.job_id, item.problem, _proof_of(item)
        )
        for item in savepoints
        if item.completion_timestamp is not None
    ]
    return _newest_first(found)


def _lineage_of(document: Mapping[str, Any]) -> str | None:
    return (document.get("catalogue") or {}).get("lineage") or document.get("job_id")


def by_lineage(newest_first: Sequence[StoredSavepoint]) -> list[list[StoredSavepoint]]:
    """The savepoints of each lineage, in the same order."""
    found: dict[str | None, list[StoredSavepoint]] = {}
    for item in newest_first:
        found.setdefault(item.lineage, []).append(item)
    return list(found.values())


def _proof_of(item: Savepoint) -> str | None:
    for what, mark in (("drilled", item.drilled), ("verified", item.verified)):
        if mark is not None and mark.passed and item.good:
            return f"it was {what} by {mark.by}" if mark.by else f"it was {what}"
    return None


def _newest_first(found: list[StoredSavepoint]) -> list[StoredSavepoint]:
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
