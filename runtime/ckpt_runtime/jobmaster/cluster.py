"""One session's driver parts, put together: control endpoint, slot pool, dispatcher. Used by Spark and by tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.program_store import ProgramStore
from ckpt_runtime.jobmaster.slot_pool import SlotPool, SlotProvider
from ckpt_runtime.network.authentication import new_secret

STORAGE_THREADS = 8


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """``work_directory`` keeps uploads, and checkpoints of jobs that configure no directory."""

    control_host: str
    work_directory: Path
    configuration: Configuration = field(default_factory=Configuration)
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    slot_idle_timeout_s: float = 50.0
    slot_request_timeout_s: float = 300.0


class Cluster:
    """A session without its REST server. All methods belong to one event loop."""

    dispatcher: Dispatcher
    slots: SlotPool

    def __init__(self, provider: SlotProvider, settings: ClusterSettings, on_shutdown: Callable[[], None]) -> None:
        self._provider = provider
        self._settings = settings
        self._on_shutdown = on_shutdown
        self._secret = new_secret()
        self._pool = ThreadPoolExecutor(STORAGE_THREADS, thread_name_prefix="storage")

    async def start(self) -> None:
        settings = self._settings
        self.slots = SlotPool(
            self._provider,
            self._secret,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            idle_timeout_s=settings.slot_idle_timeout_s,
            request_timeout_s=settings.slot_request_timeout_s,
        )
        self._endpoint = ControlEndpoint(settings.control_host, self._secret, self.slots.welcome)
        self.slots.start(await self._endpoint.start())
        self.dispatcher = Dispatcher(
            self.slots,
            ProgramStore(settings.work_directory / "uploads"),
            settings.configuration,
            settings.work_directory,
            self._pool,
            self._on_shutdown,
        )

    async def stop(self) -> None:
        """Suspends the jobs, ends the slots, closes the sockets."""
        await self.dispatcher.stop()
        await self.slots.stop()
        await self._endpoint.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
