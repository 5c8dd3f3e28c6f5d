"""Generated expressions over generated rows in Spark and in the engine: equal, or refused when the plan is made.

``PARITY_EXAMPLES`` says for how many tables, with forty expressions each; ``make parity`` takes more.
"""

from __future__ import annotations

import decimal
import os
import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.generated_parity import COLUMNS, Outcome, compare, examples_of, expressions, tables

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


@pytest.mark.row("ps.4")
def test_generated_expression_over_generated_rows_is_equal_in_spark_and_in_the_engine(session: SparkSession) -> None:
    lines = [line for line in _PAGE.read_text().splitlines() if line.startswith(("Equal", "Partly"))]
    examples = examples_of(session, re.findall(r"`([^`]+)`", "\n".join(lines)))
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
        outcome = compare(session, table, texts, ansi=ansi, zone=zone)
        total.equal += outcome.equal
        total.differences += [f"ansi={ansi} {zone}: {found}" for found in outcome.differences]

    run()
    assert total.differences == []
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
