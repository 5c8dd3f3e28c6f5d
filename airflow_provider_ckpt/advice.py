"""Remedies for errors: appended to the error itself, in the log of the task. Pure."""

from __future__ import annotations

import re
from typing import Any

from ckpt_runtime.client.errors import (
    CkptApiError,
    CkptClientError,
    NotFound,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
)

REFUSED_TOKEN = "refused_token"
"""The field of a verdict's result that says why a wait was refused."""
TROUBLE, UNREACHABLE = "trouble", "unreachable"
"""The fields of a verdict's result that say why the last look of a wait failed, and whether no server listened."""
_NO_SAVEPOINT = "no good savepoint"
_UNTRUSTED = re.compile("self-signed certificate|unable to get (local )?issuer certificate")
"""The text of OpenSSL's error for a certificate of an unknown authority."""
_ID = re.compile(r"\b[0-9a-f]{32}\b")
_IO_PROBLEM = "IO-problem detected"
"""In Flink's words, which the engine shares, for files that could not be written."""


def is_refused_token(error: CkptClientError) -> bool:
    """Whether the job manager has another token; 403 is the answer to callers whose requests are refused altogether."""
    return isinstance(error, Unauthorized) and error.status == 401


def on_error(error: CkptClientError, conn_id: str) -> str:
    """An error of a request, with the field of the connection to look at."""
    text = str(error)
    if is_refused_token(error):
        return on_refused_token(text, conn_id)
    if isinstance(error, Unreachable):
        return on_unreachable(text, conn_id)
    if isinstance(error, NotFound):
        return on_missing(text, conn_id)
    return _on_answer(text, error, conn_id) if isinstance(error, CkptApiError) else text


def _on_answer(text: str, error: CkptApiError, conn_id: str) -> str:
    """The advice for a server that answers but is unhealthy or not a job manager."""
    if error.status >= 500:
        return _with(text, f"The log of the session of the connection {conn_id!r} may have more")
    if isinstance(error, UnexpectedAnswer) or error.status < 400 or error.status == 403:
        ways = f"Check host, port and scheme of the connection {conn_id!r}"
        return _with(text, f"{ways}, and any proxy on the way: another service may answer there")
    return text


def on_refused_token(text: str, conn_id: str) -> str:
    """The advice for a job manager that refuses the token."""
    ways = f"Set the field Bearer token (password) of the connection {conn_id!r} to the token of the session"
    return _with(text, ways)


def on_unreachable(text: str, conn_id: str) -> str:
    """The advice if no server listens at the address, or its certificate is not trusted."""
    if _UNTRUSTED.search(text):
        return _with(
            text, f"Name the authority that has signed it in the field CA bundle of the connection {conn_id!r}"
        )
    return _with(text, f"Check host, port and scheme of the connection {conn_id!r}, and whether its session runs")


def on_missing(text: str, conn_id: str) -> str:
    """The named object is not in this session: a job, a program or an operation, by its id; or has no savepoint."""
    if _NO_SAVEPOINT in text:
        return _with(text, "Check the name and the directory, or take a savepoint first")
    if _ID.search(text) is None:
        return text
    return _with(text, f"Check the id, and that the connection {conn_id!r} leads to the session that has it")


def on_verdict(event: dict[str, Any], conn_id: str) -> str:
    """The message of a wait that was refused or ended without a result."""
    text, facts = str(event["message"]), event.get("result") or {}
    if facts.get(REFUSED_TOKEN):
        return on_refused_token(text, conn_id)
    return on_unreachable(text, conn_id) if facts.get(UNREACHABLE) else text


def on_failure(cause: str) -> str:
    """The reason why an operation has failed, with advice."""
    if _IO_PROBLEM not in cause:
        return cause
    return _with(cause, "The session must be able to write there: give another directory, or repair this one")


def _with(text: str, ways: str) -> str:
    return f"{text.rstrip('. ')}. {ways}"
