"""Threads in which an operator runs user code on behalf of its subtask."""

from __future__ import annotations

import threading


class HelperThread(threading.Thread):
    """Its work is attributed to the subtask whose thread created it: flame graphs show it there."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.helps = threading.current_thread()
