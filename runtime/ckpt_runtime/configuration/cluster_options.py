"""Options of the session cluster: heartbeats, slots, buffers, the job manager, high availability. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import Changeability, ConfigOption, OptionScope
from ckpt_runtime.configuration.value_types import (
    DURATION,
    NON_EMPTY_STRING,
    STRING_LIST,
    DurationType,
    EnumType,
    IntegerType,
    MemorySizeType,
)

_CLUSTER = OptionScope.CLUSTER
_NEVER = Changeability.NEVER


class CpuPinning(StrEnum):
    """Whether worker processes are bound to processor cores."""

    AUTO = "auto"
    OFF = "off"


class HeartbeatOptions:
    """Heartbeats between the driver and the slots."""

    INTERVAL = ConfigOption(
        "heartbeat.interval",
        DurationType(10),
        1_000,
        "Time between two heartbeats.",
        _CLUSTER,
        _NEVER,
    )
    TIMEOUT = ConfigOption(
        "heartbeat.timeout",
        DurationType(20),
        10_000,
        "A peer that was silent for this long is lost.",
        _CLUSTER,
        _NEVER,
    )


class SlotOptions:
    """The slot pool."""

    IDLE_TIMEOUT = ConfigOption(
        "slot.idle.timeout",
        DURATION,
        50_000,
        "A slot that no job uses is given back after this time.",
        _CLUSTER,
        _NEVER,
    )
    REQUEST_TIMEOUT = ConfigOption(
        "slot.request.timeout",
        DurationType(1),
        300_000,
        "A job fails when its slots have not come after this time.",
        _CLUSTER,
        _NEVER,
    )


class TaskManagerOptions:
    """Workers and the exchange of data between them. A job may override what concerns its own channels."""

    CPU_PINNING = ConfigOption(
        "taskmanager.cpu-pinning",
        EnumType(CpuPinning),
        CpuPinning.AUTO,
        "auto binds each worker process to a core of its own when a host has no more workers than cores.",
        _CLUSTER,
        _NEVER,
    )
    BUFFER_ROWS = ConfigOption(
        "taskmanager.network.buffer.max-rows",
        IntegerType(minimum=1, maximum=1 << 24),
        8_192,
        "Rows of a buffer at most. Fewer rows cost throughput, more rows cost latency.",
    )
    BUFFER_BYTES = ConfigOption(
        "taskmanager.network.buffer.max-bytes",
        MemorySizeType(minimum_bytes=1 << 10, maximum_bytes=1 << 30),
        1 << 20,
        "Bytes of a buffer at most; a larger row gets a buffer of its own.",
    )
    BUFFERS_PER_CHANNEL = ConfigOption(
        "taskmanager.network.memory.buffers-per-channel",
        IntegerType(minimum=1, maximum=1 << 16),
        2,
        "Credits that a receiver grants to each channel for good.",
    )
    FLOATING_BUFFERS_PER_GATE = ConfigOption(
        "taskmanager.network.memory.floating-buffers-per-gate",
        IntegerType(maximum=1 << 16),
        8,
        "Further credits that the channels of one gate share.",
    )
    MAX_BUFFERS_PER_OUTPUT_CHANNEL = ConfigOption(
        "taskmanager.network.memory.max-buffers-per-channel",
        IntegerType(minimum=1, maximum=1 << 16),
        10,
        "Buffers that a sender queues for one channel at most before it is back-pressured.",
    )


class JobManagerOptions:
    """The dispatcher and its job masters."""

    DYNAMIC_CONFIGURATION_ALLOW_LIST = ConfigOption(
        "jobmanager.execution.dynamic-configuration.allow-list",
        STRING_LIST,
        ("execution.checkpointing.interval",),
        "Keys that may be changed while a job runs (FLIP-530): `*` allows any, an empty list none.",
        _CLUSTER,
        _NEVER,
    )
    JOB_STORE_EXPIRATION = ConfigOption(
        "jobstore.expiration-time",
        DURATION,
        3_600_000,
        "How long an ended job can be looked at.",
        _CLUSTER,
        _NEVER,
    )
    CHECKPOINT_HISTORY_SIZE = ConfigOption(
        "web.checkpoints.history",
        IntegerType(minimum=0, maximum=100_000),
        10,
        "Checkpoints that the history of a job shows.",
        _CLUSTER,
        _NEVER,
    )
    EXCEPTION_HISTORY_SIZE = ConfigOption(
        "web.exception-history-size",
        IntegerType(minimum=1, maximum=10_000),
        16,
        "Failures that the exception history of a job shows.",
        _CLUSTER,
        _NEVER,
    )


class HighAvailabilityOptions:
    """What lets a new driver take over."""

    STORAGE_DIRECTORY = ConfigOption(
        "high-availability.storageDir",
        NON_EMPTY_STRING,
        None,
        "Directory (path or URL) that holds jobs, checkpoint pointers, results and the leader's address. "
        "Not set: nothing survives the driver.",
        _CLUSTER,
        _NEVER,
    )
    LEASE_DURATION = ConfigOption(
        "high-availability.leader-election.lease-duration",
        DurationType(100),
        15_000,
        "A leader that has not renewed its lease for this long may be replaced.",
        _CLUSTER,
        _NEVER,
    )
    LEASE_RENEW_INTERVAL = ConfigOption(
        "high-availability.leader-election.retry-period",
        DurationType(10),
        5_000,
        "Time between two renewals of the lease, and between two attempts to get it.",
        _CLUSTER,
        _NEVER,
    )
