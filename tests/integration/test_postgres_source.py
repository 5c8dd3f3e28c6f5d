"""Format ``postgresql`` as a source: each row once, whatever the order in which transactions commit."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import source_schema
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.integration.test_source_splits import Copy, ended
from tests.support.outputs import hidden, visible
from tests.support.patience import patient
from tests.support.postgres_server import postgres_server
from tests.unit.runtime.connectors.split_jobs import Job, moved

psycopg = pytest.importorskip("psycopg", reason="pip install 'ckpt-runtime[postgres]'")

SCHEMA = pa.schema([("id", pa.int64()), ("value", pa.int32())])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres_server() as started:
        yield started


class Table:
    """A table with a growing ``id`` and a ``value``."""

    def __init__(
        self, url: str, definition: str = "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, value int"
    ) -> None:
        self.url = url
        self.name = f"t_{uuid4().hex[:12]}"
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(f"CREATE TABLE {self.name} ({definition})")

    def options(self, **more: str) -> dict[str, str]:
        return {"url": self.url, "dbtable": self.name, "growingColumn": "id", "pollInterval": "10ms", **more}

    def insert(self, *values: int) -> None:
        self.connection.execute(f"INSERT INTO {self.name} (value) SELECT unnest(%s::int[])", (list(values),))

    def writing(self, value: int) -> Any:
        """A connection with a transaction that has inserted a value and has not ended."""
        other = psycopg.connect(self.url)
        other.execute(f"INSERT INTO {self.name} (value) VALUES (%s)", (value,))
        return other

    def job(self, schema: pa.Schema = SCHEMA, restored: Any = None, **more: Any) -> Any:
        settings = {name: more.pop(name) for name in ("parallelism", "most_rows", "attempt") if name in more}
        return closing(Job("postgresql", self.options(**more), schema, restored=restored, **settings))


@pytest.fixture
def table(url: str) -> Iterator[Table]:
    made = Table(url)
    yield made
    made.connection.close()


def dead_letters(directory: Path) -> dict[int, tuple[str, str]]:
    """The place within the table, and the beginning of the reason, of each row that was kept, by the row's id."""
    rows = [row for file in directory.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    found = {
        int(json.loads(row["raw"])["id"]): (row["position"].rpartition(", ")[2], row["reason"].partition(" into ")[0])
        for row in rows
    }
    assert len(found) == len(rows), "no row is kept twice"
    return found


def values(job: Job) -> list[int]:
    return sorted(row["value"] for row in job.rows)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.01)


def read_until(job: Job, rows: int) -> None:
    def there() -> bool:
        job.discover()
        job.read()
        return len(job.rows) >= rows

    until(there, f"{rows} rows; there are {len(job.rows)}")


@pytest.mark.row("ends.4")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_rows_wait_for_a_transaction_that_may_commit_smaller_values(table: Table, end: str) -> None:
    table.insert(0)
    with table.job() as job:
        read_until(job, 1)
        open_one = table.writing(1)
        table.insert(2)  # committed, with a greater id than the open one
        for _ in range(20):
            job.discover()
            job.read()
            time.sleep(0.005)
        assert values(job) == [0]
        state = job.checkpoint(1)
        getattr(open_one, end)()
        open_one.close()
        wanted = [0, 1, 2] if end == "commit" else [0, 2]
        read_until(job, len(wanted))
        assert values(job) == wanted
    with table.job(restored=state) as job:
        read_until(job, len(wanted) - 1)
        assert values(job) == wanted[1:]


@pytest.mark.row("ends.4")
def test_bounded_source_reads_up_to_its_start_and_the_next_job_continues_there(table: Table) -> None:
    table.insert(0)
    open_one = table.writing(1)
    table.insert(2)
    with table.job(availableNow="true") as job:
        job.discover()
        assert not job.ended  # it waits for the open transaction
        open_one.commit()
        open_one.close()
        job.run()
        assert (values(job), job.ended) == ([0, 1, 2], True)
        state = job.checkpoint(1)
    table.insert(3)
    with closing(Job("postgresql", table.options(availableNow="true"), SCHEMA, restored=state, job_id="2")) as job:
        job.run()
        assert values(job) == [3]


@pytest.mark.row("ends.4")
def test_positions_within_ranges_are_restored_at_any_parallelism(table: Table) -> None:
    table.connection.execute(f"INSERT INTO {table.name} (value) SELECT generate_series(0, 49999)")
    with table.job(parallelism=2, most_rows=700, numPartitions="4", fetchsize="1000") as job:
        until(job.discover, "splits")
        until(lambda: job.read(3) or len(job.rows) > 3_000, "some rows")
        first, state = values(job), job.checkpoint(1, 3)
        assert job.readers[0]._reader is not None
    with table.job(parallelism=3, restored=state, numPartitions="4") as job:
        read_until(job, 50_000 - len(first))
        assert sorted(first + values(job)) == list(range(50_000))
        assert [reader._reader and reader._reader.backlog() for reader in job.readers] == [0, 0, 0]


def test_types_are_read_exactly(url: str) -> None:
    table = Table(
        url,
        "id serial PRIMARY KEY, amount numeric(12,3), name varchar, tag uuid, document jsonb, data bytea, ok bool, "
        "day date, at timestamptz, local timestamp, tags text[], short smallint, ratio real",
    )
    at = datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)
    tag = "0d6eb1c3-7a86-4e3b-a4f4-1c1f3b4f5e6a"
    rows: list[dict[str, Any]] = [
        {
            "id": 1, "amount": Decimal("-12.345"), "name": "é", "tag": tag, "document": '{"a": [1, null]}',
            "data": b"\x00\xff", "ok": True, "day": date(1, 1, 1), "at": at, "local": at.replace(tzinfo=None),
            "tags": ["a", None], "short": -3, "ratio": 0.5,
        },
        {"id": 2},
    ]  # fmt: skip
    columns = ", ".join(rows[0])
    for row in rows:
        given = [row.get(name) for name in rows[0]]
        table.connection.execute(
            f"INSERT INTO {table.name} ({columns}) VALUES ({', '.join(['%s'] * len(given))})", given
        )
    schema = pa.schema(
        [
            ("id", pa.int64()), ("amount", pa.decimal128(20, 3)), ("name", pa.string()), ("tag", pa.string()),
            ("document", pa.string()), ("data", pa.binary()), ("ok", pa.bool_()), ("day", pa.date32()),
            ("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us")), ("tags", pa.list_(pa.string())),
            ("short", pa.int32()), ("ratio", pa.float64()),
        ]
    )  # fmt: skip
    with table.job(schema) as job:
        read_until(job, 2)
        assert [{name: row[name] for name in rows[0]} for row in job.rows] == [
            {name: row.get(name) for name in rows[0]} for row in rows
        ]
    narrow = schema.set(1, pa.field("amount", pa.decimal128(4, 1)))
    with table.job(narrow) as job, pytest.raises(ValueError, match="column 'amount': '-12.345' does not fit"):
        read_until(job, 2)
    table.connection.close()


@pytest.mark.row("ends.4")
def test_columns_with_any_name_and_with_types_of_the_user_are_read(url: str) -> None:
    kinds = Table(url)
    domain, mood = f"positive_{kinds.name}", f"mood_{kinds.name}"
    kinds.connection.execute(f"CREATE DOMAIN {domain} AS int CHECK (value > 0); CREATE TYPE {mood} AS ENUM ('ok', 'x')")
    table = Table(url, f'"Nr. %d {{a}} %s" bigserial NOT NULL, "a""b" {domain}, m {mood}')
    table.connection.execute(f'INSERT INTO {table.name} ("a""b", m) VALUES (1, \'x\'), (NULL, NULL)')
    schema = pa.schema([("Nr. %d {a} %s", pa.int64()), ('a"b', pa.int32()), ("m", pa.string())])
    with table.job(schema, growingColumn="Nr. %d {a} %s") as job:
        read_until(job, 2)
        assert sorted(tuple(row.values()) for row in job.rows) == [(1, 1, "x"), (2, None, None)]
    for made in (kinds, table):
        made.connection.close()


@pytest.mark.row("ends.4", "ends.6")
@pytest.mark.parametrize("settle", [{}, {"settleTime": "50ms", "growingColumn": "number"}])
def test_rows_with_values_that_no_row_of_a_stream_can_have_fail_the_job_or_are_kept_once(
    url: str, tmp_path: Path, settle: dict[str, str]
) -> None:
    """A good and a bad row have the same value of the other growing column. The reader stops behind each few rows."""
    table = Table(url, "id bigserial NOT NULL, number int NOT NULL, at timestamptz, amount numeric, days date[]")
    table.connection.execute(
        f"INSERT INTO {table.name} (number, at, amount, days) VALUES (1, '2026-01-01Z', 0.5, NULL), "
        "(1, 'infinity', 1, NULL), (1, NULL, 2, '{2026-01-01}'), (4, NULL, 'NaN', NULL), (5, NULL, 1234567.5, NULL), "
        "(6, NULL, 3, '{2026-01-01, 0044-03-15 BC}'), (7, '10001-01-01Z', 4, NULL)"
    )
    schema = pa.schema(
        [
            *(("id", pa.int64()), ("number", pa.int32()), ("at", pa.timestamp("us", "UTC"))),
            *(("amount", pa.decimal128(6, 1)), ("days", pa.list_(pa.date32()))),
        ]
    )
    with table.job(schema, **settle) as job, pytest.raises(ValueError, match=r"bad row at .*: column 'at': 'infinity'"):
        read_until(job, 7)
    options = {**settle, "badRows": "deadLetter", "badRowsDirectory": str(tmp_path)}
    state, good, attempt = None, [], 0
    while True:
        with table.job(schema, restored=state, most_rows=2, attempt=attempt, **options) as job:
            reader = job.readers[0]
            until(lambda: job.discover() or job.read() or job.rows or reader.bad_rows_dropped, "a row")  # noqa: B023
            good += [row["id"] for row in job.rows]
            attempt += 1
            state = job.checkpoint(attempt)
            if len(good) + len(letters := dead_letters(tmp_path)) >= 7:
                break
    assert sorted(good) == [1, 3]
    grows = settle.get("growingColumn", "id")
    assert letters == {
        2: (f"{grows} = {2 if grows == 'id' else 1}", "column 'at': 'infinity' does not fit"),
        4: (f"{grows} = 4", "column 'amount': 'NaN' does not fit"),
        5: (f"{grows} = 5", "column 'amount': '1234567.5' does not fit"),
        6: (f"{grows} = 6", "column 'days': '{2026-01-01,\"0044-03-15 BC\"}' does not fit"),
        7: (f"{grows} = 7", "column 'at': '10001-01-01 00:00:00+00' does not fit"),
    }
    table.connection.close()


@pytest.mark.row("ends.4")
def test_equal_times_are_read_once_and_wait_for_the_time_to_settle(url: str) -> None:
    table = Table(url, "at timestamptz NOT NULL, value int NOT NULL")
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("value", pa.int32())])
    given = {"growingColumn": "at", "settleTime": "50ms"}
    table.connection.execute(
        f"INSERT INTO {table.name} SELECT '2026-11-01T00:00:00Z'::timestamptz + interval '1 s' * (n / 7), n "
        "FROM generate_series(0, 99) n"
    )
    with table.job(schema, most_rows=3, fetchsize="5", **given) as job:
        until(job.discover, "splits")
        until(lambda: job.read() or len(job.rows) > 20, "some rows")
        first, state = values(job), job.checkpoint(1)
    with table.job(schema, restored=state, **given) as job:
        read_until(job, 100 - len(first))
        assert sorted(first + values(job)) == list(range(100))
    table.connection.close()


@pytest.mark.parametrize(("start", "wanted"), [("earliest", [0, 1, 2]), ("1", [1, 2]), ("latest", [2])])
def test_starting_value_says_where_a_new_job_begins(table: Table, start: str, wanted: list[int]) -> None:
    table.insert(0, 1)
    with table.job(startingValue=start) as job:
        if start == "latest":
            until(lambda: job.discover() or job.enumerator._enumerator.snapshot()["looked"], "a look at the table")
        table.insert(2)
        read_until(job, len(wanted))
        assert values(job) == wanted


@pytest.mark.row("ends.4")
def test_source_waits_for_a_database_that_ends_its_connections(table: Table) -> None:
    table.insert(0)
    with table.job() as job:
        read_until(job, 1)
        table.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
        )
        table.insert(1)
        read_until(job, 2)
        assert values(job) == [0, 1]


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        ("id bigint PRIMARY KEY, value int", "do not come from the column's own sequence"),
        ("id bigint GENERATED ALWAYS AS IDENTITY (CACHE 20) PRIMARY KEY, value int", "CACHE 20"),
        ("id bigint GENERATED ALWAYS AS IDENTITY (INCREMENT -1) PRIMARY KEY, value int", "INCREMENT -1"),
        ("id bigint GENERATED ALWAYS AS IDENTITY (CYCLE) PRIMARY KEY, value int", "CYCLE"),
        ("id bigint, value int", "may be null"),
        ("id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, value bigint", "'value' is int8"),
        ("id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "no column 'value'"),
    ],
)
def test_table_whose_order_or_types_cannot_be_relied_on_is_refused(url: str, definition: str, problem: str) -> None:
    table = Table(url, definition)
    with table.job() as job, pytest.raises(ValueError, match=problem):
        until(lambda: job.discover() and False, "the refusal")
    table.connection.close()


@pytest.mark.parametrize(
    ("given", "schema", "problem"),
    [
        ({}, None, "needs its schema"),
        ({"growingColumn": "x"}, SCHEMA, "no column 'x'"),
        ({"growingColumn": "value", "startingValue": "first"}, SCHEMA, "not earliest, latest or a whole number"),
        ({"growingColumn": "at"}, pa.schema([("at", pa.timestamp("us", "UTC"))]), "'settleTime'"),
        ({"growingColumn": "n"}, pa.schema([("n", pa.string())]), "it must be a whole number or a timestamp"),
        ({}, pa.schema([("id", pa.int64()), ("m", pa.map_(pa.string(), pa.string()))]), "no column of PostgreSQL"),
        ({"url": "mysql://x/y"}, SCHEMA, "postgresql://HOST"),
        ({"query": "SELECT 1"}, SCHEMA, "does not know it"),
        ({"dbtable": "(SELECT 1 AS id) t"}, SCHEMA, "is a query; expected the name of a table"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, str], schema: pa.Schema | None, problem: str) -> None:
    options = {"url": "postgresql://h/d", "dbtable": "t", "growingColumn": "id", **given}
    with pytest.raises(PlanError, match=problem):
        source_schema("postgresql", options, schema)


class Writers:
    """Threads that insert values in transactions which commit, or are rolled back, out of order."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.committed: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._next = iter(range(1 << 30))
        self._stops = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(seed,)) for seed in range(3)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stops.set()
        for thread in self._threads:
            thread.join()

    def _write(self, seed: int) -> None:
        chance = random.Random(seed)
        with psycopg.connect(self.table.url) as connection:
            while not self._stops.is_set():
                with self._lock:
                    given = [next(self._next) for _ in range(chance.randint(1, 20))]
                for value in given:
                    connection.execute(f"INSERT INTO {self.table.name} (value) VALUES (%s)", (value,))
                    self._stops.wait(chance.random() * 0.02)
                if chance.random() < 0.2:
                    connection.rollback()
                    continue
                connection.commit()
                with self._lock:
                    self.committed.update(given)


@pytest.mark.row("ends.4")
def test_a_job_reads_each_committed_row_once_through_kills_a_rescale_and_commits_out_of_order(
    client: CkptClient, cluster: MiniCluster, table: Table, tmp_path: Path
) -> None:
    copy = Copy(cluster, tmp_path, "postgresql", table.options(), schema="id BIGINT, value INT")
    with ended(copy) as job, Writers(table) as writers:
        job.start()
        for number in range(2):
            job.has(writers.committed.total())
            os.kill(cluster.worker_pids(job.job_id)[number % 2], signal.SIGKILL)
            job.has(writers.committed.total())
        client.rescale(job.job_id, dict.fromkeys(client.resource_requirements(job.job_id), 1), timeout_s=patient(180))
        savepoint = job.stop()
        job.start(3, savepoint)
        job.has(writers.committed.total())
        writers.stop()
        job.has(writers.committed.total())
        job.stop()
        assert Counter(visible(job.out).value.tolist()) == writers.committed
        assert hidden(job.out) == []


@pytest.mark.row("ends.7")
def test_table_is_read_from_the_position_that_was_set(table: Table) -> None:
    table.insert(1, 2, 3)
    with table.job() as job:
        read_until(job, 3)
        state = job.checkpoint(1)
    table.insert(4)

    def rows(to: str) -> list[int]:
        with table.job(restored=moved(state, to), availableNow="true") as job:
            job.run()
            return values(job)

    assert rows("earliest") == [1, 2, 3, 4]
    assert rows("latest") == []
    assert rows('{"value": 2}') == [3, 4]
    for to, problem in (("2026-01-01T00:00", "does not contain timestamps"), ('{"value": "x"}', "are not of the form")):
        with pytest.raises(ValueError, match=problem):
            rows(to)
    with table.job(restored=moved(state, "latest")) as job:
        table.insert(5)
        read_until(job, 1)
        assert values(job) == [5]
