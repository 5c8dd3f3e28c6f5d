"""The temporary directory of one run of the tests, in which nothing may stay behind.

Tests and all processes that they start have it as theirs, by ``TMPDIR``. What lies there when all tests have
ended was left behind: by processes that were killed and have no owner, or by tests that do not tidy up. What only the
process of the run uses, until it ends, lies beside it. Pytest's own directories, with the logs of tests that failed,
are elsewhere and stay.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from ckpt_runtime.processes.held_directory import HeldDirectory
from tests.support.java_archive import java_options
from tests.support.patience import patient

_PATIENCE_S = patient(20.0)
"""Processes may still be on their way out. Only a run that leaves something waits for as long."""
_LOOK_S = 0.1

ENGINES = "ckpt-"
"""What begins so is of the engine or its tests, and fails the run. What else stays is shown."""


class RunDirectory:
    """Of this process, from its making to :meth:`close`."""

    def __init__(self) -> None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._held = HeldDirectory("ckpt-tests-")
        self._temporary = self._held.path / "t"  # short: sockets lie below, whose paths may have 107 bytes
        self._temporary.mkdir()
        # As /tmp: other users' processes get there, too.
        self._held.path.chmod(0o711)
        self._temporary.chmod(0o1777)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._temporary)
        java = self.kept("java")  # Spark's own files stay where its JVM is killed
        java.chmod(0o1777)
        self._collections = self.kept("java-collections")
        self._collections.chmod(0o1777)
        log = f"-Xlog:gc=info:file={self._collections}/%p:none"
        options = os.environ.get("JDK_JAVA_OPTIONS") or java_options()
        os.environ["JDK_JAVA_OPTIONS"] = f"{options} -Djava.io.tmpdir={java} {log}"

    def kept(self, name: str) -> Path:
        """A directory for as long as the run lasts."""
        directory = self._held.path / name
        directory.mkdir(exist_ok=True)
        return directory

    def java_machines(self) -> int:
        """How many of Spark's Java machines have started; one that only makes up a command line collects no garbage."""
        return sum("Pause" in log.read_text() for log in self._collections.iterdir())

    def left(self) -> list[str]:
        """What lies in the temporary directory; waits for it to become empty."""
        deadline = time.monotonic() + _PATIENCE_S
        while (names := sorted(os.listdir(self._temporary))) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return names

    def close(self) -> None:
        """Deletes it, with what is in it."""
        self._held.remove()


RUN = RunDirectory()
