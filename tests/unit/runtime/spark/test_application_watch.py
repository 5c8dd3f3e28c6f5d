"""The end of Spark's application is noticed, once."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from ckpt_runtime.spark import session
from ckpt_runtime.spark.session import ApplicationWatch

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "WATCH_INTERVAL_S", 0.005)


def watched(stopped: Callable[[], bool]) -> str:
    reasons: queue.Queue[str] = queue.Queue()
    watch = ApplicationWatch(stopped, reasons.put)
    watch.start()
    reason = reasons.get(timeout=TIMEOUT_S)
    watch._thread.join(TIMEOUT_S)
    assert reasons.empty()
    return reason


def test_stopped_application_and_ended_jvm_are_reported() -> None:
    answers = iter([False, False, True, True])
    assert watched(lambda: next(answers)) == "Spark has stopped the application"

    def refused() -> bool:
        raise ConnectionRefusedError(111, "Connection refused")

    assert watched(refused) == "Spark's JVM is gone ([Errno 111] Connection refused)"


def test_end_of_a_session_that_ends_itself_is_not_reported() -> None:
    reasons: list[str] = []

    def asked() -> bool:
        watch.close()
        return True

    watch = ApplicationWatch(asked, reasons.append)
    watch.start()
    watch._thread.join(TIMEOUT_S)
    assert reasons == []
