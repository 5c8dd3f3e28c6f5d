"""Reports what waits in a subtask's input gate, for an operator that decides whether to read it now."""

from __future__ import annotations

from ckpt_runtime.network.elements import CheckpointBarrier, EndOfData, EndOfPartition, Watermark
from ckpt_runtime.network.gate import InputGate
from ckpt_runtime.operators.operator import WaitingInput


def waiting_input(gate: InputGate) -> WaitingInput:
    """Called from the subtask's thread; producers may append meanwhile. Meant for gates that hold few elements.

    The barrier of a savepoint that stops the job with drain comes after the end of data: it waits for all rows before
    it. Other barriers do not wait.
    """
    found = WaitingInput.NOTHING
    for channel in gate.channels:
        for element in tuple(channel.queue):
            match element:
                case CheckpointBarrier(options=options) if options.properties.is_synchronous:
                    break
                case CheckpointBarrier() | EndOfData(drain=False) | EndOfPartition() | BaseException():
                    return WaitingInput.BARRIER
                case EndOfData() | Watermark():
                    continue
                case _:
                    found = WaitingInput.ROWS
    return found
