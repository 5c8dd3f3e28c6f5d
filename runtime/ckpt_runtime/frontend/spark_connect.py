"""The driver's Spark as a server of Spark Connect, for functions of programs that get frames of Spark.

The server runs in the JVM of the driver's ``SparkSession`` and is started when the first sink asks for it. Whoever
connects needs its token, which is random, lives as long as the driver, and reaches workers over the authenticated
control connection. A client may do what any program on this Spark may do: the token gives the rights of the session's
pipelines, whose code runs on the same Spark, and no more. The driver's own secrets are taken out of the environment
that code in the JVM sees.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

from ckpt_runtime.frontend.analysis import spark_session
from ckpt_runtime.user_environment import HIDDEN, HIDDEN_PREFIXES

_NEEDED_BY_SPARK = frozenset({"_SPARK_AUTH_SECRET"})
"""Spark itself reads it again later; with it, a program reaches what a program on this Spark reaches anyway."""


class UnencryptedSparkError(RuntimeError):
    """Frames of Spark would leave the machine without encryption, which the session's configuration forbids."""


class SparkConnectServer:
    """Starts the server on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._url = ""
        self._application = ""

    def url(self, *, encrypted: bool) -> str:
        """Returns ``sc://host:port/;token=...``. Blocks until the server serves, which takes seconds the first time.

        With ``encrypted``, raises UnencryptedSparkError unless all clients are on this machine: Spark Connect has no
        encryption of its own.
        """
        with self._lock:
            spark = spark_session()
            master = str(spark.sparkContext.master)
            local = master.startswith("local") and not master.startswith("local-cluster")
            if encrypted and not local:
                raise UnencryptedSparkError(
                    "security.ssl.internal.enabled is set, and Spark Connect does not encrypt what it sends to other "
                    "machines; run the session with master local, or write with a format of the engine"
                )
            application = str(spark.sparkContext.applicationId)
            if self._application != application:
                host = "127.0.0.1" if local else str(spark.sparkContext.getConf().get("spark.driver.host"))
                self._url = _start(spark, host)
                self._application = application
            return self._url


SPARK_CONNECT = SparkConnectServer()
"""That of this process: Spark has one session in it."""


def _start(spark: Any, host: str) -> str:
    token = secrets.token_hex(32)
    _hide_secrets(spark._jvm)
    context = spark._jsc.sc()
    for key, value in {
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.grpc.binding.address": host,
        "spark.connect.authenticate.token": token,
    }.items():
        context.conf().set(key, value)
    service = getattr(getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    service.start(context)
    context.conf().remove("spark.connect.authenticate.token")
    return f"sc://{host}:{service.localPort()}/;token={token}"


def _hide_secrets(jvm: Any) -> None:
    """Removes the driver's secrets from the environment that ``System.getenv`` shows in the JVM."""
    field = jvm.java.lang.Class.forName("java.lang.ProcessEnvironment").getDeclaredField("theEnvironment")
    field.setAccessible(True)
    environment = field.get(None)
    for key in list(environment.keySet().toArray()):
        name = key.toString()
        if (name in HIDDEN or name.startswith(HIDDEN_PREFIXES)) and name not in _NEEDED_BY_SPARK:
            environment.remove(key)
