"""The command line and environment that start a session with ``spark-submit``: one place for the CLI and for Airflow.

Builds values, starts nothing. Imports neither pyspark nor the engine; it only finds where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ckpt_runtime.client.errors import CkptClientError

TOKEN_VARIABLE = "CKPT_REST_TOKEN"
"""Environment variable that carries the REST token: a command line can be read by everybody on the machine."""


class SessionCommandError(CkptClientError):
    """Something that a session needs is not installed beside this interpreter."""


def spark_submit() -> str:
    """The script of ``SPARK_HOME``, else of the PySpark beside this interpreter. Raises SessionCommandError."""
    home = os.environ.get("SPARK_HOME")
    if not home:
        spec = importlib.util.find_spec("pyspark")
        if spec is None or spec.origin is None:
            raise SessionCommandError("pyspark is not installed beside this interpreter and SPARK_HOME is not set")
        home = str(Path(spec.origin).parent)
    return str(Path(home) / "bin" / "spark-submit")


def application_file() -> Path:
    """What ``spark-submit`` runs: ``main.py`` beside the runtime in a source tree, else the installed package's own."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "main.py"
    return beside if beside.exists() else package / "spark" / "session_main.py"


def session_command(
    master: str,
    *,
    rest_host: str,
    rest_port: int,
    application: Path | None = None,
    spark_conf: Mapping[str, str] | None = None,
    configuration_file: str | None = None,
    work_directory: str | None = None,
    ready_file: str | None = None,
) -> list[str]:
    """The whole command. Sessions in local mode leave Spark's own UI off unless ``spark_conf`` says otherwise.

    ``configuration_file`` has the engine's options, see :func:`configuration_text`: everybody can read a command line.
    """
    settings = {"spark.ui.enabled": "false"} if master.startswith("local") else {}
    command = [spark_submit(), "--master", master]
    for key, value in {**settings, **(spark_conf or {})}.items():
        command += ["--conf", f"{key}={value}"]
    command += [str(application or application_file()), "--rest-host", rest_host, "--rest-port", str(rest_port)]
    if work_directory is not None:
        command += ["--work-dir", work_directory]
    if ready_file is not None:
        command += ["--ready-file", ready_file]
    if configuration_file is not None:
        command += ["--configuration-file", configuration_file]
    return command


def configuration_text(configuration: Mapping[str, str]) -> str:
    """The engine's options for the file that the session reads once, and deletes."""
    return json.dumps(dict(configuration))


def session_environment(master: str, token: str | None) -> dict[str, str]:
    """What the session needs in its environment besides the caller's own variables."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": os.environ.get("PYSPARK_DRIVER_PYTHON", sys.executable),
    }
    if master.startswith("local"):
        environment["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    if token:
        environment[TOKEN_VARIABLE] = token
    return environment
