"""Spark's own Connect service, which the driver's JVM runs for requests that concern no stream."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.frontend.analysis import spark_session

ADDRESS = "127.0.0.1"
"""Only this process connects to the service, with a token that it makes."""


@dataclass(frozen=True, slots=True)
class SparkService:
    """Where the service listens, and the token that every call to it has to carry."""

    target: str
    token: str


_lock = threading.Lock()
_running: dict[str, SparkService] = {}
"""The service of this process by the id of Spark's application. It ends with the application."""


def spark_service() -> SparkService:
    """Returns the service, which the first call starts. Blocks, for seconds if Spark has no session yet.

    Raises Py4JError if Spark cannot start it; a later call tries again.
    """
    with _lock:
        spark = spark_session()
        application = spark.sparkContext.applicationId
        if application not in _running:
            _running[application] = _start(spark)
        return _running[application]


def _start(spark: Any) -> SparkService:
    token = secrets.token_urlsafe(32)
    context = spark._jsc.sc()  # noqa: SLF001 PySpark has no public way to the settings of the running application
    conf = context.conf()
    conf.set("spark.connect.grpc.binding.address", ADDRESS)
    conf.set("spark.connect.grpc.binding.port", "0")
    conf.set("spark.connect.authenticate.token", token)
    package = spark._jvm.org.apache.spark.sql.connect.service  # noqa: SLF001
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    service.start(context)
    return SparkService(f"{ADDRESS}:{service.server().getPort()}", token)
