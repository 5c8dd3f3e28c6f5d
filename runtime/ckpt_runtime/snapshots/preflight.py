"""What becomes of each keyed state of a snapshot in another program, found out before anything is started or stopped.

A process with limits finds it out (``preflight_process.py``). The driver, which asks it, imports no operators.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct, to_builtins

from ckpt_runtime.api.plan_result import PlanRequest
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.state_handles import CanonicalKeyedStateHandle, KeyedHandle, KeyedStateHandle
from ckpt_runtime.graph.schema import decoded
from ckpt_runtime.processes.limited_process import ProcessLimits, run_limited

_PROCESS = "ckpt_runtime.snapshots.preflight_process"
UNTIL_IT_RUNS = "unknown until it runs"


class StateVerdict(Struct, frozen=True):
    """One keyed state. ``verdict``: matched, changed, new, dropped, unused, refused, or unknown until it runs.

    ``stored`` and ``wanted`` are the fields of both schemas as far as they are known.
    """

    operator: str
    state: str
    verdict: str
    stored: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    reason: str | None = None


class Question(Struct):
    """What the process is asked: what to plan, and what each state is that is stored."""

    plan: PlanRequest
    stored: dict[str, dict[str, dict[str, Any]]]


class PreflightAnswer(Struct):
    """What it answers."""

    states: tuple[StateVerdict, ...]


def judge_states(
    order: PlanRequest, snapshot: CompletedCheckpoint, limits: ProcessLimits, environment: Mapping[str, str]
) -> tuple[StateVerdict, ...]:
    """Blocks. ``order`` is what was planned before without an error.

    Raises LimitedProcessError, and DocumentError for an answer that is none.
    """
    question = json.dumps(to_builtins(Question(order, stored_descriptors(snapshot)))).encode()
    return decoded(run_limited(_PROCESS, question, limits, environment), PreflightAnswer).states


def stored_descriptors(snapshot: CompletedCheckpoint) -> dict[str, dict[str, dict[str, Any]]]:
    """By operator and state: what each keyed state is, as far as its backend says it in the metadata."""
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
    """RocksDB keeps all schemas in which rows were ever written, and says which is the present one."""
    if not isinstance(entry, dict) or "descriptors" not in entry:
        return entry
    with suppress(LookupError, TypeError):
        return entry["descriptors"][entry.get("current", 0)]
    return None
