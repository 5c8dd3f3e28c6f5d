"""Who has claimed a snapshot: a document beside its files, which one job can create and all others find.

A *place* is what is claimed: the directory of a job with its checkpoints, which may share files, or the directory of
a savepoint. The claim names what in it became its owner's to delete; it is not changed by anybody else, and its owner
deletes nothing there that it does not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import to_builtins

from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.storage.checkpoint_storage import SHARED_NAME, is_checkpoint_name, is_job_id
from ckpt_runtime.storage.documents import MAX_DOCUMENT_BYTES, decode_document, encode_document
from ckpt_runtime.storage.errors import AlreadyExistsError, AmbiguousWriteError, CorruptFileError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, delete_file, read_bytes
from ckpt_runtime.storage.publish import publish, replace

CLAIM_NAME = "claim"


@dataclass(frozen=True, slots=True)
class Claimant:
    """A job. ``cluster`` is its high-availability directory, or names the session of a cluster without one.

    ``directory`` is the URL of the directory in which its checkpoints lie.
    """

    job_id: str
    cluster: str
    directory: str

    def is_same_job(self, other: Claimant) -> bool:
        """Wherever its checkpoints lie."""
        return (self.job_id, self.cluster) == (other.job_id, other.cluster)


@dataclass(frozen=True, slots=True)
class Claim:
    """``snapshot`` is the URL of what the owner has claimed; ``files`` in the place, by their relative paths, are its.

    ``earlier`` owned the place before and have left it to the owner; checkpoints of theirs may need some of the files.
    """

    owner: Claimant
    snapshot: str
    files: tuple[str, ...] = ()
    earlier: tuple[Claimant, ...] = ()


class ClaimedError(AlreadyExistsError):
    """Another job has claimed the place. Nothing has changed."""

    def __init__(self, place: Location, claim: Claim) -> None:
        marker = claim_file(place).url
        super().__init__(f"{place.url} is claimed by job {claim.owner.job_id} of {claim.owner.cluster}", marker)
        self.claim = claim


def place_of_snapshot(directory: Location) -> Location:
    """The place of a snapshot: checkpoints that lie where a job wrote them share one."""
    job = directory.parent
    return job if is_checkpoint_name(directory.name) and is_job_id(job.name) else directory


def place_of_file(file: Location) -> Location:
    """The place of a file that checkpoints share."""
    directory = file.parent
    job = directory.parent
    return job if directory.name == SHARED_NAME and is_job_id(job.name) else directory


def relative_path(place: Location, file: Location) -> str:
    """As a claim names a file below its place."""
    return file.path[len(place.path.rstrip("/")) + 1 :]


def claim_file(place: Location) -> Location:
    """Where the claim of a place lies."""
    return place.child(CLAIM_NAME)


def read_claim(place: Location) -> Claim | None:
    """Raises :class:`CorruptFileError` for a file that is no claim."""
    file = claim_file(place)
    try:
        return checked(decode_document(read_bytes(file, 2 * MAX_DOCUMENT_BYTES), file.url), Claim)
    except NotFoundError:
        return None
    except DocumentError as error:
        raise CorruptFileError(f"{file.url} is no claim: {error}", file.url) from error


def acquire(place: Location, claim: Claim, heir_of: Sequence[str] = ()) -> None:
    """Claims a place, once for each job: its own claim is renewed, with what it names already.

    ``heir_of`` are directories of jobs whose claims go to the new owner, who has claimed these. Raises
    :class:`ClaimedError`; :class:`AmbiguousWriteError` when it is unknown whether the place is claimed.
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
    earlier = present.earlier
    if not present.owner.is_same_job(claim.owner) and present.owner.directory not in heir_of:
        raise ClaimedError(place, present)
    if present.owner != claim.owner:
        earlier = (*earlier, present.owner)
    files = tuple(dict.fromkeys((*present.files, *claim.files)))
    change(place, Claim(claim.owner, claim.snapshot, files, earlier))


def change(place: Location, claim: Claim) -> None:
    """Replaces a claim; for its owner alone."""
    replace(claim_file(place), _encoded(place, claim))


def release(place: Location) -> None:
    """Anybody may claim the place from now on; for its owner alone. None there is fine."""
    delete_file(claim_file(place))


def _encoded(place: Location, claim: Claim) -> bytes:
    try:
        return encode_document(to_builtins(claim))
    except ValueError as error:
        raise CorruptFileError(f"{place.url} cannot be claimed: {error}", place.url) from error
