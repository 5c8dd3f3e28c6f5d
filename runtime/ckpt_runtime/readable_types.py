"""Makes types ready to be read by msgspec in several threads.

msgspec collects the facts about a class when it reads the class for the first time. A second thread that reads the
class at the same time finds that half done, and the process crashes (msgspec 0.22; a worker restores several subtasks
at once). Types that are read after a process has started threads therefore pass through :func:`ready`. Decoders that
are made when a module is imported need not.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_ready: set[object] = set()


def ready(kind: type[T]) -> type[T]:
    """Returns the type, of which msgspec now knows everything; one thread at a time collects it."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)
            _ready.add(kind)
    return kind
