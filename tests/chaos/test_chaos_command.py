"""``make chaos``: executors of a cluster run in directories of their own, and have to import this tree all the same."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_import_path_is_absolute() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    output = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "chaos", "SPARK=1"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    [line] = [line for line in output.splitlines() if "tests.chaos" in line]
    [path] = re.findall(r'PYTHONPATH="?([^" ]+)', line)
    assert path.split(os.pathsep) == [str(ROOT / "runtime"), str(ROOT)]
    assert line.endswith("--spark")
