"""Tables of Spark's catalog that a program reads and writes, and static tables that Spark computes for it.

Streams write tables (``toTable``) and read them (``readStream.table``). Such a table is a directory of files and an
entry in the catalog. The engine reads and writes the files itself, so while a program is planned only the entry is
read. A table that does not exist yet is created when the program is submitted.

The driver's Spark computes static tables, partition by partition, so that a table that is too large raises an error
before it fills the driver's memory. Spark's tasks need cores of the session, which running jobs may all occupy:
therefore reading has a time limit, after which its Spark jobs are cancelled.
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
from ckpt_runtime.frontend.batch_writers import SPARK_FILES
from ckpt_runtime.frontend.catalyst import items
from ckpt_runtime.frontend.typed_plan import CatalogTable, Files, Shown, TableRequest, TypedColumn
from ckpt_runtime.graph.specs import FILE_FORMATS

_FORMATS = FILE_FORMATS | SPARK_FILES
_UNTRACKED = "spark.sql.hive.manageFilesourcePartitions"
"""An option of Spark: the catalog lists the partitions of a table, or else each reader looks for their directories."""


@dataclass(slots=True)
class NewTables:
    """The tables that one program writes and that do not exist, with the statements that create them, by full name."""

    tables: dict[str, CatalogTable] = field(default_factory=dict)
    statements: dict[str, str] = field(default_factory=dict)

    def create(self, session: Any) -> None:
        """Creates the tables that do not exist. Blocks. Raises Py4JJavaError for Spark's errors."""
        session.conf().set(_UNTRACKED, "false")  # the engine adds directories and no entries of the catalog
        for statement in self.statements.values():
            session.sql(statement)


def table_to_read(session: Any, request: TableRequest, new: NewTables) -> CatalogTable:
    """Returns the table that a stream reads, which may be one that the same program writes.

    Raises UnsupportedExpressionError for what is not a table of files, and Py4JJavaError for an unknown table.
    """
    catalog = session.sessionState().catalog()
    identifier = _identifier(session, request.name)
    name = identifier.unquotedString()
    if name in new.tables:
        return new.tables[name]
    entry = catalog.getTableMetadata(identifier)
    if entry.tableType().name() == "VIEW":
        raise UnsupportedExpressionError(f"the view {name} as a stream", "read the table below it")
    return _existing(name, entry)


def table_to_write(session: Any, request: TableRequest, schema: Any, new: NewTables) -> CatalogTable:
    """Returns the table that a stream with the columns ``schema`` writes; notes in ``new`` if it has to be created.

    As in Spark, an existing table has to have the format of the query, and no column is compared with it. Raises
    UnsupportedExpressionError for a table that the engine cannot write so that readers find all rows.
    """
    catalog = session.sessionState().catalog()
    identifier = _identifier(session, request.name)
    name = identifier.unquotedString()
    format_ = request.format.lower()
    if format_ not in _FORMATS:
        raise UnsupportedExpressionError(
            f"format {request.format!r} in toTable", f"tables are written as {', '.join(sorted(_FORMATS))}"
        )
    if catalog.tableExists(identifier):
        return _writable(name, catalog.getTableMetadata(identifier), request)
    if name in new.tables:
        return new.tables[name]
    location = request.path or str(catalog.defaultTablePath(identifier).toString())
    columns = schema.asNullable()
    table = CatalogTable(name, format_, _path(location), str(columns.json()), request.partitioned_by)
    new.tables[name] = table
    new.statements[name] = _statement(name, request, columns.toDDL())
    return table


def _statement(name: str, request: TableRequest, columns: str) -> str:
    quoted = ".".join(_quoted(part) for part in name.split("."))
    statement = f"CREATE TABLE IF NOT EXISTS {quoted} ({columns}) USING {request.format}"
    if request.partitioned_by:
        statement += f" PARTITIONED BY ({', '.join(map(_quoted, request.partitioned_by))})"
    if request.path:
        text = request.path.replace("\\", "\\\\").replace("'", "\\'")
        statement += f" LOCATION '{text}'"
    return statement


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _identifier(session: Any, name: str) -> Any:
    """Returns the full name of a table of the session's own catalog. Raises UnsupportedExpressionError for others."""
    catalog = session.sessionState().catalog()
    parser = session.sessionState().sqlParser()
    parts = [str(part) for part in items(parser.parseMultipartIdentifier(name))]
    if len(parts) > 3 or (len(parts) == 3 and parts[0] != "spark_catalog"):
        raise UnsupportedExpressionError(
            f"the catalog {parts[0]}", "streams write and read tables of Spark's own catalog by name"
        )
    return catalog.qualifyIdentifier(parser.parseTableIdentifier(".".join(map(_quoted, parts[-2:]))))


def _existing(name: str, entry: Any) -> CatalogTable:
    provider = str(entry.provider().get()).lower() if entry.provider().isDefined() else ""
    properties = entry.storage().properties()
    options = {str(pair._1()): str(pair._2()) for pair in items(properties.toSeq())}
    options = {key: value for key, value in options.items() if key.lower() not in ("path", "serialization.format")}
    partitioned_by = tuple(map(str, items(entry.partitionColumnNames())))
    location = _path(str(entry.location().toString()))
    return CatalogTable(name, provider, location, str(entry.schema().json()), partitioned_by, options)


def _writable(name: str, entry: Any, request: TableRequest) -> CatalogTable:
    if entry.tableType().name() == "VIEW":
        raise UnsupportedExpressionError(f"toTable to the view {name}", "streams write tables, as in Spark")
    table = _existing(name, entry)
    if table.format != request.format.lower():
        raise UnsupportedExpressionError(
            f"format {request.format!r} in toTable", f"the table {table.name} has the format {table.format!r}"
        )
    if entry.bucketSpec().isDefined():
        raise UnsupportedExpressionError(f"toTable to {table.name}", "the engine does not write buckets")
    if request.partitioned_by != table.partitioned_by:
        raise UnsupportedExpressionError(
            f"partitionBy in toTable to {table.name}",
            f"the table is partitioned by {list(table.partitioned_by)}; name the same columns",
        )
    if table.partitioned_by and entry.tracksPartitionsInCatalog():
        raise UnsupportedExpressionError(
            f"toTable to {table.name}",
            f"the catalog lists its partitions, and would not know new ones; create the table while {_UNTRACKED} is "
            "false",
        )
    return table


def _path(location: str) -> str:
    """Returns a location of Spark as sinks and sources take it: a path if it is in the local file system."""
    if location.startswith("file:"):
        from urllib.parse import unquote, urlsplit

        return unquote(urlsplit(location).path)
    return location


SIZE_OPTION = "jobmanager.planning.static-tables.max-size"
TIME_OPTION = "jobmanager.planning.static-tables.timeout"
MOST_COLLECTED_BYTES = 1 << 20
"""Maximum size of all rows that a program collects: they are part of its graph, which each worker gets."""


@dataclass(slots=True)
class StaticTables:
    """The tables of one program, as files by their digests, and their limits.

    ``size_bytes`` limits all of them together, in memory and without compression. ``new`` are the tables of the catalog
    that the program's streams write and that do not exist yet. ``writes``: the program is submitted, and what it writes
    before it starts its queries is written.
    """

    size_bytes: int = 64 << 20
    timeout_s: float = 120.0
    files: dict[str, bytes] = field(default_factory=dict)
    new: NewTables = field(default_factory=NewTables)
    writes: bool = False
    _sizes: dict[str, int] = field(default_factory=dict)
    _collected: int = 0

    def read(self, spark: Any, session: Any, plan: Any, columns: tuple[TypedColumn, ...]) -> str:
        """Computes the rows of an analyzed plan and returns the digest of their file. Blocks.

        Raises UnsupportedExpressionError for a table that is too large or not read in time, and Py4JJavaError for
        failures in Spark.
        """
        most = self.size_bytes - sum(self._sizes.values())
        advice = (
            f"the static tables of the program have more than {self.size_bytes} bytes, the limit of {SIZE_OPTION}; "
            "select only the columns and rows that the join needs, or raise the limit"
        )
        refused = UnsupportedExpressionError("a static table", advice)
        batches, schema = self._computed(spark, session, plan, columns, most, refused)
        size = sum(batch.get_total_buffer_size() for batch in batches)
        table = pa.Table.from_batches(batches, schema).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
        content = sink.getvalue().to_pybytes()
        digest = sha256(content).hexdigest()
        self.files[digest], self._sizes[digest] = content, size
        return digest

    def collected(
        self, spark: Any, session: Any, plan: Any, columns: tuple[TypedColumn, ...], shown: Shown | None
    ) -> bytes:
        """Returns the rows of an analyzed plan, or the text of ``show``, as a stream of Arrow's IPC format. Blocks.

        Raises as :meth:`read`; all rows that a program collects may have :data:`MOST_COLLECTED_BYTES`.
        """
        advice = (
            f"the rows that the program collects have more than {MOST_COLLECTED_BYTES} bytes, and are part of its job: "
            "select fewer rows and columns, or join the frame with the stream"
        )
        refused = UnsupportedExpressionError("an action on a frame", advice)
        most = MOST_COLLECTED_BYTES - self._collected
        if shown is None:
            batches, schema = self._computed(spark, session, plan, columns, most, refused)
        else:
            with self.limited(spark):
                frame = spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan)
                text = str(frame.showString(shown.rows, shown.truncate, shown.vertical))
            if len(text) > most:
                raise refused
            batches = [pa.RecordBatch.from_pydict({"show_string": [text]})]
            schema = batches[0].schema
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            # A client expects one batch in each response.
            writer.write_batch(pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema))
        content: bytes = sink.getvalue().to_pybytes()
        self._collected += len(content)
        return content

    def write(self, spark: Any, session: Any, plan: Any, files: Files) -> None:
        """Writes the rows of an analyzed plan with Spark. Blocks. Raises as :meth:`read`."""
        from pyspark.sql.classic.dataframe import DataFrame

        self.check_writes("df.write")
        with self.limited(spark):
            frame = DataFrame(spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan), spark)
            writer = frame.write.format(files.format).mode(files.mode).options(**files.options)
            writer = writer.partitionBy(*files.partitioned_by) if files.partitioned_by else writer
            if files.table:
                (writer.option("path", files.path) if files.path else writer).saveAsTable(files.table)
            else:
                writer.save(files.path)

    def check_writes(self, what: str) -> None:
        """Raises UnsupportedExpressionError unless the program is submitted."""
        if not self.writes:
            raise UnsupportedExpressionError(what, "a program changes files and tables only when it is submitted")

    def _computed(
        self,
        spark: Any,
        session: Any,
        plan: Any,
        columns: tuple[TypedColumn, ...],
        most: int,
        refused: UnsupportedExpressionError,
    ) -> tuple[list[pa.RecordBatch], pa.Schema]:
        """Returns the rows of a plan. Raises ``refused`` for more than ``most`` bytes."""
        fields = [pa.field(column.name, arrow_type(column.type)) for column in columns]
        schema = pa.schema(fields)
        session.conf().set("spark.sql.execution.arrow.useLargeVarTypes", "false")
        with self.limited(spark):
            rows = spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan)
            parts = rows.toArrowBatchRdd().toJavaRDD().toLocalIterator()
            batches = []
            while parts.hasNext():
                batches.append(pa.ipc.read_record_batch(pa.py_buffer(parts.next()), schema))
                most -= batches[-1].get_total_buffer_size()
                if most < 0:
                    raise refused
        return batches, schema

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
