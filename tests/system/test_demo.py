"""The demonstration from its start to its last line: real Kafka protocol, Spark and Airflow; nothing left running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from demo.__main__ import STEPS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.airflow
@pytest.mark.timeout(840)
def test_the_demonstration_ends_with_exact_results(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    environment = {**os.environ, "DEMO_HOME": str(home), "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "demo"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"demo: OK, (\d+) orders in (\d+) rows, 0 lost, 0 duplicated", last)
    assert found, done.stdout
    assert int(found[1]) > 1_000
    assert int(found[2]) > 16
    assert len([line for line in done.stdout.splitlines() if "done: " in line]) == len(STEPS)
    assert not _left_running(home)


def _left_running(home: Path) -> list[str]:
    """Processes whose command line or environment names the demonstration's directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = [*(process.info["cmdline"] or []), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(str(home) in word for word in words):
            found.append(" ".join(process.info["cmdline"] or []))
    return found
