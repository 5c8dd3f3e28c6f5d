"""The template of drivers: it imports everything, then forks one whenever it is asked to (see ``driver_template.py``).

It has no thread of its own and opens no database. Its descriptor, named on the command line, is a connection to the
process that asks; with each request come descriptors of the driver's document and output, and a connection on which
the template says first the driver's pid, in the end its exit code. It ends with who asks, and so do its drivers.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass

from ckpt_runtime.testing.forked_children import ForkedChildren

MAX_MESSAGE = 64


@dataclass(frozen=True)
class DriverStart:
    """What a driver is given, as by whoever starts a process."""

    arguments: list[str]
    directory: str
    environment: dict[str, str]


class _Server:
    """``connection`` is the one to the process that asks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._children = ForkedChildren(self._poll)

    def run(self) -> DriverStart | None:
        """Returns in each driver with what that one is given, and in the template when nobody asks any more."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._children.reap(descriptor)
                    continue
                data, given, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE, 3)
                if not data:
                    self._children.kill_all()
                    return None
                start = self._take(*given)
                if start is not None:
                    return start

    def _take(self, document: int, output: int, told: int) -> DriverStart | None:
        """In the driver that it forks, what that one is given."""
        reply = socket.socket(fileno=told)
        with os.fdopen(document, "rb") as file:
            file.seek(0)
            start = DriverStart(**json.load(file))
        try:
            pid = os.fork()
            if pid == 0:
                self._let_go(reply)
                os.dup2(output, 1)
                os.dup2(output, 2)
                return start
            self._children.add(pid, reply)
        finally:
            os.close(output)
        return None

    def _let_go(self, reply: socket.socket) -> None:
        """A driver has no descriptor of the template's."""
        self._connection.close()
        reply.close()
        self._children.close()


def main() -> None:
    """Of the template, and then of each driver, which ends as an interpreter does."""
    import pyarrow as pa

    from ckpt_runtime.spark.worker_main import prepare
    from ckpt_runtime.testing.agent_template import fork_template
    from tests.support import mini_session

    # Python counts the threads of OpenBLAS and of Arrow's allocator, which see to themselves in a fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    thresholds, processors = gc.get_threshold(), pa.cpu_count()
    prepare()  # what the driver's agents need
    start = _Server(socket.socket(fileno=int(sys.argv[1]))).run()
    if start is None:
        return
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


if __name__ == "__main__":
    main()
