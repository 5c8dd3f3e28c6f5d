"""Uploaded programs that are held, in the high-availability directory, where the next driver finds them.

One document lists the programs, their holders and since when; each archive is a file beside it,
written before the document names it and deleted after it no longer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct, field
from msgspec.structs import replace

from ckpt_runtime.storage.checksums import checksum_of
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError, StorageError
from ckpt_runtime.storage.fenced_document import Fence, FencedDocument, no_fence
from ckpt_runtime.storage.filesystem import Location, delete_file, list_names, make_directory, read_bytes
from ckpt_runtime.storage.job_store import MAX_ARCHIVE_BYTES
from ckpt_runtime.storage.publish import publish

_ARCHIVE = "archive-"


class HeldProgram(Struct, frozen=True):
    """``holds`` maps each holder to the start of its hold, in milliseconds since the epoch."""

    checksum: str
    uploaded_at_ms: int
    holds: dict[str, int]


class _Document(Struct, frozen=True):
    programs: dict[str, HeldProgram] = field(default_factory=dict)


class HeldProgramStore:
    """The held programs of one cluster, by program id. Calls block and raise StorageError."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._directory = directory
        self._document = FencedDocument(directory.child("holds"), _Document, fence, epoch)
        self._fence = fence

    def adopt(self) -> Mapping[str, HeldProgram]:
        """All programs; earlier leaders can no longer hold or release any. Deletes archives that are not held."""
        programs = self._document.adopt().programs
        named = {self._name(program.checksum) for program in programs.values()}
        for name in list_names(self._directory):
            if name.startswith(_ARCHIVE) and name not in named:
                with suppress(StorageError):  # the next leader tries again
                    delete_file(self._directory.child(name))
        return programs

    def read_archive(self, program: HeldProgram) -> bytes:
        """The program's archive. Raises CorruptFileError for a damaged one."""
        file = self._directory.child(self._name(program.checksum))
        archive = read_bytes(file, MAX_ARCHIVE_BYTES)
        if checksum_of(archive) != program.checksum:
            raise CorruptFileError(f"{file.url} is damaged: its checksum is not {program.checksum}", file.url)
        return archive

    def hold(self, program_id: str, uploaded_at_ms: int, archive: bytes, owner: str, since_ms: int) -> None:
        """Stores a program and a hold on it; repeating is fine."""
        self._fence()
        checksum = checksum_of(archive)
        make_directory(self._directory)
        with suppress(AlreadyExistsError):
            # Archive first: the document must only name archives that exist.
            publish(self._directory.child(self._name(checksum)), archive)

        def held(present: _Document) -> _Document:
            known = present.programs.get(program_id) or HeldProgram(checksum, uploaded_at_ms, {})
            changed = replace(known, holds={owner: since_ms, **known.holds})
            return _Document({**present.programs, program_id: changed})

        self._document.change(held)

    def release(self, program_id: str, owner: str) -> None:
        """Removes a hold, and with the last one the archive; a program that is not held is fine."""
        gone: list[HeldProgram] = []

        def released(present: _Document) -> _Document:
            gone.clear()
            known = present.programs.get(program_id)
            if known is None:
                return present
            holds = {name: since for name, since in known.holds.items() if name != owner}
            others = {name: program for name, program in present.programs.items() if name != program_id}
            if holds:
                return _Document({**others, program_id: replace(known, holds=holds)})
            gone.append(known)
            return _Document(others)

        programs = self._document.change(released).programs
        still_named = {program.checksum for program in programs.values()}
        for program in gone:
            if program.checksum not in still_named:
                delete_file(self._directory.child(self._name(program.checksum)))

    @staticmethod
    def _name(checksum: str) -> str:
        return _ARCHIVE + checksum.rpartition(":")[2]
