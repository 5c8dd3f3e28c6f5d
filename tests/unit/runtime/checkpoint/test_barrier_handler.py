"""Aligned barriers: every row of the protocol, and the rule that each barrier ends in exactly one resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.barrier_handler import (
    AbortCheckpoint,
    AlignedBarrierHandler,
    BarrierProtocolError,
    BarrierReceived,
    BlockChannel,
    CancelBarrierReceived,
    EndOfPartitionReceived,
    ResumeChannels,
    TriggerCheckpoint,
    TriggeredByCoordinator,
)
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties

A, B, C = (0, 0), (0, 1), (1, 0)
OPTIONS = CheckpointOptions(CheckpointProperties(), "dir")
CANCELLED = Reason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
SUBSUMED = Reason.CHECKPOINT_DECLINED_SUBSUMED


def barrier(channel, checkpoint_id):
    return BarrierReceived(channel, checkpoint_id, 77, OPTIONS)


def triggered(checkpoint_id, started=0, duration=0):
    return TriggerCheckpoint(checkpoint_id, 77, OPTIONS, started, duration)


def test_alignment_of_all_channels():
    handler = AlignedBarrierHandler([A, B, C])
    assert handler.handle(barrier(A, 1), 10) == [BlockChannel(A)]
    assert handler.handle(barrier(C, 1), 20) == [BlockChannel(C)]
    assert handler.pending_checkpoint == 1
    assert handler.blocked_channels == (A, C)
    assert handler.handle(barrier(B, 1), 45) == [BlockChannel(B), triggered(1, 10, 35), ResumeChannels((A, C, B))]
    assert handler.pending_checkpoint is None
    assert handler.latest_checkpoint == 1


def test_a_single_input_triggers_at_once():
    handler = AlignedBarrierHandler([A])
    assert handler.handle(barrier(A, 1), 5) == [BlockChannel(A), triggered(1, 5), ResumeChannels((A,))]


def test_an_obsolete_barrier_is_resumed():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 2), 0)
    assert handler.handle(barrier(B, 1), 0) == [ResumeChannels((B,))]
    handler.handle(barrier(B, 2), 0)
    assert handler.handle(barrier(B, 2), 0) == [ResumeChannels((B,))]


def test_a_newer_barrier_gives_the_pending_one_up():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 1), 0)
    assert handler.handle(barrier(B, 2), 0) == [
        ResumeChannels((A,)),
        AbortCheckpoint(1, SUBSUMED),
        BlockChannel(B),
    ]


def test_cancel_of_the_pending_one():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 1), 0)
    assert handler.handle(CancelBarrierReceived(B, 1), 0) == [ResumeChannels((A,)), AbortCheckpoint(1, CANCELLED)]
    assert handler.handle(barrier(B, 1), 0) == [ResumeChannels((B,))]
    assert handler.handle(CancelBarrierReceived(A, 1), 0) == []


def test_cancel_of_one_that_has_not_begun():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 1), 0)
    assert handler.handle(CancelBarrierReceived(B, 3), 0) == [
        ResumeChannels((A,)),
        AbortCheckpoint(1, SUBSUMED),
        AbortCheckpoint(3, CANCELLED),
    ]
    assert handler.handle(barrier(A, 3), 0) == [ResumeChannels((A,))]


def test_an_old_cancel_changes_nothing():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 5), 0)
    assert handler.handle(CancelBarrierReceived(B, 4), 0) == []
    assert handler.pending_checkpoint == 5


def test_an_ended_channel_counts_as_aligned():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 1), 0)
    assert handler.handle(EndOfPartitionReceived(B), 3) == [triggered(1, 0, 3), ResumeChannels((A,))]
    assert handler.handle(barrier(A, 2), 4) == [BlockChannel(A), triggered(2, 4), ResumeChannels((A,))]


def test_channels_that_ended_before_are_not_waited_for():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(EndOfPartitionReceived(A), 0)
    assert triggered(1) in handler.handle(barrier(B, 1), 0)


@pytest.mark.row("147.1")
def test_trigger_by_the_coordinator_blocks_nothing():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(EndOfPartitionReceived(A), 0)
    assert handler.handle(TriggeredByCoordinator(1, 77, OPTIONS), 0) == [triggered(1)]
    handler.handle(EndOfPartitionReceived(B), 0)
    assert handler.handle(TriggeredByCoordinator(2, 77, OPTIONS), 9) == [triggered(2, 9)]
    assert handler.handle(TriggeredByCoordinator(2, 77, OPTIONS), 9) == []


def test_trigger_by_the_coordinator_completes_a_started_alignment():
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 1), 0)
    assert handler.handle(TriggeredByCoordinator(1, 77, OPTIONS), 2) == [triggered(1, 0, 2), ResumeChannels((A,))]


@pytest.mark.parametrize(
    "event", [barrier(A, 2), CancelBarrierReceived(A, 2), EndOfPartitionReceived(A), barrier((9, 9), 2)]
)
def test_nothing_may_come_through_a_blocked_or_unknown_channel(event):
    handler = AlignedBarrierHandler([A, B])
    handler.handle(barrier(A, 1), 0)
    with pytest.raises(BarrierProtocolError):
        handler.handle(event, 0)
    assert handler.blocked_channels == (A,)


@given(st.data())
def test_every_barrier_ends_in_one_resume_and_ids_rise(data):
    channels = [(0, index) for index in range(data.draw(st.integers(1, 4)))]
    handler = AlignedBarrierHandler(channels)
    open_channels, blocked, taken, ended = set(channels), set(), [], []
    for _ in range(data.draw(st.integers(0, 40))):
        usable = sorted(open_channels - blocked)
        if not usable:
            break
        channel = data.draw(st.sampled_from(usable))
        number = data.draw(st.integers(1, 8))
        kind = data.draw(st.sampled_from(["barrier", "barrier", "barrier", "cancel", "end"]))
        if kind == "barrier":
            event = barrier(channel, number)
            blocked.add(channel)
        elif kind == "cancel":
            event = CancelBarrierReceived(channel, number)
        else:
            event = EndOfPartitionReceived(channel)
            open_channels.discard(channel)
        for effect in handler.handle(event, 0):
            match effect:
                case ResumeChannels(resumed):
                    assert set(resumed) <= blocked
                    assert len(set(resumed)) == len(resumed)
                    blocked -= set(resumed)
                case TriggerCheckpoint(checkpoint_id):
                    taken.append(checkpoint_id)
                    ended.append(checkpoint_id)
                case AbortCheckpoint(checkpoint_id):
                    ended.append(checkpoint_id)
        assert blocked == set(handler.blocked_channels)
        assert handler.pending_checkpoint is not None or not blocked
        assert blocked != open_channels or not open_channels
    assert taken == sorted(set(taken))
    assert len(ended) == len(set(ended))
