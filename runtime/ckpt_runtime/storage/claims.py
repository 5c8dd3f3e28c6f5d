"""The claim of a snapshot: a document next to its files, which only one job can create and all others find.

A *place* is the directory that is claimed: the directory of a job with its checkpoints, which may share files, or the
directory of a savepoint. The claim names the files in it that its owner may delete; the owner deletes nothing there
that the claim does not name. Besides the owner only one successor changes the claim: the heir of an owner that left
checkpoints, or a job that claims the place when the owner is proven dead. If several jobs try, one creates the file
that makes it the successor; the others then find another owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as replace_fields

from msgspec import to_builtins

from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.processes.process_mark import RELEASED
from ckpt_runtime.storage.checkpoint_storage import SHARED_NAME, is_checkpoint_name, is_job_id
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    CorruptFileError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import Location, delete_file, identity, list_names, read_bytes, read_shown, resolve
from ckpt_runtime.storage.publish import checksum_of, publish, replace
from ckpt_runtime.storage.versioned_document import MAX_DOCUMENT_BYTES, decode_document, encode_document

CLAIM_NAME = "claim"
SESSION_PREFIX = "session "
"""Prefix of the name of a cluster without high availability, which consists of one process."""

_SUCCESSOR = f"{CLAIM_NAME}-after-"
_MOST_SUCCESSORS = 16
"""Maximum number of successors that may have died before one succeeds."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """A job. ``cluster`` is its high-availability directory, or names the session of a cluster without one.

    ``directory`` is the URL of the directory of its checkpoints. ``process`` is a mark of the one process
    that can run the job (``process_mark.py``); None with high availability.
    """

    job_id: str
    cluster: str
    directory: str
    process: str | None = None

    def is_same_job(self, other: Claimant) -> bool:
        """Compares job and cluster, not the checkpoint directory. A claimant that was declared dead never matches."""
        return (self.job_id, self.cluster) == (other.job_id, other.cluster) and not (self.is_over or other.is_over)

    @property
    def is_over(self) -> bool:
        """Whether a user has released its claim."""
        return self.process == RELEASED


@dataclass(frozen=True, slots=True)
class Claim:
    """``snapshot`` is the URL of the claimed snapshot; the owner may delete ``files``, relative paths in the place.

    ``earlier`` are former owners that passed the place on; their checkpoints may need some of the files.
    ``number`` counts the changes: no claim is ever equal to an earlier one.
    """

    owner: Claimant
    snapshot: str
    files: tuple[str, ...] = ()
    earlier: tuple[Claimant, ...] = ()
    number: int = 0


class ClaimedError(AlreadyExistsError):
    """Another job has claimed the place. Nothing has changed."""

    def __init__(self, place: Location, claim: Claim) -> None:
        marker = claim_file(place).url
        super().__init__(f"{place.url} is claimed by job {claim.owner.job_id} of {claim.owner.cluster}", marker)
        self.claim = claim


def place_of_snapshot(directory: Location) -> Location:
    """The place of a snapshot; checkpoints in the directory of the job that wrote them share one place."""
    job = directory.parent
    return job if is_checkpoint_name(directory.name) and is_job_id(job.name) else directory


def place_of_file(file: Location) -> Location:
    """The place of a file that checkpoints share."""
    directory = file.parent
    job = directory.parent
    return job if directory.name == SHARED_NAME and is_job_id(job.name) else directory


def relative_path(place: Location, file: Location) -> str:
    """The path of a file relative to its place, as a claim lists it."""
    return file.path[len(place.path.rstrip("/")) + 1 :]


def claim_file(place: Location) -> Location:
    """The file that holds the claim of a place."""
    return place.child(CLAIM_NAME)


def read_claim(place: Location) -> Claim | None:
    """The claim of a place; None without one. Raises :class:`CorruptFileError` for a file that is not a claim."""
    file = claim_file(place)
    try:
        return checked(decode_document(read_shown(file, 2 * MAX_DOCUMENT_BYTES), file.url), Claim)
    except NotFoundError:
        return None
    except DocumentError as error:
        raise CorruptFileError(f"{file.url} is not a claim: {error}", file.url) from error


def claim_of(snapshot: Location) -> Claim | None:
    """The claim of the snapshot in this directory; None if it is free, even if its place is claimed for another."""
    claim = read_claim(place_of_snapshot(snapshot))
    return claim if claim is not None and identity(resolve(claim.snapshot)) == identity(snapshot) else None


def acquire(
    place: Location, claim: Claim, heir_of: Sequence[str] = (), is_dead: Callable[[Claimant], bool] = lambda _: False
) -> None:
    """Claims a place. A job that has claimed it before renews its claim, which keeps the files that it names.

    ``heir_of`` are directories of jobs whose claims pass to the new owner, which has claimed these directories; claims
    of owners that are certainly dead by ``is_dead`` pass to it as well. Raises :class:`ClaimedError`;
    :class:`AmbiguousWriteError` when it is unknown whether the place is claimed.
    """
    data = _encoded(place, claim)
    try:
        publish(claim_file(place), data)
        return
    except AlreadyExistsError:
        present = read_claim(place)
    except AmbiguousWriteError:
        present = read_claim(place)
        if present is None:
            raise
    if present is None:  # released at this very moment
        publish(claim_file(place), data)
        return
    if present.owner.is_same_job(claim.owner):
        _continue(place, present, claim)
        return
    if present.owner.directory not in heir_of and not is_dead(present.owner):
        raise ClaimedError(place, present)
    with _succession(place, present, claim.owner, is_dead):
        again = read_claim(place)
        if again is None:
            publish(claim_file(place), data)
            return
        if again != present:  # another claimant has succeeded the owner
            raise ClaimedError(place, again)
        _continue(place, again, claim)


def _continue(place: Location, present: Claim, claim: Claim) -> None:
    """Files that the present owner or earlier ones still need stay protected."""
    earlier = present.earlier if present.owner == claim.owner else (*present.earlier, present.owner)
    files = tuple(dict.fromkeys((*present.files, *claim.files)))
    change(place, Claim(claim.owner, claim.snapshot, files, earlier, present.number + 1))


@contextmanager
def _succession(
    place: Location, present: Claim, successor: Claimant, is_dead: Callable[[Claimant], bool]
) -> Iterator[None]:
    """Lets one successor at a time change this claim, which its owner no longer changes. Raises :class:`ClaimedError`.

    A successor that died on the way leaves its file, and the next one adds its own with the next number. A file also
    stays while it is unknown whether the claim was changed, because such a write may arrive at any time. No claim is
    ever equal to an earlier one, so a late successor may create a file but then finds another claim.
    """
    digest = checksum_of(_encoded(place, present)).rpartition(":")[2]
    # Named after the claim's content, which `number` makes unique: a late successor cannot affect a newer claim.
    names = [f"{_SUCCESSOR}{digest}-{number}" for number in range(_MOST_SUCCESSORS)]
    number = next((number for number, name in enumerate(names) if _is_next(place, name, successor, is_dead)), None)
    if number is None:
        raise ClaimedError(place, present)
    try:
        yield
    except AmbiguousWriteError:
        raise
    except BaseException:
        # Deletes only its own file: the files of earlier dead successors tell the next one which number to use.
        _forget(place, names[number : number + 1])
        raise
    _forget(place, names[: number + 1])


def _is_next(place: Location, name: str, successor: Claimant, is_dead: Callable[[Claimant], bool]) -> bool:
    """Creates the file: True when it is the successor's, False when it belongs to a dead successor."""
    mark = place.child(name)
    try:
        publish(mark, encode_document(to_builtins(successor)))
        return True
    except AlreadyExistsError:
        other = _read_successor(mark)
    if other == successor:  # of an attempt whose outcome was unknown
        return True
    if is_dead(other):
        return False
    raise ClaimedError(place, Claim(other, ""))


def _forget(place: Location, names: Sequence[str]) -> None:
    for name in names:
        with suppress(StorageError):
            delete_file(place.child(name))


def _read_successor(mark: Location) -> Claimant:
    """The job that the file names. Raises NotFoundError when the file was just deleted: the caller may try again."""
    try:
        return checked(decode_document(read_bytes(mark, MAX_DOCUMENT_BYTES), mark.url), Claimant)
    except DocumentError as error:
        raise CorruptFileError(f"{mark.url} names no job: {error}", mark.url) from error


def change(place: Location, claim: Claim) -> None:
    """Replaces a claim; only its owner may call this."""
    replace(claim_file(place), _encoded(place, claim))


def declare_owner_dead(place: Location, claim: Claim) -> None:
    """Declares the owner of this claim dead: the next job that claims succeeds it, and the owner loses all rights.

    Raises :class:`ClaimedError` when the claim has changed in the meantime.
    """
    over = replace_fields(claim.owner, process=RELEASED)
    with _succession(place, claim, over, lambda owner: owner.is_over):
        present = read_claim(place)
        if present is None:
            return
        if present != claim:
            raise ClaimedError(place, present)
        change(place, replace_fields(claim, owner=over, number=claim.number + 1))


def release(place: Location) -> None:
    """Deletes the claim, so that any job may claim the place; only its owner may call this. A missing claim is not an
    error."""
    # The claim is deleted before the files of successors: a job that claims the place in between makes a new claim.
    delete_file(claim_file(place))
    with suppress(StorageError):
        _forget(place, [name for name in list_names(place) if name.startswith(_SUCCESSOR)])


def _encoded(place: Location, claim: Claim) -> bytes:
    try:
        return encode_document(to_builtins(claim))
    except ValueError as error:
        raise CorruptFileError(f"{place.url} cannot be claimed: {error}", place.url) from error
