"""Functions over JSON, intervals, hashes, URLs and formats: what Spark 4.3 gave for the same arguments."""

from __future__ import annotations

import datetime
import statistics
import uuid
import zoneinfo
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions import patterns
from ckpt_runtime.expressions.evaluation import Frame, compile_all, compile_expression, evaluate
from ckpt_runtime.expressions.json_reader import DEEPEST
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type


def computed(tree: Expression, *columns: pa.Array, moment: int | None = None) -> list[Any]:
    frame = Frame(columns, len(columns[0]) if columns else 1, moment=moment)
    return evaluate(compile_expression(tree), frame, arrow_type(tree.type)).to_pylist()  # type: ignore[no-any-return]


def struct(**fields: Any) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [{"name": k, "type": v, "nullable": True, "metadata": {}} for k, v in fields.items()],
    }


def array(element: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": True}


def map_(key: str, value: Any) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


def from_json(text: str | None, type_: Any, **options: str) -> Any:
    tree = Call("JsonToStructs", (Column(0, "string"),), type_, settings={"options": options})
    return computed(tree, pa.array([text], pa.string()))[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("7,b", (7, "b", None)),
        ("7", (7, None, "7")),
        ("x,b\n", (None, "b\n", "x,b")),
        ('"7","b,"', (7, "b,", None)),
        ("", (None, None, None)),
        ("\n", (None, None, "")),
        ("7,b,c", (7, "b", "7,b,c")),
        (None, None),
    ],
)
def test_text_of_csv_becomes_a_struct_and_is_kept_where_it_is_bad(text: str | None, wanted: Any) -> None:
    type_ = struct(a="integer", b="string", bad="string")
    tree = Call(
        "CsvToStructs", (Column(0, "string"),), type_, settings={"options": {"columnNameOfCorruptRecord": "bad"}}
    )
    found = computed(tree, pa.array(["1,2", text, text]))[1:]
    assert [None if each is None else tuple(each.values()) for each in found] == [wanted, wanted]


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (("a", "b c"), "a,b c"),
        ((" a ", 'b"'), 'a,"b\\""'),
        (("#", "#"), '"#",#'),
        (("\\", ",\\"), '\\,",\\\\"'),
        (("", None), '"",'),
        (("a\n", "\nb"), '"a",b'),
    ],
)
def test_struct_becomes_a_line_of_csv_with_quotes_where_spark_writes_them(texts: tuple[Any, Any], wanted: str) -> None:
    tree = Call("StructsToCsv", (Column(0, struct(a="string", b="string")),), "string")
    rows = pa.array([dict(zip("ab", texts, strict=True))], arrow_type(struct(a="string", b="string")))
    assert computed(tree, rows) == [wanted]


def test_function_of_csv_refuses_what_it_does_not_know() -> None:
    def refused(function: str, type_: Any, argument: Any, **options: str) -> str:
        tree = Call(function, (Column(0, argument),), type_, settings={"options": options})
        with pytest.raises(UnsupportedExpressionError) as error:
            compile_expression(tree)
        return str(error.value)

    line = struct(a="string")
    assert "multiLine" in refused("CsvToStructs", line, "string", multiLine="true")
    assert "DROPMALFORMED" in refused("CsvToStructs", line, "string", mode="DROPMALFORMED")
    assert "list" in refused("CsvToStructs", struct(a=array("string")), "string")
    assert "to_csv of the type binary" in refused("StructsToCsv", "string", struct(a="binary"))
    assert "quote" in refused("StructsToCsv", "string", line, quote="")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a":1, "b":2.5}', {"a": 1, "b": 2.5}),
        ('{"a":1, "b":', {"a": None, "b": None}),
        ('{"a":1} xyz', {"a": 1, "b": None}),
        ('{"a":1,"a":"x"}', {"a": 1, "b": None}),
        ('{"a":"1","b":"NaN"}', {"a": None, "b": "NaN"}),
        ('{"a":1.0,"b":-INF}', {"a": None, "b": float("-inf")}),
        ("{'a':7}", {"a": 7, "b": None}),
        ('{"A":7}', {"a": None, "b": None}),
        ('{"a":99999999999}', {"a": None, "b": None}),
        ("[1,2]", {"a": None, "b": None}),
        ("null", {"a": None, "b": None}),
        (" ", None),
        (None, None),
    ],
)
def test_struct_of_json_has_nulls_for_what_does_not_fit(text: str | None, wanted: Any) -> None:
    found = from_json(text, struct(a="integer", b="double"))
    if found is not None and found["b"] is not None and found["b"] != found["b"]:
        found["b"] = "NaN"
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "type_", "wanted"),
    [
        ('[1,"x",3]', array("integer"), None),
        ('{"a":1}', array(struct(a="integer")), [{"a": 1}]),
        ('[{"x":1,"y":"z"}]', array(struct(x="integer", y="integer")), [{"x": 1, "y": None}]),
        ('{"a":1,"a":2}', map_("string", "integer"), [("a", 1), ("a", 2)]),
        ('{"a":200,"b":256}', struct(a="byte", b="byte"), {"a": -56, "b": None}),
        ('{"a": {"b" : 1.10, "c":[1, 2]} }', struct(a="string"), {"a": '{"b":1.1,"c":[1,2]}'}),
        ('{"a": "x\\ud800y"}', struct(a="string"), {"a": "x?y"}),
        ('{"a":"1,234.567"}', struct(a="decimal(10,2)"), {"a": Decimal("1234.57")}),
        ('{"a": 9999999999999999.99}', struct(a="decimal(20,2)"), {"a": Decimal("9999999999999999.99")}),
        ('{"a":"","b":""}', struct(a="binary", b="string"), {"a": b"", "b": ""}),
    ],
)  # fmt: skip
def test_value_of_json_is_that_of_the_type(text: str, type_: Any, wanted: Any) -> None:
    assert from_json(text, type_) == wanted


def test_json_that_is_nested_too_deep_or_has_unknown_options_is_refused() -> None:
    with pytest.raises(EvaluationError, match="deeper"):
        from_json("[" * (DEEPEST + 2), array("integer"))
    with pytest.raises(UnsupportedExpressionError, match="allowComments"):
        from_json("{}", struct(a="integer"), allowComments="true")


@pytest.mark.row("ends.6")
def test_bad_record_is_kept_in_its_column_or_fails() -> None:
    kept = struct(a="integer", bad="string")
    for text, row in (
        ('{"a": 1}', {"a": 1, "bad": None}),
        ('{"a": "x"}', {"a": None, "bad": '{"a": "x"}'}),
        ("{", {"a": None, "bad": "{"}),
        (" ", None),
    ):
        assert from_json(text, kept, columnNameOfCorruptRecord="bad") == row
    assert from_json('{"a": 1}', struct(a="integer"), mode="FAILFAST") == {"a": 1}
    with pytest.raises(EvaluationError, match="MALFORMED_RECORD_IN_PARSING"):
        from_json('{"a": "x"}', struct(a="integer"), mode="FAILFAST")
    with pytest.raises(UnsupportedExpressionError, match="option columnNameOfCorruptRecord"):
        from_json("{}", struct(a="integer", _corrupt_record="string"))


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ('{"a":1.10}', "$.a", "1.1"),
        ('{"b":null}', "$.b", None),
        ('{"d":[1,{"e":2},[3,4]]}', "$.d[*]", '[1,{"e":2},[3,4]]'),
        ('{"d":[[1,2],[3,4]]}', "$.d[*][*]", "[1,2,3,4]"),
        ('{"d":[[1,2],[3,4]]}', "$.d[0][*]", "[1,2]"),
        ('{"d":[[1,2],[3,4]]}', "$.d[*][0]", "[1,3]"),
        ('{"a":[{"x":"q"}]}', "$.a[*].x", '"q"'),
        ('{"a":[{"x":[1,2]}]}', "$.a[*].x[*]", "[1,2]"),
        ('{"a b":1}', "$['a b']", "1"),
        ('{"a":null,"a":"c"}', "$.a", "c"),
        ('{"a":1', "$.a", None),
        ('{"a":1}', "$.*", None),
    ],
)
def test_path_finds_a_part_of_a_json_document(text: str, path: str, wanted: str | None) -> None:
    tree = Call("GetJsonObject", (Column(0, "string"), Literal(path, "string")), "string")
    assert computed(tree, pa.array([text])) == [wanted]


def test_hash_takes_columns_one_after_the_other_and_passes_over_nulls() -> None:
    numbers, words = pa.array([1, None], pa.int32()), pa.array([None, "abcde"])
    for function, kind, wanted in [
        ("Murmur3Hash", "integer", [-559580957, 814637928]),
        ("XxHash64", "long", [-6698625589789238999, -990457398947679591]),
    ]:
        tree = Call(function, (Column(0, "integer"), Column(1, "string")), kind, settings={"seed": 42})
        assert computed(tree, numbers, words) == wanted
    long_ = Literal("abcdefghijklmnopqrstuvwxyz0123456789abcdefghijk", "string")
    assert computed(Call("XxHash64", (long_,), "long", settings={"seed": 42})) == [-4668011748272668580]


def test_hash_of_slice_is_that_of_its_rows() -> None:
    words = pa.array(["zz", "abcde", None, "é"]).slice(1)
    tree = Call("Murmur3Hash", (Column(0, "string"),), "integer", settings={"seed": 42})
    assert computed(tree, words) == [814637928, 42, 2119106806]


def test_day_of_an_interval_is_a_local_day_of_the_zone() -> None:
    # The clocks go forward on 2020-03-29 in Vienna: the local day has 23 hours.
    start = pa.array([datetime.datetime(2020, 3, 28, 12, tzinfo=datetime.UTC)], pa.timestamp("us", "UTC"))
    day = Literal(str(86_400_000_000), "interval day")
    for zone, hour in [("UTC", 12), ("Europe/Vienna", 11)]:
        tree = Call("TimestampAddInterval", (Column(0, "timestamp"), day), "timestamp", settings={"zone": zone})
        assert computed(tree, start) == [datetime.datetime(2020, 3, 29, hour, tzinfo=datetime.UTC)]


def test_interval_of_months_ends_with_the_month_and_is_refused_as_a_column() -> None:
    month = Literal("1", "interval month")
    date = pa.array([datetime.date(2020, 1, 31)])
    assert computed(Call("DateAddYMInterval", (Column(0, "date"), month), "date"), date) == [datetime.date(2020, 2, 29)]
    with pytest.raises(UnsupportedExpressionError, match="interval month"):
        computed(month)


def test_current_time_is_that_of_the_batch_for_all_of_its_rows() -> None:
    tree = Call("EqualTo", (Call("Now", (), "timestamp"), Column(0, "timestamp")), "boolean")
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    times = pa.array([moment, moment + datetime.timedelta(seconds=1)], pa.timestamp("us", "UTC"))
    assert computed(tree, times, moment=int(moment.timestamp()) * 1_000_000) == [True, False]
    midnight = Call("CurrentDate", (), "date", settings={"zone": "Asia/Tokyo"})
    assert computed(midnight, moment=1_767_300_000_000_000) == [datetime.date(2026, 1, 2)]


def test_random_values_differ_from_row_to_row_and_from_call_to_call() -> None:
    calls = [Call(name, (), "double") for name in ("Rand", "Rand", "Randn")]
    named = Call("Concat", (Column(0, "string"), Call("Uuid", (), "string")), "string")
    texts = pa.array(["a"] * 1000).dictionary_encode()
    frame = Frame([texts], 1000, random_bytes=Random(1).randbytes)
    first, second, normal, ids = (compute(frame).to_pylist() for compute in compile_all([*calls, named]))
    assert all(0 <= value < 1 for value in first)
    assert first != second
    for numbers, mean, deviation in ((first, 0.5, 0.289), (normal, 0.0, 1.0)):
        assert statistics.mean(numbers) == pytest.approx(mean, abs=0.1)
        assert statistics.stdev(numbers) == pytest.approx(deviation, abs=0.1)
    assert len({*first}) == len({*normal}) == len({*ids}) == 1000
    assert all(uuid.UUID(text[1:]).version == 4 for text in ids)


def test_shuffled_arrays_and_random_texts_have_their_elements_and_lengths() -> None:
    integers = array("integer")
    lists = pa.array([[9], [*range(50), None], None, [], [*range(50)]], pa.list_(pa.int32())).slice(1)
    frame = Frame([lists], 4, random_bytes=Random(2).randbytes)
    trees = [Call("Shuffle", (Column(0, integers),), integers), Call("RandStr", (Literal("7", "integer"),), "string")]
    shuffled, texts = (compute(frame).to_pylist() for compute in compile_all(trees))
    assert [found and {*found} for found in shuffled] == [{*range(50), None}, None, [], {*range(50)}]
    assert shuffled[3] != [*range(50)]
    assert shuffled[3] != [each for each in shuffled[0] if each is not None]
    assert {len(text) for text in texts} == {7}
    assert len({*texts}) == 4
    with pytest.raises(UnsupportedExpressionError, match="length must be a constant"):
        compile_expression(Call("RandStr", (Column(0, "integer"),), "string"))


@pytest.mark.parametrize(
    ("unit", "start", "end", "wanted"),
    [
        ("hour", "2026-03-01 10:30:00", "2026-03-01 09:00:00", -1),
        ("DAY", "2026-03-01 10:30:00", "2026-03-03 10:29:59", 1),
        ("WEEK", "2026-03-15 00:00:00", "2026-03-01 00:00:01", -1),
        ("MONTH", "2024-01-31 00:00:00", "2024-02-29 00:00:00", 0),
        ("MONTH", "2024-01-29 12:00:00", "2024-02-29 11:59:59", 0),
        ("MONTH", "2024-02-29 12:00:00", "2024-01-29 12:00:01", 0),
        ("QUARTER", "2026-01-01 00:00:00", "2026-12-31 00:00:00", 3),
        ("YEAR", "2024-02-29 00:00:00", "2026-02-28 00:00:00", 1),
        ("MICROSECOND", "2026-01-01 00:00:00", "2026-01-01 00:00:01", 1_000_000),
    ],
)
def test_units_between_times_are_whole_ones(unit: str, start: str, end: str, wanted: int) -> None:
    times = [pa.array([text]).cast(pa.timestamp("us", "UTC")) for text in (f"{start}Z", f"{end}Z")]
    tree = Call("TimestampDiff", (Column(0, "timestamp"), Column(1, "timestamp")), "long", settings={"unit": unit})
    assert computed(tree, *times) == [wanted]


@pytest.mark.parametrize(
    ("unit", "count", "wanted"),
    [
        ("MONTH", 1, "2024-02-29"),
        ("quarter", -1, "2023-10-31"),
        ("DAYOFYEAR", 1, "2024-02-01"),
        ("WEEK", -1, "2024-01-24"),
    ],
)
def test_units_are_added_to_local_times(unit: str, count: int, wanted: str) -> None:
    tree = Call(
        "TimestampAdd", (Column(0, "long"), Column(1, "timestamp_ntz")), "timestamp_ntz", settings={"unit": unit}
    )
    times = pa.array([datetime.datetime(2024, 1, 31)], pa.timestamp("us"))
    assert computed(tree, pa.array([count]), times) == [datetime.datetime.fromisoformat(wanted)]
    with pytest.raises(EvaluationError, match="out of range"):
        computed(tree, pa.array([1 << 40]), times)


@pytest.mark.parametrize(
    ("function", "patterns", "wanted"),
    [
        ("LikeAny", ["a%", None], [True, None, None]),
        ("LikeAny", ["a%", "_c"], [True, True, None]),
        ("LikeAll", ["a%", "%b"], [True, False, None]),
        ("LikeAll", ["%", None], [None, None, None]),
        ("NotLikeAny", ["a%", "%b"], [False, True, None]),
        ("NotLikeAll", ["b%", "%d"], [True, False, None]),
    ],
)
def test_text_is_compared_with_several_patterns(
    function: str, patterns: list[str | None], wanted: list[bool | None]
) -> None:
    tree = Call(function, (Column(0, "string"),), "boolean", settings={"patterns": patterns})
    assert computed(tree, pa.array(["ab", "bc", None])) == wanted


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ("HOST", "host.com"),
        ("PATH", "/a/b"),
        ("QUERY", "q=1&r=2"),
        ("REF", "frag"),
        ("PROTOCOL", "http"),
        ("FILE", "/a/b?q=1&r=2"),
        ("AUTHORITY", "user:pw@host.com:80"),
        ("USERINFO", "user:pw"),
        ("NONE", None),
    ],
)
def test_part_of_url_is_that_of_java(part: str, wanted: str | None) -> None:
    url = pa.array(["http://user:pw@host.com:80/a/b?q=1&r=2#frag"])
    assert computed(Call("ParseUrl", (Column(0, "string"), Literal(part, "string")), "string"), url) == [wanted]


def test_bad_url_fails_in_ansi_mode_and_is_null_otherwise() -> None:
    tree = Call(
        "ParseUrl", (Column(0, "string"), Literal("HOST", "string")), "string", "legacy", {"failOnError": False}
    )
    assert computed(tree, pa.array(["http://h/a b", "http://a_b.com/x"])) == [None, None]
    with pytest.raises(EvaluationError, match="INVALID_URL"):
        computed(Call("ParseUrl", tree.arguments, "string"), pa.array(["http://h/a b"]))


def test_format_string_writes_values_as_java() -> None:
    values = [("42", "integer"), ("ab", "string"), ("7", "integer"), ("3.14159", "double"), ("1234567", "integer")]
    arguments = [Literal("%5d|%-5s|%05d|%.2f|%,d|%%|%s", "string"), *(Literal(*value) for value in values)]
    tree = Call("FormatString", (*arguments, Literal(None, "string")), "string")
    assert computed(tree) == ["   42|ab   |00007|3.14|1,234,567|%|null"]
    with pytest.raises(UnsupportedExpressionError, match="%d of the type double"):
        computed(Call("FormatString", (Literal("%d", "string"), Literal("1.5", "double")), "string"))


def test_try_gives_null_for_the_rows_that_fail_only() -> None:
    failing = Call("Add", (Column(0, "byte"), Literal("1", "byte")), "byte")
    values = pa.array([1, 127, None, 126, 127], pa.int8())
    assert computed(Call("TryEval", (failing,), "byte"), values) == [2, None, None, 127, None]


def test_null_is_neither_less_than_nan_nor_equal_to_it() -> None:
    sides = (
        pa.array([None, float("nan"), float("nan"), 1.0]),
        pa.array([float("nan"), None, float("nan"), float("nan")]),
    )
    for function, wanted in [
        ("LessThanOrEqual", [None, None, True, True]),
        ("GreaterThanOrEqual", [None, None, True, False]),
        ("LessThan", [None, None, False, True]),
    ]:
        tree = Call(function, (Column(0, "double"), Column(1, "double")), "boolean")
        assert computed(tree, *sides) == wanted


def test_argument_that_fails_does_not_matter_where_an_earlier_one_is_null() -> None:
    number = Call("Cast", (Column(1, "string"),), "integer")
    tree = Call("Add", (Column(0, "integer"), number), "integer")
    assert computed(tree, pa.array([None, 1], pa.int32()), pa.array(["x", "2"])) == [None, 3]
    with pytest.raises(EvaluationError, match="CAST_INVALID_INPUT"):
        computed(tree, pa.array([1, 1], pa.int32()), pa.array(["x", "2"]))


def test_shift_by_all_bits_but_one_moves_the_sign_as_in_java() -> None:
    for kind, type_, bits in [("integer", pa.int32(), 32), ("long", pa.int64(), 64)]:
        values, by = pa.array([-1, 5, -(1 << (bits - 1))], type_), pa.array([-1, bits - 1, 2 * bits - 1], pa.int32())
        tree = [Column(0, kind), Column(1, "integer")]
        assert computed(Call("ShiftLeft", tuple(tree), kind), values, by) == [-(1 << (bits - 1))] * 2 + [0]
        assert computed(Call("ShiftRight", tuple(tree), kind), values, by) == [-1, 0, -1]
        assert computed(Call("ShiftRightUnsigned", tuple(tree), kind), values, by) == [1, 0, 1]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/New_York"])
@pytest.mark.parametrize("pattern", ["yyyy-MM-dd", "E D", "HH", "hh a", "HH:mm", "dd HH:mm:ss", "ss.SSSSSS", "'x'"])
def test_date_format_of_a_column_equals_that_of_each_value(pattern: str, zone: str) -> None:
    # Before and after 1970, in the repeated hour of a clock that is set back, and on both sides of a midnight.
    micros = [0, -1, 1, 86_399_999_999, -86_400_000_001, 1_793_511_000_000_001, 1_793_514_600_000_001, None]
    column = pa.array(micros, pa.timestamp("us", "UTC"))
    arguments = (Column(0, "timestamp"), Literal(pattern, "string"))
    tree = Call("DateFormatClass", arguments, "string", settings={"zone": zone})
    local = [value and value.astimezone(zoneinfo.ZoneInfo(zone)).replace(tzinfo=None) for value in column.to_pylist()]
    tokens = patterns.tokens_of(pattern)
    assert computed(tree, column) == [value and patterns.write(value, tokens) for value in local]


def test_base64_makes_lines_of_76_characters_and_unbase64_reads_them() -> None:
    data = pa.array([b"", b"x" * 57, b"x" * 58, None], pa.binary())
    encoded = Call("Base64", (Column(0, "binary"),), "string")
    line = "eHh4" * 19
    assert computed(encoded, data) == ["", line, line + "\r\neA==", None]
    assert computed(Call("UnBase64", (encoded,), "binary"), data) == data.to_pylist()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5 minutes", (0, 0, 300_000_000)),
        (" interval 1 YEAR 2 months - 3 days ", (14, -3, 0)),
        ("1.5 seconds -500 milliseconds", (0, 0, 1_000_000)),
        ("+1 week", (0, 7, 0)),
        ("1.5 minutes", None),
        ("5minutes", None),
        ("5", None),
        ("interval", None),
        ("99999999999 days", None),
        ("", None),
    ],
)
def test_text_is_cast_to_a_calendar_interval_or_null(text: str, wanted: tuple[int, int, int] | None) -> None:
    found = compile_expression(Call("Cast", (Column(0, "string"),), "interval"))(Frame((pa.array([text]),), 1))
    assert found.to_pylist() == [
        None if wanted is None else dict(zip(("months", "days", "micros"), wanted, strict=True))
    ]


def test_key_text_is_equal_for_equal_values_and_gives_the_value_back() -> None:
    moment = datetime.datetime(1969, 12, 31, 23, 59, 59, 7, tzinfo=datetime.UTC)
    element = struct(
        d="double", b="binary", t="timestamp", day="date", n="decimal(5,2)", m=map_("string", "integer"), i="boolean"
    )
    kind = array(element)
    values = [
        {"d": -0.0, "b": b"\x00\xff", "t": moment, "day": moment.date(), "n": Decimal("1.50"), "i": True}
        | {"m": [("b", 1), ("a", None)]},
        None,
        dict.fromkeys(["d", "b", "t", "day", "n", "m", "i"]),
    ]
    turned = [{**values[0], "d": 0.0, "m": [("a", None), ("b", 1)]}, *values[1:]]  # type: ignore[dict-item]
    column = pa.array([values, turned, [], None], arrow_type(kind))
    texts = computed(Call("KeyText", (Column(0, kind),), "string"), column)
    assert texts[0] == texts[1]
    assert texts[2:] == ["[]", None]
    assert computed(Call("ValueOfKey", (Column(0, "string"),), kind), pa.array(texts)) == [turned, turned, [], None]
    nan = computed(Call("KeyText", (Column(0, array("double")),), "string"), pa.array([[float("nan")]]))
    [[back]] = computed(Call("ValueOfKey", (Column(0, "string"),), array("double")), pa.array(nan))
    assert back != back
