"""Measures of intervals: each row is part of those of exactly one completed checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.measures import MOST_INTERVALS, EventTimes, Interval, OpenIntervals, OperatorMeasures
from ckpt_runtime.jobmaster.progress import since


def concatenated(uid: str, parts: Sequence[bytes]) -> bytes:
    return b"".join(parts)


def interval(checkpoint_id: int, rows: int) -> Interval:
    return Interval(checkpoint_id, (OperatorMeasures("a", rows_out=rows, observed=b"x" * rows),))


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["completed", "aborted", "unknown"])), max_size=30))
def test_completed_checkpoints_report_all_rows_once_with_any_fate_of_the_others(
    checkpoints: list[tuple[int, str]],
) -> None:
    intervals = OpenIntervals(concatenated)
    reported = observed = pending = 0
    completed = -1
    for checkpoint_id, (rows, outcome) in enumerate(checkpoints):
        sent = intervals.add(interval(checkpoint_id, rows))
        pending += rows
        if outcome == "completed":
            for known in since(sent, completed, checkpoint_id):
                reported += known.operators[0].rows_out
                observed += len(known.operators[0].observed)
            completed, pending = checkpoint_id, 0
            intervals.completed(checkpoint_id)
        elif outcome == "aborted":
            intervals.aborted(checkpoint_id)
    assert reported == observed == sum(rows for rows, _ in checkpoints) - pending


def test_completion_that_a_subtask_hears_of_late_is_not_reported_again() -> None:
    intervals = OpenIntervals(concatenated)
    intervals.add(interval(1, 3))
    sent = intervals.add(interval(2, 4))  # before the subtask knows that 1 has completed
    assert [known.operators[0].rows_out for known in since(sent, 1, 2)] == [4]


@pytest.mark.parametrize(("aborted", "most"), [(True, 2), (False, MOST_INTERVALS + 1)])
def test_intervals_of_aborted_or_unknown_checkpoints_do_not_accumulate(aborted, most):
    intervals = OpenIntervals(concatenated)
    for checkpoint_id in range(1_000):
        sent = intervals.add(interval(checkpoint_id, 1))
        assert len(sent) <= most
        if aborted:
            intervals.aborted(checkpoint_id)
    assert sum(known.operators[0].rows_out for known in sent) == 1_000


def test_joined_interval_has_the_last_levels_and_all_event_times() -> None:
    first = OperatorMeasures("a", stored_rows=5, watermark=10, event_times=EventTimes(3, 9, 12.0, 2))
    second = OperatorMeasures("a", stored_rows=2, event_times=EventTimes(1, 4, 5.0, 2))
    both = first.and_(second, concatenated)
    assert both == OperatorMeasures("a", stored_rows=2, watermark=10, event_times=EventTimes(1, 9, 17.0, 4))
