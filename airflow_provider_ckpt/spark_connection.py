"""Starting a session where a connection of Airflow's Spark provider leads, by the rules of its submit hook.

The hook reads the connection and builds the command; so master, deploy mode, queue, binary, keytab, principal and
Kubernetes namespace mean here what they mean to the team's other Spark jobs. It is imported only when such a connection
is named, and starts nothing here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from ckpt_runtime.client.session_command import SessionCommandError, spark_submit

_NAMESPACE = "spark.kubernetes.namespace"
_NEEDED = "it needs apache-airflow-providers-apache-spark, and for Kubernetes apache-airflow-providers-cncf-kubernetes"
_DEFAULT_BINARY = "spark-submit"


@dataclass(frozen=True, slots=True)
class Submission:
    """The whole command, and the master that it names."""

    command: list[str]
    master: str


def submission(
    conn_id: str, spark_conf: Mapping[str, str], properties_file: str, application: str, arguments: Sequence[str]
) -> Submission:
    """The submit hook's command for a connection. Spark's settings go by the file: everybody can read a command line.

    A keytab in the connection is written to a file by the hook, as for its own jobs.

    :raises CkptArgumentInvalid: naming the connection, what it has, and what is allowed.
    """
    try:
        from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

        BaseHook.get_connection(conn_id)  # the hook would go on with YARN
        hook = SparkSubmitHook(
            conn_id=conn_id,
            conf={key: value for key, value in spark_conf.items() if key == _NAMESPACE},  # it decides by this one
            properties_file=properties_file,
            application_args=list(arguments),
            name=spark_conf.get("spark.app.name", "checkpointing stream engine"),  # --name wins over the file
        )
    except (ImportError, NameError) as error:
        raise _refused(conn_id, f"{_NEEDED}: {error}") from error
    except (AirflowException, RuntimeError, ValueError) as error:
        raise _refused(conn_id, str(error)) from error
    connection = hook._connection  # noqa: SLF001 - the hook has no public way to ask
    if connection["deploy_mode"] == "cluster":
        raise _refused(
            conn_id, "its deploy-mode is cluster; it must be client, since a session's driver runs on this machine"
        )
    command = hook._build_spark_submit_command(application)  # noqa: SLF001
    return Submission([_binary(conn_id, command[0]), "--load-spark-defaults", *command[1:]], connection["master"])


def _binary(conn_id: str, named: str) -> str:
    """The one on the path, as the hook has it; else that of the PySpark beside this interpreter."""
    if named != _DEFAULT_BINARY or shutil.which(named) is not None:
        return named
    try:
        return spark_submit()
    except SessionCommandError as error:
        raise _refused(conn_id, f"{named} is not on the path, and {error}") from error


def _refused(conn_id: str, reason: str) -> CkptArgumentInvalid:
    return CkptArgumentInvalid("spark_conn_id", conn_id, reason)
