"""Runs a PySpark script, unchanged, as a client of a session: ``python -m ckpt_runtime.connect.script FILE [ARGS]...``.

``ckpt run --client`` becomes this process. ``SPARK_REMOTE`` has the address, which PySpark uses for the script's
``SparkSession``. The script is the application of its queries: when it or its session ends, those that still run are
stopped, as in Spark, unless ``KEEP_VARIABLE`` is set.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures.thread import _threads_queues
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from warnings import filterwarnings

from msgspec import Struct

SCRIPT_KEY = "ckpt-script"
"""Metadata of each call: a :class:`SubmittedScript` as JSON."""
KEEP_VARIABLE = "CKPT_KEEP_QUERIES"
"""Environment variable: queries that run when the script ends continue to run."""
_FAILED, _INTERRUPTED, _TERMINATED = 1, 130, 143


class SubmittedScript(Struct, frozen=True):
    """A script that runs as a client: the id of its upload, its module there, its arguments, options of all its jobs.

    ``program`` is empty for other clients.
    """

    program: str = ""
    module: str = ""
    arguments: list[str] = []
    options: dict[str, str] = {}


class _Sessions:
    """The sessions that a script has made, and the ends of their queries."""

    def __init__(self, *, keeps_queries: bool) -> None:
        self._keeps_queries = keeps_queries
        self._made: list[Any] = []

    def watch(self) -> None:
        """Gives PySpark's sessions what a script in a process with Spark's Java machine has."""
        from pyspark.sql.connect.session import SparkSession

        from ckpt_runtime.frontend.captured_session import ContextWithoutJava, let_scripts_name_masters

        let_scripts_name_masters()
        os.environ.pop("MASTER", None)
        initialize, stop = SparkSession.__init__, SparkSession.stop
        watched: Any = SparkSession

        def initialized(session: Any, *arguments: Any, **named: Any) -> None:
            initialize(session, *arguments, **named)
            self._made.append(session)

        def stopped(session: Any) -> None:
            self._end_queries(session)
            stop(session)

        watched.__init__, watched.stop = initialized, stopped
        watched.sparkContext = property(lambda session: ContextWithoutJava())  # noqa: ARG005

    def end(self) -> None:
        """Ends the queries of all sessions that the script has not stopped."""
        for session in self._made:
            self._end_queries(session)

    def _end_queries(self, session: Any) -> None:
        if self._keeps_queries or session.is_stopped:
            return
        for query in session.streams.active:
            sys.stderr.write(f"query {query.name or query.id} is stopped, because the script ends\n")
            query.stop()


def _terminated(number: int, frame: Any) -> NoReturn:  # noqa: ARG001 Python's signature
    raise SystemExit(_TERMINATED)


def run(file: str, arguments: Sequence[str]) -> int:
    """Runs a file as Python does, and returns its exit code. Raises SystemExit if the script does."""
    filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    sessions = _Sessions(keeps_queries=KEEP_VARIABLE in os.environ)
    sessions.watch()
    signal.signal(signal.SIGTERM, _terminated)
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).resolve().parent)
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = file
    from ckpt_runtime.frontend.captured_session import kept_functions

    try:
        with kept_functions([]):  # workers find them, so nothing has to be pickled
            exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)  # noqa: S102 the user's own file
    except (Exception, KeyboardInterrupt) as error:
        of_script = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(of_script), of_script)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
    finally:
        try:
            _join_threads()
        finally:
            sessions.end()
    return 0


def _join_threads() -> None:
    """Waits for the script's threads, as Python does before it ends, but while PySpark's client still works.

    Its pool, which ends with Python, sends the client's acknowledgements.
    """
    of_pools = set(_threads_queues)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread() and thread not in of_pools:
            thread.join()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
