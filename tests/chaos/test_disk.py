"""The disk of a chaos run: slow means slow for others, and nothing stays so."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.disk import Disk
from tests.support.jobs import skip_unless_root
from tests.support.patience import patient
from tests.support.spark_sessions import wait_until

_TOUCH = "import sys; open(sys.argv[1], 'w').close()"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    skip_unless_root()
    made = Disk(tmp_path / "disk")
    if not made.is_small:
        pytest.skip("cannot mount a file system here")
    yield made
    made.unmount()


def open_elsewhere(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", _TOUCH, str(path)])


def test_an_open_waits_until_the_disk_is_healed(disk: Disk) -> None:
    if not disk.slow_down(None):
        pytest.skip("the kernel does not let opens wait here")
    waits = open_elsewhere(disk.root / "file")
    slow = disk._slow
    assert slow is not None
    wait_until(lambda: slow.delayed == 1, "the open to begin", 60)
    (disk.root / "own").touch()  # this process heals it, and never waits
    assert waits.poll() is None
    assert disk.heal() == 1
    assert waits.wait(patient(60)) == 0
    assert open_elsewhere(disk.root / "again").wait(patient(60)) == 0
    assert disk.heal() == 0


def test_an_open_takes_the_configured_time(disk: Disk) -> None:
    begun = time.monotonic()
    if not disk.slow_down(0.5):
        pytest.skip("the kernel does not let opens wait here")
    assert open_elsewhere(disk.root / "file").wait(patient(60)) == 0
    assert time.monotonic() - begun >= 0.5


def test_process_that_is_killed_during_a_wait_ends(disk: Disk) -> None:
    if not disk.slow_down(None):
        pytest.skip("the kernel does not let opens wait here")
    waits = open_elsewhere(disk.root / "file")
    slow = disk._slow
    assert slow is not None
    wait_until(lambda: slow.delayed == 1, "the open to begin", 60)
    waits.kill()
    assert waits.wait(patient(60)) == -9
    assert disk.heal() == 1
