"""Crash points: nothing unarmed, the end of the process where it is armed, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ckpt_runtime.storage import driver_pools

PROGRAM = "from ckpt_runtime.storage.driver_pools import crash_point; crash_point('here'); print('alive')"


def run(file: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != driver_pools.VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if file is not None:
        environment[driver_pools.VARIABLE] = str(file)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_unarmed_it_does_nothing() -> None:
    assert run(None).stdout == "alive\n"


def test_armed_it_ends_the_process_once(tmp_path: Path) -> None:
    file = tmp_path / "point"
    assert run(file).stdout == "alive\n"
    file.write_text("elsewhere")
    assert run(file).stdout == "alive\n"
    file.write_text("here")
    assert run(file).returncode == -signal.SIGKILL
    assert not file.exists()
    assert run(file).stdout == "alive\n"
