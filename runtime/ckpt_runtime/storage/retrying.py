"""Repeats reads from an object store whose answer broke off.

The client library alone retries a request that gets no answer, gets a 5xx status or is throttled, with backoff and by
its own settings: two layers that retry the same failures would multiply the time until the error is reported. No
library retries a request whose response body breaks off or stalls; that is done here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from http.client import IncompleteRead
from typing import Any, TypeVar

from tenacity import retry, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

T = TypeVar("T")

ATTEMPTS = 5
_PATIENCE_S = 30
"""No attempt starts later than this after the first one."""

_LONGEST_WAIT_S = 2
_BROKEN_BODIES: Mapping[str, tuple[str, ...]] = {
    "aiohttp": ("ClientPayloadError",),
    "botocore.exceptions": ("IncompleteReadError", "ResponseStreamingError"),
}
"""Error classes by module of the client library; a module is used only if it is loaded."""


def settle_layers(filesystem: Any) -> None:
    """Leaves retries to one layer: s3fs would repeat, five times, requests that botocore has already given up."""
    if "s3" in filesystem.protocol and hasattr(filesystem, "retries"):
        filesystem.retries = 1


def is_broken_body(error: BaseException) -> bool:
    """Whether a response began and was not received in full; an error that the store returned does not count."""
    if getattr(error.__cause__, "response", None) is not None:
        return False
    if isinstance(error, ConnectionError | TimeoutError | IncompleteRead):
        return True
    for module, names in _BROKEN_BODIES.items():
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(error, tuple(getattr(loaded, name) for name in names)):
            return True
    return False


@retry(
    retry=retry_if_exception(is_broken_body),
    stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(_PATIENCE_S),
    wait=wait_random_exponential(multiplier=0.1, max=_LONGEST_WAIT_S),
    reraise=True,
)
def read_again(read: Callable[[], T]) -> T:
    """The result of a read, which has no effect and may be repeated. Raises the error of the last attempt."""
    return read()
