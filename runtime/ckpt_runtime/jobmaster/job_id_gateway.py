"""What the REST layer asks about ids of jobs: a part of ``gateway.DispatcherGateway``. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class JobIdGateway(Protocol):
    """Any method may raise ``NotReady``."""

    async def burn_job_id(self, job_id: str) -> None:
        """From now on no job is started with this id, by a request that is still on its way either; again is fine.

        Raises ``Conflict`` while a job of this id has not ended.
        """
        ...

    async def burnt_job_ids(self) -> Mapping[str, int]:
        """The burnt ids, with since when in milliseconds since the epoch."""
        ...
