"""Predicts what a restore in another program would do with each keyed state of a snapshot, without starting a job.

A process with limits makes the prediction (``preflight_process.py``). The driver imports no operators for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct, to_builtins

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    CompletedCheckpoint,
    KeyedHandle,
    KeyedStateHandle,
)
from ckpt_runtime.frontend.planning_process import PlanRequest
from ckpt_runtime.graph.schema import decoded
from ckpt_runtime.processes.limited_process import ProcessLimits, run_limited

_PROCESS = "ckpt_runtime.snapshots.preflight_process"
UNTIL_IT_RUNS = "unknown until it runs"


class StateVerdict(Struct, frozen=True):
    """The prediction for one keyed state.

    ``verdict`` is matched, changed, new, dropped, unused, refused, or unknown until it runs. ``stored`` and ``wanted``
    are the fields of the stored and of the requested schema, as far as they are known.
    """

    operator: str
    state: str
    verdict: str
    stored: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    reason: str | None = None


class Question(Struct):
    """The request to the process: the program to plan, and the stored states' descriptors by operator and name."""

    plan: PlanRequest
    stored: dict[str, dict[str, dict[str, Any]]]


class PreflightAnswer(Struct):
    """The answer of the process."""

    states: tuple[StateVerdict, ...]


def judge_states(
    order: PlanRequest, snapshot: CompletedCheckpoint, limits: ProcessLimits, environment: Mapping[str, str]
) -> tuple[StateVerdict, ...]:
    """Returns the prediction for each state. Blocks. ``order`` is a program that has already been planned successfully.

    Raises LimitedProcessError, and DocumentError for an invalid answer.
    """
    question = json.dumps(to_builtins(Question(order, stored_descriptors(snapshot)))).encode()
    return decoded(run_limited(_PROCESS, question, limits, environment), PreflightAnswer).states


def stored_descriptors(snapshot: CompletedCheckpoint) -> dict[str, dict[str, dict[str, Any]]]:
    """The descriptors of keyed states by operator uid and name, as far as the metadata contains them."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for state in snapshot.states.values():
        for uid, operator in state.operators.items():
            for handle in operator.keyed:
                found.setdefault(uid, {}).update(_descriptors_of(handle))
    return found


def _descriptors_of(handle: KeyedHandle) -> Iterator[tuple[str, dict[str, Any]]]:
    match handle:
        case KeyedStateHandle():
            yield from ((section.name, section.descriptor) for section in handle.sections)
        case CanonicalKeyedStateHandle():
            yield handle.name, handle.descriptor
        case _:
            states = handle.description.get("states")
            for name, entry in states.items() if isinstance(states, dict) else ():
                found = _present_descriptor(entry)
                if isinstance(found, dict) and "kind" in found:
                    yield name, found


def _present_descriptor(entry: Any) -> Any:
    """The current descriptor: RocksDB stores one for each schema in which rows were written, and which is current."""
    if not isinstance(entry, dict) or "descriptors" not in entry:
        return entry
    with suppress(LookupError, TypeError):
        return entry["descriptors"][entry.get("current", 0)]
    return None
