"""Format ``postgresql``: rows of each completed checkpoint in one transaction of the database, exactly once.

Each subtask copies its rows in binary form into a staging table. The table, its rows, and its entry in the list of
staging tables become visible to other connections with a commit before the checkpoint; a process that dies earlier
leaves no rows. When the checkpoint has completed, one committer merges the staging tables into the target, drops them,
and records the checkpoint's id in an additional table, all in one transaction; a repeated commit finds the record and
does nothing.

Staging tables that a crash between the two commits leaves are found in the list and dropped. Those of a job that no
other one continues have no owner when its snapshots are deleted, which no database knows: with option
``stagedRowsTimeout``, any later job drops them by their age.

With option ``preparedTransactions`` rows are copied into the target itself, in a transaction that the writer prepares
(``PREPARE TRANSACTION``) and the committer commits by its name. Its entry in the list becomes visible with the rows:
it shows a repeated commit that the rows are committed, until the checkpoint is recorded.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, ClassVar

import msgspec
import pyarrow as pa

from ckpt_runtime.connectors.part_directory import CommitError
from ckpt_runtime.connectors.postgres_values import TableColumn, values_of
from ckpt_runtime.graph.formats import sink_options
from ckpt_runtime.graph.postgres_options import database_types, import_driver, server_of
from ckpt_runtime.sinks import CommitOutcome, Sink, SinkCommitter, SinkContext, SinkWriter, Transaction

COMMITS, STAGED = "ckpt_commits", "ckpt_staged"
_ORDER = "ckpt_order"
_PREPARED = re.compile(r"ckpt:(?P<sink>\w+):(?P<job>\w+):(?P<attempt>[0-9]+):(?P<checkpoint>[0-9]+):\w+")
"""The name of a prepared transaction."""
_STAGING = re.compile("ckpt_staging_([0-9a-f]+)_")
"""The name of a staging table begins with the time of its first row, in seconds. Earlier releases named none."""
_LOCK = 0x636B7074
"""The advisory lock under which the tables beside the target are created: CREATE TABLE IF NOT EXISTS may collide."""


class StagingTable(msgspec.Struct, frozen=True):
    """A table with the rows of one subtask for one checkpoint, in the schema of the target; no other has its name.

    A name that begins with ``ckpt:`` is that of a prepared transaction, which has the rows.
    """

    name: str
    rows: int


class PostgresSink(Sink):
    """The sink of format ``postgresql``."""

    committable: ClassVar[type[msgspec.Struct]] = StagingTable
    single_committer = True

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.parsed = sink_options("postgresql", options)
        self._timeout_ms: float | None = self.parsed["stagedRowsTimeout"]

    @classmethod
    def name(cls) -> str:
        return "postgresql"

    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        return PostgresWriter(Database(self.parsed), schema, context, self.parsed)

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        assert schema is not None
        return PostgresCommitter(Database(self.parsed), schema, self.parsed)

    def clean_up(self, context: SinkContext) -> None:
        """Drops the staging tables of earlier attempts and jobs that neither the restored snapshot nor a savepoint
        covers, and those of other sinks that are older than ``stagedRowsTimeout``."""
        if context.subtask_index:
            return
        database = Database(self.parsed)
        try:
            database.prepare()
            restored = context.restored_checkpoint_id or 0
            covered = max(restored, context.savepoint_id)
            since_s = -inf if self._timeout_ms is None else time.time() - self._timeout_ms / 1000
            for prepared, time_s in database.prepared_transactions():
                checkpoint_id = int(prepared["checkpoint"])
                own = prepared["job"] == context.job_id and int(prepared["attempt"]) < context.attempt
                former = prepared["job"] in context.ended_jobs and checkpoint_id > restored
                if prepared["sink"] == context.sink_id:
                    ends = former or (own and checkpoint_id > covered)
                else:
                    ends = time_s < since_s
                if ends:
                    database.end_prepared(prepared[0], "ROLLBACK")
            found = database.run(
                "SELECT name FROM {staged} WHERE sink_id = %s AND ("
                "(job_id = %s AND attempt < %s AND checkpoint_id > %s) OR (job_id = ANY(%s) AND checkpoint_id > %s))",
                (context.sink_id, context.job_id, context.attempt, covered, list(context.ended_jobs), restored),
            ).fetchall()
            others = database.run("SELECT name FROM {staged} WHERE sink_id <> %s", (context.sink_id,)).fetchall()
            found += [(name,) for (name,) in others if (made := _STAGING.match(name)) and int(made[1], 16) < since_s]
            with database.connection.transaction():
                for (name,) in found:
                    database.drop(name)
        finally:
            database.close()


class Database:
    """A connection, and the names of the tables in it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        psycopg = import_driver()
        given = {key: options[key] for key in ("user", "password") if options[key] is not None}
        self.connection = psycopg.connect(server_of(options["url"]), autocommit=True, **given)
        self.sql = psycopg.sql
        row = self.connection.execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.oid = to_regclass(%s)",
            (options["dbtable"],),
        ).fetchone()
        if row is None:
            self.close()
            raise ValueError(f"there is no table {options['dbtable']!r} in the database; create it first")
        self.schema, self.table = row

    def run(self, text: str, values: Sequence[Any] | None = None, **names: Any) -> Any:
        """Executes a statement. Names in braces are replaced: those of the tables, and the given ones."""
        sql = self.sql
        put = {
            "target": self.within(self.table),
            "commits": self.within(COMMITS),
            "staged": self.within(STAGED),
        }
        for key, value in names.items():
            if isinstance(value, str):
                put[key] = sql.Identifier(value)
            elif isinstance(value, sql.Composable):
                put[key] = value
            else:
                put[key] = sql.SQL(", ").join(map(sql.Identifier, value))
        if values is not None:  # the driver looks for placeholders in names, too
            put = {key: sql.SQL(name.as_string(self.connection).replace("%", "%%")) for key, name in put.items()}
        return self.connection.execute(sql.SQL(text).format(**put), values)

    def within(self, table: str) -> Any:
        """The name of a table in the schema of the target."""
        return self.sql.Identifier(self.schema, table)

    def _quoted(self, table: str) -> str:
        """The name of a table in the schema of the target, as a value for ``to_regclass``."""
        return str(self.within(table).as_string(self.connection))

    def joined(self, separator: str, pattern: str, names: Sequence[str]) -> Any:
        """Fills the pattern with each name in turn, and concatenates the results."""
        filled = [self.sql.SQL(pattern).format(self.sql.Identifier(name)) for name in names]
        return self.sql.SQL(separator).join(filled)

    def prepare(self) -> None:
        """Creates the additional tables if they do not exist."""
        found = self.run("SELECT to_regclass(%s)", (self._quoted(STAGED),)).fetchone()
        if found[0] is not None:
            return
        with self.connection.transaction():
            self.run("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            self.run(
                "CREATE TABLE IF NOT EXISTS {commits} (writer_id text PRIMARY KEY, checkpoint_id bigint NOT NULL, "
                "committed_at timestamptz NOT NULL DEFAULT now())"
            )
            self.run(
                "CREATE TABLE IF NOT EXISTS {staged} (name text PRIMARY KEY, sink_id text NOT NULL, "
                "job_id text NOT NULL, attempt integer NOT NULL, checkpoint_id bigint NOT NULL)"
            )

    def prepared_transactions(self) -> list[tuple[re.Match[str], float]]:
        """The names of the prepared transactions of sinks in this database, with their parts and their times in s."""
        query = "SELECT gid, EXTRACT(EPOCH FROM prepared)::float8 FROM pg_prepared_xacts WHERE database = "
        rows = self.connection.execute(f"{query}current_database()")
        return [(match, time_s) for name, time_s in rows if (match := _PREPARED.fullmatch(name))]

    def end_prepared(self, name: str, action: str) -> bool:
        """Commits or rolls back (``action``) a prepared transaction; returns whether there was one of this name."""
        import psycopg

        try:
            self.run(f"{action} PREPARED {{name}}", name=self.sql.Literal(name))
        except psycopg.errors.UndefinedObject:
            return False
        return True

    def drop(self, staging: str) -> None:
        """Drops a staging table and its entry in the list; to be called within a transaction."""
        self.run("DROP TABLE IF EXISTS {table}", table=self.within(staging))
        self.run("DELETE FROM {staged} WHERE name = %s", (staging,))

    def columns(self) -> dict[str, TableColumn]:
        """The columns of the target by their names."""
        rows = self.run(
            "SELECT attname, typname, attnotnull, atttypmod, format_type(atttypid, atttypmod), "
            "CASE WHEN attgenerated <> '' THEN 'GENERATED ALWAYS AS (...)' "
            "WHEN attidentity = 'a' THEN 'GENERATED ALWAYS AS IDENTITY' ELSE '' END, "
            "CASE typtype WHEN 'e' THEN 'text' "
            "WHEN 'd' THEN (SELECT typname FROM pg_type b WHERE b.oid = t.typbasetype) ELSE typname END "
            "FROM pg_attribute JOIN pg_type t ON t.oid = atttypid "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (self._quoted(self.table),),
        )
        return {row[0]: TableColumn(*row) for row in rows}

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raises ValueError unless a unique index of the table has exactly these columns: ``ON CONFLICT`` needs it.

        A view has no index; the server looks at those of its table.
        """
        rows = self.run(
            "SELECT relkind = 'v', array(SELECT attname::text FROM pg_attribute "
            "WHERE attrelid = indrelid AND attnum = ANY((indkey::int2[])[:indnkeyatts - 1]) ORDER BY attname) "
            "FROM pg_class LEFT JOIN pg_index ON indrelid = pg_class.oid AND indisunique AND indisvalid "
            "AND indimmediate AND indpred IS NULL AND indexprs IS NULL WHERE pg_class.oid = to_regclass(%s)",
            (self._quoted(self.table),),
        ).fetchall()
        if not any(is_view or set(columns) == set(keys) for is_view, columns in rows):
            there = "; ".join(", ".join(columns) for _, columns in rows if columns) or "no unique columns"
            raise ValueError(
                f"option 'keys': mode upsert needs a unique index of table {self.table!r} with the columns "
                f"{', '.join(keys)} and no others; the table has {there}"
            )

    def close(self) -> None:
        self.connection.close()


class PostgresWriter(SinkWriter):
    """Copies rows into a staging table. A transaction is open from the first row up to the commit before a
    checkpoint."""

    def __init__(self, database: Database, schema: pa.Schema, context: SinkContext, options: Mapping[str, Any]) -> None:
        self._database = database
        self._context = context
        self._marker = options["deleteColumn"]
        self._prepares = bool(options["preparedTransactions"])
        self._columns = [name for name in schema.names if name != self._marker]
        try:
            self._table = self._checked_columns(schema, options["keys"])
        except ValueError:
            database.close()
            raise
        self._rows = 0
        self._name = ""
        self._copying: Any = None
        self._copy: Any = None
        database.prepare()
        if self._prepares and database.run("SHOW max_prepared_transactions").fetchone()[0] == "0":
            database.close()
            raise ValueError(
                "option preparedTransactions: the server has max_prepared_transactions=0; set it to at least three "
                "times the parallelism of the sink, or leave the option out"
            )

    def write(self, batch: pa.RecordBatch) -> None:
        table = self._database.table
        deleted = batch.column(self._marker).fill_null(False) if self._marker else None
        columns = [values_of(table, column, batch.column(column.name), deleted) for column in self._table]
        if deleted is not None:
            columns.append(deleted.to_pylist())
        if self._copy is None:
            self._begin()
        for at, row in enumerate(zip(*columns, strict=True), self._rows):
            self._copy.write_row(row if self._prepares else (*row, at))
        self._rows += batch.num_rows

    def prepare_commit(self, checkpoint_id: int) -> Sequence[StagingTable]:
        if self._copy is None:
            return ()
        context = self._context
        self._copying.__exit__(None, None, None)
        self._copying = self._copy = None
        if self._prepares:
            place = f"{context.sink_id}:{context.job_id}:{context.attempt}:{checkpoint_id}"
            self._name = f"ckpt:{place}:{secrets.token_hex(8)}"
        self._database.run(
            "INSERT INTO {staged} (name, sink_id, job_id, attempt, checkpoint_id) VALUES (%s, %s, %s, %s, %s)",
            (self._name, context.sink_id, context.job_id, context.attempt, checkpoint_id),
        )
        if self._prepares:
            self._database.run("PREPARE TRANSACTION {name}", name=self._database.sql.Literal(self._name))
        else:
            self._database.run("COMMIT")
        table, self._rows = StagingTable(self._name, self._rows), 0
        return [table]

    def close(self) -> None:
        """Closes the connection, which rolls an open transaction back."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            with suppress(Exception):  # a broken connection may be the cause
                copying.__exit__(RuntimeError, RuntimeError("the writer is closed"), None)
        self._database.close()

    def _begin(self) -> None:
        self._database.run("BEGIN")
        # The driver's names of types.
        types = [f"{kind[1:]}[]" if kind.startswith("_") else kind for kind in (column.kind for column in self._table)]
        if self._prepares:
            self._copy_into(self._database.within(self._database.table), self._columns, types)
            return
        database = self._database
        self._name = f"ckpt_staging_{int(time.time()):x}_{secrets.token_hex(8)}"
        table = database.within(self._name)
        database.run(
            "CREATE TABLE {table} AS SELECT {columns}{marker}, 0::bigint AS {order} FROM {target} WITH NO DATA",
            table=table,
            columns=self._columns,
            marker=database.joined("", ", false AS {}", [self._marker] if self._marker else []),
            order=_ORDER,
        )
        marker = [self._marker] if self._marker else []
        self._copy_into(table, [*self._columns, *marker, _ORDER], [*types, *("bool" for _ in marker), "int8"])

    def _copy_into(self, table: Any, columns: Sequence[str], types: Sequence[str]) -> None:
        database = self._database
        statement = database.sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
            table, database.sql.SQL(", ").join(map(database.sql.Identifier, columns))
        )
        self._copying = database.connection.cursor().copy(statement)
        self._copy = self._copying.__enter__()
        self._copy.set_types(types)

    def _checked_columns(self, schema: pa.Schema, keys: Sequence[str]) -> list[TableColumn]:
        """The columns of the table that are written.

        Raises ValueError for a column that the table lacks, computes, or has with another type, and for keys that it
        has no unique index of.
        """
        database = self._database
        known = database.columns()
        found: list[TableColumn] = []
        for name in self._columns:
            if name not in known:
                raise ValueError(f"table {database.table!r} has no column {name!r}; it has {', '.join(known)}")
            column = known[name]
            if column.generated:
                raise ValueError(
                    f"column {name!r} of table {database.table!r} is {column.generated}, so no value can be written: "
                    "leave it out of the query"
                )
            allowed = database_types(schema.field(name))
            if column.kind not in allowed:
                raise ValueError(
                    f"column {name!r} is {column.kind} in table {database.table!r} and {schema.field(name).type} in "
                    f"the query, for which the table's column may be {', '.join(allowed)}: cast it"
                )
            found.append(replace(column, is_key=name in keys))
        if keys:
            database.check_keys(keys)
        return found


class PostgresCommitter(SinkCommitter):
    """Merges staging tables into the target."""

    def __init__(self, database: Database, schema: pa.Schema, options: Mapping[str, Any]) -> None:
        self._database = database
        self._marker = options["deleteColumn"]
        self._columns = [name for name in schema.names if name != self._marker]
        self._keys: tuple[str, ...] = options["keys"]
        database.prepare()

    def commit(self, transaction: Transaction, committables: Sequence[StagingTable]) -> CommitOutcome:
        """Raises CommitError when a staging table, or a prepared transaction, is missing that was not committed."""
        prepared = [staging for staging in committables if staging.name.startswith("ckpt:")]
        noted = "SELECT 1 FROM {commits} WHERE writer_id = %s AND checkpoint_id >= %s"
        place = (transaction.writer_id, transaction.checkpoint_id)
        if prepared and self._database.run(noted, place).fetchone() is None:
            for staging in prepared:
                self.commit_prepared(staging)
        import psycopg

        try:
            return self._commit_once(transaction, committables)
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            raise CommitError(
                f"the rows of checkpoint {transaction.checkpoint_id} cannot be merged into table "
                f"{self._database.table!r}: {str(error).strip()}. They stay in "
                f"{', '.join(staging.name for staging in committables)}: change the table or these rows, then the next "
                "attempt, or a job that starts from the checkpoint, merges them"
            ) from error

    def _commit_once(self, transaction: Transaction, committables: Sequence[StagingTable]) -> CommitOutcome:
        with self._database.connection.transaction():
            noted = self._database.run(
                "INSERT INTO {commits} AS known (writer_id, checkpoint_id) VALUES (%s, %s) "
                "ON CONFLICT (writer_id) DO UPDATE SET checkpoint_id = EXCLUDED.checkpoint_id, committed_at = now() "
                "WHERE known.checkpoint_id < EXCLUDED.checkpoint_id RETURNING 1",
                (transaction.writer_id, transaction.checkpoint_id),
            ).fetchone()
            if noted is not None:
                for staging in committables:
                    if staging.name.startswith("ckpt:"):
                        self._database.run("DELETE FROM {staged} WHERE name = %s", (staging.name,))
                    else:
                        self.merge(staging)
        return CommitOutcome.ALREADY_COMMITTED if noted is None else CommitOutcome.COMMITTED

    def commit_prepared(self, staging: StagingTable) -> None:
        """Commits a prepared transaction, unless that was done before. Raises CommitError if it was rolled back."""
        if self._database.end_prepared(staging.name, "COMMIT"):
            return
        if self._database.run("SELECT 1 FROM {staged} WHERE name = %s", (staging.name,)).fetchone() is None:
            raise CommitError(
                f"the prepared transaction {staging.name} no longer exists, and its {staging.rows} rows were not "
                "committed: it was rolled back; restore an earlier checkpoint"
            )

    def merge(self, staging: StagingTable) -> None:
        """Moves the rows of a staging table into the target and drops it, within the transaction of a commit."""
        database = self._database
        exists = database.run("SELECT 1 FROM {staged} WHERE name = %s", (staging.name,)).fetchone()
        if exists is None:
            raise CommitError(
                f"the staging table {staging.name} no longer exists, and its {staging.rows} rows were not committed: "
                "restore an earlier checkpoint"
            )
        table = database.within(staging.name)
        if not self._keys:
            database.run(
                "INSERT INTO {target} ({columns}) SELECT {columns} FROM {table} ORDER BY {order}",
                columns=self._columns,
                table=table,
                order=_ORDER,
            )
        else:
            self._merge_by_key(table)
        database.drop(staging.name)

    def _merge_by_key(self, table: Any) -> None:
        """Merges the last row of each key: it replaces the row of the target, or removes it."""
        database = self._database
        last = {
            "keys": self._keys,
            "columns": self._columns,
            "table": table,
            "order": _ORDER,
            "marker": self._marker or _ORDER,
        }
        rows = "SELECT DISTINCT ON ({keys}) * FROM {table} ORDER BY {keys}, {order} DESC"
        if self._marker:
            database.run(
                f"DELETE FROM {{target}} AS t USING ({rows}) AS s WHERE s.{{marker}} AND {{equal}}",
                equal=database.joined(" AND ", "t.{0} = s.{0}", self._keys),
                **last,
            )
        others = [name for name in self._columns if name not in self._keys]
        kept = "WHERE NOT s.{marker}" if self._marker else ""
        action = "UPDATE SET {changes}" if others else "NOTHING"
        database.run(
            f"INSERT INTO {{target}} ({{columns}}) SELECT {{columns}} FROM ({rows}) AS s {kept} "
            f"ON CONFLICT ({{keys}}) DO {action}",
            changes=database.joined(", ", "{0} = EXCLUDED.{0}", others),
            **last,
        )

    def abort(self, transaction: Transaction, committables: Sequence[StagingTable]) -> None:
        for staging in committables:
            if staging.name.startswith("ckpt:"):
                self._database.end_prepared(staging.name, "ROLLBACK")
        with self._database.connection.transaction():
            for staging in committables:
                self._database.drop(staging.name)

    def close(self) -> None:
        self._database.close()
