"""Spark's own Connect service, in the JVM of the driver's ``SparkSession``; the first use starts it.

Clients are the driver itself, for a notebook's requests to Spark, and workers, for programs' functions that get Spark
frames. A client needs the token, which is random, is valid as long as Spark's application, and is sent to workers over
the authenticated control connection. The token gives exactly the rights of any program on this Spark, such as the
session's pipelines. The driver's own secrets are removed from the environment that code in the JVM sees.
"""

from __future__ import annotations

import atexit
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.frontend.analysis import spark_session
from ckpt_runtime.processes.user_environment import HIDDEN, HIDDEN_PREFIXES

_NEEDED_BY_SPARK = frozenset({"_SPARK_AUTH_SECRET"})
"""Kept: Spark reads it again later. Programs on this Spark have the access that it gives anyway."""


class UnencryptedSparkError(RuntimeError):
    """Frames of Spark would leave the machine without encryption, which the session's configuration forbids."""


@dataclass(frozen=True, slots=True)
class SparkService:
    """The address of the service (``host:port``), and the token that every call to it has to carry.

    ``local``: it listens on this machine only, because all of Spark runs on it.
    """

    target: str
    token: str
    local: bool = True


_lock = threading.Lock()
_running: dict[str, SparkService] = {}
"""The service of this process by the id of Spark's application. It ends with the application."""


def spark_service() -> SparkService:
    """Returns the service, which the first call starts. Blocks, for seconds if Spark has no session yet.

    Raises Py4JError if Spark cannot start it; a later call tries again.
    """
    with _lock:
        spark = spark_session()
        application = str(spark.sparkContext.applicationId)
        if application not in _running:
            _running[application] = _start(spark)
        return _running[application]


def spark_url(*, encrypted: bool) -> str:
    """Returns ``sc://host:port/;token=...`` for workers. Blocks as :func:`spark_service`.

    With ``encrypted``, raises UnencryptedSparkError unless all workers are on this machine: Spark Connect has no
    encryption of its own.
    """
    service = spark_service()
    if encrypted and not service.local:
        raise UnencryptedSparkError(
            "security.ssl.internal.enabled is set, but Spark Connect does not encrypt its traffic to other machines; "
            "run the session with master local, or write with a format of the engine"
        )
    return f"sc://{service.target}/;token={service.token}"


def _start(spark: Any) -> SparkService:
    master = str(spark.sparkContext.master)
    local = master.startswith("local") and not master.startswith("local-cluster")
    host = "127.0.0.1" if local else str(spark.sparkContext.getConf().get("spark.driver.host"))
    token = secrets.token_urlsafe(32)
    _hide_secrets(spark._jvm)
    context = spark._jsc.sc()
    conf = context.conf()
    conf.set("spark.connect.grpc.binding.address", host)
    conf.set("spark.connect.grpc.binding.port", "0")
    conf.set("spark.connect.authenticate.token", token)
    service = getattr(getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    service.start(context)
    # Threads of the service that are no daemons would keep the JVM alive when this process has ended.
    atexit.register(_stop, service, spark._jvm.scala.Option.empty())
    # Not in the configuration that clients may read.
    conf.remove("spark.connect.authenticate.token")
    return SparkService(f"{host}:{service.server().getPort()}", token, local)


def _stop(service: Any, no_timeout: Any) -> None:
    with suppress(Exception):  # the call fails if the JVM has ended
        service.stop(no_timeout, no_timeout)


def _hide_secrets(jvm: Any) -> None:
    """Removes the driver's secrets from the environment that ``System.getenv`` shows in the JVM."""
    field = jvm.java.lang.Class.forName("java.lang.ProcessEnvironment").getDeclaredField("theEnvironment")
    field.setAccessible(True)
    environment = field.get(None)
    for key in list(environment.keySet().toArray()):
        name = key.toString()
        if (name in HIDDEN or name.startswith(HIDDEN_PREFIXES)) and name not in _NEEDED_BY_SPARK:
            environment.remove(key)
