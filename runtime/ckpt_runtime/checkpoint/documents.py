"""The schema of a subtask's state, as acknowledgements and ``_metadata`` carry it. Shapes only."""

from __future__ import annotations

from ckpt_runtime.checkpoint.state_handles import KeyedStateHandle, SubtaskState
from ckpt_runtime.graph.schema import check_values


def check_state(state: SubtaskState, where: str) -> None:
    """Looks at the values in it that no schema describes. Raises :class:`DocumentError`."""
    for operator in state.operators.values():
        for handle in operator.keyed:
            if isinstance(handle, KeyedStateHandle):
                for section in handle.sections:
                    check_values(section.descriptor, f"{where}: a descriptor")
            else:
                check_values(handle.description, f"{where}: a description")
        for listed in operator.lists:
            check_values(listed.items, f"{where}: a list state")
