"""The template of drivers: it imports everything, then forks one whenever it is asked to (see ``driver_template.py``).

It has no thread of its own and opens no database. Its descriptor, named on the command line, is a connection to the
process that asks; with each request comes the driver's output. It ends with who asks, and so do its drivers.

All drivers plan in forks of one process, which ends with the last of them; each would else start its own.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass

from ckpt_runtime.processes import limited_process
from ckpt_runtime.processes.forking import ForkServer


@dataclass(frozen=True)
class DriverStart:
    """What a driver is started with."""

    arguments: list[str]
    directory: str
    environment: dict[str, str]


def main() -> None:
    """Of the template, and then of each driver, which ends as an interpreter does."""
    import pyarrow as pa

    from ckpt_runtime.spark.worker_main import prepare
    from ckpt_runtime.testing.agent_template import OFTEN_NEEDED, fork_template
    from tests.support import mini_session

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    thresholds, processors = gc.get_threshold(), pa.cpu_count()
    prepare(OFTEN_NEEDED)  # what the driver's agents need
    _share_planning()
    server = ForkServer(socket.socket(fileno=int(sys.argv[1])))
    request = server.run()
    if request is None:
        server.end_all()
        return
    request.begun()
    (output,) = request.descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    start = DriverStart(**json.loads(request.document))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(start.directory)
    os.environ.clear()
    os.environ.update(start.environment)
    time.tzset()
    tempfile.tempdir = None
    sys.argv = [mini_session.__file__, *start.arguments]
    fork_template()
    # As in a process that runs no user code.
    gc.set_threshold(*thresholds)
    pa.set_cpu_count(processors)
    mini_session.main()


def _share_planning() -> None:
    """Without a template, or with one that has been idle for too long, planning starts an interpreter."""
    given = {name: text for name, text in os.environ.items() if limited_process._counts_for_imports(name)}
    template = limited_process.ProcessTemplate(limited_process._ONE_THREAD | given)
    limited_process._TEMPLATES.of = lambda environment: template  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
