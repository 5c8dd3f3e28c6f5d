"""Stream elements other than data, which travel in order with the rows of a channel.

A channel carries record batches and these control elements. They need no credit and are never dropped. Their wire form
is JSON, since they are rare and small. No I/O here.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.graph.schema import DocumentError, malformed


class _Element(Struct, frozen=True, tag_field="t"):
    """Each element names its type on the wire."""


class CheckpointBarrier(_Element, frozen=True, tag="barrier"):
    """Divides the rows before it, which belong to the checkpoint, from those after it."""

    checkpoint_id: int
    timestamp_ms: int
    options: CheckpointOptions


class CancelCheckpoint(_Element, frozen=True, tag="cancel"):
    """The checkpoint was aborted upstream: its barrier will not arrive on this channel."""

    checkpoint_id: int


class Watermark(_Element, frozen=True, tag="watermark"):
    """No later row of this channel has an event time at or below ``timestamp_ms``."""

    timestamp_ms: int


class EndOfRange(_Element, frozen=True, tag="end_of_range"):
    """All rows of a range planned by a stream reader that belong to this channel have been sent."""


class EndOfData(_Element, frozen=True, tag="end_of_data"):
    """No more rows (control elements may follow). With ``drain`` operators finish; without it the job will resume."""

    drain: bool


class EndOfPartition(_Element, frozen=True, tag="end_of_partition"):
    """Nothing follows: the producer has ended."""


ControlElement = CheckpointBarrier | CancelCheckpoint | Watermark | EndOfRange | EndOfData | EndOfPartition
_DECODER: msgspec.json.Decoder[ControlElement] = msgspec.json.Decoder(ControlElement)


def encode_element(element: ControlElement) -> bytes:
    """The wire form of a control element."""
    return msgspec.json.encode(element)


def decode_element(content: bytes | memoryview) -> ControlElement:
    """The inverse of :func:`encode_element`. Raises DocumentError for anything else."""
    try:
        with malformed():
            return _DECODER.decode(content)
    except DocumentError as error:
        raise DocumentError(f"malformed control element: {error}") from error
