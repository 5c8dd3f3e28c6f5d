"""How a worker process is started: its import path and its environment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpt_runtime.spark import worker_processes


def test_workers_prefer_an_installed_pyspark_to_the_zipped_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped = ["/spark/python/lib/pyspark.zip", "/spark/python/lib/py4j-0.10.9-src.zip"]
    monkeypatch.setattr(worker_processes, "sys", SimpleNamespace(path=["", *zipped, "/job.zip", str(tmp_path)]))
    assert worker_processes.worker_environment()["PYTHONPATH"] == ":".join([*zipped, "/job.zip", str(tmp_path)])
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    assert worker_processes.worker_environment()["PYTHONPATH"] == f"/job.zip:{tmp_path}"
