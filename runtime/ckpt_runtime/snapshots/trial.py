"""Parses metadata to a checkpoint, and first tries this in a process with limits if the metadata is untrusted.

A few kilobytes can be forged so that they unpack to a document of many millions of values. Text of up to
``HARMLESS_TEXT_BYTES`` is harmless whatever its content and needs no trial, so that ordinary snapshots cost nothing.
"""

from __future__ import annotations

import json

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, OtherVersionError
from ckpt_runtime.graph.schema import DocumentError
from ckpt_runtime.processes.limited_process import LimitedProcessError, ProcessLimits, run_limited, serve
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.metadata import decode

HARMLESS_TEXT_BYTES = 1 << 20
LIMITS = ProcessLimits(time_s=30.0, memory_bytes=512 << 20, answer_bytes=64 << 10)
_MAX_MESSAGE_CHARS = 8_000


def parse_metadata(data: bytes, name: str, directory: str) -> CompletedCheckpoint:
    """The checkpoint in ``directory`` whose metadata is ``data``. Errors refer to the metadata as ``name``.

    Raises :class:`CorruptFileError` for invalid metadata of any kind.
    """
    document = decode(data, name)
    try:
        return CompletedCheckpoint.from_json(document, directory)
    except OtherVersionError as error:
        raise CorruptFileError(f"{name} cannot be read: {error}", name) from error
    except DocumentError as error:
        raise CorruptFileError(f"{name} is damaged or foreign: its content has another shape: {error}", name) from error


def try_metadata(data: bytes, name: str) -> None:
    """Parses the metadata in a process with limits. Blocks. Raises :class:`CorruptFileError` if this fails."""
    try:
        answer = json.loads(run_limited(__name__, json.dumps(name).encode() + b"\n" + data, LIMITS))
    except LimitedProcessError as error:
        message = f"{name} is damaged or foreign: it cannot be read within the limits: {error}"
        raise CorruptFileError(message, name) from error
    if answer is not None:
        raise CorruptFileError(answer, name)


def _answer(request: bytes) -> bytes:
    name, _, data = request.partition(b"\n")
    try:
        parse_metadata(data, json.loads(name), "")
    except CorruptFileError as error:
        return json.dumps(str(error)[:_MAX_MESSAGE_CHARS]).encode()
    return b"null"


def main() -> None:
    """The process's entry point."""
    serve(_answer)


if __name__ == "__main__":
    main()
