"""The barrier handler under every interleaving: what is recorded is exactly what lies before the barriers.

A model of one subtask's inputs stands around it: queues of numbered data and barriers in the order of their ids, with
gaps, cancellations and ends; announcements, polls, time, measures and aborts come in any order that a sender may cause.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.barrier_handler import (
    AbortCheckpoint,
    AbortedByCoordinator,
    AllBarriersReceived,
    BarrierAnnounced,
    BarrierHandler,
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
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from tests.support.effort import examples

POLICIES = st.one_of(
    st.just(CheckpointOptions(CheckpointProperties(), "dir")),
    st.builds(
        CheckpointOptions,
        st.just(CheckpointProperties()),
        st.just("dir"),
        unaligned=st.just(True),
        aligned_timeout_ms=st.sampled_from([0, 0, 5, 30]),
        max_inflight_data_bytes=st.sampled_from([None, None, 0, 1, 3]),
    ),
)

DATA, END = "data", "end"
Element = str | tuple[str, int]
"""DATA, one byte; END; ("barrier", id) or ("cancel", id)"""


@dataclass
class Input:
    """One channel: what is still to arrive, what is queued, how many data elements were polled."""

    elements: list[Element]
    overtaken: bool
    queue: list[Element] = field(default_factory=list)
    announced: set[Element] = field(default_factory=set)
    polled: int = 0
    blocked: bool = False
    ended: bool = False

    def queued_before(self, checkpoint_id: int) -> int:
        """Data in the queue before the barrier, or before the end."""
        count = 0
        for element in self.queue:
            if element == ("barrier", checkpoint_id):
                break
            count += element == DATA
        return count


@dataclass
class Taken:
    """What one checkpoint has of each channel: data processed before the snapshot, data recorded."""

    processed: dict[tuple[int, int], int]
    recorded: Counter[tuple[int, int]]
    recording: set[tuple[int, int]]
    complete: bool = False


class Model:
    """The shell: carries out the effects and keeps account."""

    def __init__(self, inputs: dict[tuple[int, int], Input], options: dict[int, CheckpointOptions]) -> None:
        self.inputs = inputs
        self.options = options
        self.handler = BarrierHandler(inputs, [key for key, one in inputs.items() if not one.overtaken])
        self.totals = {key: self._totals(one.elements) for key, one in inputs.items()}
        self.all_end = all(one.elements[-1] == END for one in inputs.values())
        self.now = 0
        self.sent = 0
        self.taken: dict[int, Taken] = {}
        self.given_up: list[int] = []
        self.silently: set[int] = set()

    @staticmethod
    def _totals(elements: list[Element]) -> dict[Element, int]:
        """Data before each barrier and, for ids that are not there, before the end."""
        totals: dict[Element, int] = {}
        count = 0
        for element in elements:
            totals[element] = count
            count += element == DATA
        totals[END] = count
        return totals

    def handle(self, event) -> None:
        for effect in self.handler.handle(event, Instant(self.now, 1000 + self.now)):
            match effect:
                case BlockChannel(channel):
                    assert not self.inputs[channel].blocked
                    self.inputs[channel].blocked = True
                case ResumeChannels(channels):
                    for channel in channels:
                        assert self.inputs[channel].blocked
                        self.inputs[channel].blocked = False
                case TakeSnapshot():
                    self._trigger(effect)
                case StopRecording(checkpoint_id, channel):
                    taken = self.taken[checkpoint_id]
                    taken.recording.remove(channel)
                    taken.recorded[channel] += self.inputs[channel].queued_before(checkpoint_id)
                case AllBarriersReceived(checkpoint_id):
                    taken = self.taken[checkpoint_id]
                    assert not taken.complete
                    assert not taken.recording
                    assert checkpoint_id not in self.given_up
                    assert checkpoint_id not in self.silently
                    taken.complete = True
                case AbortCheckpoint(checkpoint_id):
                    assert checkpoint_id not in self.given_up
                    assert checkpoint_id not in self.silently
                    assert checkpoint_id not in self.taken or not self.taken[checkpoint_id].complete
                    self.given_up.append(checkpoint_id)
                    if checkpoint_id not in self.taken:
                        self._send(checkpoint_id)
                case MeasureInFlight():
                    assert self.handler.waits_for_room
        assert {key for key, one in self.inputs.items() if one.blocked} == set(self.handler.blocked_channels)
        assert self.handler.pending_checkpoint is not None or not self.handler.blocked_channels

    def _send(self, checkpoint_id: int) -> None:
        """A barrier, or the cancellation of one: this subtask keeps the rule of the senders as well."""
        assert checkpoint_id > self.sent
        self.sent = checkpoint_id

    def _trigger(self, effect: TakeSnapshot) -> None:
        number = effect.checkpoint_id
        self._send(number)
        assert number not in self.given_up
        assert number not in self.silently
        recorded = Counter({channel: self.inputs[channel].queued_before(number) for channel in effect.captured})
        processed = {key: one.polled for key, one in self.inputs.items()}
        self.taken[number] = Taken(processed, recorded, set(effect.recording))
        if effect.unaligned:
            assert effect.options.unaligned
            assert effect.captured or effect.recording
            assert self.now >= effect.options.aligned_timeout_ms
            assert all(self.inputs[channel].overtaken for channel in (*effect.captured, *effect.recording))
            limit = effect.options.max_inflight_data_bytes
            assert limit is None or (not effect.recording and sum(recorded.values()) <= limit)
        else:
            assert not effect.captured
            assert not effect.recording

    # --- steps

    def arrive(self, key) -> None:
        one = self.inputs[key]
        one.queue.append(one.elements.pop(0))
        self.announce(key)

    def announce(self, key) -> None:
        """All that may be announced: nothing behind a barrier that has to stay in order."""
        one = self.inputs[key]
        for element in list(one.queue):
            if element == END and element not in one.announced:
                one.announced.add(element)
                self.handle(EndOfPartitionAnnounced(key))
            elif isinstance(element, tuple) and element[0] == "barrier":
                options = self.options[element[1]]
                if not (options.unaligned and one.overtaken):
                    return
                if element not in one.announced:
                    one.announced.add(element)
                    self.handle(BarrierAnnounced(key, element[1], 1000, options))

    def poll(self, key) -> None:
        one = self.inputs[key]
        element = one.queue.pop(0)
        if element == DATA:
            one.polled += 1
            for taken in self.taken.values():
                taken.recorded[key] += key in taken.recording
            if self.handler.waits_for_room:
                self.measure()
        elif element == END:
            one.ended = True
            self.handle(EndOfPartitionReceived(key))
        elif element[0] == "barrier":
            self.handle(BarrierReceived(key, element[1], 1000, self.options[element[1]]))
            self.announce(key)
        else:
            self.handle(CancelBarrierReceived(key, element[1]))

    def measure(self) -> None:
        pending = self.handler.pending_checkpoint
        if pending is not None:
            self.handle(InFlightMeasured(sum(one.queued_before(pending) for one in self.inputs.values())))

    def abort(self, checkpoint_id: int) -> None:
        taken = self.taken.get(checkpoint_id)
        if checkpoint_id not in self.given_up and (taken is None or not taken.complete):
            self.silently.add(checkpoint_id)
            if taken is not None:
                taken.recording.clear()
        self.handle(AbortedByCoordinator(checkpoint_id))

    def pollable(self) -> list[tuple[int, int]]:
        return [key for key, one in self.inputs.items() if one.queue and not one.blocked]

    def arriving(self) -> list[tuple[int, int]]:
        return [key for key, one in self.inputs.items() if one.elements]

    def drain(self) -> None:
        while self.arriving() or self.pollable():
            for key in self.arriving():
                self.arrive(key)
            for key in self.pollable():
                self.poll(key)

    def check_contents(self) -> None:
        """Snapshot and recorded data together are all that was sent before the barrier, or before the end."""
        for number, taken in self.taken.items():
            if taken.complete:
                for key, totals in self.totals.items():
                    expected = totals.get(("barrier", number), totals[END])
                    assert taken.processed[key] + taken.recorded[key] == expected, (number, key)


@st.composite
def models(draw: st.DrawFn) -> Model:
    numbers = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=5)))
    options = {number: draw(POLICIES) for number in numbers}
    inputs = {}
    for index in range(draw(st.integers(1, 3))):
        elements: list[Element] = []
        for number in numbers:
            elements += [DATA] * draw(st.integers(0, 2))
            kind = draw(st.sampled_from(["barrier"] * 8 + ["cancel", "gap"]))
            if kind != "gap":
                elements.append((kind, number))
            if draw(st.integers(0, 11)) == 0:
                break
        else:
            elements += [DATA] * draw(st.integers(0, 2))
        if elements[-1:] != [("barrier", numbers[-1])] or draw(st.booleans()):
            elements.append(END)
        inputs[(0, index)] = Input(elements, overtaken=draw(st.integers(0, 4)) > 0)
    return Model(inputs, options)


def run(model: Model, data: st.DataObject, aborts: bool) -> None:
    for _ in range(data.draw(st.integers(0, 60))):
        steps = [("arrive", key) for key in model.arriving()] + [("poll", key) for key in model.pollable()]
        steps += [("time", 3), ("time", 10), ("measure", 0)]
        steps += [("abort", number) for number in model.options] if aborts else []
        kind, argument = data.draw(st.sampled_from(steps))
        match kind:
            case "arrive":
                model.arrive(argument)
            case "poll":
                model.poll(argument)
            case "time":
                model.now += argument
                if model.handler.next_deadline_ms is not None and 1000 + model.now >= model.handler.next_deadline_ms:
                    model.handle(DeadlinePassed())
            case "measure":
                if model.handler.waits_for_room:
                    model.measure()
            case "abort":
                model.abort(argument)
    model.drain()


@pytest.mark.row("76.2")
@pytest.mark.row("76.8")
@settings(max_examples=examples(300))
@given(models(), st.data())
def test_recorded_in_flight_data_is_exactly_the_data_before_the_barriers(model, data):
    run(model, data, aborts=False)
    model.check_contents()
    complete = {number for number, taken in model.taken.items() if taken.complete}
    assert len(model.given_up) == len(set(model.given_up))
    assert complete.isdisjoint(model.given_up)
    barriers = [{number for number in model.options if ("barrier", number) in seen} for seen in model.totals.values()]
    assert set.intersection(*barriers) <= complete, "given up without a cause"
    if model.all_end:
        assert all(one.ended for one in model.inputs.values())
        assert model.handler.pending_checkpoint is None
        assert model.handler.collecting_checkpoints == ()
        assert set(model.taken) <= complete | set(model.given_up)


@settings(max_examples=examples(300))
@given(models(), st.data())
def test_channels_are_unblocked_after_any_abort_of_the_coordinator(model, data):
    run(model, data, aborts=True)
    model.check_contents()
    for number in model.options:
        model.abort(number)
    model.drain()
    assert model.handler.blocked_channels == ()
    assert model.handler.pending_checkpoint is None
    assert model.handler.collecting_checkpoints == ()
    assert not any(one.queue for one in model.inputs.values())


@settings(max_examples=examples(150))
@given(models(), st.data())
def test_a_trigger_of_the_coordinator_has_all_that_was_sent_before_the_ends(model, data):
    """It comes when every predecessor has finished: all that they sent is on its way, older barriers too."""
    number = 10
    for one in model.inputs.values():
        if one.elements[-1] != END:
            one.elements.append(END)
    model.options[number] = data.draw(POLICIES)
    when = data.draw(st.integers(0, 20))
    for _ in range(when):
        if not model.arriving() and not model.pollable():
            break
        key = data.draw(st.sampled_from(sorted({*model.arriving(), *model.pollable()})))
        if key in model.pollable() and data.draw(st.booleans()):
            model.poll(key)
        elif key in model.arriving():
            model.arrive(key)
    model.handle(TriggeredByCoordinator(number, 1000, model.options[number]))
    run(model, data, aborts=False)
    model.check_contents()
    assert model.taken[number].complete
    assert model.handler.blocked_channels == ()
