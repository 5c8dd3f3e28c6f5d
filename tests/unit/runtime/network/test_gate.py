from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType
from ckpt_runtime.network.elements import CheckpointBarrier, ControlElement, EndOfPartition, Watermark
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.network.output_queue import EncodedRows


def unaligned(checkpoint_id: int) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, CheckpointOptions(CheckpointProperties(), "dir", unaligned=True))


def savepoint(checkpoint_id: int) -> CheckpointBarrier:
    properties = CheckpointProperties(CheckpointType.SAVEPOINT)
    return CheckpointBarrier(checkpoint_id, 0, CheckpointOptions(properties, "dir"))


def announcements(gate: InputGate) -> list[tuple[int, object]]:
    found = []
    while (announced := gate.next_announcement()) is not None:
        found.append((announced[0].index, announced[1]))
    return found


def poll_barrier(gate: InputGate, channel: InputChannel) -> CheckpointBarrier:
    """As the subtask does: the gate hears of a barrier that came in order."""
    arrived = gate.poll()
    assert arrived is not None
    assert arrived[0] is channel
    assert isinstance(arrived[1], CheckpointBarrier)
    gate.barrier_polled(channel)
    return arrived[1]


def drain(gate: InputGate) -> list[tuple[int, object]]:
    found = []
    while (arrived := gate.poll()) is not None:
        found.append((arrived[0].index, arrived[1]))
    return found


def test_a_blocked_channel_waits_while_others_continue() -> None:
    gate = InputGate(lambda: None)
    first, second = gate.add_channel(0, 4), gate.add_channel(0, 4)
    first.put(Watermark(1))
    gate.block(0)
    second.put(Watermark(2))
    first.put(Watermark(3))
    assert drain(gate) == [(1, Watermark(2))]
    assert not gate.has_arrivals
    gate.resume(0)
    second.put(Watermark(4))
    assert drain(gate) == [(0, Watermark(1)), (0, Watermark(3)), (1, Watermark(4))]


def test_every_arrival_wakes_the_subtask() -> None:
    woken: list[bool] = []
    gate = InputGate(lambda: woken.append(True))
    channel = gate.add_channel(0, 4)
    channel.put(Watermark(1))
    channel.put(Watermark(2))
    assert len(woken) == 2


class TestAnnouncements:
    def test_barriers_that_may_overtake_and_ends_come_early_and_stay_in_their_places(self) -> None:
        gate = InputGate(lambda: None)
        first, second = gate.add_channel(0, 4), gate.add_channel(0, 4)
        one, end = unaligned(1), EndOfPartition()
        first.put(Watermark(1))
        first.put(one)
        second.put(end)
        assert gate.has_announcements
        assert announcements(gate) == [(0, one), (1, end)]
        assert not gate.has_announcements
        assert drain(gate) == [(0, Watermark(1)), (0, one), (1, end)]

    def test_elements_that_stay_in_order_are_not_announced(self) -> None:
        gate = InputGate(lambda: None)
        overtaking, in_order = gate.add_channel(0, 4), gate.add_channel(1, 4, overtakes=False)
        overtaking.put(savepoint(1))
        in_order.put(unaligned(1))
        in_order.put(EndOfPartition())
        assert not gate.has_announcements
        assert len(drain(gate)) == 3

    def test_announced_barriers_after_an_aligned_barrier_wait_until_that_was_polled(self) -> None:
        gate = InputGate(lambda: None)
        first, second = gate.add_channel(0, 4), gate.add_channel(0, 4)
        two, three, end, other = unaligned(2), unaligned(3), EndOfPartition(), unaligned(2)
        for element in (savepoint(1), two, three):
            first.put(element)
        second.put(other)
        assert announcements(gate) == [(1, other)]
        first.put(end)
        poll_barrier(gate, first)
        assert announcements(gate) == [(0, two), (0, three), (0, end)]

    def test_aligned_barrier_withholds_the_elements_after_it(self) -> None:
        gate = InputGate(lambda: None)
        channel = gate.add_channel(0, 4)
        two, four = unaligned(2), unaligned(4)
        for element in (savepoint(1), two, savepoint(3), four):
            channel.put(element)
        assert announcements(gate) == []
        poll_barrier(gate, channel)
        assert announcements(gate) == [(0, two)]
        assert poll_barrier(gate, channel) is two
        assert announcements(gate) == []
        poll_barrier(gate, channel)
        assert announcements(gate) == [(0, four)]

    def test_polled_barrier_is_not_announced_again(self) -> None:
        """The producer may append between the subtask's look at the announcements and its poll."""
        gate = InputGate(lambda: None)
        first, second = gate.add_channel(0, 4), gate.add_channel(0, 4)
        first.put(EndOfPartition())
        second.put(unaligned(1))
        second.put(savepoint(2))
        drain(gate)
        assert announcements(gate) == []
        gate.barrier_polled(second)
        assert announcements(gate) == []

    def test_data_before_a_barrier_is_rows_and_watermarks_without_older_barriers(self) -> None:
        channel = InputGate(lambda: None).add_channel(0, 4)
        batch = pa.record_batch({"n": [1]})
        encoded = EncodedRows(batch.schema, batch.serialize())
        for element in (batch, unaligned(1), Watermark(5), encoded, unaligned(2), Watermark(6)):
            channel.put(element)
        assert channel.queued_before(1) == [batch]
        found = channel.queued_before(2)
        assert found == [batch, Watermark(5), encoded]
        assert channel.queued_before(3) == []
        assert len(channel.queued_before(3, or_all=True)) == 4


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 2)),
            st.tuples(st.sampled_from(["block", "resume"]), st.integers(0, 2)),
            st.tuples(st.just("poll"), st.just(0)),
        ),
        max_size=100,
    )
)
def test_each_channel_delivers_everything_in_order(actions: list[tuple[str, int]]) -> None:
    gate = InputGate(lambda: None)
    for _ in range(3):
        gate.add_channel(0, 4)
    sent: dict[int, list[ControlElement]] = {0: [], 1: [], 2: []}
    received: dict[int, list[object]] = {0: [], 1: [], 2: []}
    for number, (action, index) in enumerate(actions):
        channel = gate.channels[index]
        if action == "put":
            sent[index].append(Watermark(number))
            channel.put(Watermark(number))
        elif action == "block":
            gate.block(index)
        elif action == "resume":
            gate.resume(index)
        elif (arrived := gate.poll()) is not None:
            assert not arrived[0].blocked
            received[arrived[0].index].append(arrived[1])
    for index in range(3):
        gate.resume(index)
    for index, element in drain(gate):
        received[index].append(element)
    assert received == sent
