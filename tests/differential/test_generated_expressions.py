"""Generated expressions over generated rows in Spark and in the engine: equal, or refused when the plan is made.

``PARITY_EXAMPLES`` says for how many tables, with forty expressions each; ``make parity`` takes more.
"""

from __future__ import annotations

import decimal
import os
import re
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import Rows
from ckpt_runtime.operators.aggregates.registry import accumulator_for
from tests.support.generated_parity import COLUMNS, Outcome, compare, examples_of, expressions, shown, tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

_PAGE = Path(__file__).parents[2] / "docs" / "functions.md"
_EXAMPLES = int(os.environ.get("PARITY_EXAMPLES", "2"))
_IN_ONE_TABLE = 40
_SESSIONS = [(True, "UTC"), (False, "Europe/Vienna"), (True, "Europe/Vienna"), (False, "UTC")]


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    kept = {key: spark.conf.get(key) for key in ("spark.sql.ansi.enabled", "spark.sql.session.timeZone")}
    yield spark
    for key, value in kept.items():
        assert value is not None
        spark.conf.set(key, value)


@pytest.fixture
def compiling(session: SparkSession) -> Iterator[SparkSession]:
    """Spark that compiles expressions over a table in memory, as it does for streams.

    If it interprets them, as elsewhere in these tests, some have other results: for example, a function then takes null
    for 0 where it expects an integer.
    """
    settings = {
        "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation",
        "spark.sql.codegen.wholeStage": "true",
        "spark.sql.codegen.factoryMode": "FALLBACK",
    }
    kept = {key: session.conf.get(key, None) for key in settings}
    for key, value in settings.items():
        session.conf.set(key, value)
    yield session
    for key, before in kept.items():
        if before is None:
            session.conf.unset(key)
        else:
            session.conf.set(key, before)


@pytest.mark.row("ps.4")
def test_generated_expression_over_generated_rows_is_equal_in_spark_and_in_the_engine(compiling: SparkSession) -> None:
    lines = [line for line in _PAGE.read_text().splitlines() if line.startswith(("Equal", "Partly"))]
    examples = examples_of(compiling, re.findall(r"`([^`]+)`", "\n".join(lines)))
    total, sessions = Outcome(), cycle(_SESSIONS)

    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        database=None,
        derandomize="PARITY_EXAMPLES" not in os.environ,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(tables(), st.lists(expressions(examples), min_size=_IN_ONE_TABLE, max_size=_IN_ONE_TABLE))
    def run(table: pa.Table, texts: list[str]) -> None:
        ansi, zone = next(sessions)
        outcome = compare(compiling, table, texts, ansi=ansi, zone=zone)
        total.equal += outcome.equal
        total.differences += [f"ansi={ansi} {zone}: {found}" for found in outcome.differences]

    run()
    assert not total.differences, "\n".join(total.differences)
    assert total.equal >= _EXAMPLES * _IN_ONE_TABLE // 3


_NUMBERS = ("", "0", "7", "-7", "+7", " 7\u00a0", " 7 ", "7-", "<7>", "45.6", "-45.67", "$4.5", "1,234", ",234", "007")
_MORE_NUMBERS = (
    ".5",
    "5.",
    "$-7",
    "-$7",
    "7 7",
    "1234,5",
    "<$7>",
    "7.555",
    "-",
    "-7-",
    "٣",
    "abc",
    "1234567",
    "$",
    None,
)
_AMOUNTS = ("0", "0.4", "7", "-7", "45.6", "-45.67", "123.45", "-0.05", "12345", "1234.5", "-9999999999.99")
_WORDS = ("banana", "aaaa", "éaéa", "a😀a", "b😀", "MARTHA", "DIXON", "ana", "")
_PARTS_OF_WORDS = ("ana", "aa", "é", "", "ab", "MARHTA", "DICKSONX", "banana", "")
_READ = (
    "999",
    "000",
    "99d99",
    "00.00",
    "S99",
    "99S",
    "MI99",
    "MI99S",
    "99PR",
    "$99.9",
    "9,999",
    "0,000.00",
    "S$9G999.00",
)
_WRITTEN = (*_READ, "99.9MI", ".99", "$00S", "990", "9,0,9", "$99PR", "9,999.9PR", "99.", "9999999999D99S")


def _repeated(column: pa.Array, length: int) -> pa.Array:
    return pa.array([column[at % len(column)].as_py() for at in range(length)], column.type)


@pytest.mark.row("ps.4")
def test_formats_of_numbers_and_searches_from_a_position_give_the_values_of_spark(session: SparkSession) -> None:
    texts = [*_NUMBERS, *_MORE_NUMBERS]
    amounts = [decimal.Decimal(each).quantize(decimal.Decimal("0.01")) for each in _AMOUNTS]
    columns = {name: pa.nulls(len(texts), kind) for name, (kind, _) in COLUMNS.items()}
    columns["s"], columns["j"] = pa.array(texts), pa.array([at % 7 - 3 for at in range(len(texts))], pa.int32())
    columns["p"] = pa.array([*amounts, *[None] * (len(texts) - len(amounts))], COLUMNS["p"][0])
    pairs = [(word, part) for word in _WORDS for part in _PARTS_OF_WORDS]
    columns |= {name: _repeated(column, len(pairs)) for name, column in columns.items()}
    columns["t"] = pa.array([word for word, _ in pairs])
    columns["at"] = pa.array([[part] for _, part in pairs])
    expressions = [
        *["instr(t, at[0], -2, 1)", "instr(t, at[0], j, 1)", "instr(t, at[0], j, 2)", "instr(t, at[0], 1, 2)"],
        *["jaro_winkler_similarity(t, at[0])", "instr(t, s, j)", "instr(t, 'a', 1, j)"],
        *[f"try_to_number(s, '{pattern}')" for pattern in _READ],
        *[f"to_char(p, '{pattern}')" for pattern in _WRITTEN],
        *["to_number(s, '99.99')", "to_varchar(p, '999')"],
        *["try_to_binary(s)", "try_to_binary(s, 'HEX')", "to_binary(s, 'utf-8')", "try_to_binary(s, 'UTF8')"],
    ]
    outcome = compare(session, pa.table(columns), expressions, ansi=True, zone="UTC")
    assert outcome.differences == []
    assert outcome.equal == len(expressions)


_CSV_TEXTS = ["".join(parts) for length in range(4) for parts in product('a,"\\ \n#\r', repeat=length)]
_CSV_VALUES = ("1,a", "x,2.5,c", "-7,,,", "300,1e3,NaN", "2020-02-29", "1 ,true", ",", "12345678901,Inf", '"1",a', None)


@pytest.mark.row("ps.4")
def test_texts_of_csv_and_of_numbers_with_a_pattern_give_the_values_of_spark(session: SparkSession) -> None:
    count = len(_CSV_TEXTS)
    columns = {name: _repeated(pa.nulls(1, kind), count) for name, (kind, _) in COLUMNS.items()}
    columns["s"] = pa.array(_CSV_TEXTS)
    columns["t"] = _repeated(pa.array(_CSV_VALUES), count)
    columns["d"] = _repeated(pa.array([0.0, -0.0, 0.5, 2.5, 1234567.891, -0.04, float("nan"), 1e20, None]), count)
    columns["p"] = _repeated(
        pa.array([decimal.Decimal("2.50"), None, decimal.Decimal("-1234.05")], COLUMNS["p"][0]), count
    )
    columns["u"] = _repeated(pa.array([1_615_706_999_123_456, -1, None, 1_604_210_400_000_000], COLUMNS["u"][0]), count)
    columns["n"] = columns["u"].cast(pa.int64()).cast(pa.timestamp("us"))
    columns["k"] = columns["n"].cast(pa.date32(), safe=False)
    blanks = "map('ignoreLeadingWhiteSpace', 'true', 'ignoreTrailingWhiteSpace', 'true')"
    kept = "map('ignoreLeadingWhiteSpace', 'false', 'ignoreTrailingWhiteSpace', 'false')"
    expressions = [
        *[f"to_csv(struct(s, 1 AS x){given}" for given in (")", f", {kept})", ", map('sep', ';', 'nullValue', 'N'))")],
        "to_csv(struct(t, s))",
        "to_csv(struct(s, t), map('quoteAll', 'true'))",
        "to_csv(struct(s), map('escape', '\"'))",
        "to_csv(struct(d, p, u, n, k, true AS b, CAST(d AS FLOAT) AS f))",
        "to_csv(struct(d), map('emptyValue', 'E'))",
        "to_csv(struct(u, k), map('timestampFormat', 'yyyy/MM/dd HH', 'dateFormat', 'dd.MM.yy'))",
        "to_csv(struct(p))",
        "from_csv(s, 'x STRING, y STRING')",
        f"from_csv(s, 'x STRING, y STRING', {blanks})",
        "from_csv(s, 'x INT, y STRING, bad STRING', map('columnNameOfCorruptRecord', 'bad'))",
        "from_csv(t, 'x INT, y DOUBLE, z STRING')",
        "from_csv(t, 'x TIMESTAMP, y BOOLEAN')",
        "from_csv(t, 'x DATE')",
        "from_csv(t, 'x DECIMAL(5,1), y FLOAT, z TINYINT')",
        "from_csv(t, 'x STRING', map('nullValue', '1', 'sep', 'x'))",
        *[f"format_number(d, '{pattern}')" for pattern in ("##.###", "#,##0.00", "000.#", "#", "", "#,###.0#")],
        "format_number(p, '0.0')",
        "time_bucket(INTERVAL '1' DAY, u)",
        "time_bucket(INTERVAL '5' MONTH, u)",
        "time_bucket(INTERVAL '90' MINUTE, u)",
        "time_bucket(INTERVAL '36' HOUR, n, TIMESTAMP_NTZ'2021-03-14 01:30:00')",
        "time_bucket(INTERVAL '2' MONTH, n, TIMESTAMP_NTZ'2020-12-31 01:30:00')",
    ]
    outcome = compare(session, pa.table(columns), expressions, ansi=True, zone="America/New_York")
    assert outcome.differences == []
    assert outcome.equal == len(expressions)


@pytest.mark.row("ps.4")
def test_corners_of_numbers_urls_and_maps_give_the_values_of_spark(compiling: SparkSession) -> None:
    columns = {name: _repeated(pa.nulls(1, kind), 12) for name, (kind, _) in COLUMNS.items()}
    columns["s"] = pa.array(["M", "22", "abcdefghm", "ABCDEFGH", "2.00", "", "0", "m=e", "MEM", "MEMEMEMEM", None, "x"])
    urls = ["\ue000", "\u200b", "\xa0", "\x85", "\u2028", "\u0378", "\U000e0001", "\xad", "\ufeff", "\u3000", "é", "😀"]
    columns["t"] = pa.array([f"http://h.org/a{each}?q={each}#r" for each in urls])
    doubles = [1e300, -1e300, 1e308, float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 9.3e12, -9.3e12, 1.5, None]
    columns["d"], columns["f"] = pa.array(doubles), pa.array(doubles).cast(pa.float32())
    columns["p"] = _repeated(pa.array([decimal.Decimal("2.50"), None], COLUMNS["p"][0]), 12)
    columns["j"] = _repeated(pa.array([None, 5], pa.int32()), 12)
    expressions = [
        *["from_base32(s)", "parse_url(t, 'PATH')", "parse_url(t, 'QUERY', 'q')", "try_parse_url(t, 'REF')"],
        *["unix_micros(timestamp_seconds(d))", "unix_micros(timestamp_seconds(f))", "CAST(d AS DECIMAL(16, 6))"],
        *["try_make_timestamp_ltz(2020, 1, 1, 1, 30, d)", "CAST(f AS DECIMAL(38, 2))"],
        *["map_from_entries(array(struct(d, j)))", "map_concat(map(d, j), map(7D, 1))", "map(f, j)"],
        *["pmod(CAST(s AS DOUBLE), p)", "CAST(s AS DOUBLE) % j", "CAST(s AS DOUBLE) / j", "CAST(s AS INT) div j"],
    ]
    for ansi in (True, False):
        outcome = compare(compiling, pa.table(columns), expressions, ansi=ansi, zone="Europe/Vienna")
        assert outcome.differences == []


_INTERVALS = (
    *(
        "1-2",
        "|1-2",
        "-0001-002",
        "1-12",
        " 1-2\t",
        "7",
        "-7",
        "1 year",
        "-1 2",
        "1 2:3",
        "1 24:00",
        "61:3",
        "3:61",
        "4.",
    ),
    *(
        "1 2:3:4.1234567",
        "1 2:3:4.1234567891",
        "10 23:60:00",
        "1000:59:59.5",
        "-0.5",
        "-1.5",
        ".5",
        "1  2",
        "\u0663",
        "",
    ),
    *("interval '-1-2' year to month", "INTERVAL -'-1-2' YEAR TO  MONTH", "INTERVAL - '1-2' YEAR TO MONTH", "-+1-2"),
    *(
        "INTERVAL '7' DAY",
        "INTERVAL '7.5' DAY",
        "INTERVAL |'5' MINUTE",
        "INTERVAL -'4.5' SECOND",
        "interval'7'day",
        None,
    ),
    *("178956970-7", "178956970-8", "-178956970-8", "2147483648", "-2147483648", "106751992", "1537228672809129301"),
    *(
        "106751991 04:00:54.775807",
        "-106751991 04:00:54.775808",
        "106751991 04:00:54.775808",
        "2562047789:00",
        "1-2\x00",
    ),
    *("9223372036854.775807", "9223372036854.775808", "-153722867280:54.775808", "99999999999999999999", "\u00a01-2"),
)


@pytest.mark.row("ps.4")
def test_texts_that_are_cast_to_intervals_give_the_values_of_spark(session: SparkSession) -> None:
    columns = {name: _repeated(pa.nulls(1, kind), len(_INTERVALS)) for name, (kind, _) in COLUMNS.items()}
    columns["s"] = pa.array(_INTERVALS)
    columns["t"] = _repeated(pa.array(["1-2", "1 2:3:4.5"]), len(_INTERVALS))
    units = ["year", "month", "year to month", "day", "hour", "minute", "second", "day to hour", "day to minute"]
    units += ["day to second", "hour to minute", "hour to second", "minute to second"]
    expressions = [
        *[f"CAST(try_cast(s AS INTERVAL {unit}) AS STRING)" for unit in units],
        *[f"CAST(CAST(s AS INTERVAL {unit}) AS STRING)" for unit in units[:7]],
        *["n + CAST(t AS INTERVAL YEAR TO MONTH)", "try_cast(t AS INTERVAL DAY TO SECOND)"],
    ]
    for ansi in (True, False):
        outcome = compare(session, pa.table(columns), expressions, ansi=ansi, zone="UTC")
        assert outcome.differences == []
        assert outcome.equal == len(expressions)


_OFFSETS = (
    *(
        "Z",
        "z",
        "+00:00",
        "-00:00",
        "+01:00",
        "-05:30",
        "+18:00",
        "+18:01",
        "-19:00",
        "+01:60",
        "+1:00",
        "+0130",
        "-0000",
    ),
    *("+01", "-11", "+013", "", "UTC", "+01:00:00", "-04:00", "-05:00", "+00", "-0430"),
)


@pytest.mark.row("ps.4")
def test_offsets_and_quarters_in_patterns_of_times_give_the_values_of_spark(session: SparkSession) -> None:
    texts = [*(f"2020-11-01T01:30:00.123{offset}" for offset in _OFFSETS), "2020-06-30T23:30:00.000-04:00", None]
    texts += [
        f"2020-06-30T23:30:01{rest}" for rest in (".1Z", ".1234+01:00", ".12", "-05:00", "", ".", "Z+01:00", " Z")
    ]
    columns = {name: pa.nulls(len(texts), kind) for name, (kind, _) in COLUMNS.items()}
    # Both sides of the hour that occurs twice, a year whose offset has seconds, the ends of quarters.
    micros = [1_604_208_600_123_456, 1_604_212_200_123_456, -3_000_000_000_000_000, None, 0, 1_593_576_000_000_000 - 1]
    columns["s"], columns["u"] = pa.array(texts), _repeated(pa.array(micros, COLUMNS["u"][0]), len(texts))
    columns["k"] = columns["u"].cast(pa.date32(), safe=False)
    columns["l"] = _repeated(pa.array([0, 1_604_208_600, 1_604_212_200, None]), len(texts))
    patterns = [f"yyyy-MM-dd\\'T\\'HH:mm:ss.SSS{'XxZ'[at // 3] * (at % 3 + 1)}" for at in range(9)]
    patterns += [
        f"yyyy-MM-dd\\'T\\'HH:mm:ss{part}" for part in ("[.SSS][XXX]", "[.SSS[xx]]", "[XXX]", "[.][SS][\\'Z\\']")
    ]
    document = "concat('{\"a\":\"', s, '\"}')"
    expressions = [
        *[f"{name}(s, '{each}')" for name in ("to_timestamp", "to_date", "unix_timestamp") for each in patterns],
        *[f"date_format({column}, '{each}')" for column in "uk" for each in patterns],
        *[f"from_unixtime(l, '{each}')" for each in patterns],
        *[f"from_json({document}, 'a TIMESTAMP', map('timestampFormat', '{each}'))" for each in patterns],
        *[f"from_csv(s, 'a TIMESTAMP', map('timestampFormat', '{each}'))" for each in patterns],
        *[
            f"{name}(struct(u), map('timestampFormat', '{patterns[at]}'))"
            for name in ("to_json", "to_csv")
            for at in (2, 6)
        ],
        *[f"date_format(u, '{each}')" for each in ("Q", "QQ", "QQQ yyyy", "QQQQ", "q/qq")],
    ]
    for zone in ("America/New_York", "UTC"):
        outcome = compare(session, pa.table(columns), expressions, ansi=False, zone=zone)
        assert outcome.differences == []
        assert outcome.equal == len(expressions)


@pytest.mark.row("ps.4")
def test_intervals_of_numbers_and_encrypted_texts_give_the_values_of_spark(session: SparkSession) -> None:
    keys = ["0000111122223333", "abcdefghijklmnop12345678ABCDEFGH", "short", None]
    columns = {name: _repeated(pa.nulls(1, kind), 12) for name, (kind, _) in COLUMNS.items()}
    columns["s"] = _repeated(pa.array(["Spark", "", "a text of more than one block"]), 12)
    columns["t"] = pa.array(keys * 3)
    columns["j"] = _repeated(pa.array([0, 7, -90, None, 400], pa.int32()), 12)
    columns["p"] = _repeated(pa.array([decimal.Decimal("2.50"), None, decimal.Decimal("-7.49")], COLUMNS["p"][0]), 12)
    units = {"day": "j", "hour": "p", "minute": "j", "second": "p", "month": "p", "year": "j"}
    start, longer = "unhex('000102030405060708090a0b0c0d0e0f')", "interval '-1 12:30:15.5' day to second"
    gcm = f"'{keys[1]}', 'GCM', 'DEFAULT'"
    expressions = [
        *[f"CAST(CAST({column} AS INTERVAL {unit}) AS STRING)" for unit, column in units.items()],
        *[f"CAST(CAST({column} AS INTERVAL {unit}) AS SMALLINT)" for unit, column in units.items()],
        "CAST(CAST(j AS INTERVAL DAY) AS TINYINT)",
        "CAST(CAST(p AS INTERVAL SECOND) AS DECIMAL(10, 1))",
        *[f"CAST({longer} AS {kind})" for kind in ("INTERVAL DAY", "INTERVAL DAY TO MINUTE", "INTERVAL HOUR", "INT")],
        *[f"CAST(CAST(interval '-1-7' year to month AS INTERVAL {kind}) AS STRING)" for kind in ("YEAR", "MONTH")],
        "try_cast(9223372036854775807 + j AS INTERVAL DAY)",
        "aes_encrypt(s, t, 'ECB')",
        "try_aes_decrypt(aes_encrypt(s, t, 'ecb', 'PKCS'), t, 'ECB')",
        f"aes_encrypt(s, '{keys[0]}', 'CBC', 'DEFAULT', {start})",
        f"aes_encrypt(s, {gcm}, substr({start}, 1, 12), t)",
        f"try_aes_decrypt(aes_encrypt(s, {gcm}, substr({start}, 1, 12), 'short'), {gcm}, t)",
        *[f"aes_encrypt(s, '{keys[0]}', '{mode}', 'PKCS', {start})" for mode in ("GCM", "CTR", "ECB")],
    ]
    outcome = compare(session, pa.table(columns), expressions, ansi=True, zone="UTC")
    assert outcome.differences == []
    assert outcome.equal == len(expressions)


def _vectors(count: int) -> list[list[float | None] | None]:
    """Vectors of up to 30 elements: long enough for several sums of eight. Some have nulls, NaN or infinity."""
    random = Random(7)
    vectors: list[list[float | None] | None] = [None, [], [0.0], [-0.0, -0.0], [3e38] * 9, [1e-45, None]]
    odd = (None, float("nan"), float("inf"), float("-inf"), -0.0)
    while len(vectors) < count:
        vector: list[float | None] = [
            random.gauss(0, 10 ** random.randint(-3, 3)) for _ in range(random.randint(1, 30))
        ]
        if len(vectors) % 5 == 0:
            vector[random.randrange(len(vector))] = random.choice(odd)
        vectors.append(vector)
    return vectors


@pytest.mark.row("ps.4")
def test_functions_of_vectors_give_the_values_of_spark(session: SparkSession) -> None:
    vectors = _vectors(60)
    columns = {name: pa.nulls(len(vectors), kind) for name, (kind, _) in COLUMNS.items()}
    columns["at"] = pa.array(vectors).cast(pa.list_(pa.string()))
    columns["j"] = _repeated(pa.array([1, 2], pa.int32()), len(vectors))
    given, other = "CAST(at AS ARRAY<FLOAT>)", "reverse(CAST(at AS ARRAY<FLOAT>))"
    pairs = [f"vector_{name}" for name in ("cosine_similarity", "inner_product", "l2_distance")]
    degrees = ("1.0F", "2.0F", "float('inf')", "CAST(j AS FLOAT)", "3.0F", "CAST(NULL AS FLOAT)")
    expressions = [
        *[f"{name}({given}, {other})" for name in pairs],
        *[f"{name}(array(1.5F, -2.0F, 0.1F), array(float(j), 0.25F, 3.0F))" for name in pairs],
        *[f"{name}({given}, array(1.0F))" for name in pairs],
        *[f"{name}({given}, {degree})" for name in ("vector_norm", "vector_normalize") for degree in degrees],
        *[f"{name}({given})" for name in ("vector_norm", "vector_normalize")],
    ]
    outcome = compare(session, pa.table(columns), expressions, ansi=True, zone="UTC")
    assert outcome.differences == []
    assert outcome.equal == len(expressions)


@pytest.mark.row("ps.3")
@pytest.mark.parametrize(("name", "function"), [("vector_sum", "VectorSum"), ("vector_avg", "VectorAvg")])
def test_aggregates_of_vectors_give_the_values_of_spark(session: SparkSession, name: str, function: str) -> None:
    kind = pa.list_(pa.float32())
    cut = [None if each is None else each[: len(each) % 7] for each in _vectors(400)]
    keys = [99 if each is None else len(each) + 7 * (at % 2) for at, each in enumerate(cut)]
    table = pa.table({"k": keys, "v": pa.array(cut, kind)})
    frame = session.createDataFrame(table).coalesce(1)
    wanted = {row["k"]: row["v"] for row in frame.groupBy("k").agg({"v": name}).toDF("k", "v").toArrow().to_pylist()}
    accumulator = accumulator_for(GroupAggregate(function, ("v",), "v", kind), table.schema)
    state = [pa.array([], field.type) for field in accumulator.stored]
    known, numbers = pa.array([], pa.int64()), np.empty(0, dtype=np.uint32)
    for batch in table.to_batches(max_chunksize=90):
        known = pa.concat_arrays([known, batch["k"]]).unique()
        groups = np.array([known.index(key).as_py() for key in batch["k"]], dtype=np.uint32)
        state = accumulator.combined(len(known), Rows(numbers, state), Rows(groups, [batch["v"]]))
        numbers = np.arange(len(known), dtype=np.uint32)
    found = dict(zip(known.to_pylist(), accumulator.result(state).to_pylist(), strict=True))
    assert {key: shown(value) for key, value in found.items()} == {key: shown(value) for key, value in wanted.items()}
