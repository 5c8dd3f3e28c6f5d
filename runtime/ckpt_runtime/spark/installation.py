"""Checks before a session starts whether its packages are installed and fit together, and names the command that
repairs them.

The distribution ckpt-runtime without extras is the client and the command line. The extra ``session`` adds the engine's
server and kernels; this module imports nothing of that extra.

Airflow's Spark provider requires the distribution ``pyspark-client``, which installs other versions of the same files
into the same ``pyspark`` package. Whose files remain depends on the installer; the mixture starts, and then fails in
functions that run Python code. PySpark is imported only for the check.

The processes of a session import the installed copy of pyspark instead of Spark's zipped one. Spark puts
``pyspark.zip`` and ``py4j-*-src.zip`` first on the import path of the processes it starts. A zip has no compiled
modules: importing pyspark from it delays the start of each process by seconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Protocol

MODULES = (
    "fastapi",
    "grpc",
    "grpc_status",
    "msgspec",
    "numba",
    "numpy",
    "pandas",
    "prometheus_client",
    "pyarrow",
    "pydantic",
    "pyspark",
    "python_multipart",
    "uvicorn",
    "zstandard",
)
"""The packages that the extra ``session`` installs, by their import names."""


class RuntimeNotInstalledError(RuntimeError):
    """The extra ``session`` is missing, or a part of it. The message holds the command that installs it."""


def missing_modules() -> list[str]:
    """Those of :data:`MODULES` that this interpreter cannot import."""
    return [module for module in MODULES if importlib.util.find_spec(module) is None]


def check_runtime() -> None:
    """Raises :class:`RuntimeNotInstalledError` if this interpreter lacks a package that a session needs."""
    if missing := missing_modules():
        raise RuntimeNotInstalledError(
            f"a session needs {', '.join(missing)}, which {sys.executable} cannot import; "
            f"run: {sys.executable} -m pip install 'ckpt-runtime[session]'"
        )


DISTRIBUTION = "pyspark"


class PySparkMismatchError(RuntimeError):
    """PySpark is missing or mixed from several versions. The message holds the command that repairs it."""


class HasVersion(Protocol):
    """A ``SparkSession`` or ``SparkContext``, as far as it matters here."""

    @property
    def version(self) -> str:
        """The version of Spark on the JVM's side."""


def check_pyspark(spark: HasVersion | None = None) -> str:
    """Return PySpark's version if package, distribution and (if given) the running Spark agree on it.

    Raises :class:`PySparkMismatchError` otherwise.
    """
    try:
        distribution = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise PySparkMismatchError(f"PySpark is not installed; run: {_command('')}") from None
    package = _package_version()
    if package != distribution:
        found = "lack a version" if package is None else f"are of version {package}"
        message = (
            f"the distribution {DISTRIBUTION} is {distribution}, but the files of the package pyspark {found}: another "
            f"distribution ({_clashing()}) has overwritten them"
        )
        raise PySparkMismatchError(f"{message}; run: {_command(distribution)}")
    if spark is not None and spark.version != distribution:
        message = f"PySpark is {distribution}, but the Spark that it connects to is {spark.version}"
        raise PySparkMismatchError(f"{message}; unset SPARK_HOME or run: {_command(spark.version)}")
    return distribution


def _package_version() -> str | None:
    """The version in the files; None if they are so mixed that the package cannot be imported or has no version."""
    try:
        import pyspark
    except ImportError:
        return None
    version = getattr(pyspark, "__version__", None)
    return None if version is None else str(version)


def _clashing() -> str:
    try:
        return f"pyspark-client {importlib.metadata.version('pyspark-client')}"
    except importlib.metadata.PackageNotFoundError:
        return "pyspark-client, since removed"


def _command(version: str) -> str:
    requirement = f"{DISTRIBUTION}=={version}" if version else "'pyspark>=4.3,<4.4'"
    return f"{sys.executable} -m pip install --force-reinstall --no-deps {requirement}"


_ZIPPED = ("pyspark.zip", "py4j-")


def import_path() -> list[str]:
    """This process's import path for use in another process; without the zipped copies if pyspark is installed."""
    return [entry for entry in _preferred() if entry]


def prefer_installed_pyspark() -> None:
    """Remove the zipped copies from the path of this process and its children. Call it before importing pyspark."""
    path = _preferred()
    zipped = {entry for entry in sys.path if entry not in path}
    sys.path[:] = path
    inherited = os.environ.get("PYTHONPATH")
    if inherited is not None and zipped:
        kept = (entry for entry in inherited.split(os.pathsep) if entry not in zipped)
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)


def _preferred() -> list[str]:
    if any((Path(entry) / "pyspark" / "__init__.py").is_file() for entry in sys.path if entry):
        return [entry for entry in sys.path if not (entry.endswith(".zip") and Path(entry).name.startswith(_ZIPPED))]
    return list(sys.path)
