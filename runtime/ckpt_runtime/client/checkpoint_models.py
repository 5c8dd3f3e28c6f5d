"""The structs of the REST contract about checkpoints, by the names that the client uses."""

from __future__ import annotations

from ckpt_runtime.contract.base import reader
from ckpt_runtime.contract.checkpoints import (
    CanceledJob,
    Checkpoint,
    CheckpointCounts,
    CheckpointStatistics,
    LatestCheckpoints,
    RestoredCheckpoint,
    RetainedCheckpoint,
    TaskCheckpoint,
)
from ckpt_runtime.contract.configuration import PERIODIC_OFF, CheckpointConfig, CheckpointConfigPatch

__all__ = [
    "PERIODIC_OFF",
    "CanceledJob",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConfigPatch",
    "CheckpointCounts",
    "CheckpointStatistics",
    "LatestCheckpoints",
    "RestoredCheckpoint",
    "RetainedCheckpoint",
    "TaskCheckpoint",
    "read_checkpoint",
    "read_config",
    "read_retained",
    "read_statistics",
]

read_checkpoint = reader(Checkpoint)
read_statistics = reader(CheckpointStatistics)
read_config = reader(CheckpointConfig)


def read_retained(document: object) -> RetainedCheckpoint | None:
    """Read the answer to a cancellation."""
    return reader(CanceledJob)(document).retained_checkpoint
