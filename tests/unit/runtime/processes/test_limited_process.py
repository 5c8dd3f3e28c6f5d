"""A process with limits on memory, time and output: what passes one ends with a named error, and nothing stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.processes.limited_process import (
    LimitedProcessError,
    ProcessLimits,
    ProcessTimeLimitError,
    drop_templates,
    keep_templates,
    run_limited,
)
from tests.support.processes import living

LIMITS = ProcessLimits(time_s=60, memory_bytes=256 << 20, answer_bytes=1_000, file_bytes=1 << 20)


@pytest.fixture(params=["reported of ends", "looking for ends", "forked"])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module ``served`` runs the code that it is sent; ``answer`` is what it answers."""
    if request.param == "looking for ends":  # as where the system has no descriptors of processes
        monkeypatch.delattr(os, "pidfd_open")
    (tmp_path / "served.py").write_text(
        "import os, sys, subprocess, time\n"
        "from ckpt_runtime.processes.limited_process import serve\n"
        "def run(request):\n"
        "    names = {'answer': b'done'}\n"
        "    exec(request, names)\n"
        "    return names['answer']\n"
        "def main():\n"
        "    serve(run)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if request.param == "forked":
        keep_templates()
    yield
    if request.param == "forked":
        drop_templates()


def run(code: str, limits: ProcessLimits = LIMITS) -> bytes:
    return run_limited("served", f"import os, sys, subprocess\n{code}".encode(), limits)


pytestmark = pytest.mark.usefixtures("served")


def test_answer_comes_back_without_the_output_of_the_process() -> None:
    assert run("answer = sys.argv[0].encode()[-9:]") == b"served.py"
    # Much more than any pipe or the memory allowed holds.
    noise = "for stream in (sys.stdout, sys.stderr):\n    for _ in range(4_000):\n        stream.write('x' * 100_000)"
    assert run(noise) == b"done"


def test_the_end_of_standard_error_is_reported() -> None:
    with pytest.raises(LimitedProcessError, match="code 3 and gave no result") as ended:
        run("sys.stderr.write('x' * 100_000 + 'last words')\nsys.stderr.flush()\nos._exit(3)")
    assert ended.value.last_words.endswith("last words")
    assert len(ended.value.last_words) == 4_000


def test_memory_files_and_answer_are_limited(tmp_path: Path) -> None:
    assert run("answer = str(len(bytearray(100 << 20))).encode()") == b"104857600"
    with pytest.raises(LimitedProcessError, match="allowed are 60 s, 256 MiB of memory") as ended:
        run("bytearray(400 << 20)")
    assert "MemoryError" in ended.value.last_words
    with pytest.raises(LimitedProcessError) as ended:
        run(f"open({str(tmp_path / 'large')!r}, 'wb').write(bytes(2 << 20))")
    assert "File too large" in ended.value.last_words
    with pytest.raises(LimitedProcessError, match="result of 1001 bytes is larger than the 1000 allowed"):
        run("answer = b'x' * 1001")


@pytest.mark.parametrize("code", ["import threading\nthreading.Event().wait()", "while True: pass"])
def test_time_is_limited(code: str) -> None:
    with pytest.raises(ProcessTimeLimitError, match="longer than the 0.5 s allowed"):
        run(code, replace(LIMITS, time_s=0.5))


def test_process_that_is_killed_says_how_and_children_end_with_it() -> None:
    """Also when that holds its standard error open."""
    child = int(run("answer = str(subprocess.Popen(['sleep', '1000']).pid).encode()"))
    while living([child]):
        pass
    with pytest.raises(LimitedProcessError, match="by signal 9"):
        run("os.kill(os.getpid(), 9)")
