"""Which pyspark a session's processes import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ckpt_runtime.spark.installation import import_path, prefer_installed_pyspark
from ckpt_runtime.spark.worker_processes import worker_environment

ZIPPED = ["/spark/python/lib/pyspark.zip", "/spark/python/lib/py4j-0.10.9-src.zip"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages, the last entry of a path that Spark has put its zipped copies on."""
    monkeypatch.setattr(sys, "path", ["", *ZIPPED, "/job.zip", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*ZIPPED, "/job.zip"]))
    return tmp_path


def install(site: Path) -> None:
    (site / "pyspark").mkdir()
    (site / "pyspark" / "__init__.py").touch()


def test_an_installed_pyspark_is_preferred_to_the_zipped_copy(site: Path) -> None:
    install(site)
    assert import_path() == ["/job.zip", str(site)]
    assert worker_environment()["PYTHONPATH"] == f"/job.zip:{site}"
    prefer_installed_pyspark()
    assert sys.path == ["", "/job.zip", str(site)]
    assert os.environ["PYTHONPATH"] == "/job.zip"


def test_the_zipped_copy_stays_where_it_is_the_only_one(site: Path) -> None:
    assert import_path() == [*ZIPPED, "/job.zip", str(site)]
    prefer_installed_pyspark()
    assert sys.path == ["", *ZIPPED, "/job.zip", str(site)]
    assert os.environ["PYTHONPATH"] == os.pathsep.join([*ZIPPED, "/job.zip"])


def test_absent_import_path_stays_absent(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site)
    monkeypatch.delenv("PYTHONPATH")
    prefer_installed_pyspark()
    assert "PYTHONPATH" not in os.environ
