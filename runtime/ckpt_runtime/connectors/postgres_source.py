"""Format ``postgresql`` as a source: the rows of a table in the order of a column whose values grow.

Values that grow do not become visible in their order: a transaction that drew a value may commit after one that drew a
greater value, and a reader that has passed the greater value would miss the row. Therefore the reader advances to a
value only when no row below it can appear any longer. An INSERT draws the value of a sequence while it holds a lock of
the table, up to the end of its transaction. The enumerator therefore records the greatest value, then the transactions
that hold such a lock, and waits until they have ended, as CREATE INDEX CONCURRENTLY does. It blocks no transaction.
With option ``settleTime`` it waits for that time instead, for values that the database does not draw.

A split is a range of values; its position is the last value that was emitted. Never writes to the database.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from queue import Empty, Full, Queue, SimpleQueue
from threading import Event
from typing import Any, ClassVar, TypedDict, TypeVar

import msgspec
import pyarrow as pa

from ckpt_runtime.connectors.postgres_sink import Database
from ckpt_runtime.connectors.splits import BuiltInSource
from ckpt_runtime.failure_report import printable
from ckpt_runtime.graph.postgres_options import LATEST, import_driver, readable_types
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.operators.task_context import HelperThread
from ckpt_runtime.sources import (
    BadRow,
    PositionKind,
    Split,
    SplitEnumerator,
    SplitReader,
    SplitRows,
    StartPosition,
    single_offset,
)

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_RECONNECT_S = 1.0
_STEP_S = 0.1
_PAGES = 2
_MOST_SHOWN_CHARS = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEAST_VALUES = 10_000
_LEAST_MICROSECONDS = 60_000_000
"""How many values, or microseconds, a split has at least; below, a range is not divided."""

_CATALOG = """
SELECT c.oid, c.relkind, a.attnotnull, a.attidentity <> '' OR pg_get_expr(d.adbin, d.adrelid) LIKE 'nextval(%%',
    s.seqcache, s.seqincrement, s.seqcycle, pg_is_in_recovery(),
    EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = c.oid),
    EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indkey[0] = a.attnum AND indpred IS NULL AND indisvalid)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
LEFT JOIN pg_sequence s ON s.seqrelid =
    pg_get_serial_sequence(format('%%I.%%I', %(schema)s::text, %(table)s::text), a.attname)::regclass
WHERE c.oid = format('%%I.%%I', %(schema)s::text, %(table)s::text)::regclass AND a.attname = %(column)s AND a.attnum > 0
"""
_WRITERS = """
WITH RECURSIVE parts(oid) AS (
    SELECT %s::oid UNION SELECT inhrelid FROM pg_inherits JOIN parts ON inhparent = parts.oid
)
SELECT virtualtransaction FROM pg_locks JOIN parts ON relation = parts.oid
WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_PREPARED = "-1/"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SAID_AFTER_S = 0.02, 0.5, 30.0


class _ReadUpTo(TypedDict):
    """The state of an enumerator: whether it has ``looked`` at the table and therefore begun at ``startingValue``; the
    value up to which rows were sent, None before the first row; and the number of splits so far, for their ids."""

    looked: bool
    upto: int | None
    splits: NonNegative


class _ValueRange(TypedDict):
    """The rows of a split: with greater values than ``after``, up to ``upto``. Timestamps are microseconds."""

    after: int
    upto: int


class PostgresSource(BuiltInSource):
    """The source of format ``postgresql``."""

    state_type: Any = _ReadUpTo
    description_type: Any = _ValueRange
    position_type: Any = int
    start_positions: ClassVar[frozenset[PositionKind]] = frozenset({"earliest", "latest", "timestamp", "offsets"})

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return PostgresEnumerator(self._values, schema, state, bounded=bounded)

    def repositioned(
        self, schema: pa.Schema, state: Any, reading: Sequence[tuple[Split, Any]], position: StartPosition
    ) -> Any:
        """``offsets`` are a value of the growing column, after whose row the source continues."""
        column = self._values["growingColumn"]
        is_time = pa.types.is_timestamp(schema.field(column).type)
        upto: int | None = None
        match position.kind:
            case "latest":
                options = {**self._values, "startingValue": LATEST}
                before = {"looked": False, "upto": None, "splits": state["splits"]}
                with closing(PostgresEnumerator(options, schema, before, bounded=True)) as there:
                    while there.discover():
                        pass  # transactions that may still commit smaller values are waited for
                    return there.snapshot()
            case "timestamp":
                if not is_time:
                    raise ValueError(
                        f"its growing column {column!r} does not contain timestamps: set an offset instead of a time"
                    )
                assert position.time_ms is not None
                upto = position.time_ms * 1000 - 1
            case "offsets":
                if is_time:
                    raise ValueError(f"its growing column {column!r} contains timestamps: set a time")
                upto = single_offset(position.offsets, "value")
        return {"looked": True, "upto": upto, "splits": state["splits"]}

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        return PostgresReader(self._values, schema)


@dataclass(frozen=True, slots=True)
class RowsOfTable:
    """Rows in order: those that fit, the values of the growing column of all, and those that do not, by position."""

    batch: pa.RecordBatch
    numbers: Sequence[int]
    bad: Mapping[int, BadRow]

    def parted(self, cut: int) -> tuple[RowsOfTable, RowsOfTable]:
        """The first ``cut`` rows, and the others."""
        first = {at: row for at, row in self.bad.items() if at < cut}
        rest = {at - cut: row for at, row in self.bad.items() if at >= cut}
        good = cut - len(first)
        return (
            RowsOfTable(self.batch.slice(0, good), self.numbers[:cut], first),
            RowsOfTable(self.batch.slice(good), self.numbers[cut:], rest),
        )


class GrowingTable:
    """A connection to the table. Raises ValueError for a table that cannot be read exactly."""

    def __init__(self, options: Mapping[str, Any], schema: pa.Schema) -> None:
        self._column = options["growingColumn"]
        self._is_time = pa.types.is_timestamp(schema.field(self._column).type)
        self._has_zone = self._is_time and schema.field(self._column).type.tz is not None
        self._settle_ms: float | None = options["settleTime"]
        self._schema = schema
        self._database = Database(options)
        try:
            self._oid = self._checked()
            self._database.run("SET TIME ZONE 'UTC'")
        except BaseException:
            self.close()
            raise
        self._columns = self._database.sql.SQL(", ").join(
            self._database.sql.SQL("{}::text" if field.type == pa.string() else "{}").format(
                self._database.sql.Identifier(field.name)
            )
            for field in schema
        )

    def bounds(self) -> tuple[int, int] | None:
        """The least and the greatest value of the rows that are visible now; None if there are none."""
        least, greatest = self._run("SELECT min({column}), max({column}) FROM {target}").fetchone()
        return None if greatest is None else (self._number(least), self._number(greatest))

    def writers(self) -> set[str]:
        """The transactions that have written to the table, or are about to, and have not ended."""
        return {writer for (writer,) in self._run(_WRITERS, (self._oid,)).fetchall()}

    def count(self, after: int, upto: int) -> int:
        """The number of rows of a range."""
        condition = "{column} > %s AND {column} <= %s"
        values = (self._value(after), self._value(upto))
        return int(self._run(f"SELECT count(*) FROM {{target}} WHERE {condition}", values).fetchone()[0])

    def page(self, after: int, upto: int, rows: int) -> RowsOfTable | None:
        """The next rows of a range in order, some more than ``rows`` if they share a value; None after the last."""
        cursor = self._run(
            "SELECT {columns} FROM {target} WHERE {column} > %s AND {column} <= %s ORDER BY {column} "
            f"FETCH FIRST {rows:d} ROWS WITH TIES",
            (self._value(after), self._value(upto)),
            columns=self._columns,
        )
        if not cursor.rowcount:
            return None
        try:
            batch = self._batch_of(cursor.fetchall())
        except (import_driver().DataError, pa.ArrowException, ValueError, OverflowError):
            return self._good_and_bad(cursor)
        return RowsOfTable(batch, batch.column(self._column).cast(pa.int64()).to_pylist(), {})

    def _batch_of(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True) if rows else [()] * len(self._schema)
        arrays = [pa.array(values, field.type) for field, values in zip(self._schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _good_and_bad(self, cursor: Any) -> RowsOfTable:
        """Reads value by value what the cursor has found. Raises ValueError for a growing column without a value."""
        found, kinds = cursor.pgresult, cursor.adapters
        loaders = []
        for at in range(found.nfields):
            kind, form = found.ftype(at), found.fformat(at)
            loaders.append((kinds.get_loader(kind, form) or kinds.get_loader(0, form))(kind, cursor))
        rows: list[list[Any]] = []
        numbers: list[int] = []
        bad: dict[int, BadRow] = {}
        for at in range(found.ntuples):
            raw = [found.get_value(at, column) for column in range(found.nfields)]
            row, problem = self._loaded(raw, [loader.load for loader in loaders])
            number = row[self._schema.get_field_index(self._column)]
            if number is None:
                raise ValueError(f"table {self._database.table!r}: {problem}")
            numbers.append(self._number(number))
            if problem is None:
                rows.append(row)
                continue
            texts = {name: value and value.decode() for name, value in zip(self._schema.names, raw, strict=True)}
            place = f"table {self._database.table!r}, {self._column} = {number}"
            bad[at] = BadRow(problem, place, msgspec.json.encode(texts))
        return RowsOfTable(self._batch_of(rows), numbers, bad)

    def _loaded(
        self, raw: Sequence[bytes | None], loads: Sequence[Callable[[bytes], Any]]
    ) -> tuple[list[Any], str | None]:
        """The values of a row, None for one that cannot be read, and what is wrong with the first of these."""
        row: list[Any] = []
        problem = None
        for field, value, load in zip(self._schema, raw, loads, strict=True):
            try:
                loaded = None if value is None else load(value)
                pa.scalar(loaded, field.type)
            except (import_driver().DataError, pa.ArrowException, ValueError, OverflowError) as error:
                shown = printable(repr(value and value.decode()), _MOST_SHOWN_CHARS)
                problem = problem or f"column {field.name!r}: {shown} does not fit into {field.type}: {error}"
                loaded = None
            row.append(loaded)
        return row, problem

    def close(self) -> None:
        self._database.close()

    def _run(self, text: str, values: Sequence[Any] | None = None, **names: Any) -> Any:
        return self._database.run(text, values, column=self._column, **names)

    def _number(self, value: Any) -> int:
        if not self._is_time:
            return int(value)
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return int((moment - _EPOCH) // timedelta(microseconds=1))

    def _value(self, number: int) -> Any:
        if not self._is_time:
            return number
        moment = _EPOCH + timedelta(microseconds=number)
        return moment if self._has_zone else moment.replace(tzinfo=None)

    def _checked(self) -> int:
        """Checks types, and whether the order of values can be relied on. Returns the id of the table."""
        database = self._database
        known = database.columns()
        for field in self._schema:
            if field.name not in known:
                raise ValueError(f"table {database.table!r} has no column {field.name!r}; it has {', '.join(known)}")
            allowed = readable_types(field)
            column = known[field.name]
            if column.read_as not in allowed:
                raise ValueError(
                    f"column {field.name!r} is {column.kind} in table {database.table!r} and was declared as "
                    f"{field.type}, which can read {', '.join(allowed)}"
                )
        place = {"schema": database.schema, "table": database.table, "column": self._column}
        row = database.connection.execute(_CATALOG, place).fetchone()
        oid, kind, required, is_drawn, cache, increment, cycles, is_standby, is_subscribed, has_index = row
        name = f"column {self._column!r} of table {database.table!r}"
        if kind not in ("r", "p"):
            raise ValueError(f"{database.table!r} is not a table, but a stream can only read tables")
        if not required:
            raise ValueError(f"{name} may be null, and such rows would never be read: ALTER COLUMN ... SET NOT NULL")
        if not has_index:
            _LOG.warning(
                "postgresql: %s has no index, so the whole table is read whenever the source looks for new rows", name
            )
        if self._settle_ms is None:
            self._check_order(name, is_drawn and cache is not None, cache, increment, cycles, is_standby, is_subscribed)
        return int(oid)

    @staticmethod
    def _check_order(
        name: str,
        is_drawn: bool,
        cache: int | None,
        increment: int | None,
        cycles: bool | None,
        is_standby: bool,
        is_subscribed: bool,
    ) -> None:
        """Raises ValueError if the locks of the table do not show which rows may still appear."""
        problem = None
        if not is_drawn:
            problem = "its values do not come from the column's own sequence (serial, or GENERATED AS IDENTITY)"
        elif cache != 1 or cycles or (increment or 0) < 1:
            problem = f"its sequence has CACHE {cache}, INCREMENT {increment}, {'CYCLE' if cycles else 'NO CYCLE'}"
        elif is_standby:
            problem = "the server is a standby, which does not show open transactions of writers"
        elif is_subscribed:
            problem = "the table is the target of a subscription, which writes values in the order of commits"
        if problem is not None:
            raise ValueError(
                f"{name}: {problem}, so rows with smaller values may appear later. Set option settleTime to the time "
                "after which this cannot happen"
            )


class _Connection:
    """The table, with a new connection after each one that broke. While the database does not answer, it is asked
    again until ``closed`` is set; but the first connection has to succeed."""

    def __init__(self, options: dict[str, Any], schema: pa.Schema, closed: Event) -> None:
        self._options = options
        self._schema = schema
        self._closed = closed
        self._table: GrowingTable | None = None
        self._was_connected = False

    def answer(self, ask: Callable[[GrowingTable], T]) -> T | None:
        """What ``ask`` returns for the table; None if the source was closed meanwhile."""
        operational = import_driver().OperationalError
        while not self._closed.is_set():
            try:
                if self._table is None:
                    self._table = GrowingTable(self._options, self._schema)
                    self._was_connected = True
                return ask(self._table)
            except operational as error:
                if not self._was_connected:
                    raise
                _LOG.warning("postgresql: the table cannot be read now: %s", error)
                self.close()
                self._closed.wait(_RECONNECT_S)
        return None

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None


@dataclass(frozen=True, slots=True)
class _Settled:
    """Rows up to ``upto`` are complete; ``least`` is the least value of the table then. None: the table is empty."""

    least: int | None
    upto: int | None


class PostgresEnumerator(SplitEnumerator):
    """Sends ranges of values below which no row can appear any longer. A thread queries the database."""

    idle_ms = 50

    def __init__(self, options: dict[str, Any], schema: pa.Schema, state: Any, *, bounded: bool) -> None:
        self._options = options
        self._schema = schema
        self._bounded = bounded
        self._upto: int | None = None if state is None else state["upto"]
        self._splits = 0 if state is None else state["splits"]
        start = options["startingValue"]
        self._is_first = state is None or not state["looked"]
        self._skips = self._is_first and start == LATEST
        if self._is_first and isinstance(start, int):
            self._upto = start
        is_time = pa.types.is_timestamp(schema.field(options["growingColumn"]).type)
        self._least_width = _LEAST_MICROSECONDS if is_time else _LEAST_VALUES
        self._found: SimpleQueue[_Settled | Exception] = SimpleQueue()
        self._taken, self._closed = Event(), Event()
        self._ended = False
        self._thread = HelperThread(target=self._watch, name="postgresql values", daemon=True)
        self._thread.start()

    def discover(self) -> Sequence[Split]:
        if self._ended:
            return ()
        try:
            found = self._found.get(timeout=_STEP_S) if self._bounded else self._found.get_nowait()
        except Empty:
            # An empty range keeps a bounded source open while transactions are waited for.
            return [self._split(0, 0)] if self._bounded else ()
        if isinstance(found, Exception):
            raise found
        self._ended = self._bounded
        splits: list[Split] = []
        if found.upto is not None and found.least is not None and (self._upto is None or found.upto > self._upto):
            after = found.least - 1 if self._upto is None else self._upto
            if not self._skips:
                splits = [self._split(*part) for part in self._parts(after, found.upto)]
            self._upto = found.upto
        self._is_first = self._skips = False
        self._taken.set()
        return splits

    def snapshot(self) -> Any:
        return {"looked": not self._is_first, "upto": self._upto, "splits": self._splits}

    def close(self) -> None:
        self._closed.set()
        self._taken.set()
        self._thread.join(5.0)

    def _split(self, after: int, upto: int) -> Split:
        self._splits += 1
        return Split(f"values#{self._splits}", {"after": after, "upto": upto})

    def _parts(self, after: int, upto: int) -> list[tuple[int, int]]:
        """Divides a range into at most ``numPartitions`` parts of equal width."""
        width = upto - after
        count = max(1, min(self._options["numPartitions"], width // self._least_width))
        ends = [after + width * part // count for part in range(count + 1)]
        return list(pairwise(ends))

    def _watch(self) -> None:
        """Looks for settled values periodically."""
        pause_s = self._options["pollInterval"] / 1000
        sent: int | None = self._upto
        try:
            with closing(_Connection(self._options, self._schema, self._closed)) as connection:
                while not self._closed.is_set():
                    settled = connection.answer(partial(self._settle, sent=sent))
                    if settled is not None:
                        self._taken.clear()
                        self._found.put(settled)
                        if self._bounded:
                            break
                        if not self._closed.is_set():
                            self._taken.wait()
                        sent = settled.upto if settled.upto is not None else sent
                    self._closed.wait(pause_s)
        except Exception as error:
            self._found.put(error)

    def _settle(self, table: GrowingTable, sent: int | None) -> _Settled | None:
        """Waits until rows up to the greatest value of now are complete; None if there is no greater one than before.

        An empty table and one without new rows are a result, too, where it is waited for: for a bounded source, and for
        one that begins after the latest value.
        """
        bounds = table.bounds()
        is_new = bounds is not None and (sent is None or bounds[1] > sent)
        if not is_new and not (self._bounded or self._skips):
            return None
        wait_ms: float | None = self._options["settleTime"]
        if wait_ms is None:
            self._wait_for_writers(table)
        elif is_new:
            self._closed.wait(wait_ms / 1000)
        return _Settled(*(bounds or (None, None)))

    def _wait_for_writers(self, table: GrowingTable) -> None:
        """Returns when the transactions that write to the table now have ended."""
        pause_s, waited_s = _FIRST_PAUSE_S, 0.0
        before = table.writers()
        while before and not self._closed.wait(pause_s):
            # A transaction that is prepared for a commit in two phases gets another name.
            before = {now for now in table.writers() if now in before or now.startswith(_PREPARED)}
            waited_s += pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if waited_s >= _SAID_AFTER_S and before:
                waited_s = 0.0
                _LOG.warning(
                    "postgresql: new rows of %s wait for open transactions that have written to it, with these "
                    "values of virtualtransaction in pg_locks: %s",
                    self._options["dbtable"],
                    ", ".join(sorted(before)[:10]),
                )


@dataclass(frozen=True, slots=True)
class _Page:
    """Rows of a split; None at its end."""

    split_id: str
    rows: RowsOfTable | None


class PostgresReader(SplitReader):
    """Reads ranges of values, one after the other. A thread fetches the next rows while these are processed."""

    def __init__(self, options: dict[str, Any], schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._waiting: SimpleQueue[tuple[Split, int | None]] = SimpleQueue()
        self._pages: Queue[_Page | Exception] = Queue(_PAGES)
        self._positions: dict[str, int] = {}
        self._counts: dict[str, int | None] = {}
        self._rest: _Page | None = None
        self._closed = Event()
        self._thread: HelperThread | None = None

    def add(self, split: Split, position: Any) -> None:
        self._positions[split.id] = split.description["after"] if position is None else position
        self._counts[split.id] = None
        self._waiting.put((split, position))
        if self._thread is None:
            self._thread = HelperThread(target=self._fetch, name="postgresql rows", daemon=True)
            self._thread.start()

    def read(self, most_rows: int) -> SplitRows | None:
        if self._rest is None:
            try:
                found = self._pages.get_nowait()
            except Empty:
                return None
            if isinstance(found, Exception):
                raise found
            self._rest = found
        page, name = self._rest, self._rest.split_id
        if page.rows is None:
            self._rest = None
            del self._counts[name]
            return SplitRows(name, self._positions.pop(name), ended=True)
        numbers = page.rows.numbers
        cut = min(most_rows, len(numbers))
        while cut < len(numbers) and numbers[cut] == numbers[cut - 1]:
            cut += 1  # a position is after all rows of one value
        rows, rest = page.rows.parted(cut)
        self._rest = _Page(name, rest) if rest.numbers else None
        self._positions[name] = numbers[cut - 1]
        if (count := self._counts[name]) is not None:
            self._counts[name] = max(0, count - cut)
        return SplitRows(name, self._positions[name], rows.batch, bad=tuple(rows.bad.values()))

    def backlog(self) -> int | None:
        counts = list(self._counts.values())
        return None if None in counts else sum(filter(None, counts))

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _fetch(self) -> None:
        """Fetches the pages of splits."""
        split: Split | None = None
        after = 0
        try:
            with closing(_Connection(self._options, self._schema, self._closed)) as connection:
                while not self._closed.is_set():
                    if split is None:
                        try:
                            split, position = self._waiting.get(timeout=_STEP_S)
                        except Empty:
                            continue
                        after = split.description["after"] if position is None else position
                    page = connection.answer(partial(self._next_page, split=split, after=after))
                    if page is not None:
                        self._put(page)
                        split, after = (None, 0) if page.rows is None else (split, page.rows.numbers[-1])
        except Exception as error:
            self._put(error)

    def _next_page(self, table: GrowingTable, split: Split, after: int) -> _Page:
        upto = split.description["upto"]
        if after >= upto:
            return _Page(split.id, None)
        if self._counts.get(split.id) is None:
            self._counts[split.id] = table.count(after, upto)
        return _Page(split.id, table.page(after, upto, self._options["fetchsize"]))

    def _put(self, item: _Page | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._pages.put(item, timeout=_STEP_S)
                return
            except Full:
                continue
