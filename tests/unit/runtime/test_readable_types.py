"""Types that several threads read for the first time at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, threading
import msgspec
from ckpt_runtime.graph.schema import checked
from ckpt_runtime.contract.spelling import read

sys.setswitchinterval(1e-6)
for number in range(100):
    inner = msgspec.defstruct(f"Inner{number}", [(f"f{at}", "int", 0) for at in range(40)])
    outer = msgspec.defstruct(f"Outer{number}", [(f"a{at}", inner | None, None) for at in range(40)])
    document = {f"a{at}": {f"f{of}": of for of in range(40)} for at in range(40)}
    together = threading.Barrier(3)

    def run(convert):
        together.wait()
        assert convert(document, outer).a39.f39 == 39

    threads = [threading.Thread(target=run, args=(convert,)) for convert in (checked, checked, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_read_a_new_type_at_once_do_not_crash_the_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "runtime")}, check=False, timeout=300)
    assert ended.returncode == 0
