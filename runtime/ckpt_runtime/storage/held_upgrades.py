"""Upgrades that are in progress, as they lie in the high-availability directory for the next driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_runtime.graph.schema import NonNegative


@dataclass(frozen=True, slots=True)
class HeldUpgrade:
    """Who is replacing, suspending or resuming the job of a lineage, and until when others have to wait for that.

    ``owner`` is the token that the requests of the upgrade carry; ``requester`` says in words who it is. ``job_id`` is
    the job that the upgrade began with, and ``snapshot`` is what it will go on from, once that is known.
    """

    owner: str
    job_id: str
    since_ms: NonNegative
    until_ms: NonNegative
    requester: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class HeldUpgrades:
    """By lineage."""

    upgrades: Mapping[str, HeldUpgrade] = field(default_factory=dict)
