"""The sessions of Spark that a worker keeps in use."""

from __future__ import annotations

import queue
import threading

from ckpt_runtime.frontend.live_session import SessionsInUse
from tests.support.patience import patient


def test_one_thread_keeps_all_sessions_in_use_at_the_shortest_pause_of_their_servers() -> None:
    asked: queue.Queue[str] = queue.Queue(3)  # the thread waits when it is full, also behind the test
    before = threading.active_count()
    sessions = SessionsInUse(asked.put)
    sessions.add("job/first", "first", 3600.0)
    sessions.add("job/second", "second", 0.01)
    sessions.add("job/third", "third", 60.0)
    assert threading.active_count() == before + 1
    seen: set[str] = set()
    while seen != {"first", "second", "third"}:
        seen.add(asked.get(timeout=patient(30)))
