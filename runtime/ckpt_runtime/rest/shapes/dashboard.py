"""Applications and task managers in the JSON shapes of Flink's dashboard. Pure functions.

A pipeline is one job, so it is also an application with the job's id. A slot agent is a task manager with one slot.
"""

from __future__ import annotations

from typing import Any

from ckpt_runtime.jobmaster.gateway_values import NOT_YET, JobDetails, JobOverview, SlotOverview
from ckpt_runtime.rest.shapes.jobs import job_line, times
from ckpt_runtime.scheduler.job_status import JobStatus

Json = dict[str, Any]

_APPLICATION_STATES = ("CREATED", "RUNNING", "FAILING", "FAILED", "CANCELLING", "CANCELED", "FINISHED")
_STATE_OF = {
    JobStatus.INITIALIZING: "CREATED",
    JobStatus.RESTARTING: "RUNNING",
    JobStatus.SUSPENDED: "RUNNING",
    JobStatus.RECONCILING: "RUNNING",
}
_RESOURCES = ("taskHeapMemory", "taskOffHeapMemory", "managedMemory", "networkMemory")
_MEMORY = (
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
_HEAP = ("heapUsed", "heapCommitted", "heapMax", "nonHeapUsed", "nonHeapCommitted", "nonHeapMax", "directCount")
_BUFFERS = ("directUsed", "directMax", "mappedCount", "mappedUsed", "mappedMax", "memorySegmentsAvailable")
_SEGMENTS = ("memorySegmentsTotal", "nettyShuffleMemorySegmentsAvailable", "nettyShuffleMemorySegmentsUsed")
_SHUFFLE = (
    "nettyShuffleMemorySegmentsTotal",
    "nettyShuffleMemoryAvailable",
    "nettyShuffleMemoryUsed",
    "nettyShuffleMemoryTotal",
)


def _state(status: JobStatus) -> str:
    return _STATE_OF.get(status, status.value)


def _application(job: JobOverview, now_ms: int) -> Json:
    return {
        "id": job.job_id,
        "name": job.name,
        **times(job.start_time_ms, job.end_time_ms, now_ms),
        "status": _state(job.status),
    }


def application_line(job: JobOverview, now_ms: int) -> Json:
    """Makes an entry of ``/applications/overview``; ``jobs`` counts by state."""
    return {**_application(job, now_ms), "jobs": {job.status.value: 1}}


def application(details: JobDetails, now_ms: int) -> Json:
    """Answers ``/applications/:applicationid``."""
    job = details.overview
    timestamps = dict.fromkeys(_APPLICATION_STATES, 0)
    for status, entered in details.state_timestamps_ms.items():
        timestamps[_state(status)] = max(entered, timestamps[_state(status)])
    if job.start_time_ms != NOT_YET:
        timestamps["CREATED"] = job.start_time_ms
    return {**_application(job, now_ms), "timestamps": timestamps, "jobs": [job_line(job, now_ms)]}


def task_manager(agent: SlotOverview) -> Json:
    """Makes an entry of ``/taskmanagers``. The sizes of JVM memory pools, which do not exist here, are 0."""
    free = int(agent.is_free)
    return {
        "id": agent.slot_id,
        "path": agent.endpoint,
        "dataPort": agent.data_port,
        "jmxPort": -1,
        "timeSinceLastHeartbeat": agent.last_heartbeat_ms,
        "slotsNumber": 1,
        "freeSlots": free,
        "assignedTasks": 1 - free,
        "totalResource": _resource(1),
        "freeResource": _resource(free),
        "hardware": {"cpuCores": agent.cpus, "physicalMemory": 0, "freeMemory": 0, "managedMemory": 0},
        "memoryConfiguration": dict.fromkeys(_MEMORY, 0),
    }


def task_manager_details(agent: SlotOverview) -> Json:
    """Answers ``/taskmanagers/:taskmanagerid``; a slot agent has no memory pools."""
    figures: Json = dict.fromkeys((*_HEAP, *_BUFFERS, *_SEGMENTS, *_SHUFFLE), 0)
    return {**task_manager(agent), "allocatedSlots": [], "metrics": {**figures, "garbageCollectors": []}}


def _resource(cores: int) -> Json:
    return {"cpuCores": float(cores), **dict.fromkeys(_RESOURCES, 0), "extendedResources": {}}
