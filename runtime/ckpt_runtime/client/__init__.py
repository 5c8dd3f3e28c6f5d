"""The REST client of the runtime, for scripts, the command line and Airflow; also speaks to a real Flink cluster.

Imports nothing of the engine. The clients themselves are loaded on first use, so that naming a model or an error
does not load the HTTP library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_runtime.client.errors import (
    BadRequest,
    CkptApiError,
    CkptClientError,
    Conflict,
    JobEnded,
    NotFound,
    NotServed,
    OperationFailed,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
    WaitTimeout,
    is_passing,
)

if TYPE_CHECKING:
    from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient

__all__ = [
    "AsyncCkptClient",
    "BadRequest",
    "CkptApiError",
    "CkptClient",
    "CkptClientError",
    "Conflict",
    "JobEnded",
    "NotFound",
    "NotServed",
    "OperationFailed",
    "Unauthorized",
    "UnexpectedAnswer",
    "Unreachable",
    "WaitTimeout",
    "is_passing",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncCkptClient", "CkptClient"):
        from ckpt_runtime.client import clients

        return getattr(clients, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
