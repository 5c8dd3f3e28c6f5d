"""Format ``postgresql``, beside a real server: staging, merging, repeated commits, and what a crash leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.connectors.part_directory import CommitError
from ckpt_runtime.connectors.postgres_sink import PostgresSink, StagingTable
from ckpt_runtime.connectors.sink_operators import PreparingSinkOperator
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import check_sink
from ckpt_runtime.sinks import BadRowError, CommitOutcome, SinkContext, Transaction
from tests.support.patience import patient
from tests.support.postgres_server import postgres_server
from tests.unit.runtime.connectors.harness import context, opened

psycopg = pytest.importorskip("psycopg", reason="pip install 'ckpt-runtime[postgres]'")

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
CONTEXT = SinkContext("0123456789abcdef", "job", "sink", 0, 1, 0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres_server() as started:
        yield started


@pytest.fixture
def database(url: str) -> Iterator[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        tables = "SELECT quote_ident(tablename) FROM pg_tables WHERE schemaname = 'public'"
        for (name,) in connection.execute(tables).fetchall():
            connection.execute(f"DROP TABLE {name}")
        connection.execute("CREATE TABLE target (id bigint PRIMARY KEY, name text)")
        yield connection


UPSERT = {"mode": "upsert", "keys": "id"}


def sink_of(url: str, schema: pa.Schema = SCHEMA, **options: str) -> PostgresSink:
    given = {"url": f"jdbc:{url}", "dbtable": "target", "password": "unused", **options}
    check_sink("postgresql", given, schema)
    return PostgresSink(given)


def staged(
    sink: PostgresSink, rows: pa.RecordBatch, checkpoint: int, context: SinkContext = CONTEXT
) -> list[StagingTable]:
    """What a writer prepares that is closed, or killed, behind it."""
    writer = sink.open_writer(rows.schema, context)
    try:
        if rows.num_rows:
            writer.write(rows.slice(0, 1))
            writer.write(rows.slice(1))
        return list(writer.prepare_commit(checkpoint))
    finally:
        writer.close()


def committed(sink: PostgresSink, schema: pa.Schema, checkpoint: int, tables: list[StagingTable]) -> CommitOutcome:
    committer = sink.open_committer(schema, CONTEXT)
    try:
        return committer.commit(Transaction("writer", checkpoint), tables)
    finally:
        committer.close()


def named(*pairs: tuple[int, str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": number, "name": name} for number, name in pairs], schema=SCHEMA)


def content(database: Any) -> list[tuple[Any, ...]]:
    return list(database.execute("SELECT * FROM target ORDER BY 1").fetchall())


def staging_tables(database: Any) -> set[str]:
    found = database.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'ckpt_staging_%'").fetchall()
    listed = database.execute("SELECT name FROM ckpt_staged").fetchall()
    assert sorted(found) == sorted(listed)
    return {name for (name,) in found}


def test_rows_are_visible_with_their_commit_and_a_repeated_one_changes_nothing(url: str, database: Any) -> None:
    sink = sink_of(url)
    tables = [*staged(sink, named((1, "a"), (2, None)), 5), *staged(sink, named((3, "c")), 5, other_subtask())]
    assert content(database) == []
    tables = [sink.decode(sink.encode(table)) for table in tables]
    assert committed(sink, SCHEMA, 5, tables) is CommitOutcome.COMMITTED
    assert committed(sink, SCHEMA, 5, tables) is CommitOutcome.ALREADY_COMMITTED
    assert content(database) == [(1, "a"), (2, None), (3, "c")]
    assert staging_tables(database) == set()
    assert staged(sink, named(), 6) == []


def other_subtask() -> SinkContext:
    return replace(CONTEXT, subtask_index=1, parallelism=2)


def test_commit_that_fails_half_way_leaves_nothing_and_can_be_repeated(url: str, database: Any) -> None:
    sink = sink_of(url)
    tables = staged(sink, named((1, "a")), 1)
    with pytest.raises(CommitError, match="ckpt_staging_gone no longer exists, and its 7 rows"):
        committed(sink, SCHEMA, 1, [*tables, StagingTable("ckpt_staging_gone", 7)])
    assert content(database) == []
    assert committed(sink, SCHEMA, 1, tables) is CommitOutcome.COMMITTED
    assert content(database) == [(1, "a")]


@pytest.mark.parametrize("options", [{}, {"preparedTransactions": "true"}, {"mode": "upsert", "keys": "id"}])
def test_jobs_that_write_to_one_table_at_the_same_time_have_each_row_once(
    url: str, database: Any, options: dict[str, str]
) -> None:
    """They also create the tables beside it, and of ``upsert`` write the same keys in other orders."""
    sink, jobs, together = sink_of(url, **options), range(3), Barrier(3, timeout=patient(30))
    upserts = "mode" in options

    def run(job: int) -> None:
        place = replace(CONTEXT, sink_id=f"{job}" * 16, job_id=f"{job}" * 32)
        together.wait()
        sink.clean_up(place)
        committer = sink.open_committer(SCHEMA, place)
        for checkpoint in range(1, 6):
            ids = range(20) if upserts else range(100 * job + 10 * checkpoint, 100 * job + 10 * checkpoint + 10)
            rows = named(*((number, f"{job}") for number in (reversed(ids) if job % 2 else ids)))
            tables = staged(sink, rows, checkpoint, place)
            together.wait()
            committer.commit(Transaction(f"writer-{job}", checkpoint), tables)
        committer.close()

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(run, jobs))
    wanted = range(20) if upserts else sorted(100 * job + number for job in jobs for number in range(10, 60))
    assert [number for number, _ in content(database)] == list(wanted)
    assert staging_tables(database) == set()


@pytest.mark.parametrize("marked", [False, True])
def test_last_row_of_each_key_replaces_or_removes_that_of_the_table(url: str, database: Any, marked: bool) -> None:
    database.execute("INSERT INTO target VALUES (1, 'old'), (2, 'kept'), (4, 'removed')")
    rows = named((1, "first"), (1, "last"), (3, "gone"), (4, "x"), (3, None))
    options = {"mode": "upsert", "keys": "id"}
    if marked:
        rows = rows.append_column("deleted", pa.array([True, False, False, True, None], pa.bool_()))
        options["deleteColumn"] = "deleted"
    sink = PostgresSink({"url": url, "dbtable": "public.target", **options})
    assert committed(sink, rows.schema, 1, staged(sink, rows, 1)) is CommitOutcome.COMMITTED
    wanted = [(1, "last"), (2, "kept"), (3, None), (4, "x")]
    assert content(database) == (wanted[:3] if marked else wanted)


def test_staging_tables_that_no_snapshot_covers_are_dropped_by_the_next_attempt(url: str, database: Any) -> None:
    sink = sink_of(url)
    covered = staged(sink, named((1, "a")), 3)
    staged(sink, named((2, "b")), 4)
    own = staged(sink, named((3, "c")), 4, replace(CONTEXT, attempt=1))
    other = staged(sink, named((4, "d")), 4, replace(CONTEXT, sink_id="f" * 16))
    staged(sink, named((5, "e")), 9, replace(CONTEXT, job_id="ended"))
    sink.clean_up(replace(CONTEXT, attempt=1, restored_checkpoint_id=3, ended_jobs=("ended",)))
    assert staging_tables(database) == {table.name for table in [*covered, *own, *other]}
    committer = sink.open_committer(SCHEMA, CONTEXT)
    committer.abort(Transaction("writer", 4), [*own, *other])
    committer.close()
    assert staging_tables(database) == {covered[0].name}


def test_writer_that_dies_before_the_checkpoint_leaves_nothing(url: str, database: Any) -> None:
    writer = sink_of(url).open_writer(SCHEMA, CONTEXT)
    writer.write(named((1, "a"), (2, "b")))
    writer.close()
    assert staging_tables(database) == set()


def test_values_of_all_types_are_those_of_the_rows(url: str, database: Any) -> None:
    moment = datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)
    row: dict[str, Any] = {
        "flag": True,
        "small": -(2**15),
        "number": 2**31 - 1,
        "big": -(2**63),
        "single": 1.5,
        "real": float("inf"),
        "price": Decimal("-12.30"),
        "name": "é\n\\",
        "raw": b"\x00\xff",
        "day": date(1500, 2, 28),
        "at": moment,
        "local": moment.replace(tzinfo=None),
        "tags": ["a", None],
    }
    kinds: list[Any] = [
        *(pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(10, 2)),
        *(pa.string(), pa.binary(), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.list_(pa.string())),
    ]
    schema = pa.schema([*zip(row, kinds, strict=True), ("wide", pa.int32()), ("document", pa.string())])
    columns = (
        *("flag boolean", "small smallint", "number integer", "big bigint", "single real", "real double precision"),
        *("price numeric(10,2)", "name varchar", "raw bytea", "day date", "at timestamptz", "local timestamp"),
        *("tags text[]", "wide numeric", "document jsonb", "added bigserial"),
    )
    database.execute(f"DROP TABLE target; CREATE TABLE target ({', '.join(columns)})")
    rows = [{**row, "wide": 7, "document": '{"a": [1]}'}, dict.fromkeys(schema.names)]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    sink = PostgresSink({"url": url, "dbtable": "target"})
    assert committed(sink, schema, 1, staged(sink, batch, 1)) is CommitOutcome.COMMITTED
    found = database.execute("SELECT * FROM target ORDER BY added").fetchall()
    assert found[0] == (*row.values(), 7, {"a": [1]}, 1)
    assert found[1] == (*[None] * len(schema.names), 2)


def test_columns_that_the_table_does_not_have_are_refused_by_name(url: str, database: Any) -> None:
    sink = sink_of(url)
    with pytest.raises(ValueError, match="has no column 'title'; it has id, name"):
        sink.open_writer(pa.schema([("title", pa.string())]), CONTEXT)
    with pytest.raises(ValueError, match="column 'id' is int8 in table 'target' and string in the query"):
        sink.open_writer(pa.schema([("id", pa.string())]), CONTEXT)
    with pytest.raises(ValueError, match="there is no table 'missing'"):
        sink_of(url, dbtable="missing").open_writer(SCHEMA, CONTEXT)


@pytest.mark.parametrize(
    ("columns", "more", "problem"),
    [
        ("id bigint, name text", UPSERT, "with the columns id and no others; the table has no unique columns"),
        ("id bigint, name text, UNIQUE (id, name)", UPSERT, "the table has id, name"),
        ("id bigint UNIQUE DEFERRABLE, name text UNIQUE", UPSERT, "the table has name"),
        (
            "id bigint, name text GENERATED ALWAYS AS ('x') STORED",
            {},
            r"'name' .* is GENERATED ALWAYS AS \(...\), so no",
        ),
        ("id bigint GENERATED ALWAYS AS IDENTITY, name text", {}, "'id' .* is GENERATED ALWAYS AS IDENTITY, so no"),
    ],
)
def test_table_that_cannot_take_the_rows_is_refused_before_a_commit(
    url: str, database: Any, columns: str, more: dict[str, str], problem: str
) -> None:
    database.execute(
        f"DROP TABLE target; CREATE TABLE target ({columns}); CREATE UNIQUE INDEX ON target (id) WHERE id > 5"
    )
    with pytest.raises(ValueError, match=problem):
        sink_of(url, **more).open_writer(SCHEMA, CONTEXT)


def test_keys_may_be_in_any_order_and_the_index_may_have_other_columns_beside_them(url: str, database: Any) -> None:
    database.execute(
        'DROP TABLE target; CREATE TABLE target (id bigint, name text, "Nr." int GENERATED BY DEFAULT AS IDENTITY); '
        'CREATE UNIQUE INDEX ON target (name, id) INCLUDE ("Nr."); CREATE VIEW seen AS SELECT id, name FROM target'
    )
    for table, rows in (("target", named((1, "a"))), ("seen", named((1, "a"), (2, "a")))):
        sink = sink_of(url, mode="upsert", keys="id, name", dbtable=table)
        committed(sink, SCHEMA, 1 if table == "target" else 2, staged(sink, rows, 1))
    database.execute("DROP VIEW seen")
    assert database.execute('SELECT id, name, "Nr." FROM target ORDER BY id').fetchall() == [(1, "a", 1), (2, "a", 3)]


def test_tables_and_columns_may_have_any_name(url: str, database: Any) -> None:
    database.execute('CREATE TABLE "T %s {x} ""t" ("Nr. %d" bigint PRIMARY KEY, "a ""{}""" text, "gone?" boolean)')
    schema = pa.schema([("Nr. %d", pa.int64()), ('a "{}"', pa.string()), ("gone?", pa.bool_())])
    rows = pa.RecordBatch.from_arrays([[1, 2, 2], ["a", "b", None], [False, False, True]], schema=schema)
    given = {"dbtable": '"T %s {x} ""t"', "mode": "upsert", "keys": "Nr. %d", "deleteColumn": "gone?"}
    sink = sink_of(url, schema, **given)
    committed(sink, schema, 1, staged(sink, rows, 1))
    assert database.execute('SELECT * FROM "T %s {x} ""t"').fetchall() == [(1, "a", None)]


def test_row_without_its_key_is_refused_and_one_that_is_removed_needs_no_other_column(url: str, database: Any) -> None:
    database.execute("DROP TABLE target; CREATE TABLE target (id bigint UNIQUE, name text NOT NULL)")
    database.execute("INSERT INTO target VALUES (1, 'a'), (2, 'b')")
    schema = SCHEMA.append(pa.field("gone", pa.bool_()))
    sink = sink_of(url, mode="upsert", keys="id", deleteColumn="gone", schema=schema)

    def tables(*rows: tuple[int | None, str | None, bool | None]) -> list[StagingTable]:
        values = [dict(zip(schema.names, row, strict=True)) for row in rows]
        return staged(sink, pa.RecordBatch.from_pylist(values, schema=schema), 1)

    for row, problem in (((None, "x", True), "a key, and null is equal to no key"), ((3, None, None), "NOT NULL")):
        with pytest.raises(BadRowError, match=f"cannot hold None: the column is {problem}"):
            tables(row)
    assert committed(sink, schema, 1, tables((1, None, True), (2, "c", False))) is CommitOutcome.COMMITTED
    assert content(database) == [(2, "c")]


def test_commit_that_a_constraint_refuses_names_the_table_and_where_the_rows_are(url: str, database: Any) -> None:
    database.execute("INSERT INTO target VALUES (1, 'there')")
    sink = sink_of(url)
    tables = staged(sink, named((1, "a"), (2, "b")), 7)
    expected = rf"rows of checkpoint 7 .* table 'target': duplicate key .*target_pkey.*They stay in {tables[0].name}"
    with pytest.raises(CommitError, match=re.compile(expected, re.DOTALL)):
        committed(sink, SCHEMA, 7, tables)
    database.execute(f'DELETE FROM "{tables[0].name}" WHERE id = 1')
    assert committed(sink, SCHEMA, 7, tables) is CommitOutcome.COMMITTED
    assert content(database) == [(1, "there"), (2, "b")]


UNFIT: list[tuple[str, pa.DataType, Any, Any, str]] = [
    ("numeric(5,2)", pa.decimal128(10, 3), Decimal("999.994"), Decimal("-999.995"), "must be less than 1000"),
    ("numeric(3,-2)", pa.int64(), 99_949, 99_950, "must be less than 100000"),
    ("varchar(3)", pa.string(), "äöü  ", "abcd", "it has 4 characters"),
    ("text", pa.string(), "a", "a\0", "the character with the code 0"),
    ("text[]", pa.list_(pa.string()), [None, "a"], ["a\0"], "the character with the code 0"),
    ("uuid", pa.string(), "0123456789abcdef0123456789abcdef", "1234", "badly formed"),
    ("jsonb", pa.string(), '{"a": 1e999, "b": "\\\\u0000"}', '{"a": "\\u0000"}', "the character with the code 0"),
    ("jsonb", pa.string(), "[]", '"\\ud800"', "surrogates not allowed"),
    ("jsonb", pa.string(), "0", "NaN", "NaN is not JSON"),
    ("date", pa.date32(), date(9999, 12, 31), 2_932_897, "out of range"),
    ("timestamptz", pa.timestamp("us", "UTC"), datetime(1, 1, 1, tzinfo=UTC), -(1 << 58), "out of range"),
    ("text NOT NULL", pa.string(), "", None, "NOT NULL"),
]


@pytest.mark.row("ends.6")
@pytest.mark.parametrize(("kind", "type_", "fits", "unfit", "problem"), UNFIT, ids=str)
def test_value_that_a_column_cannot_hold_fails_the_job_or_is_left_out(
    url: str, database: Any, tmp_path: Path, kind: str, type_: pa.DataType, fits: Any, unfit: Any, problem: str
) -> None:
    """The server takes what fits, and refuses what does not: neither more nor less is left out than has to be."""
    database.execute(f"ALTER TABLE target ADD COLUMN v {kind}")
    schema = pa.schema([("id", pa.int64()), ("v", type_)])
    numbers, values = pa.array([1, 2, 3], pa.int64()), pa.array([fits, unfit, fits], type_)
    rows = pa.RecordBatch.from_arrays([numbers, values], schema=schema)
    operator = PreparingSinkOperator(sink_of(url))
    opened(operator, context())
    with pytest.raises(BadRowError, match=rf"table 'target', column 'v' \(.*\) cannot hold .*{re.escape(problem)}"):
        operator.process_batch(rows, 0)
    operator.close()
    letters = tmp_path / "letters"
    options = {"execution.bad-rows.mode": "DEAD_LETTER", "execution.bad-rows.directory": str(letters)}
    operator = PreparingSinkOperator(sink_of(url))
    output = opened(operator, context(configuration=options))
    operator.process_batch(rows, 0)
    operator.prepare_snapshot(1)
    tables = [operator._sink.decode(text) for text in output.column("message")]
    operator.close()
    assert committed(sink_of(url), schema, 1, tables) is CommitOutcome.COMMITTED
    assert [number for number, *_ in content(database)] == [1, 3]
    assert operator.bad_rows_dropped == 1
    [letter] = pq.read_table(letters).to_pylist()
    assert json.loads(letter["row"])["id"] == 2
    assert letter["condition"] == "BadRowError"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "mysql://host/db"}, "must be postgresql://"),
        ({"mode": "upsert"}, "needs the columns of a unique index"),
        ({"keys": "id"}, "requires mode upsert"),
        ({"mode": "upsert", "keys": "nr"}, "no column 'nr'"),
        ({"mode": "upsert", "keys": "id", "deleteColumn": "name"}, "must be a BOOLEAN"),
        ({"mode": "overwrite"}, "is not one of append, upsert"),
        ({"batchsize": "5"}, "does not know it"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, str], problem: str) -> None:
    given = {"url": "postgresql://host/db", "dbtable": "target", **options}
    with pytest.raises(PlanError, match=problem):
        check_sink("postgresql", given, SCHEMA)


def prepared(database: Any) -> list[str]:
    return [name for (name,) in database.execute("SELECT gid FROM pg_prepared_xacts").fetchall()]


@pytest.mark.row("ends.5")
def test_prepared_transaction_is_committed_once_if_a_crash_interrupts_any_step(url: str, database: Any) -> None:
    sink = sink_of(url, preparedTransactions="true")
    tables = staged(sink, named((1, "a"), (2, None)), 5)
    assert (content(database), len(prepared(database)), staging_tables(database)) == ([], 1, set())
    committer = sink.open_committer(SCHEMA, CONTEXT)
    committer.commit_prepared(tables[0])  # type: ignore[attr-defined]
    committer.close()  # the process ends between the commit of the rows and the record of the checkpoint
    assert committed(sink, SCHEMA, 5, tables) is CommitOutcome.COMMITTED
    assert committed(sink, SCHEMA, 5, tables) is CommitOutcome.ALREADY_COMMITTED
    assert (content(database), prepared(database)) == ([(1, "a"), (2, None)], [])
    assert database.execute("SELECT count(*) FROM ckpt_staged").fetchone() == (0,)
    with pytest.raises(psycopg.errors.UniqueViolation):
        staged(sink, named((1, "again")), 6)


@pytest.mark.row("ends.5")
def test_prepared_transactions_that_no_snapshot_covers_are_rolled_back(url: str, database: Any) -> None:
    sink = sink_of(url, preparedTransactions="true")
    covered, uncovered = staged(sink, named((1, "a")), 5), staged(sink, named((2, "b")), 6)
    other = staged(sink, named((3, "c")), 7, replace(CONTEXT, sink_id="f" * 16))
    sink.clean_up(replace(CONTEXT, attempt=1, restored_checkpoint_id=5))
    assert sorted(prepared(database)) == sorted(table.name for table in (*covered, *other))
    with pytest.raises(
        CommitError, match=r"prepared transaction ckpt:.* no longer exists, and its 1 rows were not committed"
    ):
        committed(sink, SCHEMA, 6, uncovered)
    committer = sink.open_committer(SCHEMA, CONTEXT)
    committer.abort(Transaction("writer", 7), other)
    committer.close()
    assert committed(sink, SCHEMA, 5, covered) is CommitOutcome.COMMITTED
    assert (content(database), prepared(database)) == ([(1, "a")], [])


@pytest.mark.row("ends.5")
@pytest.mark.parametrize("options", [{}, {"preparedTransactions": "true"}])
def test_rows_that_another_job_has_staged_are_dropped_when_they_are_older_than_the_timeout(
    url: str, database: Any, options: dict[str, str]
) -> None:
    """Those of the sink itself have the rules of its own, however long its job was down."""
    sink, stopped = sink_of(url, **options), replace(CONTEXT, sink_id="f" * 16)
    own, others = staged(sink, named((1, "a")), 5), staged(sink, named((2, "b")), 5, stopped)

    def waiting() -> set[str]:
        return {*staging_tables(database), *prepared(database)}

    again = replace(CONTEXT, attempt=1, restored_checkpoint_id=5)
    for timeout in ({}, {"stagedRowsTimeout": "1d"}):
        sink_of(url, **options, **timeout).clean_up(again)
        assert waiting() == {table.name for table in (*own, *others)}
    sink_of(url, **options, stagedRowsTimeout="0s").clean_up(again)
    assert waiting() == {table.name for table in own}
    assert committed(sink, SCHEMA, 5, own) is CommitOutcome.COMMITTED
    with pytest.raises(CommitError, match="no longer exists, and its 1 rows were not committed"):
        committed(sink, SCHEMA, 6, others)
    assert content(database) == [(1, "a")]


def test_prepared_transactions_with_upsert_are_refused(url: str) -> None:
    with pytest.raises(PlanError, match="option 'stagedRowsTimeout': '1 week' is not a duration"):
        sink_of(url, stagedRowsTimeout="1 week")
    with pytest.raises(PlanError, match="it requires mode append"):
        sink_of(url, preparedTransactions="true", mode="upsert", keys="id")
