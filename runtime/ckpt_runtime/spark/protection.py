"""What closes Spark's own ports to everybody else, and the refusal of a Spark that leaves them open.

Who may talk to a block manager reads what tasks are sent; who may talk to the driver's RPC ends tasks. Spark asks for a
secret only when ``spark.authenticate`` is set, so that every session sets it. On ``local``, YARN and Kubernetes Spark
makes up a secret for each application. A standalone cluster has one secret for all its applications, which the session
has to be given. Imports no pyspark.
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
"""Spark's own: another way to give it the secret."""

CONTROL_SECRET = "spark.ckpt.control.secret"
"""Local property of a stage: the engine's secret for its agents.

A local property reaches a task in the message that launches it, over an authenticated connection. What a closure holds
becomes a broadcast, which executors keep and pass on. Spark hides the values of properties in its event log if they are
in its configuration as well, and their names speak of a secret.
"""

SOCKET_DIRECTORY = "spark.python.unix.domain.socket.dir"

SETTINGS = {
    AUTHENTICATE: "true",
    # The sockets between Java and Python become files that only their owner can connect to.
    "spark.python.unix.domain.socket.enabled": "true",
    # Spark's web pages ask nobody for a secret: they may show a job, and not end it.
    "spark.ui.killEnabled": "false",
    CONTROL_SECRET: "set for each stage",
}
"""Of every session."""

_DEFAULTS = {"spark.network.crypto.enabled": "true"}
"""Connections between driver and executors are encrypted unless the user says otherwise."""


class UnprotectedSparkError(RuntimeError):
    """Spark would let anybody in, or its secret is missing. The message says what to set."""


def protect(conf: SparkConf) -> None:
    """Sets what closes the ports. Raises UnprotectedSparkError when the settings given forbid it."""
    given = conf.get(AUTHENTICATE)
    if given is not None and given.strip().lower() != "true":
        raise UnprotectedSparkError(
            f"{AUTHENTICATE}: {given!r} is not acceptable, it must be true: without it everybody who reaches a port of "
            "Spark takes over the session"
        )
    conf.setAll(list(SETTINGS.items()))
    for key, value in _DEFAULTS.items():
        conf.setIfMissing(key, value)
    master = conf.get("spark.master") or ""
    if master.startswith("local-cluster"):
        conf.setIfMissing(AUTHENTICATION_SECRET, secrets.token_hex(32))
    if master.startswith("spark://") and not (conf.get(AUTHENTICATION_SECRET) or os.environ.get(SECRET_VARIABLE)):
        raise UnprotectedSparkError(
            f"{AUTHENTICATION_SECRET}: is not set, a standalone cluster has one secret for its master, its workers and "
            f"its applications; set {AUTHENTICATE} and {AUTHENTICATION_SECRET} in the spark-defaults.conf of the "
            "cluster and of this session, in files that only their owner can read"
        )


def check_protected(context: SparkContext) -> None:
    """Raises UnprotectedSparkError unless the running application asks for its secret and its master took it in."""
    if context.getConf().get(AUTHENTICATE) != "true":
        raise UnprotectedSparkError(f"{AUTHENTICATE}: the running application was started without it")
    # Spark gives up on a master without an error, and stops the application in its own time.
    if (context.master or "").startswith("spark://") and not _is_registered(context.applicationId):
        raise UnprotectedSparkError(
            f"the master {context.master} does not take the application in: it does not run, does not have "
            f"{AUTHENTICATE} set, or has another {AUTHENTICATION_SECRET}"
        )


def _is_registered(application_id: str | None) -> bool:
    """Whether a standalone master has given the application its id; Spark makes one up otherwise."""
    return application_id is not None and application_id.startswith("app-")
