"""The environment of processes that run user code: the driver's, without the secrets of the driver and of Airflow."""

from __future__ import annotations

import os
from collections.abc import Mapping

HIDDEN = frozenset(
    {
        "CKPT_REST_TOKEN",
        "PYSPARK_GATEWAY_PORT",
        "PYSPARK_GATEWAY_SECRET",
        "PYSPARK_SUBMIT_ARGS",
        "PYTHON_WORKER_FACTORY_PORT",
        "PYTHON_WORKER_FACTORY_SECRET",
        "PYTHON_WORKER_FACTORY_SOCK_DIR",
        "PYTHON_WORKER_FACTORY_SOCK_PATH",
        "_SPARK_AUTH_SECRET",
    }
)
"""The token of the REST API, and the secrets with which a Python program or worker connects to the JVM."""

HIDDEN_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_")
"""Airflow's keys and connections, which a session started by an Airflow task inherits."""

ALLOCATOR = {"MIMALLOC_ALLOW_THP": "0"}
"""Arrow's memory has no huge pages, unless the user's own variable says so. The operating system clears a page of 2 MiB
where a few kilobytes are needed, and clears it again when the memory is used after it was free: half of the time of
joins that keep text."""


def user_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that user code may see. The user's own variables stay, including storage credentials."""
    return ALLOCATOR | {
        name: value
        for name, value in environment.items()
        if name not in HIDDEN and not name.startswith(HIDDEN_PREFIXES)
    }
