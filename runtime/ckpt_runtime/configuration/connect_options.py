"""Options under ``connect``: the Spark Connect endpoint of a session. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import cluster_option
from ckpt_runtime.configuration.value_types import BOOLEAN, EnumType, IntegerType


class QueryStop(StrEnum):
    """What ``StreamingQuery.stop()`` does with the query's job."""

    CANCEL = "CANCEL"
    SAVEPOINT = "SAVEPOINT"


class ConnectOptions:
    """The endpoint for PySpark clients (``sc://host:port``)."""

    ENABLED = cluster_option(
        "connect.enabled",
        BOOLEAN,
        False,
        "Whether the session serves Spark Connect. A client can run any code in Spark and in the driver's JVM.",
    )
    PORT = cluster_option(
        "connect.port",
        IntegerType(minimum=0, maximum=65_535),
        15_002,
        "Port of Spark Connect; 0 takes any free one. It listens on rest.bind-address, speaks TLS where the REST API "
        "does, and asks for the same token.",
    )
    STOP = cluster_option(
        "connect.query.stop",
        EnumType(QueryStop),
        QueryStop.CANCEL,
        "What StreamingQuery.stop() does: CANCEL ends the job, SAVEPOINT takes a savepoint in "
        "execution.checkpointing.savepoint-dir first and keeps the job running if that fails.",
    )
