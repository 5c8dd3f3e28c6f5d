"""A log that grows while others write it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.spark import session
from ckpt_runtime.spark.session import output_file, rotate, rotated_output

TIMEOUT_S = 60


def test_a_small_file_stays(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100)
    assert not rotate(log, 100, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


def test_last_part_of_a_large_log_is_kept_with_a_bounded_number_of_old_files(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number in range(5):
        log.write_bytes(b"old" + b"%d" % number * 100)
        assert rotate(log, 50, 3)
        assert log.read_bytes() == b""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1", "log.2", "log.3"]
    assert [(tmp_path / f"log.{n}").read_bytes() for n in (1, 2, 3)] == [b"4" * 50, b"3" * 50, b"2" * 50]
    assert (tmp_path / "log.1").stat().st_mode & 0o777 == 0o600


WRITER = """
import sys, threading
def write(stream):
    for number in range(20_000):
        stream.write(f"line {number}\\n")
        stream.flush()
other = threading.Thread(target=write, args=(sys.stderr,))
other.start()
write(sys.stdout)
other.join()
"""


def test_a_file_that_is_written_all_the_time_stays_small_and_has_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab") as output:
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=output, stderr=subprocess.STDOUT)
    rotations = 0
    while writer.poll() is None:
        rotations += rotate(log, 20_000, 2)
    assert writer.returncode == 0
    assert rotations > 2
    assert b"\0" not in log.read_bytes() + (tmp_path / "log.1").read_bytes()
    assert 20_000 <= (tmp_path / "log.1").stat().st_size <= 40_000
    assert len(list(tmp_path.iterdir())) == 3


OUTPUT = """
import os, subprocess, sys
from ckpt_runtime.spark.session import output_file
print(output_file(), file=open(sys.argv[1], "w"))
"""
BEHIND = f"""
import subprocess, sys
pipe = subprocess.PIPE
subprocess.run([sys.executable, "-c", {OUTPUT!r}, sys.argv[1]], stdout=pipe, stderr=pipe, check=True)
"""


@pytest.mark.parametrize(
    ("script", "mode", "found"),
    [
        pytest.param(OUTPUT, "wb", False, id="itself"),
        pytest.param(BEHIND, "ab", True, id="its parent passes output on"),
    ],
)
def test_the_file_is_found_that_output_is_appended_to(tmp_path: Path, script: str, mode: str, found: bool) -> None:
    log, reported = tmp_path / "log", tmp_path / "reported"
    with log.open(mode) as output:
        subprocess.run([sys.executable, "-c", script, str(reported)], stdout=output, stderr=output, check=True)
    assert reported.read_text().strip() == (str(log) if found else "None")


def test_a_session_looks_after_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 10_000)
    monkeypatch.setattr(session, "output_file", lambda: log)
    monkeypatch.setattr(session, "CHECK_INTERVAL_S", 0.01)
    with rotated_output(Configuration({"env.log.max-size": "5000", "env.log.max": "1"})):
        deadline = time.monotonic() + TIMEOUT_S
        while log.stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert (tmp_path / "log.1").stat().st_size == 5_000
    assert not any(thread.name == "log-rotation" for thread in threading.enumerate())


def test_this_test_has_no_file_of_its_own_for_a_pipe() -> None:
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert output_file(process.pid) is None
        process.kill()
