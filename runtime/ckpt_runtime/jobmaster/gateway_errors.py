"""The errors that the dispatcher raises on purpose: each is a REST answer, and its message is for the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_runtime.scheduler.job_status import JobStatus

if TYPE_CHECKING:
    from ckpt_runtime.jobmaster.gateway_values import OperationKind


class GatewayError(Exception):
    """Base of the errors that the dispatcher raises on purpose; the message is for the client."""


class NotFound(GatewayError):
    """Something that the request names does not exist."""


class JobNotFound(NotFound):
    """No living or kept job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job {job_id} not found")


class VertexNotFound(NotFound):
    """The job has no such vertex."""

    def __init__(self, vertex_id: str) -> None:
        super().__init__(f"Job vertex {vertex_id} not found")


class CheckpointNotFound(NotFound):
    """No statistics are kept for this checkpoint."""

    def __init__(self, checkpoint_id: int) -> None:
        super().__init__(f"Could not find checkpointing statistics for checkpoint {checkpoint_id}.")


class OperationNotFound(NotFound):
    """No operation has this trigger id, or the operation has expired."""

    def __init__(self, kind: OperationKind, trigger_id: str, job_id: str | None = None) -> None:
        suffix = "" if job_id is None else f" for job {job_id}"
        super().__init__(f"There is no {kind.value} operation with triggerId={trigger_id}{suffix}.")


class PipelineNotFound(NotFound):
    """No uploaded pipeline has this id."""

    def __init__(self, pipeline_id: str) -> None:
        super().__init__(f"There is no uploaded pipeline {pipeline_id!r}")


class InvalidRequest(GatewayError):
    """A value is not acceptable. ``field`` is the request's field or configuration option; nothing has changed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {value!r} is not acceptable, {allowed}")
        self.field = field


class RequirementsRefused(GatewayError):
    """A job cannot run with these parallelism bounds of its vertices; the message has one line per problem."""


class SubmissionFailed(GatewayError):
    """The pipeline's entry point raised, its plan is wrong, or the snapshot to restore from cannot be used."""


class Conflict(GatewayError):
    """The request is fine, but the present state of its target forbids it; nothing has changed."""


class PipelineInUse(Conflict):
    """An uploaded pipeline is not deleted while an owner holds it."""

    def __init__(self, pipeline_id: str, owners: Sequence[str]) -> None:
        super().__init__(f"Pipeline {pipeline_id} is held by {', '.join(owners)}; release it first")


class UpdateInProgress(Conflict):
    """FLIP-571: of two concurrent updates of one job the second is refused."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Another update of the configuration of job {job_id} is in progress")


class RescaleInProgress(Conflict):
    """Another rescale of the job is in progress; only one may run at a time."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Another rescale of job {job_id} is in progress")


class JobTerminated(Conflict):
    """The job has ended for good."""

    def __init__(self, job_id: str, status: JobStatus) -> None:
        super().__init__(f"Job {job_id} has already reached the terminal state {status.value}")
        self.status = status


class SnapshotInUse(Conflict):
    """A snapshot to be disposed of, or claimed, is in use by a living job."""

    def __init__(self, path: str, job_id: str, state: str, reason: str, action: str = "disposed of") -> None:
        super().__init__(f"{path} cannot be {action} while job {job_id} is {state}: {reason}")


class SnapshotNotFound(Conflict):
    """The directory to be disposed of is not a snapshot."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} cannot be disposed of: it is not a checkpoint or savepoint, because there is no _metadata"
        )


class JobAlreadyExists(Conflict):
    """A client-chosen job id is taken by a job of another submission."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job {job_id} already exists and was submitted with a different request")


class NotReady(GatewayError):
    """This driver cannot serve now (it is starting, is not the leader, or is shutting down); try again later."""


class ConfigurationRefused(GatewayError):
    """A job cannot run with this configuration or cannot change to it; the message has one line per problem."""


class OptionsNotAllowed(GatewayError):
    """The request changes options that are not on the cluster's allow-list. Nothing has changed."""

    def __init__(self, keys: Sequence[str], allow_list: Sequence[str]) -> None:
        allowed = ", ".join(allow_list) or "none"
        super().__init__(
            f"{', '.join(keys)}: cannot be changed while a job runs; the options that this cluster allows to change "
            f"are {allowed} (jobmanager.execution.dynamic-configuration.allow-list)"
        )


class VersionConflict(Conflict):
    """A change is based on another version than the present one."""

    def __init__(self, job_id: str, version: int | None, present: int) -> None:
        made_of = "another configuration" if version is None or version == present else f"version {version}"
        super().__init__(
            f"The change is based on {made_of}, but the configuration of job {job_id} has version {present}. Read it "
            "again"
        )
