"""Begins and ends a job's claims on snapshots, deletes claimed files, and disposes of snapshots that a user names.

Checkpoints of one job share files, and so do those of jobs that claimed each other's snapshots. In a claimed place the
owner deletes only files that the claim names, and of these only files that no other complete checkpoint refers to: a
job that claims one of several retained checkpoints leaves the others intact. When that job ends, the ownership of files
that are still needed returns to the earlier owner whose checkpoints need them.

The disposal of a snapshot whose owner is dead or has ended is treated as if a job claimed it and replaced it at once:
the claim is taken over by the same rule, and its files are deleted except those that a checkpoint of an earlier owner
needs. All functions block and raise StorageError.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState, is_shared
from ckpt_runtime.processes import process_mark
from ckpt_runtime.processes.process_mark import own_mark
from ckpt_runtime.snapshots.catalogue import dispose_of
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage import claims
from ckpt_runtime.storage.checkpoint_storage import (
    CheckpointStorage,
    delete_job_directory,
    delete_state_file,
    is_job_id,
    shared_file_owner,
)
from ckpt_runtime.storage.claims import Claim, Claimant, acquire, claim_of, place_of_snapshot
from ckpt_runtime.storage.errors import AlreadyExistsError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import (
    Location,
    check_directory,
    delete_empty_directory,
    identity,
    list_names,
    resolve,
)
from ckpt_runtime.storage.metadata import has_metadata, snapshot_directory

logger = logging.getLogger(__name__)


class OwnedElsewhereError(AlreadyExistsError):
    """A job of another cluster writes checkpoints into the directory, or did when it was last seen."""

    def __init__(self, storage: CheckpointStorage, holder: str) -> None:
        message = (
            f"{storage.location.url} belongs to the job of this id in the cluster {holder}; if that cluster no longer "
            f"exists, delete {storage.owner.url}"
        )
        super().__init__(message, storage.owner.url)


@dataclass(frozen=True, slots=True)
class JobClaims:
    """The claims of one job; ``places`` are their URLs."""

    claimant: Claimant
    places: tuple[str, ...] = ()

    def delete(self, paths: Iterable[str], first_id: int) -> None:
        """Deletes files that nothing of this job refers to, except those that others need.

        The job's own checkpoints have ids from ``first_id`` on; lower ids belong to an earlier job of the same id.
        """
        by_place: dict[Location, list[Location]] = defaultdict(list)
        for path in paths:
            file = resolve(path)
            by_place[claims.place_of_file(file)].append(file)
        for place, files in by_place.items():
            self._delete_in(place, files, first_id)

    def _delete_in(self, place: Location, files: list[Location], first_id: int) -> None:
        check_directory(place.parent)
        claim = claims.read_claim(place)
        if claim is None:  # claimed by a driver of an earlier version: delete only files in shared directories
            for file in files:
                delete_state_file(shared_file_owner(file), file)
            return
        if not claim.owner.is_same_job(self.claimant):
            logger.warning(
                "%d files in %s are kept: job %s has claimed them", len(files), place.url, claim.owner.job_id
            )
            return
        named = set(claim.files)
        needed = self._needed_by_others(place, claim, first_id)
        for file in files:
            if claims.relative_path(place, file) not in named:
                logger.warning("%s is kept: it is not a file of the claimed snapshot", file.url)
            elif file.url not in needed:
                delete_state_file(place, file)
        self.settle(place)

    def settle(self, place: Location) -> None:
        """Ends this job's claim on a place if the claimed snapshot and all files of the claim are deleted."""
        claim = claims.read_claim(place)
        if claim is None or not claim.owner.is_same_job(self.claimant) or has_metadata(resolve(claim.snapshot)):
            return
        if next(_present(place, claim.files), None) is None:
            _release_place(place)

    def unused(self, states: Iterable[SubtaskState]) -> tuple[str, ...]:
        """Sorted URLs of claimed files that no state refers to: an earlier driver did not delete them in time."""
        used = {resolve(file.path).url for state in states for file in state.files() if is_shared(file)}
        return tuple(sorted(file.url for file in self._left() if file.url not in used))

    def _left(self) -> Iterator[Location]:
        """Yields claimed files that still exist. A snapshot with metadata is intact, so its files are left out."""
        for url in self.places:
            place = resolve(url)
            check_directory(place.parent)
            claim = claims.read_claim(place)
            if claim is None or not claim.owner.is_same_job(self.claimant) or has_metadata(resolve(claim.snapshot)):
                continue
            yield from _present(place, claim.files)

    def release(self) -> None:
        """After the job's end, deletes files that no checkpoint needs and ends claims its checkpoints do not need."""
        for url in self.places:
            place = resolve(url)
            check_directory(place.parent)
            claim = claims.read_claim(place)
            if claim is not None and claim.owner.is_same_job(self.claimant):
                self._release(place, claim)

    def abandon(self) -> None:
        """Declares this job dead in its claims, so that the next claimant may take them over without further proof.

        An error is ignored; the next claimant then has to prove that the job is dead.
        """
        for url in self.places:
            with suppress(StorageError):
                place = resolve(url)
                claim = claims.read_claim(place)
                if claim is not None and claim.owner.is_same_job(self.claimant):
                    claims.declare_owner_dead(place, claim)

    def _release(self, place: Location, claim: Claim) -> None:
        candidates = (claim.owner, *reversed(claim.earlier))
        by_job = [files_of_checkpoints(resolve(job.directory)) for job in candidates]
        needed = set[str]().union(*by_job, files_of_checkpoints(place), _files_of(resolve(claim.snapshot)))
        left = []
        for file in _present(place, claim.files):
            if file.url in needed:
                left.append(file.url)
            else:
                delete_state_file(place, file)
        for index, (job, its) in enumerate(zip(candidates, by_job, strict=True)):
            if not its.isdisjoint(left):  # one of its retained checkpoints outlives the job
                if index:
                    handed_back = replace(claim, owner=job, earlier=claim.earlier[:-index], number=claim.number + 1)
                    claims.change(place, handed_back)
                return
        _release_place(place)

    def _needed_by_others(self, place: Location, claim: Claim, first_id: int) -> set[str]:
        """URLs of files that others' complete checkpoints need, in the place and in directories of earlier owners."""
        others = {resolve(job.directory) for job in claim.earlier} | {place}
        own = resolve(self.claimant.directory)
        needed = files_of_checkpoints(own, below=first_id, but=(claim.snapshot,))
        for directory in others - {own}:
            needed |= files_of_checkpoints(directory, but=(claim.snapshot,))
        return needed


def is_dead(owner: Claimant) -> bool:
    """Whether it is certain that no process runs this job, and that none ever will."""
    return process_mark.is_gone(owner.process)


def claim_snapshot(
    snapshot: CompletedCheckpoint,
    claimant: Claimant,
    written: Collection[str] = (),
    is_over: Callable[[Claimant], bool] = is_dead,
) -> JobClaims:
    """Makes a job the only owner of a snapshot, whose ``directory`` is a path without symbolic links.

    ``written`` are URLs of directories in which living jobs of this cluster write checkpoints. Claims of owners for
    which ``is_over`` is true, because they have finished or are dead, are taken over.
    Raises :class:`ClaimedError`, :class:`OwnedElsewhereError`, and InvalidLocationError for files that no job can own.
    Nothing is claimed then.
    """
    directory = resolve(snapshot.directory)
    own = claims.place_of_snapshot(directory)
    files = _files_by_place(snapshot, own)
    # All places are checked before the first is acquired: a refusal should change nothing.
    for place in files:
        _check_is_claimable(place, own, written)
        check_not_written(place, claimant.cluster)
    made = JobClaims(claimant)
    try:
        for place in (own, *(place for place in files if place != own)):
            named = tuple(sorted(claims.relative_path(place, file) for file in files.get(place, ())))
            heir_of = (own.url,) if made.places else ()
            claims.acquire(place, Claim(claimant, snapshot.directory, named), heir_of, is_over)
            # One by one, so that an error releases exactly what was acquired.
            made = replace(made, places=(*made.places, place.url))
        if not has_metadata(directory):  # its previous owner has just deleted it
            raise NotFoundError(f"cannot find checkpoint or savepoint: {directory.url} no longer exists", directory.url)
    except StorageError:
        made.release()
        raise
    return made


def check_not_written(place: Location, cluster: str) -> None:
    """Raises :class:`OwnedElsewhereError` for the directory of a job that another cluster may be running."""
    if is_job_id(place.name):
        storage = CheckpointStorage(place.parent, place.name)
        holder = storage.holder()
        if holder is not None and holder != cluster:
            raise OwnedElsewhereError(storage, holder)


def files_of_checkpoints(directory: Location, below: int = sys.maxsize, but: Collection[str] = ()) -> set[str]:
    """URLs of shared files of complete checkpoints in a job's directory, or of the savepoint in another directory."""
    if not is_job_id(directory.name):
        return set() if directory.url in but else _files_of(directory)
    storage = CheckpointStorage(directory.parent, directory.name)
    found = (storage.checkpoint(number) for number in storage.list_checkpoints() if number < below)
    return set[str]().union(*(_files_of(checkpoint) for checkpoint in found if checkpoint.url not in but))


def _files_of(snapshot: Location) -> set[str]:
    try:
        states = open_snapshot(snapshot).metadata.claimed().states.values()
    except NotFoundError:  # incomplete, or deleted at this moment
        return set()
    return {resolve(file.path).url for state in states for file in state.files() if is_shared(file)}


def _files_by_place(snapshot: CompletedCheckpoint, own: Location) -> Mapping[Location, set[Location]]:
    """Shared files by place: the job owns them one by one. Other files are deleted with the snapshot."""
    found: dict[Location, set[Location]] = {own: set()}
    for file in (file for state in snapshot.claimed().states.values() for file in state.files() if is_shared(file)):
        location = resolve(file.path)
        place = own if own.contains(location) else claims.place_of_file(location)
        found.setdefault(place, set()).add(location)
    return found


def _check_is_claimable(place: Location, own: Location, written: Collection[str]) -> None:
    """Checks a place that the snapshot names: outside its own, it must be a job's directory or claimed before."""
    if any(identity(place) == identity(resolve(url)) for url in written):
        raise InvalidLocationError(f"the snapshot cannot be claimed: an active job writes to {place.url}", place.url)
    if place != own and not is_job_id(place.name) and claims.read_claim(place) is None:
        message = (
            f"the snapshot cannot be claimed: it refers to {place.url}, which does not contain shared files of a job"
        )
        raise InvalidLocationError(message, place.url)


def _present(place: Location, files: Iterable[str]) -> Iterator[Location]:
    """Yields those files that exist."""
    by_directory: dict[Location, list[Location]] = defaultdict(list)
    for path in files:
        file = place.child(*path.split("/"))
        by_directory[file.parent].append(file)
    for directory, wanted in by_directory.items():
        names = set(list_names(directory))
        yield from (file for file in wanted if file.name in names)


def _release_place(place: Location) -> None:
    claims.release(place)
    if is_job_id(place.name):
        storage = CheckpointStorage(place.parent, place.name)
        if storage.holder() is None:
            delete_job_directory(storage)
    else:
        delete_empty_directory(place)


def dispose_of_snapshot(
    path: str, cluster: str, written: Collection[str] = (), ended: Collection[str] = frozenset()
) -> None:
    """Deletes the snapshot. After an error, a later call by any caller continues the deletion.

    ``written`` are URLs of directories in which living jobs of this ``cluster`` write checkpoints, ``ended`` the ids of
    its finished jobs. Raises :class:`ClaimedError` while the owner of a claim is not known to be dead or to have
    ended, and as ``dispose_of``.
    """
    directory = snapshot_directory(resolve(path)).real()
    claim = claim_of(directory)
    if claim is None:
        dispose_of(path)
        return
    claims = _taken_over(directory, claim, cluster, written, ended)
    try:
        dispose_of(directory.url, claims.release)
    except BaseException:
        claims.abandon()
        raise


def is_inactive(owner: Claimant, cluster: str, ended: Collection[str]) -> bool:
    """Whether this owner certainly no longer acts: it is dead, or one of the ``cluster``'s ``ended`` jobs."""
    return is_dead(owner) or (owner.cluster == cluster and owner.job_id in ended)


def _taken_over(
    directory: Location, claim: Claim, cluster: str, written: Collection[str], ended: Collection[str]
) -> JobClaims:
    """Claims the snapshot for the disposal, as an owner without checkpoints that no later driver continues."""
    place, name = place_of_snapshot(directory), f"disposal-{secrets.token_hex(8)}"
    claimant = Claimant(name, cluster, place.child(name).url, own_mark())

    def is_over(owner: Claimant) -> bool:
        return is_inactive(owner, cluster, ended)

    if has_metadata(directory):
        return claim_snapshot(open_snapshot(directory).metadata, claimant, written, is_over)
    # The owner or an earlier disposal has already deleted the metadata: other places are no longer known.
    acquire(place, Claim(claimant, claim.snapshot), is_dead=is_over)
    return JobClaims(claimant, (place.url,))
