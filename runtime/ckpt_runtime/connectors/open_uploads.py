"""Uploads in parts on S3 that stay open until they are committed: the object appears at once, and is never copied.

Small hidden objects tell which uploads are open. Their names are those that a file has on other file systems before its
commit, so that one clean-up works for both:

* *In progress*: written before the upload begins, so that there is no upload without it.
* *Pending*: has the id of the upload and the tags of its parts, with which any process can complete it.

A clean-up asks for the uploads of one key at a time, because some stores list no others.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_runtime.graph.schema import DocumentError, decoded
from ckpt_runtime.storage.errors import NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, exists, naming, read_bytes
from ckpt_runtime.storage.publish import replace

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PART_BYTES = 8 << 20
"""The size of all parts but the last one: with at most 10,000 parts, a file has up to 80 GB."""
_MOST_MARKER_BYTES = 4 << 20


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a hidden object. ``upload`` and ``tags`` are set when all parts have arrived.

    ``partition`` is the directory of the visible object, below that of the sink.
    """

    partition: str = ""
    upload: str = ""
    tags: tuple[str, ...] = ()


class OpenUpload(io.RawIOBase):
    """A binary file whose bytes are sent as parts. Closing it sends nothing; :meth:`finish` sends the last part."""

    def __init__(self, target: Location) -> None:
        """Begins an upload. Raises StorageError."""
        super().__init__()
        self._target = target
        self._held = bytearray()
        self._size = 0
        self.tags: list[str] = []
        self.upload: str = call("create_multipart_upload", target)["UploadId"]

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        self._held += view
        self._size += len(view)
        while len(self._held) >= PART_BYTES:
            self._send(bytes(self._held[:PART_BYTES]))
            del self._held[:PART_BYTES]
        return len(view)

    def tell(self) -> int:
        return self._size

    def finish(self) -> None:
        """Sends what is left. All parts are stored when this returns; an empty file has one empty part."""
        if self._held or not self.tags:
            self._send(bytes(self._held))
        self._held.clear()
        self.close()

    def _send(self, data: bytes) -> None:
        number = len(self.tags) + 1
        answer = call("upload_part", self._target, UploadId=self.upload, PartNumber=number, Body=data)
        self.tags.append(answer["ETag"])


def call(method: str, target: Location, **arguments: Any) -> Any:
    """Calls a method of S3 for the key of ``target``. Raises StorageError, and NotFoundError for an unknown upload."""
    bucket, _, key = target.path.partition("/")
    with naming("write", target):
        return target.filesystem.call_s3(method, Bucket=bucket, Key=key, **arguments)


def write_marker(place: Location, marker: Marker) -> None:
    """Creates or replaces a hidden object."""
    replace(place, msgspec.json.encode(marker))


def read_marker(place: Location) -> Marker:
    """Raises NotFoundError, and StorageError for an object that has not the form of a marker."""
    try:
        return decoded(read_bytes(place, _MOST_MARKER_BYTES), Marker)
    except DocumentError as error:
        raise StorageError(f"{place.url} does not name an open upload: {error}", place.url, error) from error


def complete_upload(target: Location, upload: str, tags: Sequence[str]) -> bool | None:
    """Makes the object visible. Returns False if it already was, and None if neither upload nor object exists."""
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    try:
        call("complete_multipart_upload", target, UploadId=upload, MultipartUpload={"Parts": parts})
    except NotFoundError:
        return False if exists(target) else None
    return True


def abort_uploads(target: Location) -> None:
    """Gives up all open uploads of a key."""
    bucket, _, key = target.path.partition("/")
    with naming("list uploads of", target):
        answer = target.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
    for upload in answer.get("Uploads", ()):
        if upload["Key"] == key:
            try:
                call("abort_multipart_upload", target, UploadId=upload["UploadId"])
            except NotFoundError:
                continue  # another process has given it up, or completed it
