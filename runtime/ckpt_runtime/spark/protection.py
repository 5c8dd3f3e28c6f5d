"""Protects Spark's own ports by a secret, and refuses a Spark that leaves them open.

With access to a block manager one can read the data sent to tasks; with access to the driver's RPC one can end tasks.
Spark requires a secret only if ``spark.authenticate`` is set, so every session sets it. On ``local``, YARN and
Kubernetes, Spark generates a secret for each application. A standalone cluster has one secret for all its applications,
which must be given to the session. Does not import pyspark.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext

AUTHENTICATE = "spark.authenticate"
AUTHENTICATION_SECRET = "spark.authenticate.secret"
SECRET_VARIABLE = "_SPARK_AUTH_SECRET"
"""Spark's own environment variable: another way to pass the secret."""

CONTROL_SECRET = "spark.ckpt.control.secret"
"""Local property of a stage: the engine's secret for its agents.

A local property reaches a task in the message that launches it, over an authenticated connection. The content of a
closure becomes a broadcast, which executors keep and pass on. Spark hides the values of properties in its event log if
they are also in its configuration, and their names indicate a secret.
"""

SOCKET_DIRECTORY = "spark.python.unix.domain.socket.dir"

SETTINGS = {
    AUTHENTICATE: "true",
    # The sockets between Java and Python become Unix sockets, to which only their owner can connect.
    "spark.python.unix.domain.socket.enabled": "true",
    # Spark's web pages require no secret, so they may show a job but not end it.
    "spark.ui.killEnabled": "false",
    CONTROL_SECRET: "set for each stage",
}
"""The settings of every session."""

_DEFAULTS = {"spark.network.crypto.enabled": "true"}
"""Connections between driver and executors are encrypted unless the user says otherwise."""


class UnprotectedSparkError(RuntimeError):
    """Spark would accept connections without a secret, or its secret is missing. The message names the options."""


def protect(conf: SparkConf) -> None:
    """Set the options that protect the ports. Raises UnprotectedSparkError if the given settings forbid it."""
    given = conf.get(AUTHENTICATE)
    if given is not None and given.strip().lower() != "true":
        raise UnprotectedSparkError(
            f"{AUTHENTICATE}: {given!r} is not acceptable, it must be true: otherwise anyone who can reach a port of "
            "Spark can control the session"
        )
    conf.setAll(list(SETTINGS.items()))
    for key, value in _DEFAULTS.items():
        conf.setIfMissing(key, value)
    master = conf.get("spark.master") or ""
    if master.startswith("local-cluster"):
        conf.setIfMissing(AUTHENTICATION_SECRET, secrets.token_hex(32))
    if master.startswith("spark://") and not (conf.get(AUTHENTICATION_SECRET) or os.environ.get(SECRET_VARIABLE)):
        raise UnprotectedSparkError(
            f"{AUTHENTICATION_SECRET}: is not set. A standalone cluster has one secret for its master, its workers "
            f"and its applications; set {AUTHENTICATE} and {AUTHENTICATION_SECRET} in the spark-defaults.conf of the "
            "cluster and of this session, in files that only their owner can read"
        )


def check_protected(context: SparkContext) -> None:
    """Raises UnprotectedSparkError unless the application requires its secret and its master has registered it."""
    if context.getConf().get(AUTHENTICATE) != "true":
        raise UnprotectedSparkError(f"{AUTHENTICATE}: the running application was started without it")
    # Spark gives up on a master without raising an error, and stops the application some time later. It generates the
    # application's id unless the master has assigned one.
    is_registered = (context.applicationId or "").startswith("app-")
    if (context.master or "").startswith("spark://") and not is_registered:
        raise UnprotectedSparkError(
            f"the master {context.master} does not accept the application: it does not run, does not have "
            f"{AUTHENTICATE} set, or has another {AUTHENTICATION_SECRET}"
        )
