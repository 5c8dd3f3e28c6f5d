"""Built-in formats as a plan sees them: options, schemas, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import check_sink, source_options, source_schema
from ckpt_runtime.graph.kafka_columns import producer_settings
from ckpt_runtime.graph.kafka_options import consumer_settings
from ckpt_runtime.graph.options import Option, parse_options
from ckpt_runtime.graph.postgres_options import server_of

ROWS = pa.schema([("key", pa.int64()), ("count", pa.int64()), ("name", pa.string())])


def test_options_are_case_insensitive_and_typed() -> None:
    options = source_options("numbers", {"ROWS": "10", "sequence": "True", "rowspersecond": "2.5"})
    assert (options["rows"], options["sequence"], options["rowsPerSecond"], options["keys"]) == (10, True, 2.5, 100_000)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rowz": "1"}, "option 'rowz': format 'numbers' does not know it; known options are rows, keys"),
        ({"rows": "ten"}, "option 'rows': 'ten' is not a whole number"),
        ({"rows": "-1"}, "option 'rows': -1 is less than the minimum 0"),
        ({"rowsPerSecond": "nan"}, "option 'rowsPerSecond': nan is less than"),
        ({"keys": "0"}, "option 'keys': 0 is less than the minimum 1"),
        ({"sequence": "maybe"}, "option 'sequence': 'maybe' is not true or false"),
    ],
)
def test_bad_options_are_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        source_schema("numbers", given, None)


def test_required_options_and_choices() -> None:
    declared = (Option("path", required=True), Option("mode", default="a", choices=("a", "b")))
    with pytest.raises(PlanError, match="option 'path': format 'x' needs it"):
        parse_options("x", declared, {})
    with pytest.raises(PlanError, match="option 'mode': 'c' is not one of a, b"):
        parse_options("x", declared, {"path": "/p", "mode": "c"})
    assert parse_options("x", declared, {"path": "/p", "mode": "B"})["mode"] == "b"


def test_option_has_its_own_name_and_another_one_of_which_its_own_counts() -> None:
    declared = (Option("sep", default=",", alias="delimiter"),)
    assert parse_options("x", declared, {}) == {"sep": ","}
    assert parse_options("x", declared, {"Delimiter": "|"}) == {"sep": "|"}
    assert parse_options("x", declared, {"SEP": ";", "delimiter": "|"}) == {"sep": ";"}
    assert parse_options("x", declared, {"delimiter": "|", "sep": ";"}) == {"sep": ";"}
    with pytest.raises(PlanError, match="known options are sep$"):
        parse_options("x", declared, {"separator": "|"})


def test_the_numbers_schema_follows_the_options() -> None:
    assert source_schema("numbers", {}, None).names == ["key", "value"]
    assert source_schema("numbers", {"rowNumber": "true"}, None).names == ["key", "value", "row"]
    assert source_schema("numbers", {"sequence": "true"}, None).names == ["source", "n"]
    assert source_schema("numbers", {"keyForm": "scattered"}, None).field("key").type == pa.int64()
    assert source_schema("numbers", {"keyForm": "string"}, None).field("key").type == pa.string()
    with pytest.raises(PlanError, match="do not set a schema"):
        source_schema("numbers", {}, ROWS)


def test_replay_format_takes_its_schema_from_the_file(tmp_path: Path) -> None:
    pq.write_table(ROWS.empty_table(), tmp_path / "b.parquet")
    pq.write_table(pa.schema([("hidden", pa.int8())]).empty_table(), tmp_path / "_a.parquet")
    for path in (str(tmp_path), str(tmp_path / "b.parquet"), (tmp_path / "b.parquet").as_uri()):
        assert source_schema("replay", {"path": path}, None).equals(ROWS)
    with pytest.raises(PlanError, match="option 'partitionBy': no column 'nope'; there are key, count, name"):
        source_schema("replay", {"path": str(tmp_path), "partitionBy": "key,nope"}, None)


def test_texts_that_a_file_has_as_views_are_read_as_texts(tmp_path: Path) -> None:
    views = pa.schema([("s", pa.string_view()), ("b", pa.binary_view()), ("n", pa.int64())])
    pq.write_table(views.empty_table(), tmp_path / "views.parquet")
    plain = pa.schema([("s", pa.string()), ("b", pa.binary()), ("n", pa.int64())])
    assert source_schema("replay", {"path": str(tmp_path)}, None).equals(plain)


def test_error_for_a_format_that_only_spark_reads_says_how_a_stream_can_have_it() -> None:
    with pytest.raises(PlanError, match=r"format: 'xml' is not one of csv, .*; a FrameSource reads what spark\.read"):
        source_schema("xml", {"path": "/in"}, ROWS)


def test_file_that_cannot_be_replayed_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="option 'path': .* is not a Parquet file"):
        source_schema("replay", {"path": str(tmp_path)}, None)
    with pytest.raises(PlanError, match="option 'path': 'data.parquet' is relative"):
        source_schema("replay", {"path": "data.parquet"}, None)
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(PlanError, match="cannot be read, set .schema"):
        source_schema("replay", {"path": str(tmp_path)}, None)
    assert source_schema("replay", {"path": "memory://somewhere"}, ROWS) is ROWS


@pytest.mark.parametrize(
    ("format_", "options", "message"),
    [
        (
            "nope",
            {},
            "format: 'nope' is not one of csv, delta, json, kafka, noop, parquet, .*, and no .*; foreachBatch writes",
        ),
        ("parquet", {}, "option 'path': format 'parquet' needs it"),
        ("parquet", {"path": "out"}, "option 'path': 'out' is relative"),
        ("parquet", {"path": "/out", "compression": "rar"}, "option 'compression': 'rar' is not one of"),
        ("verify", {"report": "/r", "key": "name"}, "option 'key': column 'name' is string, not an integer"),
        (
            "verify",
            {"report": "/r", "keyForm": "string", "key": "key"},
            "option 'key': column 'key' is int64, not a string",
        ),
        ("verify", {"report": "/r", "sum": "total"}, "option 'sum': no column 'total'"),
        ("verify", {"report": "/r", "row": "name"}, "option 'row': column 'name' is string, not an integer"),
        ("verify", {"report": "r"}, "option 'report': 'r' is not an absolute local directory"),
    ],
)
def test_bad_sinks_are_named(format_: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_sink(format_, options, ROWS)


def test_schema_of_a_data_source_class_is_used() -> None:
    class WithSchema:
        def __init__(self, options: Any) -> None:
            self.options = options

        def schema(self) -> str:
            return f"{self.options['COLUMN']} BIGINT"

        def streamReader(self, schema: Any) -> Any:
            raise AssertionError("a plan makes no reader")

    class Without(WithSchema):
        def schema(self) -> str:
            raise NotImplementedError("schema")

    assert source_schema(WithSchema, {"column": "x"}, None).names == ["x"]
    assert source_schema(Without, {}, ROWS) is ROWS
    with pytest.raises(PlanError, match=r"schema: Without.schema\(\) failed, set .schema"):
        source_schema(Without, {}, None)


NUMBER = pa.schema([("n", pa.int64())])
TEXT = pa.schema([("value", pa.string())])
TWICE = pa.schema([("n", pa.int64()), ("N", pa.string())])
BROKERS = {"kafka.bootstrap.servers": "localhost:1"}


@pytest.mark.parametrize(
    ("source", "options", "schema", "problem"),
    [
        ("text", {"path": "/x"}, pa.schema([]), "schema: it has no column"),
        ("csv", {"path": "/x"}, pa.schema([]), "schema: it has no column"),
        ("json", {"path": "/x"}, TWICE, "the columns 'n' and 'N' have one name"),
        ("kafka", {**BROKERS, "assign": '{"a": [-1]}'}, None, "option 'assign': expected the numbers of partitions"),
        ("kafka", {**BROKERS, "assign": "{}"}, None, "option 'assign': expected the numbers of partitions"),
        (
            "postgresql",
            {"url": "postgresql://me:a:b@db:99999/x?sslmode=require", "dbtable": "t", "growingColumn": "n"},
            NUMBER,
            "option 'url': 'db:99999' is not a host with a port from 1 to 65535",
        ),
    ],
)
def test_source_that_could_never_read_is_refused(
    source: str, options: dict[str, str], schema: pa.Schema | None, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        source_schema(source, options, schema)


@pytest.mark.parametrize(
    ("sink", "options", "schema", "problem"),
    [
        ("kafka", {**BROKERS, "topic": ""}, TEXT, "option 'topic': '' is not a topic's name"),
        ("kafka", {**BROKERS, "topic": "a b"}, TEXT, "option 'topic': 'a b' is not a topic's name: up to 249 letters"),
        ("kafka", {**BROKERS, "topic": ".."}, TEXT, "option 'topic': '..' is not a topic's name"),
        ("parquet", {"path": "/x"}, TWICE, "the columns 'n' and 'N' have one name"),
        ("postgresql", {"url": "postgresql://db:0/x", "dbtable": "t"}, NUMBER, "'db:0' is not a host with a port"),
    ],
)
def test_sink_that_could_never_write_is_refused(
    sink: str, options: dict[str, str], schema: pa.Schema, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        check_sink(sink, options, schema)


@pytest.mark.parametrize("host", ["", "db", "db:5432", "[::1]:5432", "a:1,b:2", "me:p%40ss:x@db:5432", "%2Fvar%2Frun"])
def test_url_of_a_server_may_have_every_form_of_a_host(host: str) -> None:
    assert server_of(f"jdbc:postgresql://{host}/x?a=b:c") == f"postgresql://{host}/x?a=b:c"


LOGINS = {
    'x.plain.PlainLoginModule required username="$ConnectionString" password=\'a;="b\';': (
        "$ConnectionString",
        'a;="b',
    ),
    "kafkashaded.org.apache.kafka.common.security.scram.ScramLoginModule required\n password = x1 username=me ;": (
        "me",
        "x1",
    ),
    "org.apache.kafka.common.security.plain.PlainLoginModule required username=me;": None,
    "org.apache.kafka.common.security.scram.ScramLoginModule required username=a password=b tokenauth=true;": None,
    "com.sun.security.auth.module.Krb5LoginModule required username=a password=b;": None,
    "org.apache.kafka.common.security.plain.PlainLoginModule required username=a password=b": None,
}


@pytest.mark.parametrize("line", LOGINS)
def test_login_of_the_java_client_is_the_user_and_password_of_each_client(line: str) -> None:
    given = {"kafka.bootstrap.servers": "x:1", "kafka.SASL.jaas.config": line, "kafka.sasl.mechanism": "PLAIN"}
    subscribed = {**given, "subscribe": "a", "kafka.security.protocol": "sasl_plaintext"}
    wanted = LOGINS[line]
    if wanted is None:
        with pytest.raises(PlanError, match=r"kafka\.sasl\.jaas\.config") as caught:
            source_schema("kafka", subscribed, None)
        assert line not in str(caught.value)
        return
    source_schema("kafka", subscribed, None)
    for settings in (consumer_settings(source_options("kafka", subscribed)), producer_settings(given)):
        assert (settings["sasl.username"], settings["sasl.password"]) == wanted
        assert "sasl.jaas.config" not in settings
