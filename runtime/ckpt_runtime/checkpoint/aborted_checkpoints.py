"""Remembers a bounded number of checkpoints that ended without completing, to recognise late messages. Nothing else."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 1_024


class AbortedCheckpoints:
    """The most recent aborted ids. An id that is forgotten, or completed, counts as not aborted."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, None] = OrderedDict()

    def add(self, checkpoint_id: int) -> None:
        self._ids[checkpoint_id] = None
        if len(self._ids) > REMEMBERED:
            self._ids.popitem(last=False)

    def __contains__(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self._ids
