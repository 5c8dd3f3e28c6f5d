"""The snapshots that living jobs refer to, which must not be disposed of or claimed. Reads only, deletes nothing.

A snapshot is identified by its place: symbolic links, forms of a URL and ``_metadata`` lead to the same one.

The driver reads the savepoint catalogue here, too: in the pools of addresses, with errors for REST.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.jobmaster.gateway_values import (
    Conflict,
    GatewayError,
    InvalidRequest,
    KnownSavepoints,
    NotFound,
    NotReady,
    SavepointList,
    SnapshotInUse,
    SnapshotNotFound,
)
from ckpt_runtime.processes.process_mark import own_mark
from ckpt_runtime.snapshots import catalogue
from ckpt_runtime.snapshots.catalogue import NOT_ALLOWED, CataloguedSavepoint
from ckpt_runtime.snapshots.job_claims import (
    JobClaims,
    OwnedElsewhereError,
    check_not_written,
    claim_snapshot,
    is_inactive,
)
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.claims import SESSION_PREFIX, Claimant, ClaimedError, claim_of, place_of_snapshot
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Identity, address_of, identity, is_directory, resolve
from ckpt_runtime.storage.metadata import has_metadata, snapshot_directory
from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind, read_entry


@dataclass(frozen=True, slots=True)
class References:
    """The files that one job needs, as URLs: its own directory of ``checkpoints``, and ``snapshots`` that it may start
    from.

    ``state`` is shown. ``is_known`` is false for a job whose needs are unknown. ``claims``: it is about to claim its
    snapshot, as other jobs may be; the claim itself decides which one was first. ``reason``: why it needs the
    snapshots. ``kept_for``: the job does not run, and its snapshots are kept for the next job of this lineage, which
    may claim them.
    """

    job_id: str
    state: str
    checkpoints: str | None = None
    snapshots: tuple[str, ...] = ()
    is_known: bool = True
    claims: bool = False
    reason: str = "that job would start from it after a failure"
    kept_for: str | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        return self.snapshots if self.checkpoints is None else (self.checkpoints, *self.snapshots)


@dataclass(frozen=True, slots=True)
class _Place:
    own: Identity
    parent: Identity


class SnapshotReferences:
    """``living`` gives the references of all jobs that may still run, ``ended`` the ids of finished jobs.

    Runs on one event loop; reads storage in the pool that ``paths`` gives for a URL.
    """

    def __init__(
        self,
        living: Callable[[], Sequence[References]],
        paths: Callable[[str], Executor],
        ended: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self._living = living
        self._paths = paths
        self._ended = ended
        self._disposing: list[Identity] = []

    async def begin_disposal(self, path: str, cluster: str) -> Identity:
        """Prevents jobs from starting from the snapshot until :meth:`end_disposal` of the returned identity.

        ``cluster`` is this cluster's name in claims. Raises :class:`SnapshotInUse` naming a job that refers to the
        snapshot, :class:`SnapshotNotFound` for a directory that is not one, and :class:`StorageError` for an unusable
        path.
        """
        check = partial(self._check_stored, path, cluster, self._ended())
        await asyncio.get_running_loop().run_in_executor(self._paths(path), check)
        target = await self._unreferenced(path, self._living, "disposed of")
        self._disposing.append(target.own)
        return target.own

    async def claim(
        self, snapshot: CompletedCheckpoint, job_id: str, directory: str, cluster: str, lineage: str | None = None
    ) -> JobClaims:
        """Claims a snapshot for a job of ``lineage`` whose checkpoints are written below ``directory``.

        Raises :class:`SnapshotInUse`, and :class:`StorageError` for a snapshot that cannot be claimed.
        """
        path = snapshot.directory
        # With high availability another driver may recover the job: the end of this process proves nothing.
        process = own_mark() if cluster.startswith(SESSION_PREFIX) else None
        written = await self.check_claimable(path, job_id, lineage)

        def claim() -> JobClaims:
            own = CheckpointStorage(directory, job_id).location.real()
            return claim_snapshot(snapshot, Claimant(job_id, cluster, own.url, process), written)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._paths(path), claim)
        except ClaimedError as error:
            raise self._claimed_by(path, "claimed", error, cluster) from error

    async def check_claimable(self, path: str, job_id: str, lineage: str | None = None) -> tuple[str, ...]:
        """Checks that no other living job needs the snapshot to be claimed. Raises as :meth:`begin_disposal`.

        Returns the directories in which living jobs write checkpoints.
        """

        def others() -> list[References]:
            return [
                job
                for job in self._living()
                if job.job_id != job_id and not job.claims and (lineage is None or job.kept_for != lineage)
            ]

        await self._unreferenced(path, others, "claimed")
        return self.written()

    def written(self) -> tuple[str, ...]:
        """The directories in which living jobs write checkpoints."""
        return tuple(job.checkpoints for job in self._living() if job.checkpoints is not None)

    async def _unreferenced(self, path: str, living: Callable[[], Sequence[References]], action: str) -> _Place:
        places: dict[str, _Place | None] = {}
        target = await asyncio.get_running_loop().run_in_executor(self._paths(path), _place, path)
        while unknown := {url for job in living() for url in job.urls} - places.keys():
            places |= await self._places(unknown)
        for job in living():
            if not job.is_known:
                raise SnapshotInUse(
                    path, job.job_id, job.state, "it is unknown which snapshots that job refers to", action
                )
            own = None if job.checkpoints is None else places[job.checkpoints]
            if own is not None and own.own == target.parent:
                raise SnapshotInUse(path, job.job_id, job.state, "it is a checkpoint of that job", action)
            found = (places[url] for url in job.snapshots)
            if any(place is not None and place.own == target.own for place in found):
                raise SnapshotInUse(path, job.job_id, job.state, job.reason, action)
        return target

    async def _places(self, urls: Iterable[str]) -> dict[str, _Place | None]:
        """Finds the places of URLs, None for unreadable ones. Raises :class:`StorageError` if storage does not answer.

        Two spellings of an address may lead to one place, so none of them is left out.
        """
        by_address: dict[str, list[str]] = {}
        for url in sorted(urls):
            by_address.setdefault(address_of(url), []).append(url)
        loop = asyncio.get_running_loop()
        found = await asyncio.gather(
            *(loop.run_in_executor(self._paths(there[0]), _places, there) for there in by_address.values())
        )
        return {url: place for places in found for url, place in places.items()}

    def _claimed_by(self, path: str, action: str, error: ClaimedError, cluster: str) -> SnapshotInUse:
        """The error names the job that has claimed the snapshot, its known facts, and the remedies."""
        owner = error.claim.owner
        states = {job.job_id: job.state for job in self._living()}
        if owner.cluster != cluster:
            state = f"a job of {owner.cluster}, which is unknown here"
        else:
            state = states.get(owner.job_id, "at its end: no active job of this session")
        way_out = f"if that job no longer exists, release the snapshot with: ckpt snapshot release {path}"
        return SnapshotInUse(path, owner.job_id, state, f"it has claimed the snapshot; {way_out}", action)

    def _check_stored(self, path: str, cluster: str, ended: Collection[str]) -> None:
        """Checks in storage that the path is a snapshot and that no other job owns it."""
        directory = snapshot_directory(resolve(path)).real()
        place, claim = place_of_snapshot(directory), claim_of(directory)
        something = has_metadata(directory) or read_entry(directory) is not None or claim is not None
        if not something and is_directory(directory):
            raise SnapshotNotFound(path)
        try:
            check_not_written(place, cluster)
        except OwnedElsewhereError as error:
            raise SnapshotInUse(path, place.name, "known elsewhere", str(error)) from error
        if claim is not None and not is_inactive(claim.owner, cluster, ended):
            raise self._claimed_by(path, "disposed of", ClaimedError(place, claim), cluster)

    def end_disposal(self, disposed: Identity) -> None:
        self._disposing.remove(disposed)

    async def is_being_disposed(self, path: str) -> bool:
        """Whether a user is deleting the snapshot right now."""
        place = (await self._places([path]))[path]
        return place is not None and place.own in self._disposing


def _place(url: str) -> _Place:
    directory = snapshot_directory(resolve(url)).real()
    return _Place(identity(directory), identity(directory.parent))


def _places(urls: Iterable[str]) -> dict[str, _Place | None]:
    """Finds the place of each URL, None for an unreadable one."""
    found: dict[str, _Place | None] = {}
    for url in urls:
        try:
            found[url] = _place(url)
        except StorageError:
            found[url] = None
    return found


T = TypeVar("T")
MAX_TARGETS = 100


class SavepointCatalogue:
    """Keeps no savepoints itself. Runs on one event loop; reads in the pool that ``paths`` gives for a URL."""

    def __init__(self, paths: Callable[[str], Executor]) -> None:
        self._paths = paths
        self._targets: dict[str, None] = {}

    def expect_in(self, directory: str) -> None:
        """Remembers a directory into which a savepoint is being taken; the latest hundred are kept."""
        self._targets.pop(directory, None)
        self._targets[directory] = None
        if len(self._targets) > MAX_TARGETS:
            del self._targets[next(iter(self._targets))]

    async def known(self, directories: Iterable[str], job: str | None) -> KnownSavepoints:
        """The savepoints below these directories and below remembered targets of savepoints. Never raises."""
        unread: dict[str, str] = {}

        async def look(directory: str) -> SavepointList | None:
            try:
                return await self.list(directory, job)
            except NotFound:  # no savepoint has been taken into it yet, or it was removed
                return None
            except GatewayError as error:
                unread[directory] = str(error)
                return None

        listings = await asyncio.gather(*map(look, dict.fromkeys([*directories, *self._targets])))
        found = {listing.directory: listing for listing in listings if listing is not None}
        savepoints = {item.location: item for listing in found.values() for item in listing.savepoints}
        return KnownSavepoints(tuple(found), tuple(sorted(savepoints.values(), key=catalogue.latest_first)), unread)

    async def list(self, directory: str, job: str | None) -> SavepointList:
        """The savepoints below a directory. Raises InvalidRequest, NotFound, NotReady."""

        def look() -> SavepointList:
            base = resolve(directory)
            return SavepointList(base.url, tuple(catalogue.list_savepoints(base, job)))

        return await self._call("directory", directory, look)

    async def latest(self, directory: str, job: str | None, before_ms: int | None) -> CataloguedSavepoint:
        """The latest good savepoint, before a time if one is given. Raises InvalidRequest, NotFound, NotReady."""
        found = await self._call("directory", directory, partial(catalogue.latest_good, directory, job, before_ms))
        if found is None:
            of_job, before = (
                ("" if job is None else f" of job {job}"),
                ("" if before_ms is None else f" before {before_ms}"),
            )
            raise NotFound(f"there is no good savepoint{of_job}{before} in {directory}")
        return found

    async def mark(self, path: str, kind: MarkKind, mark: Mark) -> CataloguedSavepoint:
        """Marks a savepoint and returns it. Raises InvalidRequest, NotFound, NotReady, Conflict if it is damaged."""

        def change() -> CataloguedSavepoint:
            catalogue.mark_savepoint(path, kind, mark)
            found = catalogue.look_at(catalogue.open_savepoint(path).directory)
            assert found is not None
            return found

        return await self._call("savepoint-path", path, change)

    async def _call(self, field: str, given: str, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._paths(given), call)
        except InvalidLocationError as error:
            raise InvalidRequest(field, given, str(error)) from error
        except NotFoundError as error:
            raise NotFound(str(error)) from error
        except CorruptFileError as error:
            raise Conflict(str(error)) from error
        except StorageError as error:
            if error.errno in NOT_ALLOWED:
                raise InvalidRequest(field, given, f"this session does not have the permission: {error}") from error
            raise NotReady(str(error)) from error
