"""Triggers a checkpoint and waits for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from airflow.sdk import XComArg

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.job import Operation
from airflow_provider_ckpt.operators.base import CkptOperationOperator
from ckpt_runtime.client import requests
from ckpt_runtime.client.requests import Call

CHECKPOINT_TYPES = ("CONFIGURED", "FULL")


class TriggerCheckpointOperator(CkptOperationOperator):
    """Takes a checkpoint now, independent of the job's interval.

    Returns ``{"job_id", "trigger_id", "checkpoint_id"}``.

    :param job: the job, by id or unique name. (templated)
    :param checkpoint_type: ``CONFIGURED``: incremental where the job's checkpoints are; ``FULL``: all of the state.
        (templated)
    """

    template_fields: Collection[str] = (*CkptOperationOperator.template_fields, "checkpoint_type")
    operation: ClassVar[Operation] = Operation.CHECKPOINT

    def __init__(self, *, job: Templated[str], checkpoint_type: Templated[str] = "CONFIGURED", **kwargs: Any) -> None:
        super().__init__(job=job, **kwargs)
        self.checkpoint_type = checkpoint_type

    @property
    def checkpoint_id(self) -> XComArg:
        """The id of the checkpoint that this task takes, for arguments of other tasks."""
        return XComArg(self, "checkpoint_id")

    def request(self, job_id: str, trigger_id: str) -> Call[str]:
        kind = arguments.choice("checkpoint_type", self.checkpoint_type, CHECKPOINT_TYPES)
        return requests.trigger_checkpoint(job_id, full=kind == "FULL", trigger_id=trigger_id)
