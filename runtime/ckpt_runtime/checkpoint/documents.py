"""The schema of a subtask's state, as acknowledgements and ``_metadata`` carry it. Shapes only."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.checkpoint.state_handles import KeyedStateHandle, SubtaskState
from ckpt_runtime.graph.schema import check_levels, checked


def subtask_state_of(document: dict[str, Any]) -> SubtaskState:
    """The state that an acknowledgement carries. Raises :class:`DocumentError`."""
    state = checked(document, SubtaskState)
    check_state(state, "the state")
    return state


def check_state(state: SubtaskState, where: str) -> None:
    """Looks at the values in it that no schema describes. Raises :class:`DocumentError`."""
    for operator in state.operators.values():
        for handle in operator.keyed:
            if isinstance(handle, KeyedStateHandle):
                for section in handle.sections:
                    check_levels(section.descriptor, f"{where}: a descriptor")
            else:
                check_levels(handle.description, f"{where}: a description")
        for listed in operator.lists:
            check_levels(list(listed.items), f"{where}: a list state")
