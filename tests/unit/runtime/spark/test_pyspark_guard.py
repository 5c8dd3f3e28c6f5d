"""The guard against a PySpark that another distribution has overwritten."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from ckpt_runtime.spark.installation import PySparkMismatchError, check_pyspark


@dataclass
class Spark:
    version: str


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The distributions that are installed, by name."""
    versions = {"pyspark": "4.3.0", "pyspark-client": "4.2.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


def use_package(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    package = ModuleType("pyspark")
    if version is not None:
        package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", package)


def test_this_environment_is_sound() -> None:
    assert check_pyspark().startswith("4.3.")


@pytest.mark.usefixtures("installed")
def test_versions_that_agree_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, "4.3.0")
    assert check_pyspark() == "4.3.0"
    assert check_pyspark(Spark("4.3.0")) == "4.3.0"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("version", "words"), [("4.2.0", "are of version 4.2.0"), (None, "lack a version")])
def test_overwritten_files_are_reported_with_the_command_that_repairs_them(
    monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    use_package(monkeypatch, version)
    with pytest.raises(PySparkMismatchError, match=words) as caught:
        check_pyspark()
    message = str(caught.value)
    assert "pyspark-client 4.2.0" in message
    assert message.endswith(f"{sys.executable} -m pip install --force-reinstall --no-deps pyspark==4.3.0")


def test_a_client_that_was_removed_again_is_suspected_too(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    del installed["pyspark-client"]
    use_package(monkeypatch, None)
    with pytest.raises(PySparkMismatchError, match="since removed"):
        check_pyspark()


@pytest.mark.usefixtures("installed")
def test_a_package_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(PySparkMismatchError, match="lack a version"):
        check_pyspark()


def test_a_missing_pyspark_is_reported(installed: dict[str, str]) -> None:
    del installed["pyspark"]
    with pytest.raises(PySparkMismatchError, match=r"not installed; run: .*'pyspark>=4\.3,<4\.4'"):
        check_pyspark()


@pytest.mark.usefixtures("installed")
def test_another_version_of_spark_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, "4.3.0")
    with pytest.raises(PySparkMismatchError, match=r"the Spark that it connects to is 4\.1\.1"):
        check_pyspark(Spark("4.1.1"))
