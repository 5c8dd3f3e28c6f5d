"""Barriers of one subtask: what each event does in each state of a checkpoint, and several checkpoints at once."""

from __future__ import annotations

import pytest

from ckpt_runtime.checkpoint.barrier_handler import (
    AbortCheckpoint,
    AbortedByCoordinator,
    AllBarriersReceived,
    BarrierAnnounced,
    BarrierHandler,
    BarrierProtocolError,
    BarrierReceived,
    BlockChannel,
    CancelBarrierReceived,
    DeadlinePassed,
    EndOfPartitionAnnounced,
    EndOfPartitionReceived,
    InFlightMeasured,
    MeasureInFlight,
    ResumeChannels,
    StopRecording,
    TakeSnapshot,
    TriggeredByCoordinator,
)
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType

A, B, C = (0, 0), (0, 1), (1, 0)
STARTED = 1_000
"""Wall clock of the trigger; the tests' monotonic clock is 0 then."""

ALIGNED = CheckpointOptions(CheckpointProperties(), "dir")
SAVEPOINT = CheckpointOptions(CheckpointProperties(CheckpointType.SAVEPOINT), "dir")
UNALIGNED = CheckpointOptions(CheckpointProperties(), "dir", unaligned=True)
LATER = CheckpointOptions(CheckpointProperties(), "dir", unaligned=True, aligned_timeout_ms=100)
BOUNDED = CheckpointOptions(CheckpointProperties(), "dir", unaligned=True, max_inflight_data_bytes=50)
COUNTED = CheckpointOptions(CheckpointProperties(), "dir", exactly_once=False)
FULLY_BOUNDED = CheckpointOptions(CheckpointProperties(), "dir", unaligned=True, max_inflight_data_bytes=0)
CANCELLED = Reason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
SUBSUMED = Reason.CHECKPOINT_DECLINED_SUBSUMED


def at(rel):
    return Instant(rel, STARTED + rel)


def announced(channel, checkpoint_id, options=UNALIGNED):
    return BarrierAnnounced(channel, checkpoint_id, STARTED, options)


def received(channel, checkpoint_id, options=ALIGNED):
    return BarrierReceived(channel, checkpoint_id, STARTED, options)


def triggered(checkpoint_id, duration=0, options=ALIGNED):
    return TakeSnapshot(checkpoint_id, STARTED, options, duration, False, (), ())


def turned(checkpoint_id, recording=(), captured=(), duration=0, options=UNALIGNED):
    return TakeSnapshot(checkpoint_id, STARTED, options, duration, True, recording, captured)


def fed(channels, *events, now=0):
    handler = BarrierHandler(channels)
    feed(handler, *events, now=now)
    return handler


def feed(handler, *events, now=0):
    """The effects of the last event."""
    effects = []
    for event in events:
        effects = handler.handle(event, at(now))
    return effects


# --- at least once


def test_barriers_of_a_checkpoint_at_least_once_are_counted_and_block_nothing():
    handler = BarrierHandler([A, B, C])
    assert handler.handle(received(A, 1, COUNTED), at(10)) == []
    assert handler.handle(received(A, 2, COUNTED), at(15)) == []
    assert handler.handle(EndOfPartitionReceived(C), at(20)) == []
    assert handler.blocked_channels == ()
    assert handler.handle(received(B, 1, COUNTED), at(45)) == [triggered(1, 35, COUNTED), AllBarriersReceived(1, 35)]
    assert handler.handle(received(B, 2, COUNTED), at(50)) == [triggered(2, 35, COUNTED), AllBarriersReceived(2, 35)]
    assert handler.pending_checkpoint is None


def test_cancelled_or_passed_over_checkpoint_at_least_once_is_given_up_once():
    handler = BarrierHandler([A, B])
    assert feed(handler, received(A, 1, COUNTED), received(B, 2, COUNTED)) == [AbortCheckpoint(1, SUBSUMED)]
    assert feed(handler, received(A, 2, COUNTED)) == [triggered(2, 0, COUNTED), AllBarriersReceived(2, 0)]
    handler = fed([A, B], received(A, 1, COUNTED))
    assert feed(handler, CancelBarrierReceived(B, 1)) == [AbortCheckpoint(1, CANCELLED)]
    assert feed(handler, CancelBarrierReceived(A, 2)) == [AbortCheckpoint(2, CANCELLED)]
    assert feed(handler, CancelBarrierReceived(B, 2)) == []


def test_savepoint_aligns_after_an_at_least_once_checkpoint():
    handler = fed([A, B], received(A, 1, COUNTED))
    assert feed(handler, received(A, 2, SAVEPOINT)) == [BlockChannel(A)]
    assert feed(handler, received(B, 1, COUNTED)) == [triggered(1, 0, COUNTED), AllBarriersReceived(1, 0)]
    assert handler.blocked_channels == (A,)
    assert feed(handler, received(B, 2, SAVEPOINT))[-1] == ResumeChannels((A, B))


def test_channels_of_counted_work_align_in_every_checkpoint():
    handler = BarrierHandler([A, B], aligned_only=[A])
    assert feed(handler, received(A, 1, COUNTED)) == [BlockChannel(A)]
    assert feed(handler, received(B, 1, COUNTED)) == [
        triggered(1, 0, COUNTED),
        AllBarriersReceived(1, 0),
        ResumeChannels((A,)),
    ]


# --- aligned


def test_alignment_of_all_channels():
    handler = BarrierHandler([A, B, C])
    assert handler.handle(received(A, 1), at(10)) == [BlockChannel(A)]
    assert handler.handle(received(C, 1), at(20)) == [BlockChannel(C)]
    assert handler.pending_checkpoint == 1
    assert handler.blocked_channels == (A, C)
    assert handler.next_deadline_ms is None
    assert handler.handle(received(B, 1), at(45)) == [
        BlockChannel(B),
        triggered(1, 35),
        AllBarriersReceived(1, 35),
        ResumeChannels((A, C, B)),
    ]
    assert handler.pending_checkpoint is None


def test_an_old_cancel_changes_nothing_but_what_it_has_passed():
    handler = fed([A, B, C], received(A, 5))
    assert feed(handler, CancelBarrierReceived(B, 4)) == []
    assert handler.pending_checkpoint == 5
    assert feed(handler, announced(B, 7, LATER), CancelBarrierReceived(C, 6)) == []


@pytest.mark.parametrize(
    "event",
    [
        received(A, 2),
        CancelBarrierReceived(A, 2),
        EndOfPartitionReceived(A),
        received((9, 9), 2),
        announced((9, 9), 2),
        EndOfPartitionAnnounced((9, 9)),
    ],
)
def test_input_from_a_blocked_or_unknown_channel_is_an_error(event):
    handler = BarrierHandler([A, B])
    handler.handle(received(A, 1), at(0))
    with pytest.raises(BarrierProtocolError):
        handler.handle(event, at(0))
    assert handler.blocked_channels == (A,)


@pytest.mark.parametrize("event", [announced(A, 1), received(A, 1), EndOfPartitionAnnounced(A)])
def test_input_after_the_end_of_a_channel_is_an_error(event):
    handler = BarrierHandler([A, B])
    handler.handle(EndOfPartitionReceived(A), at(0))
    with pytest.raises(BarrierProtocolError):
        handler.handle(event, at(0))


# --- triggered by the coordinator


@pytest.mark.row("147.1")
def test_the_coordinators_trigger_waits_for_the_ends_that_were_sent():
    handler = BarrierHandler([A, B])
    assert feed(handler, EndOfPartitionReceived(A), TriggeredByCoordinator(1, STARTED, ALIGNED)) == []
    assert handler.blocked_channels == ()
    assert handler.handle(EndOfPartitionReceived(B), at(9)) == [triggered(1, 9), AllBarriersReceived(1, 9)]
    assert feed(handler, TriggeredByCoordinator(1, STARTED, ALIGNED)) == []


def test_the_coordinators_trigger_without_open_channels_is_immediate():
    ended = BarrierHandler([A])
    feed(ended, EndOfPartitionReceived(A))
    for handler in (BarrierHandler([]), ended):
        for number, options in enumerate((ALIGNED, UNALIGNED, BOUNDED), start=1):
            trigger = TriggeredByCoordinator(number, STARTED, options)
            assert feed(handler, trigger) == [triggered(number, options=options), AllBarriersReceived(number, 0)]


def test_coordinators_trigger_of_an_unaligned_checkpoint_records_data_before_the_ends():
    handler = fed([A, B], EndOfPartitionAnnounced(A))
    assert feed(handler, TriggeredByCoordinator(1, STARTED, UNALIGNED)) == [turned(1, recording=(B,), captured=(A,))]
    assert feed(handler, EndOfPartitionAnnounced(B)) == [StopRecording(1, B), AllBarriersReceived(1, 0)]


def test_coordinators_trigger_counts_beside_older_barriers_and_not_of_an_aborted_checkpoint():
    """It was sent before the end of its channel."""
    handler = fed([A, B], TriggeredByCoordinator(2, STARTED, ALIGNED), received(A, 1))
    assert handler.pending_checkpoint == 1
    assert triggered(1) in feed(handler, received(B, 1))
    feed(handler, EndOfPartitionReceived(A))
    assert triggered(2) in feed(handler, EndOfPartitionReceived(B))
    handler = BarrierHandler([A])
    assert feed(handler, AbortedByCoordinator(1), TriggeredByCoordinator(1, STARTED, ALIGNED)) == []
    assert handler.pending_checkpoint is None


# --- turning unaligned


@pytest.mark.row("76.1")
def test_unaligned_starts_at_the_first_announcement():
    handler = BarrierHandler([A, B, C])
    assert feed(handler, announced(B, 1)) == [turned(1, recording=(A, C), captured=(B,))]
    assert handler.collecting_checkpoints == (1,)
    assert feed(handler, received(B, 1, UNALIGNED)) == []
    assert feed(handler, announced(A, 1)) == [StopRecording(1, A)]
    assert handler.handle(received(C, 1, UNALIGNED), at(8)) == [StopRecording(1, C), AllBarriersReceived(1, 8)]
    assert feed(handler, received(A, 1, UNALIGNED)) == []
    assert handler.collecting_checkpoints == ()


@pytest.mark.row("76.4")
def test_an_alignment_that_takes_too_long_turns_unaligned():
    handler = BarrierHandler([A, B, C])
    assert handler.handle(announced(A, 1, LATER), at(10)) == []
    assert handler.next_deadline_ms == STARTED + 100
    assert handler.handle(announced(B, 1, LATER), at(20)) == []
    assert handler.handle(received(B, 1, LATER), at(30)) == [BlockChannel(B)]
    assert handler.handle(DeadlinePassed(), at(99)) == []
    assert handler.handle(DeadlinePassed(), at(100)) == [
        turned(1, recording=(C,), captured=(A,), duration=90, options=LATER),
        ResumeChannels((B,)),
    ]
    assert handler.next_deadline_ms is None
    assert handler.handle(received(A, 1, LATER), at(110)) == []
    assert handler.handle(announced(C, 1, LATER), at(120)) == [StopRecording(1, C), AllBarriersReceived(1, 110)]


def test_alignment_ends_aligned_before_its_deadline_and_unaligned_behind_it():
    handler = fed([A, B], announced(A, 1, LATER), announced(B, 1, LATER), received(A, 1, LATER))
    assert feed(handler, received(B, 1, LATER), now=99)[1] == triggered(1, 99, LATER)
    handler = fed([A, B], announced(A, 1, LATER))
    assert feed(handler, announced(B, 1, LATER), now=500)[0].unaligned


def test_clock_that_is_slow_or_set_back_moves_no_deadline():
    handler = BarrierHandler([A, B])
    assert handler.handle(announced(A, 1), Instant(0, STARTED - 60_000)) == [turned(1, recording=(B,), captured=(A,))]
    handler = BarrierHandler([A, B], aligned_only=[B])
    feed(handler, announced(A, 1, LATER), DeadlinePassed(), now=100)
    assert handler.next_deadline_ms is None
    assert handler.handle(EndOfPartitionReceived(B), Instant(200, 0))[0].unaligned


# --- aligned-only channels


def test_data_that_may_not_be_overtaken_is_consumed_first():
    handler = BarrierHandler([A, B, C], aligned_only=[C])
    assert feed(handler, announced(A, 1)) == []
    assert feed(handler, received(A, 1, UNALIGNED)) == [BlockChannel(A)]
    assert feed(handler, received(C, 1, UNALIGNED)) == [
        BlockChannel(C),
        turned(1, recording=(B,)),
        ResumeChannels((A, C)),
    ]


def test_the_end_of_a_channel_that_may_not_be_overtaken_has_to_arrive_in_order():
    handler = BarrierHandler([A, C], aligned_only=[C])
    assert feed(handler, announced(A, 1), EndOfPartitionAnnounced(C)) == []
    assert feed(handler, EndOfPartitionReceived(C)) == [turned(1, captured=(A,)), AllBarriersReceived(1, 0)]


# --- bound of in-flight data


@pytest.mark.row("76.1")
def test_checkpoint_with_a_bound_turns_unaligned_when_the_remaining_data_fits():
    handler = BarrierHandler([A, B, C])
    assert feed(handler, announced(A, 1, BOUNDED)) == []
    assert feed(handler, received(B, 1, BOUNDED)) == [BlockChannel(B)]
    assert not handler.waits_for_room
    assert feed(handler, InFlightMeasured(0)) == []
    assert feed(handler, EndOfPartitionAnnounced(C)) == [MeasureInFlight()]
    assert handler.waits_for_room
    assert feed(handler, InFlightMeasured(51)) == []
    assert feed(handler, InFlightMeasured(50)) == [
        turned(1, captured=(A, C), options=BOUNDED),
        AllBarriersReceived(1, 0),
        ResumeChannels((B,)),
    ]
    assert not handler.waits_for_room


def test_checkpoint_whose_bound_is_never_met_or_nothing_ends_aligned():
    handler = fed(
        [A, B], announced(A, 1, BOUNDED), announced(B, 1, BOUNDED), InFlightMeasured(99), received(A, 1, BOUNDED)
    )
    assert feed(handler, received(B, 1, BOUNDED))[1] == triggered(1, options=BOUNDED)
    assert not handler.waits_for_room
    handler = BarrierHandler([A, B])
    assert feed(handler, announced(A, 1, FULLY_BOUNDED), announced(B, 1, FULLY_BOUNDED), InFlightMeasured(0)) == []
    assert handler.next_deadline_ms is None
    feed(handler, received(A, 1, FULLY_BOUNDED))
    assert feed(handler, received(B, 1, FULLY_BOUNDED))[1] == triggered(1, options=FULLY_BOUNDED)


def test_a_measure_counts_for_one_checkpoint_only():
    handler = fed([A], announced(A, 1, BOUNDED), announced(A, 2, BOUNDED))
    assert feed(handler, InFlightMeasured(10)) == [
        turned(1, captured=(A,), options=BOUNDED),
        AllBarriersReceived(1, 0),
        MeasureInFlight(),
    ]
    assert handler.pending_checkpoint == 2


# --- several at once


@pytest.mark.row("76.8")
def test_several_unaligned_checkpoints_record_at_once():
    handler = BarrierHandler([A, B, C])
    assert feed(handler, announced(A, 1)) == [turned(1, recording=(B, C), captured=(A,))]
    assert feed(handler, announced(A, 2)) == [turned(2, recording=(B, C), captured=(A,))]
    assert handler.collecting_checkpoints == (1, 2)
    assert feed(handler, announced(B, 1)) == [StopRecording(1, B)]
    assert feed(handler, announced(B, 2)) == [StopRecording(2, B)]
    assert feed(handler, announced(C, 1)) == [StopRecording(1, C), AllBarriersReceived(1, 0)]
    assert feed(handler, announced(C, 2)) == [StopRecording(2, C), AllBarriersReceived(2, 0)]


def test_the_end_of_a_channel_ends_the_recordings_of_all():
    handler = fed([A, B], announced(A, 1), announced(A, 2))
    assert feed(handler, EndOfPartitionAnnounced(B)) == [
        StopRecording(1, B),
        AllBarriersReceived(1, 0),
        StopRecording(2, B),
        AllBarriersReceived(2, 0),
    ]
    assert feed(handler, EndOfPartitionReceived(B)) == []


def test_a_checkpoint_that_a_recorded_channel_skipped_is_aborted_and_the_newer_one_continues():
    handler = fed([A, B], announced(A, 1), announced(A, 2))
    assert feed(handler, announced(B, 2)) == [
        StopRecording(2, B),
        AllBarriersReceived(2, 0),
        AbortCheckpoint(1, SUBSUMED),
    ]
    assert feed(handler, received(A, 1, UNALIGNED), received(A, 2, UNALIGNED), received(B, 2, UNALIGNED)) == []
    assert handler.blocked_channels == ()


@pytest.mark.row("76.9")
def test_savepoint_keeps_its_order_among_unaligned_checkpoints():
    handler = fed([A, B], announced(A, 1))
    assert feed(handler, received(A, 1, UNALIGNED), received(A, 2, SAVEPOINT)) == [BlockChannel(A)]
    assert feed(handler, announced(B, 1)) == [StopRecording(1, B), AllBarriersReceived(1, 0)]
    assert feed(handler, announced(A, 3)) == [], "behind the savepoint, which has not been taken"
    assert feed(handler, received(B, 1, UNALIGNED)) == []
    assert feed(handler, received(B, 2, SAVEPOINT)) == [
        BlockChannel(B),
        triggered(2, options=SAVEPOINT),
        AllBarriersReceived(2, 0),
        ResumeChannels((A, B)),
        turned(3, recording=(B,), captured=(A,)),
    ]


def test_an_older_one_that_may_turn_turns_first():
    handler = fed([A, B], announced(A, 1, LATER))
    assert feed(handler, announced(A, 2), now=50) == [], "an older one is still aligning"
    assert feed(handler, DeadlinePassed(), now=100) == [
        turned(1, recording=(B,), captured=(A,), duration=100, options=LATER),
        turned(2, recording=(B,), captured=(A,), duration=50),
    ]


def test_the_cancel_of_a_newer_one_waits_for_the_older():
    """Downstream it would say that the older barrier does not come."""
    handler = fed([A, B, C], announced(A, 1, LATER), announced(A, 2, LATER), announced(B, 1, LATER))
    assert feed(handler, announced(B, 3, LATER)) == []
    assert feed(handler, EndOfPartitionReceived(C)) == []
    assert feed(handler, DeadlinePassed(), now=100) == [
        turned(1, captured=(A, B), duration=100, options=LATER),
        AllBarriersReceived(1, 100),
        AbortCheckpoint(2, SUBSUMED),
        turned(3, recording=(A,), captured=(B,), duration=100, options=LATER),
    ]


def test_checkpoint_that_was_given_up_is_not_declined_after_the_coordinators_abort():
    handler = fed(
        [A, B, C], announced(A, 1, LATER), announced(A, 2, LATER), announced(B, 1, LATER), announced(B, 3, LATER)
    )
    feed(handler, AbortedByCoordinator(2))
    effects = feed(handler, DeadlinePassed(), now=100)
    assert AbortCheckpoint(2, SUBSUMED) not in effects
    assert [effect.checkpoint_id for effect in effects if isinstance(effect, TakeSnapshot)] == [1, 3]


# --- each state x each event: the checkpoint is 5, its channels A (has shown it), B (has not), C (ended before)


def state(name, *events):
    def build():
        return fed([A, B, C], EndOfPartitionReceived(C), *events)

    build.__name__ = name
    return build


aligning = state("aligning", received(A, 5, LATER))
aligning_announced = state("aligning_announced", announced(A, 5, LATER))
measuring = state("measuring", received(A, 5, BOUNDED), announced(B, 5, BOUNDED))
collecting = state("collecting", announced(A, 5, UNALIGNED), received(A, 5, UNALIGNED))
done = state("done", announced(A, 5, UNALIGNED), announced(B, 5, UNALIGNED))
given_up = state("given_up", received(A, 5, LATER), CancelBarrierReceived(B, 5))
aborted_before = state("aborted_before", AbortedByCoordinator(5))
started_by_coordinator = state(
    "started_by_coordinator", EndOfPartitionReceived(A), TriggeredByCoordinator(5, STARTED, ALIGNED)
)

ALIGNED_END = [triggered(5, options=LATER), AllBarriersReceived(5, 0), ResumeChannels((A,))]
BOUNDED_END = [triggered(5, options=BOUNDED), AllBarriersReceived(5, 0)]
STOPPED = [StopRecording(5, B), AllBarriersReceived(5, 0)]
LOST = [ResumeChannels((A,)), AbortCheckpoint(5, SUBSUMED)]
NEXT = [turned(6, recording=(A,), captured=(B,))]
NEXT_IN_ORDER = [BlockChannel(B), turned(6, recording=(A,)), ResumeChannels((B,))]

TABLE = [
    (aligning, announced(B, 5, LATER), []),
    (aligning, received(B, 5, LATER), [BlockChannel(B), *ALIGNED_END[:2], ResumeChannels((A, B))]),
    (aligning, announced(B, 4), []),
    (aligning, received(B, 4), []),
    (aligning, announced(B, 6), [*LOST, *NEXT]),
    (aligning, announced(A, 6), []),
    (aligning, received(B, 6, UNALIGNED), [LOST[0], BlockChannel(B), LOST[1], *NEXT_IN_ORDER[1:]]),
    (aligning, CancelBarrierReceived(B, 5), [ResumeChannels((A,)), AbortCheckpoint(5, CANCELLED)]),
    (aligning, CancelBarrierReceived(B, 4), []),
    (aligning, CancelBarrierReceived(B, 6), [*LOST, AbortCheckpoint(6, CANCELLED)]),
    (aligning, EndOfPartitionAnnounced(B), []),
    (aligning, EndOfPartitionReceived(B), ALIGNED_END),
    (aligning, TriggeredByCoordinator(5, STARTED, LATER), []),
    (aligning, DeadlinePassed(), []),
    (aligning, InFlightMeasured(0), []),
    (aligning, AbortedByCoordinator(5), [ResumeChannels((A,))]),
    (aligning, AbortedByCoordinator(4), []),
    (aligning_announced, received(A, 5, LATER), [BlockChannel(A)]),
    (aligning_announced, announced(A, 5, LATER), []),
    (aligning_announced, announced(A, 6), []),
    (aligning_announced, received(A, 6, LATER), [BlockChannel(A), AbortCheckpoint(5, SUBSUMED)]),
    (aligning_announced, announced(B, 5, LATER), []),
    (aligning_announced, received(B, 5, LATER), [BlockChannel(B)]),
    (aligning_announced, CancelBarrierReceived(B, 5), [AbortCheckpoint(5, CANCELLED)]),
    (aligning_announced, EndOfPartitionAnnounced(A), []),
    (aligning_announced, EndOfPartitionReceived(B), []),
    (aligning_announced, TriggeredByCoordinator(5, STARTED, LATER), []),
    (aligning_announced, DeadlinePassed(), []),
    (aligning_announced, InFlightMeasured(0), []),
    (aligning_announced, AbortedByCoordinator(5), []),
    (measuring, announced(B, 5, BOUNDED), []),
    (measuring, received(B, 5, BOUNDED), [BlockChannel(B), *BOUNDED_END, ResumeChannels((A, B))]),
    (measuring, announced(B, 6), []),
    (measuring, CancelBarrierReceived(B, 5), [ResumeChannels((A,)), AbortCheckpoint(5, CANCELLED)]),
    (measuring, EndOfPartitionAnnounced(B), []),
    (measuring, EndOfPartitionReceived(B), [*BOUNDED_END, ResumeChannels((A,))]),
    (measuring, TriggeredByCoordinator(5, STARTED, BOUNDED), []),
    (measuring, DeadlinePassed(), []),
    (measuring, InFlightMeasured(51), []),
    (
        measuring,
        InFlightMeasured(50),
        [turned(5, captured=(B,), options=BOUNDED), AllBarriersReceived(5, 0), ResumeChannels((A,))],
    ),
    (measuring, AbortedByCoordinator(5), [ResumeChannels((A,))]),
    (collecting, announced(B, 5), STOPPED),
    (collecting, received(B, 5, UNALIGNED), STOPPED),
    (collecting, announced(B, 4), []),
    (collecting, received(B, 4), []),
    (collecting, announced(A, 6), [turned(6, recording=(B,), captured=(A,))]),
    (collecting, announced(B, 6), [AbortCheckpoint(5, SUBSUMED), *NEXT]),
    (collecting, received(B, 6, UNALIGNED), [BlockChannel(B), AbortCheckpoint(5, SUBSUMED), *NEXT_IN_ORDER[1:]]),
    (collecting, CancelBarrierReceived(B, 5), [AbortCheckpoint(5, CANCELLED)]),
    (collecting, CancelBarrierReceived(B, 6), [AbortCheckpoint(5, SUBSUMED), AbortCheckpoint(6, CANCELLED)]),
    (collecting, CancelBarrierReceived(A, 6), [AbortCheckpoint(6, CANCELLED)]),
    (collecting, EndOfPartitionAnnounced(B), STOPPED),
    (collecting, EndOfPartitionReceived(B), STOPPED),
    (collecting, EndOfPartitionReceived(A), []),
    (collecting, TriggeredByCoordinator(5, STARTED, UNALIGNED), []),
    (collecting, DeadlinePassed(), []),
    (collecting, InFlightMeasured(0), []),
    (collecting, AbortedByCoordinator(5), []),
    (done, received(A, 5, UNALIGNED), []),
    (done, received(B, 5, UNALIGNED), []),
    (done, announced(B, 5), []),
    (done, announced(B, 6), NEXT),
    (done, CancelBarrierReceived(B, 5), []),
    (done, CancelBarrierReceived(B, 6), [AbortCheckpoint(6, CANCELLED)]),
    (done, EndOfPartitionAnnounced(B), []),
    (done, EndOfPartitionReceived(B), []),
    (done, TriggeredByCoordinator(5, STARTED, UNALIGNED), []),
    (done, DeadlinePassed(), []),
    (done, InFlightMeasured(0), []),
    (done, AbortedByCoordinator(5), []),
    (given_up, received(B, 5, LATER), []),
    (given_up, announced(B, 5, LATER), []),
    (given_up, announced(B, 6), NEXT),
    (given_up, CancelBarrierReceived(A, 5), []),
    (given_up, EndOfPartitionAnnounced(B), []),
    (given_up, EndOfPartitionReceived(B), []),
    (given_up, TriggeredByCoordinator(5, STARTED, LATER), []),
    (given_up, DeadlinePassed(), []),
    (given_up, InFlightMeasured(0), []),
    (given_up, AbortedByCoordinator(5), []),
    (aborted_before, received(B, 5), []),
    (aborted_before, announced(B, 5), []),
    (aborted_before, announced(B, 6), NEXT),
    (aborted_before, CancelBarrierReceived(A, 5), []),
    (aborted_before, EndOfPartitionAnnounced(B), []),
    (aborted_before, EndOfPartitionReceived(B), []),
    (aborted_before, TriggeredByCoordinator(5, STARTED, UNALIGNED), []),
    (aborted_before, AbortedByCoordinator(5), []),
    (
        started_by_coordinator,
        received(B, 4),
        [BlockChannel(B), triggered(4), AllBarriersReceived(4, 0), ResumeChannels((B,))],
    ),
    (
        started_by_coordinator,
        received(B, 5),
        [BlockChannel(B), triggered(5), AllBarriersReceived(5, 0), ResumeChannels((B,))],
    ),
    (
        started_by_coordinator,
        announced(B, 6),
        [AbortCheckpoint(5, SUBSUMED), turned(6, captured=(B,)), AllBarriersReceived(6, 0)],
    ),
    (started_by_coordinator, CancelBarrierReceived(B, 5), [AbortCheckpoint(5, CANCELLED)]),
    (started_by_coordinator, EndOfPartitionAnnounced(B), []),
    (started_by_coordinator, EndOfPartitionReceived(B), [triggered(5), AllBarriersReceived(5, 0)]),
    (started_by_coordinator, TriggeredByCoordinator(5, STARTED, ALIGNED), []),
    (started_by_coordinator, AbortedByCoordinator(5), []),
]


@pytest.mark.parametrize(("state", "event", "effects"), TABLE, ids=lambda value: getattr(value, "__name__", None))
def test_each_event_has_the_listed_effect_in_each_state(state, event, effects):
    assert feed(state(), event) == effects


@pytest.mark.parametrize(
    "state",
    [aligning, aligning_announced, measuring, collecting, done, given_up, aborted_before, started_by_coordinator],
)
def test_coordinators_abort_unblocks_all_channels(state):
    handler = state()
    feed(handler, AbortedByCoordinator(5))
    assert handler.blocked_channels == ()
    assert handler.pending_checkpoint is None
    assert handler.collecting_checkpoints == ()
    assert handler.next_deadline_ms is None
    assert not handler.waits_for_room
    assert feed(handler, received(B, 5, LATER)) == [], "its barriers block nothing when they come later"


def test_next_checkpoint_turns_unaligned_after_the_coordinators_abort():
    handler = fed([A, B], received(A, 1), announced(A, 2))
    assert feed(handler, AbortedByCoordinator(1)) == [ResumeChannels((A,)), turned(2, recording=(B,), captured=(A,))]
