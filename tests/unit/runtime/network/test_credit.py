from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.network.elements import ReceiverCredit, SenderCredit


def test_sending_without_credit_is_an_error() -> None:
    credit = SenderCredit()
    with pytest.raises(RuntimeError, match="without credit"):
        credit.spend()
    credit.grant(1)
    credit.spend()
    assert credit.available == 0


def test_credit_is_complete_when_everything_that_was_sent_is_consumed() -> None:
    credit = SenderCredit()
    credit.grant(4)
    assert credit.is_complete
    credit.spend()
    credit.spend()
    credit.grant(1)
    assert not credit.is_complete
    credit.grant(1)
    assert credit.is_complete


@pytest.mark.parametrize("count", [0, -1])
def test_a_grant_must_be_positive(count: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        SenderCredit().grant(count)


def test_a_window_must_hold_a_buffer() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ReceiverCredit(0)


@given(st.integers(1, 20), st.lists(st.booleans(), max_size=200))
def test_a_sender_never_waits_for_an_idle_receiver(window: int, consumer_goes: list[bool]) -> None:
    """Whatever the interleaving: unsent credit + queued + owed = window, and an empty queue owes nothing."""
    sender, receiver = SenderCredit(), ReceiverCredit(window)
    sender.grant(window)
    queued = 0
    for consume in consumer_goes:
        if consume and queued:
            queued -= 1
            given_back = receiver.consumed(queue_empty=queued == 0)
            if given_back:
                sender.grant(given_back)
        elif not consume and sender.available:
            sender.spend()
            queued += 1
        assert sender.available + queued <= window
        assert sender.available or queued
