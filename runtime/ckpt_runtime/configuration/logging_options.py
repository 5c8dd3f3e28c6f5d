"""Options of the log. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import cluster_option
from ckpt_runtime.configuration.value_types import EnumType, IntegerType, MemorySizeType


class LogFormat(StrEnum):
    """How a line of the log is written."""

    TEXT = "text"
    JSON = "json"


class LoggingOptions:
    """The file that the session's output goes to, with that of workers in local mode, and its lines."""

    FORMAT = cluster_option(
        "env.log.format",
        EnumType(LogFormat),
        LogFormat.TEXT,
        "How driver, slot agents and workers write their lines. `json`: one object each, with ids.",
    )

    MAX_SIZE = cluster_option(
        "env.log.max-size",
        MemorySizeType(minimum=4_096),
        64 << 20,
        "A log file that has grown beyond this size is emptied; its last part of this size is kept beside it.",
    )
    MAX_FILES = cluster_option(
        "env.log.max",
        IntegerType(minimum=1, maximum=1_000),
        5,
        "How many old log files are kept (`<file>.1` is the newest).",
    )
