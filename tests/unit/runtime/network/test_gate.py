from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.network.elements import ControlElement, Watermark
from ckpt_runtime.network.gate import InputGate


def drain(gate: InputGate) -> list[tuple[int, object]]:
    found = []
    while (arrived := gate.poll()) is not None:
        found.append((arrived[0].index, arrived[1]))
    return found


def test_a_blocked_channel_waits_while_others_go_on() -> None:
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
