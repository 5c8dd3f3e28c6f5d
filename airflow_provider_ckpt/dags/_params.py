"""Fields of the trigger forms that several DAGs have: with sections, descriptions, and patterns that are checked."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from airflow.sdk import Param, task

DURATION: Final = r"^\s*\d{1,15}(\.\d{1,9})?\s*(ms|s|sec|min|m|h|d)?\s*$"
"""Durations as operators take them; a number without a unit is seconds."""

JOB: Final = "Job"
TAGS: Final = ["ckpt"]
DEFAULT_ARGS: Final[dict[str, Any]] = {"retries": 2, "retry_delay": timedelta(seconds=10)}
CONNECTION: Final = "{{ params.connection }}"

_UNITS = "A number of seconds, or with a unit: 250 ms, 90 s, 5 min, 2 h, 7 d."


def savepoint_directory() -> str:
    """The default directory of savepoints: ``CKPT_DATA`` of the environment, else a folder in the home directory."""
    return f"{os.environ.get('CKPT_DATA', str(Path.home() / 'ckpt-data'))}/savepoints"


def connection() -> Param:
    """The session."""
    default = os.environ.get("CKPT_CONN_ID", "ckpt_default")
    description = "The Airflow connection of the session's job manager."
    return Param(default, type="string", minLength=1, title="Connection", description=description, section=JOB)


def job(default: str = "") -> Param:
    """The job."""
    description = "The job's id, or its name if no other active job has it: a name stays the same after redeployments."
    return Param(default, type="string", minLength=1, title="Job", description=description, section=JOB)


def if_not_found() -> Param:
    """What happens if the job does not exist."""
    description = "Whether the run fails or is skipped if there is no such job."
    return Param(
        "fail",
        type="string",
        enum=["fail", "skip"],
        title="If the job does not exist",
        description=description,
        section=JOB,
    )


def text(default: str, title: str, description: str, section: str) -> Param:
    """A required text."""
    return Param(default, type="string", minLength=1, title=title, description=description, section=section)


def optional_text(title: str, description: str, section: str, **schema: Any) -> Param:
    """A text that may be left empty."""
    return Param(None, type=["null", "string"], title=title, description=description, section=section, **schema)


def duration(default: str, title: str, description: str, section: str) -> Param:
    """A required duration."""
    full = f"{description} {_UNITS}"
    return Param(default, type="string", pattern=DURATION, title=title, description=full, section=section)


def optional_duration(title: str, description: str, section: str) -> Param:
    """A duration that may be left empty."""
    full = f"{description} {_UNITS} Leave it empty for no change."
    return Param(None, type=["null", "string"], pattern=DURATION, title=title, description=full, section=section)


def optional_integer(title: str, description: str, section: str, minimum: int) -> Param:
    """An integer that may be left empty."""
    full = f"{description} Leave it empty for no change."
    return Param(None, type=["null", "integer"], minimum=minimum, title=title, description=full, section=section)


def number(
    default: int, title: str, description: str, section: str, *, kind: str = "integer", minimum: int = 1, **schema: Any
) -> Param:
    """A required number."""
    return Param(default, type=kind, minimum=minimum, title=title, description=description, section=section, **schema)


def arguments(description: str, section: str) -> Param:
    """The arguments of a program."""
    return Param(
        [], type="array", items={"type": "string"}, title="Arguments", description=description, section=section
    )


def options(title: str, description: str, section: str) -> Param:
    """Options by key."""
    return Param({}, type="object", title=title, description=description, section=section)


def switch(default: bool, title: str, description: str, section: str) -> Param:
    """Yes or no."""
    return Param(default, type="boolean", title=title, description=description, section=section)


def savepoint_format(section: str) -> Param:
    """The format of savepoints."""
    description = "NATIVE: the state backend's own files. CANONICAL: every state backend restores it."
    return Param(
        "NATIVE", type="string", enum=["NATIVE", "CANONICAL"], title="Format", description=description, section=section
    )


def gate(name: str) -> Any:
    """A task that skips what follows it unless the parameter is filled in, or switched on."""

    @task.short_circuit(task_id=f"if_{name}", ignore_downstream_trigger_rules=False)
    def wanted(params: dict[str, Any] | None = None) -> bool:
        return bool(dict(params or {})[name])

    return wanted
