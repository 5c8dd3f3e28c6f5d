"""A job's graph, configuration and version, as one value that is replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.own_configuration import OwnConfiguration
from ckpt_runtime.graph.job_graph import JobGraph


@dataclass(frozen=True, slots=True)
class JobPlan:
    """``configuration`` is the job's ``own`` over the cluster's. Like the checkpoint ``settings`` in it, it does not
    include FLIP-571's overrides.

    A new job starts from ``savepoint``, in ``restore_mode``.
    """

    graph: JobGraph
    configuration: Configuration
    settings: CheckpointConfiguration
    savepoint: CompletedCheckpoint | None = None
    restore_mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM
    allow_non_restored_state: bool = False
    own: OwnConfiguration = field(default_factory=OwnConfiguration)
