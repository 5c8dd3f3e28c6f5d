"""Detects that Spark's application has ended: its JVM is gone, or its master or the JVM itself has stopped it.

Otherwise the driver would keep running without slots, as a leader that no other session can replace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

INTERVAL_S = 1.0


class ApplicationWatch:
    """Asks the JVM every second, in a thread: a JVM that does not respond for a while does not count as gone.

    ``on_end(reason)`` is called once, from that thread.
    """

    def __init__(self, stopped: Callable[[], bool], on_end: Callable[[str], None]) -> None:
        """``stopped`` says whether the application was stopped, and raises if the JVM is gone."""
        self._stopped = stopped
        self._on_end = on_end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="application-watch", daemon=True)

    @classmethod
    def of(cls, context: SparkContext, on_end: Callable[[str], None]) -> ApplicationWatch:
        return cls(context._jsc.sc().isStopped, on_end)  # noqa: SLF001 - PySpark has no other way to ask

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching: nothing is reported afterwards."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            reason = self._end()
            if reason and not self._closed.is_set():
                self._on_end(reason)
                return

    def _end(self) -> str:
        try:
            return "Spark has stopped the application" if self._stopped() else ""
        except Exception as error:
            return f"Spark's JVM is gone ({error})"
