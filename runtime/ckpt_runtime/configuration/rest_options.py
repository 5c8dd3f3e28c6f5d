"""Options under ``rest``: the REST API's address and its authentication. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import cluster_option
from ckpt_runtime.configuration.value_types import (
    NON_EMPTY_STRING,
    EnumType,
    IntegerType,
    MemorySizeType,
)

_PORT = IntegerType(minimum=0, maximum=65_535)


class RestAuthentication(StrEnum):
    """How a REST call is authenticated."""

    TOKEN = "TOKEN"
    NONE = "NONE"


class AuditDestination(StrEnum):
    """Where audit records of changes are written."""

    NONE = "NONE"
    LOG = "LOG"
    FILE = "FILE"


class RestOptions:
    """The REST endpoint."""

    PORT = cluster_option("rest.port", _PORT, 8_081, "Port under which clients reach the API; 0 takes any free one.")
    ADDRESS = cluster_option(
        "rest.address",
        NON_EMPTY_STRING,
        None,
        "Name or address under which clients reach the API, as the session shows it and as they find it in the "
        "high-availability directory; the address that the server listens on if not given.",
    )
    BIND_ADDRESS = cluster_option(
        "rest.bind-address",
        NON_EMPTY_STRING,
        "127.0.0.1",
        "Address that the server listens on. Anything but a loopback address needs a token.",
    )
    AUTHENTICATION = cluster_option(
        "rest.authentication",
        EnumType(RestAuthentication),
        RestAuthentication.TOKEN,
        "TOKEN asks every call for the token, and a session without one does not start. NONE lets every user of the "
        "machine run code as the session's user; it is for loopback addresses only.",
    )
    TOKEN = cluster_option(
        "rest.token",
        NON_EMPTY_STRING,
        None,
        "Bearer token that every call has to carry. A file or the environment variable CKPT_REST_TOKEN keeps it out of "
        "process lists.",
        secret=True,
    )
    TOKEN_FILE = cluster_option("rest.token-file", NON_EMPTY_STRING, None, "File that holds the token.")
    MAX_CONTENT_LENGTH = cluster_option(
        "rest.server.max-content-length", MemorySizeType(minimum=1 << 10), 100 << 20, "Greatest body of a request."
    )
    MAX_METRIC_SERIES = cluster_option(
        "rest.metrics.max-series",
        IntegerType(minimum=0, maximum=10_000_000),
        20_000,
        "How many series of subtasks and operators /metrics gives at most, those of subtasks first. "
        "ckpt_metrics_series_left_out says how many are left out.",
    )
    EVENT_BUFFER_SIZE = cluster_option(
        "rest.events.buffer-size",
        IntegerType(minimum=1, maximum=1_000_000),
        4_096,
        "Events that are kept for clients of event streams that were away or are slow.",
    )
    AUDIT_DESTINATION = cluster_option(
        "rest.audit.destination",
        EnumType(AuditDestination),
        AuditDestination.NONE,
        "Where requests over REST that change something are recorded: the logger ckpt_runtime.audit (LOG), or "
        "rest.audit.file (FILE).",
    )
    AUDIT_FILE = cluster_option(
        "rest.audit.file",
        NON_EMPTY_STRING,
        None,
        "Absolute path of a file on the driver's machine; records are appended, one JSON document in each line.",
    )
    MAX_CONNECTIONS = cluster_option(
        "rest.server.max-connections",
        IntegerType(minimum=1, maximum=65_535),
        512,
        "Connections that are served at a time; requests on further ones get 503.",
    )
