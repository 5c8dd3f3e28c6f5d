"""Assembles the driver's parts of one session: control endpoint, slot pool, dispatcher. Used by Spark and by tests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_runtime.configuration.cluster_options import (
    HighAvailabilityOptions,
    HighAvailabilityType,
    JobManagerOptions,
    TaskManagerOptions,
)
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.leadership import LEASE_TIMEOUT_S, ClusterEnded, Leadership, LeaseSignature
from ckpt_runtime.jobmaster.program_store import ProgramStore
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.jobmaster.slots import SlotProvider, SlotTimes
from ckpt_runtime.network.framing import new_secret
from ckpt_runtime.network.tls import credentials
from ckpt_runtime.processes.limited_process import drop_templates, keep_templates
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.ha_store import HaStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """``work_directory`` keeps uploads, and checkpoints of jobs that configure no directory."""

    control_host: str
    work_directory: Path
    configuration: Configuration = field(default_factory=Configuration)
    slot_times: SlotTimes = SlotTimes()
    lease_timeout_s: float = LEASE_TIMEOUT_S

    @property
    def high_availability(self) -> tuple[str, str] | None:
        """Directory and cluster id; None without high availability."""
        get = self.configuration.get
        if get(HighAvailabilityOptions.TYPE) is HighAvailabilityType.NONE:
            return None
        return get(HighAvailabilityOptions.STORAGE_DIRECTORY) or "", get(HighAvailabilityOptions.CLUSTER_ID)


class Cluster:
    """A session without its REST server. All methods run on one event loop."""

    dispatcher: Dispatcher
    slots: SlotPool

    def __init__(self, provider: SlotProvider, settings: ClusterSettings, on_shutdown: Callable[[], None]) -> None:
        self._provider = provider
        self._settings = settings
        self._on_shutdown = on_shutdown
        self._secret = credentials(new_secret(), settings.configuration)
        self._leadership: Leadership | None = None
        self._losing: asyncio.Task[None] | None = None
        self._pools = DriverPools.create(settings.configuration)

    async def start(self) -> None:
        settings = self._settings
        get = settings.configuration.get
        first_port = get(TaskManagerOptions.DATA_PORT)
        data_ports = (first_port, first_port + get(TaskManagerOptions.DATA_PORT_COUNT) - 1) if first_port else None
        self.slots = SlotPool(self._provider, self._secret, settings.slot_times, data_ports=data_ports)
        control_port = get(JobManagerOptions.RPC_PORT)
        self._endpoint = ControlEndpoint(settings.control_host, self._secret, self.slots, control_port)
        self.slots.start(await self._endpoint.start())
        self.dispatcher = Dispatcher(
            self.slots,
            ProgramStore(settings.work_directory / "uploads"),
            settings.configuration,
            settings.work_directory,
            self._pools,
            self._on_shutdown,
            leads=settings.high_availability is None,
        )
        keep_templates()

    async def lead(self, rest_url: str, application_id: str, token: str | None = None) -> None:
        """With high availability, waits until this driver leads and recovers all jobs; otherwise does nothing. If the
        leader that it waits for was asked to end the cluster, this driver shuts down, too. ``token``, a secret that the
        clients of ``rest_url`` share, proves to them who published it. Raises StorageError for an unusable directory.
        """
        place = self._settings.high_availability
        if place is None:
            return
        store = HaStore(*place)
        lease_s = self._settings.lease_timeout_s
        leader = store.leader if token is None else store.leader.signed_by(LeaseSignature(token, place[1], lease_s))
        leadership = self._leadership = Leadership(leader, lease_s)
        try:
            await leadership.acquire(rest_url, application_id, self._lost, self.dispatcher.wait_for)
        except ClusterEnded as error:
            logger.info("%s, and so does this standby driver", error)
            self._on_shutdown()
            return
        await self.dispatcher.take_over(HaStore(*place, fence=leadership.fence, epoch=leadership.epoch))

    def _lost(self) -> None:
        self._losing = asyncio.get_running_loop().create_task(self.dispatcher.lose_leadership())

    async def stop(self) -> None:
        """Suspends the jobs, ends the slots, and only then lets the next driver lead; closes the sockets."""
        await self.dispatcher.stop()
        await self.slots.stop()
        if self._leadership is not None:
            await self._leadership.release(ended=self.dispatcher.shutdown_requested)
        await self._endpoint.stop()
        await asyncio.to_thread(drop_templates)
        self._pools.shutdown()
