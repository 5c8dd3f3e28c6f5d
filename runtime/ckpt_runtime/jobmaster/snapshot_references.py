"""Which snapshots living jobs refer to: nobody disposes of these. Looks at directories, deletes nothing.

A snapshot is known by its place: symbolic links, forms of a URL and ``_metadata`` lead to the same one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ckpt_runtime.jobmaster.gateway import SnapshotInUse
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Identity, identity, resolve
from ckpt_runtime.storage.snapshot_metadata import snapshot_directory


@dataclass(frozen=True, slots=True)
class References:
    """What one job needs, as URLs: its own directory of ``checkpoints``, and ``snapshots`` that it may start from.

    ``state`` is shown. ``is_known`` is false for a job of which nobody can tell what it needs.
    """

    job_id: str
    state: str
    checkpoints: str | None = None
    snapshots: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def urls(self) -> tuple[str, ...]:
        return self.snapshots if self.checkpoints is None else (self.checkpoints, *self.snapshots)


@dataclass(frozen=True, slots=True)
class _Place:
    own: Identity
    parent: Identity


class SnapshotReferences:
    """``living`` tells what all jobs refer to that may still run. Lives on one event loop; looks in ``pool``."""

    def __init__(self, living: Callable[[], Sequence[References]], pool: Executor) -> None:
        self._living = living
        self._pool = pool
        self._disposing: list[Identity] = []

    async def begin_disposal(self, path: str) -> Identity:
        """From here on, until :meth:`end_disposal` of what it returns, no job may start from the snapshot.

        Raises :class:`SnapshotInUse` naming a job that refers to it, and :class:`StorageError` for an unusable path.
        """
        places: dict[str, _Place | None] = {}
        loop = asyncio.get_running_loop()
        target = await loop.run_in_executor(self._pool, _place, path)
        while unknown := {url for job in self._living() for url in job.urls} - places.keys():
            places |= await loop.run_in_executor(self._pool, _places, sorted(unknown))
        for job in self._living():
            _check(path, target, job, places)
        self._disposing.append(target.own)
        return target.own

    def end_disposal(self, disposed: Identity) -> None:
        self._disposing.remove(disposed)

    async def is_being_disposed(self, path: str) -> bool:
        """Whether a user is deleting the snapshot right now."""
        place = (await asyncio.get_running_loop().run_in_executor(self._pool, _places, [path]))[path]
        return place is not None and place.own in self._disposing


def _check(path: str, target: _Place, job: References, places: dict[str, _Place | None]) -> None:
    if not job.is_known:
        raise SnapshotInUse(path, job.job_id, job.state, "it is not known what that job refers to")
    own = None if job.checkpoints is None else places[job.checkpoints]
    if own is not None and own.own == target.parent:
        raise SnapshotInUse(path, job.job_id, job.state, "it is a checkpoint of that job")
    found = (places[url] for url in job.snapshots)
    if any(place is not None and place.own == target.own for place in found):
        raise SnapshotInUse(path, job.job_id, job.state, "that job would start from it after a failure")


def _place(url: str) -> _Place:
    directory = snapshot_directory(resolve(url)).real()
    return _Place(identity(directory), identity(directory.parent))


def _places(urls: Iterable[str]) -> dict[str, _Place | None]:
    """None for what cannot be looked at."""
    found: dict[str, _Place | None] = {}
    for url in urls:
        try:
            found[url] = _place(url)
        except StorageError:
            found[url] = None
    return found
