"""The driver's access to the savepoint catalogue: in the pools of addresses, with errors for REST."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from ckpt_runtime.jobmaster.gateway_errors import Conflict, GatewayError, InvalidRequest, NotFound, NotReady
from ckpt_runtime.jobmaster.gateway_values import KnownSavepoints, SavepointList
from ckpt_runtime.snapshots import catalogue
from ckpt_runtime.snapshots.catalogue import NOT_ALLOWED, CataloguedSavepoint
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind

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
        """The savepoints below these directories and below remembered targets of savepoints. Raises nothing."""
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
                raise InvalidRequest(field, given, f"this session has no permission to do that: {error}") from error
            raise NotReady(str(error)) from error
