"""The savepoint catalogue as JSON. Pure functions."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.jobmaster.gateway_values import KnownSavepoints, SavepointList
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.storage.savepoint_entry import Mark

Json = dict[str, Any]


def savepoint_list(found: SavepointList) -> Json:
    """Answers ``/savepoints``."""
    return {"directory": found.directory, "savepoints": [savepoint(item) for item in found.savepoints]}


def known_savepoints(found: KnownSavepoints) -> Json:
    """Answers ``/savepoints/known``."""
    return {
        "directories": list(found.directories),
        "unread": [{"directory": directory, "problem": problem} for directory, problem in found.unread.items()],
        "savepoints": [savepoint(item) for item in found.savepoints],
    }


def savepoint(found: CataloguedSavepoint) -> Json:
    """Shows a savepoint; one that cannot be read has only its location and the problem."""
    document: Json = {"location": found.location, "good": found.is_good, "problem": found.problem}
    entry = found.entry
    if entry is None:
        return document
    verifications, drills = [_mark(mark) for mark in entry.verifications], [_mark(mark) for mark in entry.drills]
    return {
        **document,
        "job-id": entry.job_id,
        "job-name": entry.job_name,
        "lineage": entry.lineage_id,
        "program": entry.program,
        "configuration-version": entry.configuration_version,
        "savepoint-id": entry.savepoint_id,
        "taken-by": entry.taken_by,
        "cluster": entry.cluster,
        "trigger-timestamp": entry.triggered_at_ms,
        "completion-timestamp": entry.completed_at_ms,
        "duration": entry.duration_ms,
        "size": entry.bytes,
        "files": entry.files,
        "format": entry.format,
        "state-backend": entry.state_backend,
        "written-by": entry.written_by,
        "verified": verifications[-1] if verifications else None,
        "drilled": drills[-1] if drills else None,
        "verifications": verifications,
        "drills": drills,
    }


def _mark(mark: Mark) -> Json:
    return {
        "timestamp": mark.at_ms,
        "passed": mark.passed,
        "by": mark.by,
        "detail": mark.detail,
        "duration": mark.duration_ms,
    }
