"""The environment of processes that run user code: the driver's, without what opens its doors or Airflow's."""

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
"""The token of the REST API, and what lets a process talk to the JVM as its Python program or worker."""

HIDDEN_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_")
"""A session that an Airflow task has started inherits the keys and connections of Airflow."""


def user_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What user code may see. Variables of the user's own stay, those of storage credentials included."""
    return {
        name: value
        for name, value in environment.items()
        if name not in HIDDEN and not name.startswith(HIDDEN_PREFIXES)
    }
