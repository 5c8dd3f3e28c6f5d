"""Defaults from Airflow's configuration, section ``[ckpt]``; read when a task is constructed or a trigger runs,
never at import.
"""

from __future__ import annotations

from airflow.sdk.configuration import conf

_SECTION = "ckpt"


def deferrable() -> bool:
    """Whether tasks wait in the triggerer. On by default: these waits are long and hold no worker then."""
    return bool(conf.getboolean(_SECTION, "deferrable", fallback=True))


def poll_interval() -> float:
    """Seconds between two polls."""
    return float(conf.getfloat(_SECTION, "poll_interval", fallback=2.0))


def defer_after() -> float:
    """Seconds that a task waits in its worker before it is deferred."""
    return float(conf.getfloat(_SECTION, "defer_after", fallback=3.0))


def min_deferral() -> float:
    """Seconds that a trigger runs before it gives its event."""
    return float(conf.getfloat(_SECTION, "min_deferral", fallback=6.0))


def wait_timeout() -> float:
    """Seconds that an operator waits for its operation."""
    return float(conf.getfloat(_SECTION, "wait_timeout", fallback=600.0))


def request_patience() -> float:
    """Seconds that one request is repeated while the job manager is away."""
    return float(conf.getfloat(_SECTION, "request_patience", fallback=180.0))
