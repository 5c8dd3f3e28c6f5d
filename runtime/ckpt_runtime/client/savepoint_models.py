"""Answers of the savepoint catalogue as plain frozen values. Flink has none."""

from __future__ import annotations

from msgspec import Struct, field


class SavepointMark(Struct, frozen=True):
    """The result of a verification or a restore drill."""

    passed: bool
    timestamp: int
    by: str | None = None
    detail: str = ""
    duration_ms: int | None = field(name="duration", default=None)


class Savepoint(Struct, frozen=True, rename="kebab"):
    """One savepoint. ``problem`` says why it is not ``good``. A value of None means unknown.

    ``verified`` and ``drilled`` are the newest marks of their kind.
    """

    location: str
    good: bool
    problem: str | None = None
    job_id: str | None = None
    job_name: str | None = None
    lineage: str | None = None
    program: str | None = None
    configuration_version: int | None = None
    savepoint_id: int | None = None
    taken_by: str | None = None
    cluster: str | None = None
    trigger_timestamp: int | None = None
    completion_timestamp: int | None = None
    duration_ms: int | None = field(name="duration", default=None)
    size: int | None = None
    files: int | None = None
    format: str | None = None
    state_backend: str | None = None
    written_by: str | None = None
    verified: SavepointMark | None = None
    drilled: SavepointMark | None = None
