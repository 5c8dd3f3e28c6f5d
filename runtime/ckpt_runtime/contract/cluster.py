"""The session, its processes, uploaded pipelines and retired job ids."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ckpt_runtime.contract import spelling
from ckpt_runtime.contract.spelling import always


class Nothing(Struct, frozen=True):
    """The answer ``{}``."""


class Errors(Struct, frozen=True):
    """Every answer with an error status."""

    errors: tuple[str, ...]


class ClusterOverview(Struct, frozen=True, kw_only=True, rename=spelling.CLUSTER_OVERVIEW):
    """``/overview``. ``jobs_running`` counts every job that has not ended.

    ``flink_version`` is Flink's own version, or the version of Flink whose REST API a session offers;
    ``ckpt_version`` is the session's version, and empty on Flink.
    """

    slot_agents: int
    slots_total: int
    slots_available: int
    jobs_running: int
    jobs_finished: int
    jobs_cancelled: int
    jobs_failed: int
    flink_version: str = ""
    flink_commit: str = ""
    ckpt_version: str = ""

    @property
    def version(self) -> str:
        """The version to show to users: that of the session, if it is one."""
        return self.ckpt_version or self.flink_version


class Features(Struct, frozen=True, rename="kebab"):
    """The features of the server. ``cancel_and_retain``: a job can be canceled so that its checkpoints outlive it."""

    web_submit: bool = True
    web_cancel: bool = False
    web_rescale: bool = False
    web_history: bool = False
    cancel_and_retain: bool = False


class DashboardConfig(Struct, frozen=True, kw_only=True, rename=spelling.kebab()):
    """``/config``. Pages refresh at ``refresh_interval_ms``; ``timezone_offset_ms`` is that of the driver.

    ``connect_port`` is that of Spark Connect on the address of the REST API; None if the session does not serve it.
    """

    refresh_interval_ms: int
    timezone_name: str
    timezone_offset_ms: int
    flink_version: str
    flink_revision: str
    ckpt_version: str = ""
    connect_port: int | None = None
    features: Features = Features()


class OptionValue(Struct, frozen=True):
    """An option of the cluster; secrets are masked."""

    key: str
    value: str


class Metric(Struct, frozen=True, omit_defaults=True):
    """A metric: its name, and its value if values were requested."""

    id: str
    value: str | None = None


class AggregatedMetric(Struct, frozen=True, omit_defaults=True):
    """A metric over jobs or subtasks; only requested aggregations are present. ``skew`` is a percentage."""

    id: str
    min: float | None = None
    max: float | None = None
    avg: float | None = None
    sum: float | None = None
    skew: float | None = None


class Resource(Struct, frozen=True, kw_only=True, rename=spelling.TASK_MANAGER):
    """Cores of a slot agent. Memory pools of JVMs do not exist here and are 0."""

    cpu_cores: float
    task_heap_memory: int = 0
    task_off_heap_memory: int = 0
    managed_memory: int = 0
    network_memory: int = 0
    extended_resources: dict[str, float] = {}


class Hardware(Struct, frozen=True, kw_only=True, rename=spelling.TASK_MANAGER):
    """The hardware of a slot agent; memory is not measured."""

    cpu_cores: int
    physical_memory: int = 0
    free_memory: int = 0
    managed_memory: int = 0


_MEMORY_POOLS = (
    "frameworkHeap",
    "taskHeap",
    "frameworkOffHeap",
    "taskOffHeap",
    "networkMemory",
    "managedMemory",
    "jvmMetaspace",
    "jvmOverhead",
    "totalFlinkMemory",
    "totalProcessMemory",
)


class TaskManager(Struct, frozen=True, kw_only=True, rename=spelling.TASK_MANAGER):
    """A slot agent, which Flink calls a task manager, with its one slot. ``path`` is ``host:port``.

    ``data_port`` is -1 while no worker is ready.
    """

    id: str
    path: str
    data_port: int = -1
    jmx_port: int = -1
    time_since_last_heartbeat: int = 0
    slots_number: int = 1
    free_slots: int = 0
    assigned_tasks: int = 0
    total_resource: Resource = Resource(cpu_cores=1.0)
    free_resource: Resource = Resource(cpu_cores=0.0)
    hardware: Hardware = Hardware(cpu_cores=0)
    memory_configuration: dict[str, Any] = always(dict.fromkeys(_MEMORY_POOLS, 0))


_JVM_FIGURES = (
    *("heapUsed", "heapCommitted", "heapMax", "nonHeapUsed", "nonHeapCommitted", "nonHeapMax", "directCount"),
    *("directUsed", "directMax", "mappedCount", "mappedUsed", "mappedMax", "memorySegmentsAvailable"),
    *("memorySegmentsTotal", "nettyShuffleMemorySegmentsAvailable", "nettyShuffleMemorySegmentsUsed"),
    *("nettyShuffleMemorySegmentsTotal", "nettyShuffleMemoryAvailable", "nettyShuffleMemoryUsed"),
    "nettyShuffleMemoryTotal",
)


class TaskManagerDetails(TaskManager, frozen=True, kw_only=True, rename=spelling.TASK_MANAGER):
    """``/taskmanagers/:taskmanagerid``. Figures of a JVM do not exist here and are 0."""

    allocated_slots: tuple[Any, ...] = ()
    metrics: dict[str, Any] = always({**dict.fromkeys(_JVM_FIGURES, 0), "garbageCollectors": []})


class TaskManagers(Struct, frozen=True, rename=spelling.TASK_MANAGERS):
    """``/taskmanagers``."""

    task_managers: tuple[TaskManager, ...]


class ThreadInfo(Struct, frozen=True, rename=spelling.THREAD):
    """A thread: ``text`` has its name and its frames, innermost first."""

    name: str
    text: str


class ThreadDump(Struct, frozen=True, rename=spelling.THREAD_DUMP):
    """The threads of a process."""

    threads: tuple[ThreadInfo, ...]


class LogFile(Struct, frozen=True, rename=spelling.LOG_FILE):
    """A log file with its size in bytes."""

    name: str
    size: int
    modified_at_ms: int


class LogFiles(Struct, frozen=True):
    """The log files of a process."""

    logs: tuple[LogFile, ...]


class EntryPoint(Struct, frozen=True):
    """An entry point of a pipeline: ``name`` is ``module:function``."""

    name: str
    description: str | None = None


class Holder(Struct, frozen=True, rename=spelling.kebab()):
    """The holder of an uploaded pipeline, and the time at which the hold began."""

    owner: str
    since_ms: int


class Pipeline(Struct, frozen=True, kw_only=True, rename=spelling.PIPELINE):
    """An uploaded pipeline."""

    id: str
    name: str
    uploaded_at_ms: int
    entries: tuple[EntryPoint, ...] = ()
    holders: tuple[Holder, ...] = ()

    @property
    def entry_points(self) -> tuple[str, ...]:
        """The entry points, each written as ``module:function``."""
        return tuple(entry.name for entry in self.entries)


class Pipelines(Struct, frozen=True):
    """``/jars``, newest first. ``address`` is that of the server."""

    address: str
    files: tuple[Pipeline, ...]


class UploadedPipeline(Struct, frozen=True):
    """The answer to an upload; the last part of ``filename`` is the pipeline's id."""

    filename: str
    status: str = "success"


class RetiredJobId(Struct, frozen=True, rename=spelling.kebab()):
    """A retired id: no job can be started with it."""

    id: str
    since_ms: int


class RetiredJobIds(Struct, frozen=True, rename="kebab"):
    """``/retired-job-ids``."""

    job_ids: tuple[RetiredJobId, ...]
