"""Answers about plans of jobs that have not been started."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msgspec import to_builtins

from ckpt_runtime.jobmaster.restore_preview import PlanPreview, RestorePreview
from ckpt_runtime.rest.shapes import jobs

Json = dict[str, Any]


def plan_preview(found: PlanPreview) -> Json:
    """Flink's plan with warnings beside it, and ``restore`` if a snapshot was given."""
    answer: Json = {"plan": jobs.plan("", found.graph), "warnings": list(found.warnings)}
    return answer if found.restore is None else {**answer, "restore": _restore(found.restore)}


def _restore(found: RestorePreview) -> Json:
    snapshot = found.snapshot
    return {
        "snapshot": snapshot.directory,
        "type": snapshot.properties.type.value,
        "format": snapshot.format.value,
        "state-backend": snapshot.state_backend,
        "fits": not found.refusals,
        "refusals": list(found.refusals),
        "operators": [_spelled(asdict(each)) for each in found.operators],
        "states": [to_builtins(state) for state in found.states],
    }


def _spelled(fields: Json) -> Json:
    return {key.replace("_", "-"): value for key, value in fields.items()}
