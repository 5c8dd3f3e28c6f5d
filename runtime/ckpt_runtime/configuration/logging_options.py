"""Options of the log. Declarations only."""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import Changeability, ConfigOption, OptionScope
from ckpt_runtime.configuration.value_types import EnumType, IntegerType, MemorySizeType


class LogFormat(StrEnum):
    """How a line of the log is written."""

    TEXT = "text"
    JSON = "json"


class LoggingOptions:
    """The file that the session's output goes to, with that of workers in local mode, and its lines."""

    FORMAT = ConfigOption(
        "env.log.format",
        EnumType(LogFormat),
        LogFormat.TEXT,
        "How driver, slot agents and workers write their lines. `json`: one object each, with ids.",
        OptionScope.CLUSTER,
        Changeability.NEVER,
    )

    MAX_SIZE = ConfigOption(
        "env.log.max-size",
        MemorySizeType(minimum=4_096),
        64 << 20,
        "A log file that has grown beyond this size goes on empty; its last part of this size is kept beside it.",
        OptionScope.CLUSTER,
        Changeability.NEVER,
    )
    MAX_FILES = ConfigOption(
        "env.log.max",
        IntegerType(minimum=1, maximum=1_000),
        5,
        "How many old log files are kept (`<file>.1` is the newest).",
        OptionScope.CLUSTER,
        Changeability.NEVER,
    )
