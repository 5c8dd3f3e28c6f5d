"""A job's configuration as clients see it, their requests to change it (FLIP-530), and the errors of refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_runtime.configuration.effective import EffectiveOption
from ckpt_runtime.configuration.own_configuration import OwnConfiguration
from ckpt_runtime.contract.configuration import ConfigVersion, JobConfig
from ckpt_runtime.contract.configuration import EffectiveOption as ShownOption
from ckpt_runtime.jobmaster.gateway_errors import Conflict, GatewayError


class ConfigurationRefused(GatewayError):
    """A job cannot run with this configuration or cannot change to it; the message has one line per problem."""


class OptionsNotAllowed(GatewayError):
    """The request changes options that are not on the cluster's allow-list. Nothing has changed."""

    def __init__(self, keys: Sequence[str], allow_list: Sequence[str]) -> None:
        allowed = ", ".join(allow_list) or "none"
        super().__init__(
            f"{', '.join(keys)}: not to be changed while a job runs; the options that this cluster allows to change "
            f"are {allowed} (jobmanager.execution.dynamic-configuration.allow-list)"
        )


class VersionConflict(Conflict):
    """A change is based on another version than the present one."""

    def __init__(self, job_id: str, version: int | None, present: int) -> None:
        made_of = "another configuration" if version is None or version == present else f"version {version}"
        super().__init__(
            f"The change was made of {made_of}; the configuration of job {job_id} has version {present}. Read it again"
        )


@dataclass(frozen=True, slots=True)
class ConfigurationRequest:
    """``options`` are the whole configuration; with ``partial`` those to change, where None removes one.

    ``version`` is the one that it is based on, None for the present one. ``by`` names the requester.
    """

    options: Mapping[str, str | None]
    version: int | None
    partial: bool = False
    dry_run: bool = False
    by: str = ""


def shown_configuration(
    job_id: str,
    name: str,
    own: OwnConfiguration,
    *,
    restart_strategy: str,
    parallelism: int,
    running_version: int,
    pipeline_id: str | None,
    effective: Iterable[EffectiveOption],
) -> JobConfig:
    """The job's configuration as clients see it; secrets are masked."""
    return JobConfig(
        job_id=job_id,
        name=name,
        execution_config={
            "restart-strategy": restart_strategy,
            "job-parallelism": parallelism,
            "object-reuse-mode": False,
            "user-config": {},
        },
        configuration=own.given.displayed(),
        version=own.version,
        running_version=running_version,
        pipeline_id=pipeline_id,
        changes=tuple(
            ConfigVersion(note.version, note.timestamp_ms, note.by, tuple(note.options)) for note in own.notes
        ),
        effective=tuple(ShownOption(option.key, option.value, option.origin) for option in effective),
    )
