"""Spark's answers to questions of planned programs, shared by all processes of a test run.

A program that was planned once in the run is planned again without Spark: a driver that a test starts and kills needs
no Java machine of its own. Answers are JSON texts, each in a file that is named by the digest of its question, of
Spark's version and of the SQL options of this process's Spark. A question gets its first answer from Spark itself.
Answers that depend on more than that are never kept: errors, tables of the catalog, and rows and columns of what Spark
reads.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import msgspec
import pyspark
from pyspark import SparkContext

from ckpt_runtime.frontend.analysis import Analyzer
from ckpt_runtime.frontend.table_reader import StaticTables
from ckpt_runtime.frontend.typed_plan import Analysis, AnalysisRequest

VARIABLE = "CKPT_TEST_ANALYSES"
"""Names the directory for the processes that tests start."""
WAREHOUSE = "spark.sql.warehouse.dir"
"""Differs between processes, and changes no answer that is kept."""

_ask = Analyzer.analyze


def share(directory: Path) -> None:
    """Makes the analyzers of this process use the answers in ``directory``, and those of its children."""
    os.environ[VARIABLE] = str(directory)

    def analyze(self: Analyzer, request: AnalysisRequest, tables: StaticTables | None = None) -> Analysis:
        question = msgspec.json.encode([pyspark.__version__, _options(), request])
        file = directory / sha256(question).hexdigest()
        known = _read(file)
        if known is not None:
            return known
        answer = _ask(self, request, tables)
        if answer.lasts and request.table is msgspec.UNSET:
            partial = file.with_name(f".{uuid4().hex}")
            partial.write_bytes(msgspec.json.encode(answer))
            partial.replace(file)
        return answer

    Analyzer.analyze = analyze  # type: ignore[method-assign]


def _options() -> list[tuple[str, str]]:
    """The SQL options that the Spark of this process was started with; none if it has yet to start for an analysis."""
    context = SparkContext._active_spark_context
    options = [] if context is None else context.getConf().getAll()
    return sorted(each for each in options if each[0].startswith("spark.sql.") and each[0] != WAREHOUSE)


def _read(file: Path) -> Analysis | None:
    """Returns the answer in a file; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Analysis)
    except (OSError, msgspec.MsgspecError):
        return None
