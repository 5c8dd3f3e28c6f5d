"""The command line and environment that start a session with ``spark-submit``: one place for the CLI and for Airflow.

Builds values, starts nothing. Imports neither pyspark nor the engine; it only finds where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_runtime.client.errors import CkptClientError

TOKEN_VARIABLE = "CKPT_REST_TOKEN"
"""Environment variable that carries the REST token: every user of the machine can read a command line."""

UMASK_VARIABLE = "CKPT_UMASK"
"""Environment variable: the umask, in octal, for the files of jobs. Files of the session itself are always private."""

NO_AUTHENTICATION = {"rest.authentication": "NONE"}
"""The configuration of a session that requires no token."""

_ESCAPES = {"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", " ": r"\ "} | {
    character: f"\\{character}" for character in "=:#!"
}


class SessionCommandError(CkptClientError):
    """Software that a session needs is not installed beside this interpreter."""


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """The paths of a session's files.

    ``properties`` has Spark's settings and is deleted when Spark has read them. ``log`` gets all output.

    ``ready`` is written when the session leads. ``work`` is the directory for uploads and, by default, checkpoints.
    ``configuration`` has the engine's options and is deleted when the session has read them.
    """

    properties: str
    log: str | None
    ready: str | None = None
    work: str | None = None
    configuration: str | None = None


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
    """The file that ``spark-submit`` runs: ``main.py`` beside the runtime in a source tree, else the package's own."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "main.py"
    return beside if beside.exists() else package / "spark" / "session_main.py"


def session_command(
    master: str, *, rest_host: str, rest_port: int, files: SessionFiles, application: Path | None = None
) -> list[str]:
    """The whole command. Options of Spark and of the engine are in files, as all users can read a command line."""
    command = [spark_submit(), *_spark_arguments(master, files), str(application or application_file())]
    return command + session_arguments(rest_host=rest_host, rest_port=rest_port, files=files)


def driver_command(
    master: str, *, rest_host: str, rest_port: int, files: SessionFiles
) -> tuple[list[str], dict[str, str]]:
    """The command of a driver that starts Spark's JVM itself, and the environment variables it needs for that.

    The JVM ends with the driver, and signals go to the driver; with spark-submit, the JVM would be the driver's parent.
    Raises SessionCommandError.
    """
    spark_submit()  # PySpark looks for the same script
    python = session_environment(master, None)["PYSPARK_DRIVER_PYTHON"]
    command = [shutil.which(python) or python, str(application_file())]
    submit = shlex.join([*_spark_arguments(master, files), "pyspark-shell"])
    arguments = session_arguments(rest_host=rest_host, rest_port=rest_port, files=files)
    return command + arguments, {"PYSPARK_SUBMIT_ARGS": submit}


def _spark_arguments(master: str, files: SessionFiles) -> list[str]:
    return ["--master", master, "--properties-file", files.properties, "--load-spark-defaults"]


def session_arguments(*, rest_host: str, rest_port: int, files: SessionFiles) -> list[str]:
    """The arguments that follow the application in the command."""
    arguments = ["--rest-host", rest_host, "--rest-port", str(rest_port)]
    arguments += ["--properties-file", files.properties]
    if files.log is not None:
        arguments += ["--log-file", files.log]
    if files.work is not None:
        arguments += ["--work-dir", files.work]
    if files.ready is not None:
        arguments += ["--ready-file", files.ready]
    if files.configuration is not None:
        arguments += ["--configuration-file", files.configuration]
    return arguments


def configuration_text(configuration: Mapping[str, str]) -> str:
    """The engine's options as text for a file that the session reads once and deletes."""
    return json.dumps(dict(configuration))


def properties_text(master: str, spark_conf: Mapping[str, str]) -> str:
    """Spark's settings as a properties file, which keeps them out of the process list.

    Sessions in local mode leave Spark's own UI off unless ``spark_conf`` says otherwise.
    """
    settings = {"spark.ui.enabled": "false"} if master.startswith("local") else {}
    return "".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in {**settings, **spark_conf}.items())


def _escaped(text: str) -> str:
    """Escape a text as Java's properties files require."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def session_environment(master: str, token: str | None) -> dict[str, str]:
    """The variables that the session needs in addition to the caller's own environment."""
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
    return environment | {UMASK_VARIABLE: f"{_umask():o}"}


def _umask() -> int:
    """The umask of this process, read without changing it if the system shows it."""
    with suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    # On this system, it can only be read by setting it. Other threads briefly see the new value, so the strictest umask
    # is set.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
