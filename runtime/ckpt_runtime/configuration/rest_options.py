"""Options under ``rest``: where the REST API listens and who may call it. Declarations only."""

from __future__ import annotations

from ckpt_runtime.configuration.option import Changeability, ConfigOption, OptionScope
from ckpt_runtime.configuration.value_types import (
    DURATION,
    NON_EMPTY_STRING,
    IntegerType,
    MemorySizeType,
)

_CLUSTER = OptionScope.CLUSTER
_NEVER = Changeability.NEVER
_PORT = IntegerType(minimum=0, maximum=65_535)


class RestOptions:
    """The REST endpoint."""

    ADDRESS = ConfigOption(
        "rest.address",
        NON_EMPTY_STRING,
        None,
        "Host name under which clients reach the API. Not set: the bind address.",
        _CLUSTER,
        _NEVER,
    )
    PORT = ConfigOption(
        "rest.port",
        _PORT,
        8_081,
        "Port under which clients reach the API; 0 takes any free one.",
        _CLUSTER,
        _NEVER,
    )
    BIND_ADDRESS = ConfigOption(
        "rest.bind-address",
        NON_EMPTY_STRING,
        "127.0.0.1",
        "Address that the server listens on. Anything but a loopback address needs a token.",
        _CLUSTER,
        _NEVER,
    )
    BIND_PORT = ConfigOption(
        "rest.bind-port",
        _PORT,
        None,
        "Port that the server listens on. Not set: `rest.port`.",
        _CLUSTER,
        _NEVER,
    )
    TOKEN = ConfigOption(
        "rest.token",
        NON_EMPTY_STRING,
        None,
        "Bearer token that every call has to carry.",
        _CLUSTER,
        _NEVER,
        secret=True,
    )
    TOKEN_FILE = ConfigOption(
        "rest.token-file",
        NON_EMPTY_STRING,
        None,
        "File that holds the token; keeps it out of process lists.",
        _CLUSTER,
        _NEVER,
    )
    ASYNC_STORE_DURATION = ConfigOption(
        "rest.async.store-duration",
        DURATION,
        300_000,
        "How long the result of a savepoint, checkpoint or stop can be asked for.",
        _CLUSTER,
        _NEVER,
    )
    MAX_CONTENT_LENGTH = ConfigOption(
        "rest.server.max-content-length",
        MemorySizeType(minimum_bytes=1 << 10),
        100 << 20,
        "Greatest body of a request.",
        _CLUSTER,
        _NEVER,
    )
