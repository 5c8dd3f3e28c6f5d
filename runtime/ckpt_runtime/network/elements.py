"""Stream elements other than data: what travels in order with the rows of a channel.

A channel carries record batches and these control elements. They need no credit and are never dropped. Their wire form
is JSON, since they are rare and small. No I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from ckpt_runtime.checkpoint.properties import CheckpointOptions


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """Divides the rows before it, which belong to the checkpoint, from those after it."""

    checkpoint_id: int
    timestamp_ms: int
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class CancelCheckpoint:
    """The checkpoint was given up upstream; do not wait for its barrier on this channel."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class Watermark:
    """No later row of this channel has an event time at or below ``timestamp_ms``."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class EndOfData:
    """No more rows (control elements may follow). With ``drain`` operators finish, without it the job will resume."""

    drain: bool


@dataclass(frozen=True, slots=True)
class EndOfPartition:
    """Nothing follows: the producer ended."""


ControlElement = CheckpointBarrier | CancelCheckpoint | Watermark | EndOfData | EndOfPartition


def encode_element(element: ControlElement) -> bytes:
    """The wire form of a control element."""
    document: dict[str, Any]
    match element:
        case CheckpointBarrier(checkpoint_id, timestamp_ms, options):
            document = {"t": "barrier", "id": checkpoint_id, "ts": timestamp_ms, "options": options.to_json()}
        case CancelCheckpoint(checkpoint_id):
            document = {"t": "cancel", "id": checkpoint_id}
        case Watermark(timestamp_ms):
            document = {"t": "watermark", "ts": timestamp_ms}
        case EndOfData(drain):
            document = {"t": "end_of_data", "drain": drain}
        case EndOfPartition():
            document = {"t": "end_of_partition"}
    return orjson.dumps(document)


def decode_element(content: bytes | memoryview) -> ControlElement:
    """The inverse of :func:`encode_element`. Raises ValueError for anything else."""
    try:
        document = orjson.loads(content)
        match document["t"]:
            case "barrier":
                return CheckpointBarrier(
                    document["id"], document["ts"], CheckpointOptions.from_json(document["options"])
                )
            case "cancel":
                return CancelCheckpoint(document["id"])
            case "watermark":
                return Watermark(document["ts"])
            case "end_of_data":
                return EndOfData(document["drain"])
            case "end_of_partition":
                return EndOfPartition()
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"malformed control element: {error}") from error
    raise ValueError(f"unknown control element {document['t']!r}")
