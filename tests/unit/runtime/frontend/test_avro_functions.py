"""``from_avro`` and ``to_avro`` beside fastavro: types, changed schemas, malformed messages, a Schema Registry."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.avro.functions import from_avro, to_avro

from ckpt_runtime.expressions.nodes import Call, Column
from ckpt_runtime.expressions.types import arrow_type
from ckpt_runtime.frontend import message_functions
from ckpt_runtime.frontend.avro_functions import FromAvro, ToAvro
from ckpt_runtime.frontend.capture import Capture
from ckpt_runtime.frontend.captured_session import captured_session
from ckpt_runtime.frontend.message_functions import RegistryError
from ckpt_runtime.frontend.python_functions import FUNCTION, functions_spec, separated
from ckpt_runtime.frontend.typed_plan import AnalysisNeeded
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.operators.python_functions import PythonFunctionsOperator
from tests.unit.runtime.connectors.harness import context, opened

fastavro = pytest.importorskip("fastavro")

PRICE = {"type": "fixed", "name": "Price", "size": 8, "logicalType": "decimal", "precision": 12, "scale": 2}
LINE = {
    "type": "record",
    "name": "Line",
    "fields": [
        {"name": "sku", "type": ["null", "string"], "default": None},
        {"name": "price", "type": PRICE},
        {"name": "tax", "type": "Price"},
    ],
}
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "count", "type": "int"},
        {"name": "share", "type": "float"},
        {"name": "ratio", "type": ["double", "null"]},
        {"name": "paid", "type": "boolean"},
        {"name": "raw", "type": "bytes"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "exactly", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
        {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 3}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}},
        {"name": "was", "type": ["null", "Kind"]},
        {"name": "tags", "type": {"type": "map", "values": ["null", "string"]}},
        {"name": "lines", "type": {"type": "array", "items": LINE}},
        {"name": "number", "type": ["int", "long"]},
    ],
}
VALUE = {
    "id": 1 << 40,
    "count": -7,
    "share": 0.5,
    "ratio": None,
    "paid": True,
    "raw": b"\x00\xff",
    "at": datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC),
    "exactly": datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
    "local": datetime(2026, 1, 2, 3, 4, 5, 6),
    "day": date(1969, 7, 20),
    "total": Decimal("-12.345"),
    "kind": "NEW",
    "was": None,
    "tags": {"a": None, "b": "x"},
    "lines": [{"sku": None, "price": Decimal("1.50"), "tax": Decimal("-0.01")}],
    "number": 1 << 33,
}


def encoded(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return stream.getvalue()


def decoded(messages: list[bytes | None], schema: Any, **options: str) -> list[Any]:
    function = FromAvro(json.dumps(schema), options)
    return function(pa.array(messages, pa.binary())).to_pylist(maps_as_pydicts="strict")


@pytest.mark.row("ends.4")
def test_messages_of_every_type_become_the_values_that_were_written() -> None:
    assert decoded([encoded(ORDER, VALUE), None], ORDER) == [VALUE, None]
    result = FromAvro(json.dumps(ORDER), {}).result
    assert isinstance(result, dict)
    kinds = {field["name"]: (field["type"], field["nullable"]) for field in result["fields"]}
    assert kinds["at"] == ("timestamp", False)
    assert (kinds["local"], kinds["day"], kinds["total"]) == (
        ("timestamp_ntz", False), ("date", True), ("decimal(10,3)", False),
    )  # fmt: skip
    assert (kinds["number"], kinds["kind"], kinds["ratio"]) == (("long", False), ("string", False), ("double", True))


@pytest.mark.row("ends.5")
def test_values_are_encoded_as_another_writer_encodes_them() -> None:
    schema = {**ORDER, "fields": [field for field in ORDER["fields"] if field["name"] != "number"]}  # type: ignore[union-attr, index]
    value = {name: given for name, given in VALUE.items() if name != "number"}
    function = ToAvro(json.dumps(schema))
    kind = FromAvro(json.dumps(schema), {}).result
    function.check(kind)
    # A column of a struct has its fields in any order.
    rows = pa.array([dict(reversed(value.items())), None], arrow_type(kind))
    assert function(rows).to_pylist() == [encoded(schema, value), None]


@pytest.mark.row("ends.4")
def test_message_of_an_older_schema_is_read_as_the_newer_one() -> None:
    older = {
        "type": "record",
        "name": "O",
        "fields": [{"name": "id", "type": "int"}, {"name": "gone", "type": "string"}],
    }
    newer = {
        "type": "record",
        "name": "Other",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "country", "type": "string", "default": "DE"},
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": None},
        ],
    }
    message = encoded(older, {"id": 5, "gone": "x"})
    assert decoded([message], older, avroSchema=json.dumps(newer)) == [{"id": 5, "country": "DE", "at": None}]


@pytest.mark.row("ends.6")
@pytest.mark.parametrize("message", [b"", b"\x02", b"\x00\x80\x80", encoded(ORDER, VALUE)[:-3]])
def test_malformed_message_fails_or_is_a_struct_of_nulls(message: bytes) -> None:
    good = encoded(ORDER, VALUE)
    with pytest.raises(ValueError, match="is malformed"):
        decoded([good, message], ORDER)
    with pytest.raises(ValueError, match="is malformed"):
        decoded([good, message], ORDER, mode="failfast")
    found = decoded([good, message], ORDER, mode="PERMISSIVE")
    assert found == [VALUE, dict.fromkeys(VALUE)]
    assert decoded([b"\xff"], "long", mode="permissive") == [None]
    result = FromAvro(json.dumps(ORDER), {"mode": "PERMISSIVE"}).result
    assert '"nullable": false' not in json.dumps(result)
    assert '"containsNull": false' not in json.dumps(result)


@pytest.mark.parametrize(
    ("schema", "options", "problem"),
    [
        ("{", {}, "its schema cannot be used: JSONDecodeError"),
        ('{"type": "reocrd"}', {}, "its schema cannot be used: UnknownType"),
        ('["int", "string"]', {}, "a union of 2 types has no type of Spark's but a struct"),
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]}', {}, "R contains itself"),
        ('{"type": "int", "logicalType": "time-millis"}', {}, "the logical type time-millis is not supported"),
        ('"int"', {"mode": "DROPMALFORMED"}, "mode 'DROPMALFORMED' is not FAILFAST or PERMISSIVE"),
        ('"int"', {"recursiveFieldMaxDepth": "2"}, "the option 'recursivefieldmaxdepth' is not supported"),
        ('"int"', {"schema.registry.basic.auth.user.info": "u:p"}, "needs schema.registry.url"),
    ],
)
def test_avro_that_spark_reads_differently_or_not_at_all_is_refused(
    schema: str, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        FromAvro(schema, options)


def test_columns_of_other_types_than_the_schema_are_refused() -> None:
    with pytest.raises(PlanError, match="its argument is string, not binary"):
        FromAvro('"int"', {}).check("string")
    with pytest.raises(PlanError, match="its schema is that of integer, and the column is long: cast the column"):
        ToAvro('"int"').check("long")
    with pytest.raises(PlanError, match="does not derive a schema"):
        ToAvro("")


class Registry:
    """A Schema Registry over HTTP. ``refusals`` are the first answers, as status codes.

    Schemas are registered and looked up as in Confluent's API: equal ones have one id, and a record of Avro has to be
    backward compatible with the version before.
    """

    def __init__(self, schemas: Mapping[Any, dict[str, Any]], refusals: list[int]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.subjects: dict[str, list[dict[str, Any]]] = {}
        self.ids: list[dict[str, Any]] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append((self.path, self.headers.get("authorization")))
                path = self.path.partition("?")[0]
                key = int(path.rsplit("/", 1)[-1]) if path.startswith("/schemas/ids/") else path
                status = refusals.pop(0) if refusals else 200 if key in schemas else 404
                body = json.dumps(schemas.get(key, {})).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                registry.asked.append((self.path, self.headers.get("authorization")))
                given = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, answer = (refusals.pop(0), {}) if refusals else registry.posted(self.path, given)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def posted(self, path: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The status and the answer to a registration, ``/subjects/x/versions``, or a look-up, ``/subjects/x``."""
        subject = unquote(path.split("/")[2])
        versions = self.subjects.get(subject, [])
        if given not in versions:
            if not path.endswith("/versions"):
                missing = (40403, "Schema not found") if versions else (40401, f"Subject '{subject}' not found.")
                return 404, dict(zip(("error_code", "message"), missing, strict=True))
            if versions and not _is_backward_compatible(given, versions[-1]):
                problem = f'Schema being registered is incompatible with an earlier schema for subject "{subject}"'
                return 409, {"error_code": 409, "message": problem}
            self.subjects.setdefault(subject, []).append(given)
        if given not in self.ids:
            self.ids.append(given)
        number = 100 + self.ids.index(given)
        if path.endswith("/versions"):
            return 200, {"id": number}
        version = self.subjects[subject].index(given) + 1
        return 200, {"subject": subject, "id": number, "version": version, **given}


def _is_backward_compatible(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a reader with the new schema of a record can read what was written with the old one."""
    fields, before = (json.loads(given["schema"])["fields"] for given in (new, old))
    known = {field["name"]: field["type"] for field in before}
    return all(
        known[field["name"]] == field["type"] if field["name"] in known else "default" in field for field in fields
    )


@contextmanager
def registry(schemas: Mapping[Any, dict[str, Any]], refusals: list[int] | None = None) -> Iterator[Registry]:
    serving = Registry(schemas, refusals or [])
    thread = threading.Thread(target=serving.server.serve_forever)
    thread.start()
    try:
        yield serving
    finally:
        serving.server.shutdown()
        thread.join()
        serving.server.server_close()


def framed(number: int, message: bytes) -> bytes:
    return b"\x00" + number.to_bytes(4, "big") + message


FIRST = {"type": "record", "name": "O", "fields": [{"name": "id", "type": "int"}]}
SECOND = {
    "type": "record",
    "name": "O",
    "fields": [{"name": "id", "type": "long"}, {"name": "to", "type": "string", "default": "?"}],
}


@pytest.mark.row("ends.4")
def test_messages_are_read_with_the_schema_whose_id_they_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_functions, "_PAUSE_S", 0.0)
    schemas = {7: {"schema": json.dumps(FIRST)}, 300: {"schema": json.dumps(SECOND), "schemaType": "AVRO"}}
    old = framed(7, encoded(FIRST, {"id": 1}))
    new = framed(300, encoded(SECOND, {"id": 2, "to": "DE"}))
    with registry(schemas, [503, 500]) as serving:
        given = {"schema.registry.url": serving.url + "/", "schema.registry.basic.auth.user.info": "me:pass:word"}
        found = decoded([old, new, old, None], SECOND, **given)
    assert found == [{"id": 1, "to": "?"}, {"id": 2, "to": "DE"}, {"id": 1, "to": "?"}, None]
    authorization = "Basic " + base64.b64encode(b"me:pass:word").decode()
    assert serving.asked == [("/schemas/ids/7", authorization)] * 3 + [("/schemas/ids/300", authorization)]


@pytest.mark.row("ends.5")
def test_values_are_written_with_the_id_under_which_their_schema_is_registered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_functions, "_PAUSE_S", 0.0)
    rows = pa.array([{"id": 1}, None, {"id": 2}], pa.struct([("id", pa.int32())]))
    with registry({}, [503]) as serving:
        user = {"schema.registry.basic.auth.user.info": "me:secret"}
        given = {"schema.registry.url": serving.url, "schema.registry.subject": "orders/x-value", **user}
        function = ToAvro(json.dumps(FIRST), given)
        assert serving.asked == []
        messages = [framed(100, encoded(FIRST, {"id": 1})), None, framed(100, encoded(FIRST, {"id": 2}))]
        assert function(rows).to_pylist() == function(rows).to_pylist() == messages
        path, credentials = "/subjects/orders%2Fx-value", "Basic " + base64.b64encode(b"me:secret").decode()
        assert serving.asked == [(f"{path}/versions", credentials)] * 2
        assert serving.subjects == {"orders/x-value": [{"schema": json.dumps(FIRST)}]}
        known = ToAvro(json.dumps(FIRST), {**given, "auto.register.schemas": "false"})
        assert known(rows).to_pylist() == messages


@pytest.mark.row("ends.5")
def test_schema_that_the_registry_refuses_fails_the_job_with_its_reason_and_is_no_bad_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_functions, "_PAUSE_S", 0.0)
    rows = pa.array([{"id": 1}], pa.struct([("id", pa.int32())]))
    with registry({}) as serving:
        given = {"schema.registry.url": serving.url, "schema.registry.subject": "s"}
        unknown = "refused the schema of subject 's': Subject 's' not found.; register it, or let auto.register.schemas"
        with pytest.raises(RegistryError, match=unknown):
            ToAvro(json.dumps(FIRST), {**given, "auto.register.schemas": "false"})(rows)
        assert serving.subjects == {}
        ToAvro(json.dumps(SECOND), given)(pa.array([{"id": 1, "to": "x"}]))
        with pytest.raises(
            RegistryError, match="incompatible with an earlier schema .* or the compatibility of the subject"
        ):
            ToAvro(json.dumps(FIRST), given)(rows)
    with (
        registry({}, [401]) as serving,
        pytest.raises(RegistryError, match="refused the schema of subject 's': status 401"),
    ):
        ToAvro(json.dumps(FIRST), {**given, "schema.registry.url": serving.url})(rows)
    with pytest.raises(RegistryError, match="the schema of subject 's' cannot be registered at http"):
        ToAvro(json.dumps(FIRST), given)(rows)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"schema.registry.subject": "s"}, "schema.registry.subject needs schema.registry.url"),
        ({"auto.register.schemas": "true"}, "auto.register.schemas needs schema.registry.url"),
        ({"schema.registry.url": "http://r"}, "needs schema.registry.subject, such as orders-value"),
        (
            {"schema.registry.url": "http://r", "schema.registry.subject": "s", "auto.register.schemas": "yes"},
            "auto.register.schemas 'yes' is not true or false",
        ),
        ({"mode": "PERMISSIVE"}, "the option 'mode' is not supported; there are schema.registry.url"),
    ],
)
def test_options_of_a_writer_that_do_not_fit_are_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        ToAvro('"int"', options)


@pytest.mark.row("ends.4")
def test_schemas_that_a_schema_refers_to_are_read_from_the_registry_once() -> None:
    money = {"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]}
    line = {"type": "record", "name": "shop.Line", "fields": [{"name": "price", "type": "shop.Money"}]}
    order = {
        "type": "record",
        "name": "shop.Order",
        "fields": [
            {"name": "lines", "type": {"type": "array", "items": "shop.Line"}},
            {"name": "tax", "type": "Money"},
        ],
    }
    whole = json.loads(
        json.dumps(order).replace('"shop.Line"', json.dumps(line).replace('"shop.Money"', json.dumps(money), 1), 1)
    )
    refer_to = {name: {"name": name, "subject": f"of {name}", "version": 2} for name in ("Money", "Line")}
    schemas: dict[int | str, dict[str, Any]] = {
        5: {"schema": json.dumps(order), "references": list(refer_to.values())},
        "/subjects/of%20Line/versions/2": {"schema": json.dumps(line), "references": [refer_to["Money"]]},
        "/subjects/of%20Money/versions/2": {"schema": json.dumps(money)},
    }
    value = {"lines": [{"price": {"cents": 5}}, {"price": {"cents": 7}}], "tax": {"cents": 2}}
    with registry(schemas) as serving:
        message = framed(5, encoded(whole, value))
        assert decoded([message, message], whole, **{"schema.registry.url": serving.url}) == [value, value]
    assert len(serving.asked) == 3


@pytest.mark.row("ends.6")
def test_message_without_a_known_schema_is_malformed_and_a_registry_that_fails_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_functions, "_PAUSE_S", 0.0)
    other = {"name": "x", "subject": "x", "version": 3}
    schemas: dict[int | str, dict[str, Any]] = {
        1: {"schema": "{}", "schemaType": "PROTOBUF"},
        2: {"schema": "{}", "references": [other]},
    }
    bad = [framed(9, b"\x02"), framed(1, b"\x02"), framed(2, b"\x02"), b"\x00\x00", b"\x01\x00\x00\x00\x01\x02"]
    with registry(schemas) as serving:
        given = {"schema.registry.url": serving.url}
        assert decoded(bad, FIRST, mode="PERMISSIVE", **given) == [{"id": None}] * 5
        for message, problem in zip(
            bad, ("no schema 9", "of type PROTOBUF", "no version 3 of 'x'", "zero", "zero"), strict=True
        ):
            with pytest.raises(ValueError, match=problem):
                decoded([message], FIRST, **given)
    with registry(schemas, [401]) as serving, pytest.raises(RegistryError, match="status 401"):
        decoded(bad[:1], FIRST, mode="PERMISSIVE", **{"schema.registry.url": serving.url})
    with pytest.raises(RegistryError, match="schema 9 cannot be read from the Schema Registry at http"):
        decoded(bad[:1], FIRST, mode="PERMISSIVE", **{"schema.registry.url": serving.url})


def planned() -> Capture:
    return Capture({}, lambda _: [("value", "binary")], lambda _key, _value: None)


@pytest.mark.row("ends.4")
def test_spark_analyzes_a_function_of_python_in_place_of_one_of_a_package_that_it_lacks() -> None:
    from pyspark.sql.connect import proto

    given = planned()

    def program(spark: SparkSession) -> None:
        frame = spark.readStream.format("replay").load("/data")
        order = from_avro("value", json.dumps(ORDER), {"mode": "PERMISSIVE"})
        again = from_avro(frame.value, json.dumps(ORDER), {"mode": "PERMISSIVE"})
        frame.select(order.alias("order"), again.alias("again"), to_avro("value", '"bytes"').alias("bytes")).schema  # noqa: B018

    with pytest.raises(AnalysisNeeded) as needed, captured_session(given, lambda _: None) as spark:
        program(spark)
    [question] = json.loads(needed.value.text)
    relation = proto.Relation.FromString(base64.b64decode(question["relation"]))
    calls = [each.alias.expr.common_inline_user_defined_function for each in relation.project.expressions]
    assert [call.function_name for call in calls] == ["from_avro", "from_avro", "to_avro"]
    assert [call.python_udf.command for call in calls] == [b"0", b"0", b"1"]
    assert [call.python_udf.output_type.WhichOneof("kind") for call in calls] == ["struct", "struct", "binary"]
    assert isinstance(given.called.of_number(1), ToAvro)


@pytest.mark.row("ends.4")
def test_operator_decodes_a_column_and_encodes_it_again() -> None:
    given = planned().called
    numbers = [given.number_of(function) for function in (FromAvro(json.dumps(FIRST), {}), ToAvro('"bytes"'))]
    result = FromAvro(json.dumps(FIRST), {}).result

    def call(number: int, kind: Any) -> Call:
        settings = {"name": "f", "number": number, "eval_type": 250, "deterministic": True}
        return Call(FUNCTION, (Column(0, "binary"),), kind, settings=settings)

    [step], _ = separated([call(numbers[0], result), call(numbers[1], "binary")], 1, given)
    spec, _ = functions_spec(step, [("value", pa.binary())], {})
    operator = PythonFunctionsOperator(spec)
    output = opened(operator, context())
    values = pa.array([encoded(FIRST, {"id": at}) for at in range(3)], pa.binary())
    operator.process_batch(pa.RecordBatch.from_arrays([values, values], ["value", "_argument0"]).slice(1), 0)
    columns = output.batches[0].columns
    assert columns[1].to_pylist() == [{"id": 1}, {"id": 2}]
    assert columns[2].to_pylist() == [encoded("bytes", value) for value in values.to_pylist()[1:]]
    with pytest.raises(PlanError, match="its argument is string"):
        separated(
            [Call(FUNCTION, (Column(0, "string"),), result, settings=call(numbers[0], result).settings)], 1, given
        )


@pytest.mark.row("ends.6")
def test_malformed_message_is_left_out_and_none_is_because_the_registry_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_functions, "_PAUSE_S", 0.0)
    good = framed(7, encoded(FIRST, {"id": 1}))
    values = pa.array([good, b"\x00", good], pa.binary())
    batch = pa.RecordBatch.from_arrays([values, values], ["value", "_argument0"])
    with registry({7: {"schema": json.dumps(FIRST)}}, [401]) as serving:
        given = planned().called
        function = FromAvro(json.dumps(FIRST), {"schema.registry.url": serving.url})
        settings = {"name": "f", "number": given.number_of(function), "eval_type": 250, "deterministic": True}
        call = Call(FUNCTION, (Column(0, "binary"),), function.result, settings=settings)
        spec, _ = functions_spec(separated([call], 1, given)[0][0], [("value", pa.binary())], {})
        operator = PythonFunctionsOperator(spec)
        output = opened(operator, context(configuration={"execution.bad-rows.mode": "DROP"}))
        with pytest.raises(RegistryError, match="status 401"):
            operator.process_batch(batch, 0)
        assert output.batches == []
        operator.process_batch(batch, 0)
    rows = [row for each in output.batches for row in each.column(1).to_pylist()]
    assert (rows, operator.bad_rows_dropped) == ([{"id": 1}] * 2, 1)
