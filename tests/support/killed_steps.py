"""Kills the process of a sink at a step of a commit when a test drops a file for the step."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ckpt_runtime.sinks import SinkWriter


def killed(faults: str, step: str) -> None:
    """Kills this process if the file is there; removes the file first, so that the next attempt gets further."""
    try:
        Path(faults, step).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_writing(writer: SinkWriter, faults: str) -> SinkWriter:
    """The writer, whose process is killed behind ``write`` and behind ``prepare``."""
    write, prepare = writer.write, writer.prepare_commit

    def killed_write(batch: pa.RecordBatch) -> None:
        write(batch)
        killed(faults, "write")

    def killed_prepare(checkpoint_id: int) -> Sequence[Any]:
        prepared = prepare(checkpoint_id)
        killed(faults, "prepare")
        return prepared

    writer.write, writer.prepare_commit = killed_write, killed_prepare  # type: ignore[method-assign]
    return writer
