"""Requests of REST to change a running job's configuration (FLIP-530), their answers, and the errors of refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ChangedOption:
    """``before`` and ``after`` are as displayed, None if not given. ``hidden_by`` names the override (FLIP-571)."""

    key: str
    before: str | None
    after: str | None
    needs_restart: bool
    hidden_by: str | None = None


@dataclass(frozen=True, slots=True)
class ConfigurationAnswer:
    """``version`` is the present one, also without a change; for a dry run it is the one that would result."""

    version: int
    changes: tuple[ChangedOption, ...] = ()
    dry_run: bool = False

    @property
    def needs_restart(self) -> bool:
        return any(change.needs_restart for change in self.changes)
