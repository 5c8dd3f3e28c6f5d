"""The ring of events and places in it."""

from __future__ import annotations

import pytest

from ckpt_runtime.jobmaster.event_log import BATCH, EventLog, EventReader, EventsMissedError, EventType

STATUS = EventType.JOB_STATUS


def filled(events: int, capacity: int) -> EventLog:
    log = EventLog("session", capacity)
    for number in range(1, events + 1):
        log.publish(STATUS, f"job-{number % 2}", {"number": number})
    return log


def numbers(reader: EventReader) -> list[int]:
    return [event.data["number"] for event in reader.take()]


@pytest.mark.parametrize("events", [5, 10, 11, 27])
def test_kept_events_are_read_in_order_after_any_id(events: int) -> None:
    log = filled(events, 10)
    oldest = max(0, events - 10)
    for after in range(oldest, events + 1):
        assert numbers(EventReader(log, None, f"session-{after}")) == list(range(after + 1, events + 1))


@pytest.mark.parametrize(
    "last", ["session-16", "session-28", "other-20", "session-", "session-²", "session-1" + "0" * 30, "", "17"]
)
def test_dropped_events_are_reported_as_missed(last: str) -> None:
    log = filled(27, 10)
    with pytest.raises(EventsMissedError):
        EventReader(log, None, last)


def test_a_reader_that_the_ring_has_overtaken_gets_an_error() -> None:
    log = filled(2, 3)
    reader = EventReader(log, None)
    for number in range(3, 6):
        log.publish(STATUS, None, {"number": number})
    assert numbers(reader) == [3, 4, 5]
    for number in range(6, 10):
        log.publish(STATUS, None, {"number": number})
    with pytest.raises(EventsMissedError):
        reader.take()


def test_events_of_other_jobs_are_passed_over() -> None:
    """They cause no gap, and move the place from which a client continues."""
    log = filled(4 * BATCH, 10 * BATCH)
    reader = EventReader(log, frozenset(["job-1"]), "session-0")
    seen: list[int] = []
    while found := numbers(reader):
        seen += found
    assert seen == list(range(1, 4 * BATCH, 2))
    assert reader.last_event_id == f"session-{4 * BATCH}"
    only = EventReader(log, frozenset(["unknown"]), "session-0")
    assert numbers(only) == []
    assert only.last_event_id == f"session-{4 * BATCH}"


def test_listeners_are_called_until_they_are_removed() -> None:
    log = filled(0, 3)
    called: list[str] = []
    silence_a, silence_b = log.listen(lambda: called.append("a")), log.listen(lambda: called.append("b"))
    log.publish(STATUS, None, {})
    silence_a()
    silence_a()
    log.publish(STATUS, None, {})
    silence_b()
    log.publish(STATUS, None, {})
    assert sorted(called) == ["a", "b", "b"]
    assert log.listeners == 0


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be >= 1, is 0"):
        EventLog("session", 0)
