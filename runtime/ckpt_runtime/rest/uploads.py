"""Receiving an uploaded pipeline: one multipart part called ``jarfile``, a ``.py`` or a ``.zip``.

The client's file name is only displayed and never used as a path. The size is limited while the bytes arrive.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import StoredPipeline
from ckpt_runtime.rest.errors import BadRequest, echo
from ckpt_runtime.rest.json_body import limited_stream

PART_NAME = "jarfile"
DEFAULT_MAX_UPLOAD_BYTES = 100 * 1024 * 1024
_FRAMING_BYTES = 16 * 1024
_CHUNK_BYTES = 256 * 1024
_MAX_NAME_CHARS = 200
_ZIP_MAGIC = b"PK\x03\x04"


def display_name(raw: str | None) -> str:
    """The last segment of the client's file name. Raises 400 unless it ends in ``.py`` or ``.zip``."""
    name = re.split(r"[/\\]", raw or "")[-1]
    printable = name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS and not name.startswith(".")
    if not printable or not name.lower().endswith((".py", ".zip")):
        raise BadRequest(f"{PART_NAME}: the file name {echo(raw)} is not acceptable, it must end in .py or .zip")
    return name


async def receive_pipeline(request: Request, dispatcher: Dispatcher, max_bytes: int) -> StoredPipeline:
    """Parse the form, check the part and hand its bytes to the dispatcher."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadRequest(f"The upload must be multipart/form-data with one file in the part {PART_NAME!r}.")
    body = limited_stream(request, max_bytes + _FRAMING_BYTES)
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=4)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"Malformed multipart upload: {error.message}") from None
    except (KeyError, UnicodeDecodeError, LookupError, ValueError):
        raise BadRequest("Malformed multipart upload.") from None
    try:
        part = form.get(PART_NAME)
        if not isinstance(part, UploadFile):
            raise BadRequest(f"The upload has no file in the part {PART_NAME!r}.")
        name = display_name(part.filename)
        await _check_content(part, name)
        return await dispatcher.store_pipeline(name, _chunks(part))
    finally:
        await form.close()


async def _check_content(part: UploadFile, name: str) -> None:
    first = await part.read(len(_ZIP_MAGIC))
    await part.seek(0)
    if not first:
        raise BadRequest(f"{PART_NAME}: {echo(name)} is empty")
    if name.lower().endswith(".zip") and first != _ZIP_MAGIC:
        raise BadRequest(f"{PART_NAME}: {echo(name)} is not a zip archive")


async def _chunks(part: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await part.read(_CHUNK_BYTES):
        yield chunk
