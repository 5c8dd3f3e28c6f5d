"""User code looks for secrets that would give it access to its session."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.testing.mini_cluster import MiniCluster

pytestmark = pytest.mark.attack
NAMES = ("PYSPARK_GATEWAY_SECRET", "_SPARK_AUTH_SECRET", "CKPT_REST_TOKEN", "AIRFLOW__CORE__FERNET_KEY")
CURIOUS = """
import os
def pipeline(spark):
    raise ValueError(f"found {sorted(name for name, value in os.environ.items() if value == 'do-not-show-this')}")
"""


def test_the_process_that_plans_inherits_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "OF_THE_USER"):
        monkeypatch.setenv(name, "do-not-show-this")
    (tmp_path / "curious.py").write_text(CURIOUS)
    with MiniCluster() as cluster, pytest.raises(SubmissionFailed, match=r"found \['OF_THE_USER'\]"):
        cluster.submit(tmp_path / "curious.py")
