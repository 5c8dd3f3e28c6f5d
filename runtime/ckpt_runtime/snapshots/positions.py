"""Sets the position of a source in a snapshot; all other state stays as it is.

The position is recorded with the state of the source's enumerator, with the splits that its readers had. The source
itself resolves it when a job starts from the snapshot, because only the program knows where the data is. This module
checks the rest: the snapshot has such a source, and the source takes such positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState
from ckpt_runtime.connectors.split_host import (
    ENDED_SPLITS,
    ENUMERATOR,
    OFFSET,
    OPEN_SPLITS,
    UNREAD_PARTITIONS,
    Reposition,
    repositioned_item,
)
from ckpt_runtime.graph.schema import DocumentError, check_values, checked
from ckpt_runtime.sources import StartPosition
from ckpt_runtime.storage.errors import InvalidLocationError

_OF_ENUMERATORS = (ENUMERATOR, OFFSET)
ALLOWED = "earliest, latest, a time such as 2026-11-01T09:00 (UTC unless it has an offset), or offsets as JSON"


def start_position(text: str, now_ms: int) -> StartPosition:
    """The position that a user means. Raises ValueError for a text of another form, and for a time in the future."""
    given = text.strip()
    if given.lower() in ("earliest", "latest"):
        return StartPosition(given.lower())  # type: ignore[arg-type]
    if given.startswith("{"):
        try:
            offsets = json.loads(given)
            check_values(offsets, "the offsets")
        except RecursionError:
            raise ValueError("the offsets are nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"the offsets are not JSON: {error}") from None
        return StartPosition("offsets", offsets=offsets)
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        raise ValueError(f"{given[:200]!r} is not a position; allowed are {ALLOWED}") from None
    time_ms = int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    if not 0 <= time_ms <= now_ms:
        raise ValueError(f"{given!r} must be a time between 1970 and now")
    return StartPosition("timestamp", time_ms)


def position_text(position: StartPosition) -> str:
    """The text that shows a position to a user."""
    if position.time_ms is not None:
        return datetime.fromtimestamp(position.time_ms / 1000, UTC).isoformat()
    return position.kind if position.offsets is None else json.dumps(position.offsets)


def repositioned(metadata: CompletedCheckpoint, positions: Mapping[str, StartPosition]) -> CompletedCheckpoint:
    """The snapshot with these positions, by uid of the source. Raises InvalidLocationError naming the fault."""
    check_positions(metadata, positions)
    if positions and any(state.has_channel_state for state in metadata.states.values()):
        url = metadata.directory
        raise InvalidLocationError(f"{url} contains in-flight data; take a savepoint, which contains none", url)
    states = dict(metadata.states)
    for uid, position in positions.items():
        _set(metadata, states, uid, position)
    return replace(metadata, states=states)


def check_positions(metadata: CompletedCheckpoint, positions: Mapping[str, StartPosition]) -> None:
    """Raises InvalidLocationError unless the sources of these uids are in the snapshot and take such positions."""
    known = dict(_enumerators(metadata))
    for uid, position in positions.items():
        _check(metadata, known, uid, position)


def repositions_of(metadata: CompletedCheckpoint) -> dict[str, str]:
    """The positions that were set in a snapshot and that no job has started from yet, by uid, as texts."""
    found = {}
    for uid, item in _enumerators(metadata):
        given = item.get("reposition")
        if given is not None:
            with suppress(DocumentError):
                found[uid] = position_text(checked(given, Reposition).position)
    return found


def _enumerators(metadata: CompletedCheckpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """Uid and stored item of each source that is read in splits."""
    for state in metadata.states.values():
        for uid, operator in state.operators.items():
            for listed in operator.lists:
                if listed.name in _OF_ENUMERATORS and len(listed.items) == 1 and isinstance(listed.items[0], dict):
                    yield uid, listed.items[0]


def _set(
    metadata: CompletedCheckpoint, states: dict[tuple[str, int], SubtaskState], uid: str, position: StartPosition
) -> None:
    vertex = next(vertex for vertex in metadata.vertices if uid in vertex.operator_uids)
    readers = {edge.target for edge in metadata.edges if edge.source == vertex.id}
    if not readers:
        url = metadata.directory
        raise InvalidLocationError(f"{url} does not say which operators read source {uid!r}; take a new savepoint", url)
    reading: list[Any] = []
    for key, state in states.items():
        if key[0] in readers:
            kept = {}
            for name, operator in state.operators.items():
                reading += [item for listed in operator.lists if listed.name == OPEN_SPLITS for item in listed.items]
                # Splits that have ended are kept for ``latest`` only: otherwise they may be read again, and must not be
                # cleaned up.
                dropped = {OPEN_SPLITS, UNREAD_PARTITIONS}
                if position.kind != "latest":
                    dropped.add(ENDED_SPLITS)
                kept[name] = replace(
                    operator, lists=tuple(listed for listed in operator.lists if listed.name not in dropped)
                )
            states[key] = replace(state, operators=kept)
    item = repositioned_item(dict(_enumerators(metadata))[uid], reading, position)
    for key, state in states.items():
        if key[0] == vertex.id and uid in state.operators:
            operator = state.operators[uid]
            lists = tuple(
                replace(listed, items=(item,)) if listed.name in _OF_ENUMERATORS else listed
                for listed in operator.lists
            )
            states[key] = replace(state, operators={**state.operators, uid: replace(operator, lists=lists)})


def _check(
    metadata: CompletedCheckpoint, known: Mapping[str, dict[str, Any]], uid: str, position: StartPosition
) -> None:
    url = metadata.directory
    if uid not in known:
        there = ", ".join(map(repr, sorted(known))) or "none"
        raise InvalidLocationError(
            f"{url} has no source {uid!r} whose position can be set; sources of that kind in it: {there}", url
        )
    item = known[uid]
    if item.get("reposition") is not None:
        raise InvalidLocationError(
            f"the position of source {uid!r} was already set in {url}; set it in the snapshot from which this one was "
            "created",
            url,
        )
    can = item.get("start_positions")
    if isinstance(can, list) and position.kind not in can:
        takes = f"its format takes {', '.join(map(str, can))}" if can else "its format has no positions"
        raise InvalidLocationError(f"source {uid!r} cannot be set to {position_text(position)}: {takes}", url)
