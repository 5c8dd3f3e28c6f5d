"""The template process: imports everything, loads the kernels, then forks a worker for each request of its agent.

It has a single thread of its own and runs no user code. The descriptor on its command line is a connection to the
agent; each request carries the reading end of a pipe that ties the worker to the agent. The template ends with its
agent, while its workers keep running.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from functools import partial
from typing import NoReturn

import msgspec

from ckpt_runtime.processes import handles
from ckpt_runtime.processes.forking import ForkRequest, ForkServer
from ckpt_runtime.spark.supervisor import keep
from ckpt_runtime.spark.worker_main import make_ready, prepare, work
from ckpt_runtime.spark.worker_processes import WorkerStart

logger = logging.getLogger(__name__)


def main() -> None:
    """Runs until the agent is gone."""
    handles.set_name(handles.TEMPLATE)
    make_ready()
    prepare()
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(connection: socket.socket) -> NoReturn:
    """Serve requests until the agent is gone, in a process that has imported everything."""
    code = 1
    try:
        handles.set_name(handles.TEMPLATE)
        request = ForkServer(connection, binds=False).run()
        if request is not None:
            _become_supervisor(request)
        code = 0
    except BaseException:
        logger.exception("a template or a supervisor ends")
    finally:
        os._exit(code)


def _become_supervisor(request: ForkRequest) -> NoReturn:
    """Become the supervisor of a new worker: the template's child, which ends with the worker's exit code or signal."""
    start = msgspec.json.decode(request.document, type=WorkerStart)
    (pipe,) = request.descriptors

    def begun(worker: int) -> None:
        os.close(pipe)
        request.begun(worker)

    keep(partial(_become_worker, start, pipe, request.notices), begun, start.directory)


def _become_worker(start: WorkerStart, pipe: int, notices: socket.socket) -> NoReturn:
    """Set up what the agent would have given to a new process, then run as a worker."""
    try:
        notices.close()
        handles.set_name(handles.WORKER)
        os.environ["TMPDIR"] = start.directory
        tempfile.tempdir = None
        work(start, pipe)
    except BaseException:
        logger.exception("worker %s cannot begin", start.worker)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
