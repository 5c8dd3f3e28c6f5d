"""Spark's answers to questions of planned programs, shared by all processes of a test run.

A program that was planned once in the run is planned again without Spark: a driver that a test starts and kills needs
no Java machine of its own. Answers are JSON texts, each in a file that is named by the digest of its question, of
Spark's version and of the SQL options of this process's Spark. A question gets its first answer from Spark itself.
Answers that depend on more than that are never kept: errors, tables of the catalog, and rows and columns of what Spark
reads.

Drivers also share which answers a program needed when it was planned last. Each question is another run of the program,
so that planning it in the next driver takes one run instead of several.

``python -m tests.support.analyses <directory>`` starts one Spark that answers the processes that have none, so that
they need not start one. Questions about tables of the catalog are not sent to it: each Spark has its own catalog.
"""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import msgspec
import pyspark
from pyspark import SparkContext

from ckpt_runtime.frontend.analysis import Analyzer
from ckpt_runtime.frontend.catalog_tables import StaticTables
from ckpt_runtime.frontend.typed_plan import Analysis, AnalysisRequest
from ckpt_runtime.jobmaster.planning import RememberedAnswers
from ckpt_runtime.processes.forking import end_with
from tests.support.java_archive import end_spark, java_options
from tests.support.processor_time import IN_ALL, used

VARIABLE = "CKPT_TEST_ANALYSES"
"""Names the directory for the processes that tests start."""
SOCKET = "socket"
"""The file in that directory on which the Spark of the run listens."""
MACHINES = "Spark's Java machines that were started:"
WAREHOUSE = "spark.sql.warehouse.dir"
"""Differs between processes, and changes no answer that is kept."""

_ask = Analyzer.analyze
OWN_ANSWERS = {"of": RememberedAnswers.of, "keep": RememberedAnswers.keep}
"""The methods of a driver that shares no answers with others."""
_remembered, _keep = RememberedAnswers.of, RememberedAnswers.keep


def share(directory: Path) -> None:
    """Makes the analyzers of this process use the answers in ``directory``, and those of its children."""
    os.environ[VARIABLE] = str(directory)

    def analyze(self: Analyzer, request: AnalysisRequest, tables: StaticTables | None = None) -> Analysis:
        question = msgspec.json.encode([pyspark.__version__, _options(), request])
        file = directory / sha256(question).hexdigest()
        known = _read(file)
        if known is not None:
            return known
        answer = _from_shared_spark(directory, request, tables) or _ask(self, request, tables)
        if answer.lasts and request.table is msgspec.UNSET:
            _write(file, msgspec.json.encode(answer))
        return answer

    def of_program(program: str, entry: str) -> Path:
        return directory / sha256(msgspec.json.encode([program, entry, _options()])).hexdigest()

    def remembered(self: RememberedAnswers, program: str, entry: str) -> dict[str, str]:
        if not (known := _remembered(self, program, entry)):
            with suppress(OSError):  # no driver has planned it
                known = msgspec.json.decode(of_program(program, entry).read_bytes(), type=dict[str, str])
        return known

    def keep(self: RememberedAnswers, program: str, entry: str, answers: Mapping[str, str]) -> None:
        before = _remembered(self, program, entry)
        _keep(self, program, entry, answers)
        if (lasting := _remembered(self, program, entry)) != before:
            _write(of_program(program, entry), msgspec.json.encode(lasting))

    Analyzer.analyze = analyze  # type: ignore[method-assign]
    RememberedAnswers.of, RememberedAnswers.keep = remembered, keep  # type: ignore[method-assign]


def _options() -> list[tuple[str, str]]:
    """The SQL options that the Spark of this process was started with; none if it has yet to start for an analysis."""
    context = SparkContext._active_spark_context
    options = [] if context is None else context.getConf().getAll()
    return sorted(each for each in options if each[0].startswith("spark.sql.") and each[0] != WAREHOUSE)


def _write(file: Path, content: bytes) -> None:
    """In one step, because other processes may read the file meanwhile."""
    partial = file.with_name(f".{uuid4().hex}")
    partial.write_bytes(content)
    partial.replace(file)


def _read(file: Path) -> Analysis | None:
    """Returns the answer in a file; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Analysis)
    except (OSError, msgspec.MsgspecError):
        return None


class _Question(msgspec.Struct):
    """A request to the Spark of the run, with the limits of the program's static tables."""

    request: AnalysisRequest
    size_bytes: int
    timeout_s: float
    sizes: dict[str, int]
    """Of the tables that the program has read before."""


class _Answer(msgspec.Struct):
    """The answer with the tables that were read for it."""

    analysis: Analysis
    files: dict[str, bytes]
    sizes: dict[str, int]


def _from_shared_spark(directory: Path, request: AnalysisRequest, tables: StaticTables | None) -> Analysis | None:
    """Returns the answer of the run's Spark; None if there is none, or if this process has a Spark of its own."""
    file = directory / SOCKET
    if SparkContext._active_spark_context is not None or request.table is not msgspec.UNSET or not file.exists():
        return None
    known = tables or StaticTables()
    question = _Question(request, known.size_bytes, known.timeout_s, known._sizes)
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as received:
        try:
            connection.connect(str(file))
            connection.sendall(msgspec.json.encode(question))
            connection.shutdown(socket.SHUT_WR)
            text = received.read()
        except OSError:
            return None
    if not text:  # it has ended meanwhile
        return None
    answer = msgspec.json.decode(text, type=_Answer)
    known.files.update(answer.files)
    known._sizes.update(answer.sizes)
    return answer.analysis


class SharedSpark(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers questions from the processes of a test run with the Spark of this process."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, directory: Path, analyzer: Analyzer) -> None:
        self.analyzer = analyzer
        super().__init__(str(directory / SOCKET), _Handler)

    def server_close(self) -> None:
        super().server_close()
        os.unlink(str(self.server_address))


class _Handler(socketserver.StreamRequestHandler):
    server: SharedSpark

    def handle(self) -> None:
        question = msgspec.json.decode(self.rfile.read(), type=_Question)
        tables = StaticTables(question.size_bytes, question.timeout_s, _sizes=question.sizes)
        analysis = _ask(self.server.analyzer, question.request, tables)
        self.wfile.write(msgspec.json.encode(_Answer(analysis, tables.files, tables._sizes)))


def main(directory: Path) -> None:
    """Serves until SIGTERM, or the end of the process that has started this one; says what it has cost."""
    end_with(os.getppid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.environ["JDK_JAVA_OPTIONS"] = f"{java_options()} -Djava.io.tmpdir={directory}"
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_DIRS=str(directory))
    with SharedSpark(directory, Analyzer()) as server:
        try:
            server.serve_forever()
        finally:
            started = SparkContext._gateway is not None
            end_spark()
            print(f"{MACHINES} {int(started)}\n{used():8.1f} s {IN_ALL}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
