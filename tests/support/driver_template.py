"""Drivers from a template: a process that has imported everything, from which a run's drivers are forked.

Three seconds of a processor are what a driver from a cold interpreter spends on imports: its own, and those of the
template that its agents come from. A forked one is a process like another, with its own pid, environment, working
directory and output; it ends as an interpreter does, or by a signal. That it has imported what workers need is all that
it could notice.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_runtime.processes.forking import ForkedProcess, Template
from ckpt_runtime.storage.driver_pools import VARIABLE
from tests.support.driver_template_main import DriverStart
from tests.support.run_directory import RUN


class DriverTemplate:
    """The template of this process."""

    def __init__(self) -> None:
        # The place of crash points is read when they are imported: all drivers have the same.
        self.crash_point = RUN.kept("drivers") / "crash-point"
        self._template = Template.started("tests.support.driver_template_main", self._environment({}))
        atexit.register(self.close)

    def fork(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkedProcess:
        """Its environment is this process's with ``environment`` on top. Raises OSError."""
        start = DriverStart(list(arguments), os.getcwd(), self._environment(environment))
        with log.open("wb") as output:
            driver = self._template.fork(json.dumps(vars(start)).encode(), [output.fileno()])
        if not driver.has_begun():
            raise OSError("the driver cannot be forked, or its template is gone")
        return driver

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join(path for path in sys.path if path)
        return {**os.environ, "PYTHONPATH": path, VARIABLE: str(self.crash_point), **more}

    def close(self) -> None:
        """Ends it with all its drivers."""
        atexit.unregister(self.close)
        self._template.close()
        self._template.process.wait()


_template: DriverTemplate | None = None


def driver_template() -> DriverTemplate:
    """The one of this process, which is started when it is asked for first."""
    global _template
    if _template is None:
        _template = DriverTemplate()
    return _template
