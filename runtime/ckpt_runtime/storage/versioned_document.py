"""Documents with compare-and-set, on any file system that can create a file only if it is absent.

Each revision of a :class:`VersionedDocument` is a file of its own, ``<number>.json``, created exclusively and never
changed; the greatest number is the current one. A writer that lost a race, or continues after a long pause, can
therefore never undo newer changes.

A :class:`FencedDocument` has a schema, and only the current leader can change it, even if a former one still tries. The
leader's epoch is part of the document, and every change is a compare-and-set: a new leader that has adopted the
document has closed it for all earlier epochs, in one step with its own change. The fence only refuses changes sooner.

Every document has a checksum and a format version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson
from msgspec import to_builtins

from ckpt_runtime.graph.schema import DocumentError, NonNegative, checked
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    ConflictError,
    CorruptFileError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_empty_directory,
    delete_file,
    list_names,
    make_directory,
    read_bytes,
)
from ckpt_runtime.storage.publish import checksum_of, parsed_to_json_text, publish, to_json_text

VERSION = 1
MAX_DOCUMENT_BYTES = 16 << 20


def encode_document(document: Mapping[str, Any]) -> bytes:
    """The bytes of a document. Raises ValueError for what is not JSON, and when it is too large."""
    payload = to_json_text(document, sort_keys=True)
    if len(payload) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"a document of {len(payload)} bytes is larger than the {MAX_DOCUMENT_BYTES} allowed")
    return _enclosed(payload)


def _enclosed(payload: bytes) -> bytes:
    return b'{"version":%d,"checksum":"%s","document":%s}\n' % (VERSION, checksum_of(payload).encode(), payload)


def decode_document(data: bytes, name: str) -> dict[str, Any]:
    """The document in ``data``; errors refer to it as ``name``. Raises :class:`CorruptFileError`."""
    try:
        envelope = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptFileError(f"{name} is damaged: it is not JSON", name) from error
    if not isinstance(envelope, dict) or not isinstance(envelope.get("document"), dict):
        raise CorruptFileError(f"{name} is damaged or foreign", name)
    if envelope.get("version") != VERSION:
        raise CorruptFileError(f"{name} has format version {envelope.get('version')!r}; this release reads 1", name)
    document: dict[str, Any] = envelope["document"]
    try:
        intact = _enclosed(parsed_to_json_text(document, sort_keys=True)) == data
    except TypeError:  # nested deeper than any document that this module writes
        intact = False
    if not intact:
        raise CorruptFileError(f"{name} is damaged: its checksum is wrong", name)
    return document


_NAME = re.compile(r"([0-9]{20})\.json")
_READ_ATTEMPTS = 20
_CHANGE_ATTEMPTS = 100
_UNKNOWN_OUTCOMES = 5


@dataclass(frozen=True, slots=True)
class Revision:
    """A document as it was at one revision; numbers start at 1 and grow by one."""

    number: int
    document: dict[str, Any]


def _allow(_: dict[str, Any] | None) -> None:
    """The default check, which allows every change."""


class VersionedDocument:
    """One document in a directory of its own. Several processes may use it at the same time."""

    def __init__(self, directory: Location) -> None:
        """Touches nothing."""
        self.directory = directory

    def exists(self) -> bool:
        """Whether there is a revision, readable or not."""
        return self._latest() != 0

    def read(self) -> Revision | None:
        """The present revision, or None when there is none. Raises :class:`CorruptFileError` naming the file."""
        for _ in range(_READ_ATTEMPTS):
            number = self._latest()
            if number == 0:
                return None
            file = self._file(number)
            # The revision may have been replaced and deleted since the listing; then a newer one exists.
            with suppress(NotFoundError):
                return Revision(number, decode_document(read_bytes(file, 2 * MAX_DOCUMENT_BYTES), file.url))
        raise StorageError(f"cannot read {self.directory.url}: it changes all the time", self.directory.url)

    def write(self, expected: int, document: Mapping[str, Any]) -> None:
        """Makes the revision after ``expected`` (0 when there must be none).

        Raises :class:`ConflictError` when the present revision is another one, :class:`AmbiguousWriteError` when it
        is unknown whether the revision was made; a read of the document then shows the outcome.
        """
        data = encode_document(document)
        # Only an early refusal: the exclusive creation of the file decides.
        if self._latest() != expected:
            raise self._conflict(expected)
        make_directory(self.directory)
        file = self._file(expected + 1)
        try:
            publish(file, data)
        except AlreadyExistsError:
            raise self._conflict(expected) from None
        # Settles the races that exclusive creation alone leaves open: the number may have been used and deleted.
        numbers = self._numbers()
        if max(numbers, default=0) > expected + 1:
            message = f"{self.directory.url} went on to a later revision at once; read it to see what it is based on"
            raise AmbiguousWriteError(message, self.directory.url)
        if expected and expected not in numbers:
            # The document has been removed in the meantime and must not be created again.
            delete_file(file)
            raise self._conflict(expected)
        # Last: a crash before leaves one revision too many, never one too few. One that remains does no harm, and the
        # next write tries again.
        with suppress(StorageError):
            for number in numbers:
                if number <= expected:
                    delete_file(self._file(number))

    def change(
        self,
        make: Callable[[dict[str, Any] | None], Mapping[str, Any] | None],
        check: Callable[[dict[str, Any] | None], None] = _allow,
    ) -> None:
        """Reads, and writes the result of ``make``; repeats if another process was faster or the outcome is unknown.

        ``make`` may be called on its own result, for which it must return None, and may raise to change nothing.
        ``check`` is called before it, and raises StorageError when changes are no longer allowed.
        Raises :class:`AmbiguousWriteError` when it is unknown whether a change is stored, :class:`StorageError` when it
        is not.
        """
        unknown = 0
        for _ in range(_CHANGE_ATTEMPTS):
            with self._unless(unknown):
                revision = self.read()
                present = None if revision is None else revision.document
                check(present)
            document = make(present)
            if document is None:
                return None
            try:
                return self.write(0 if revision is None else revision.number, document)
            except ConflictError:
                continue  # another process was faster, or the answer to this change was lost: a read shows which
            except AmbiguousWriteError:
                # Tried again on the content that is read: if the change has arrived, no new revision is made.
                unknown += 1
                if unknown == _UNKNOWN_OUTCOMES:
                    raise
            except StorageError:
                with self._unless(unknown):
                    raise
        with self._unless(unknown):
            raise StorageError(f"cannot change {self.directory.url}: it changes all the time", self.directory.url)

    @contextmanager
    def _unless(self, unknown: int) -> Iterator[None]:
        """Turns an error into an ambiguous one if an earlier write may still take effect."""
        try:
            yield
        except StorageError as error:
            if unknown:
                raise AmbiguousWriteError(str(error), self.directory.url, error) from error
            raise

    def delete(self) -> None:
        """Deletes all revisions, the current one last, and the directory; a missing document is not an error."""
        while numbers := self._numbers():
            for number in numbers:
                delete_file(self._file(number))
        with suppress(StorageError):
            delete_empty_directory(self.directory)

    def _latest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        matches = (_NAME.fullmatch(name) for name in list_names(self.directory))
        return [int(match[1]) for match in matches if match]

    def _file(self, number: int) -> Location:
        return self.directory.child(f"{number:020d}.json")

    def _conflict(self, expected: int) -> ConflictError:
        message = f"{self.directory.url} was changed by another process: revision {expected} is not the present one"
        return ConflictError(message, self.directory.url)


S = TypeVar("S")
T = TypeVar("T")
Fence = Callable[[], None]
"""Called before each change; raises when this process may not, or may no longer, change anything."""


def no_fence() -> None:
    """The fence of a process without competitors."""


class FencedDocument(Generic[T]):
    """One document. ``epoch`` is this leader's; a document that no leader has changed has epoch 0."""

    def __init__(self, directory: Location, schema: type[T], fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist; an empty document must match ``schema``. Touches nothing."""
        self._document = VersionedDocument(directory)
        self._schema = schema
        self._fence = fence
        self._epoch = epoch

    @property
    def directory(self) -> Location:
        return self._document.directory

    def read(self) -> T:
        """The current content, or that of an empty document. Raises :class:`CorruptFileError` naming the file."""
        revision = self._document.read()
        return self._content({} if revision is None else revision.document)

    def change(self, modify: Callable[[T], T]) -> T:
        """Fetches, modifies, writes; repeats if another process was faster or the outcome is unknown.

        ``modify`` may be called on its own result, which it must return unchanged, and may raise to change nothing.
        Raises :class:`NotLeaderError`, :class:`AmbiguousWriteError` when it is unknown whether the change is stored,
        :class:`StorageError` when it is not.
        """
        changed: T

        def check(present: dict[str, Any] | None) -> None:
            self._fence()
            # Checked in each round: a later leader may have adopted the document since the last one.
            check_epoch(self._checked((present or {}).get("epoch", 0), NonNegative), self._epoch, self.directory)

        def make(present: dict[str, Any] | None) -> dict[str, Any] | None:
            nonlocal changed
            content = self._content(present or {})
            changed = modify(content)
            # A document of an older epoch is written even if unchanged: that closes it for earlier leaders.
            if changed == content and (present or {}).get("epoch") == self._epoch:
                return None
            return {**to_builtins(changed), "epoch": self._epoch}

        self._document.change(make, check)
        return changed

    def adopt(self) -> T:
        """Closes the document for all earlier epochs, which can no longer change the returned content."""
        return self.change(lambda present: present)

    def _content(self, document: dict[str, Any]) -> T:
        return self._checked({key: value for key, value in document.items() if key != "epoch"}, self._schema)

    def _checked(self, value: object, schema: type[S]) -> S:
        try:
            return checked(value, schema)
        except DocumentError as error:
            raise CorruptFileError(f"{self.directory.url} is not usable: {error}", self.directory.url) from error


def check_epoch(stored: int, own: int, directory: Location) -> None:
    """Raises :class:`NotLeaderError` for a document that a later leader has taken over."""
    if stored > own:
        message = f"{directory.url} belongs to the leader of epoch {stored}; this driver's epoch is {own}"
        raise NotLeaderError(message, directory.url)
