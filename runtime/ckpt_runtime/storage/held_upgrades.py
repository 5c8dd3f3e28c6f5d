"""Upgrades in progress, as stored in the high-availability directory for the next driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_runtime.graph.schema import NonNegative


@dataclass(frozen=True, slots=True)
class HeldUpgrade:
    """An upgrade that replaces, suspends or resumes the job of a lineage, and the time until which others must wait.

    ``owner`` is the token that the requests of the upgrade carry; ``requester`` describes the requester in words.
    ``job_id`` is the job that the upgrade began with; ``snapshot`` is what it will resume from, once known.
    """

    owner: str
    job_id: str
    since_ms: NonNegative
    until_ms: NonNegative
    requester: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class HeldUpgrades:
    """All upgrades in progress, by lineage."""

    upgrades: Mapping[str, HeldUpgrade] = field(default_factory=dict)
