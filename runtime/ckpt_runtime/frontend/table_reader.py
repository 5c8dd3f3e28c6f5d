"""Has the driver's Spark compute the static tables of a program, within limits.

Rows are read partition by partition, so that a table that is too large raises an error before it fills the driver's
memory. Spark's tasks need cores of the session, which running jobs may all occupy: therefore reading has a time limit,
after which its Spark jobs are cancelled.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type
from ckpt_runtime.frontend.catalog_tables import NewTables
from ckpt_runtime.frontend.typed_plan import TypedColumn

SIZE_OPTION = "jobmanager.planning.static-tables.max-size"
TIME_OPTION = "jobmanager.planning.static-tables.timeout"


@dataclass(slots=True)
class StaticTables:
    """The tables of one program, as files by their digests, and their limits.

    ``size_bytes`` limits all of them together, in memory and without compression. ``new`` are the tables of the catalog
    that the program's streams write and that do not exist yet.
    """

    size_bytes: int = 64 << 20
    timeout_s: float = 120.0
    files: dict[str, bytes] = field(default_factory=dict)
    new: NewTables = field(default_factory=NewTables)
    _sizes: dict[str, int] = field(default_factory=dict)

    def read(self, spark: Any, session: Any, plan: Any, columns: tuple[TypedColumn, ...]) -> str:
        """Computes the rows of an analyzed plan and returns the digest of their file. Blocks.

        Raises UnsupportedExpressionError for a table that is too large or not read in time, and Py4JJavaError for
        failures in Spark.
        """
        fields = [pa.field(column.name, arrow_type(column.type)) for column in columns]
        schema = pa.schema(fields)
        session.conf().set("spark.sql.execution.arrow.useLargeVarTypes", "false")
        with self.limited(spark):
            rows = spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan)
            parts = rows.toArrowBatchRdd().toJavaRDD().toLocalIterator()
            batches = []
            size = 0
            while parts.hasNext():
                batch = pa.ipc.read_record_batch(pa.py_buffer(parts.next()), schema)
                size += batch.get_total_buffer_size()
                if size + sum(self._sizes.values()) > self.size_bytes:
                    raise UnsupportedExpressionError(
                        "a static table",
                        f"the static tables of the program have more than {self.size_bytes} bytes, the limit of "
                        f"{SIZE_OPTION}; select only the columns and rows that the join needs, or raise the limit",
                    )
                batches.append(batch)
        table = pa.Table.from_batches(batches, schema).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
        content = sink.getvalue().to_pybytes()
        digest = sha256(content).hexdigest()
        self.files[digest], self._sizes[digest] = content, size
        return digest

    @contextmanager
    def limited(self, spark: Any) -> Iterator[None]:
        """In this context, cancels the Spark jobs of this thread when the time limit is reached.

        Raises UnsupportedExpressionError then.
        """
        context = spark._jsc.sc()
        group = f"ckpt-static-{uuid.uuid4().hex}"
        over = threading.Event()

        def cancel() -> None:
            over.set()
            context.cancelJobGroupAndFutureJobs(group)

        timer = threading.Timer(self.timeout_s, cancel)
        timer.daemon = True
        context.setJobGroup(group, "static tables of a program", True)
        timer.start()
        try:
            yield
        except Exception as error:
            if not over.is_set():
                raise
            raise UnsupportedExpressionError(
                "a static table",
                f"Spark has not read it within {self.timeout_s:g} s, the limit of {TIME_OPTION}; its tasks need cores "
                "that no job of the session occupies",
            ) from error
        finally:
            timer.cancel()
            context.clearJobGroup()


def check_static(jvm: Any, plan: Any) -> None:
    """Raises UnsupportedExpressionError for a plan that Spark must not run: a command, or one with Python functions.

    A plan contains a number in place of a Python function, which only the program itself can resolve.
    """
    patterns = getattr(getattr(jvm.org.apache.spark.sql.catalyst.trees, "TreePattern$"), "MODULE$")
    if plan.containsPattern(patterns.COMMAND()):
        raise UnsupportedExpressionError(
            f"the operation {plan.nodeName()}", "a program describes queries; run commands before it is submitted"
        )
    if plan.containsPattern(patterns.PYTHON_UDF()):
        raise UnsupportedExpressionError("a Python function in a static table", "call it on the stream, after the join")
