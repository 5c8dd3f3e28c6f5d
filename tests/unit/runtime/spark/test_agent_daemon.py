"""What Spark forks slot agents from, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pyspark
import pytest

from ckpt_runtime.spark.agent_daemon import installed_version, is_sparks, zipped_version
from tests.support.spark_sessions import wait_until

INSTALLED = Path(pyspark.__file__).parent
SAYS_WHICH = "import os, pyspark\nprint(pyspark.__file__, flush=True)\nos._exit(0)\n"
STARTS_A_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def zipped(directory: Path, version: str) -> Path:
    """What Spark puts first on the import path."""
    path = directory / "pyspark.zip"
    with ZipFile(path, "w") as archive:
        archive.writestr("pyspark/__init__.py", "")
        archive.writestr("pyspark/version.py", f'# of Spark\n__version__: str = "{version}"\n')
    return path


def begin(directory: Path, worker: str, archive: Path) -> subprocess.Popen[str]:
    """The daemon with a module in the place of Spark's worker, which it imports."""
    (directory / "probe_worker.py").write_text(worker)
    path = [str(archive), *filter(None, sys.path), str(directory)]
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt_runtime.spark.agent_daemon", "probe_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHON_WORKER_FACTORY_SECRET": "none"},
        start_new_session=True,
    )


def test_the_installed_pyspark_is_imported_before_anything_is_forked(tmp_path: Path) -> None:
    version = installed_version()
    assert version is not None
    reported, _ = begin(tmp_path, SAYS_WHICH, zipped(tmp_path, version)).communicate(timeout=120)
    assert Path(reported.strip()).parent == INSTALLED


def test_the_zipped_pyspark_stays_when_the_installed_one_is_another_release(tmp_path: Path) -> None:
    archive = zipped(tmp_path, "0.0.1")
    reported, _ = begin(tmp_path, SAYS_WHICH, archive).communicate(timeout=120)
    assert reported.strip() == str(archive / "pyspark" / "__init__.py")


def test_spark_s_own_daemon_takes_over_when_an_import_has_started_a_thread(tmp_path: Path) -> None:
    """A fork would not have it."""
    version = installed_version()
    assert version is not None
    with begin(tmp_path, STARTS_A_THREAD, zipped(tmp_path, version)) as process:
        arguments = Path(f"/proc/{process.pid}/cmdline")
        wait_until(lambda: b"\0pyspark.daemon\0probe_worker\0" in arguments.read_bytes(), "Spark's daemon")
        process.kill()


@pytest.mark.parametrize(
    ("installed", "expected"), [("4.3.0", True), ("4.3.1", False), (None, False)], ids=["same", "another", "none"]
)
def test_daemon_is_used_only_with_the_release_of_spark_itself(
    tmp_path: Path, installed: str | None, expected: bool
) -> None:
    found = zipped_version(["", "/nowhere/pyspark.zip", str(zipped(tmp_path, "4.3.0"))])
    assert found == "4.3.0"
    assert is_sparks(installed, found) is expected


def test_release_of_spark_is_unknown_without_a_zipped_copy(tmp_path: Path) -> None:
    (tmp_path / "pyspark.zip").write_bytes(b"no archive")
    assert zipped_version([str(tmp_path)]) is None
    assert zipped_version([str(tmp_path / "pyspark.zip")]) is None
    assert not is_sparks("4.3.0", None)
