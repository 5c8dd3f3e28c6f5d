"""The offline tools for snapshots as a process: ``ckpt snapshot ...`` on the worker, which needs the extra ``runtime``
there and has to reach the storage. What it decodes stays out of Airflow's process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from airflow_provider_ckpt.conditions.progress import Log
from airflow_provider_ckpt.exceptions import (
    CkptNotFound,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptSnapshotDamaged,
    CkptTargetExists,
    CkptUnavailable,
)

_EXCEPTIONS: dict[int, type[Exception]] = {
    1: CkptSnapshotDamaged,
    2: CkptRequestRejected,
    3: CkptUnavailable,
    4: CkptNotFound,
    5: CkptTargetExists,
}
_GRACE_SECONDS = 20.0


class SnapshotProcess:
    """Runs one command at a time; ``end`` may be called meanwhile, by a signal handler."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._running: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, accepted: Sequence[int] = (0,)) -> Any:
        """The document that ``ckpt snapshot`` prints for these arguments.

        :raises CkptSnapshotDamaged: and the others by the command's exit code, unless that is accepted.
        """
        command = [sys.executable, "-m", "ckpt_runtime.cli", "--json", "snapshot", *arguments]
        self._log.info("Running ckpt snapshot %s", " ".join(arguments))
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        ) as process:
            self._running = process
            output, errors = process.communicate()
        self._running = None
        if process.returncode in accepted:
            return json.loads(output)
        raise _EXCEPTIONS.get(process.returncode, CkptOperationFailed)(_reason(errors, process.returncode))

    def end(self) -> bool:
        """End what runs, so that it cleans up behind itself; whether something ran."""
        process = self._running
        if process is None or process.poll() is not None:
            return False
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return True


def _reason(errors: str, code: int) -> str:
    """The message of its error document, else its last words."""
    for line in reversed(errors.strip().splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["error"])
    return errors.strip()[-2000:] or f"ckpt snapshot ended with code {code}"
