"""Generated expressions over generated rows in Spark and in the engine: equal, or refused when the plan is made.

``PARITY_EXAMPLES`` says for how many tables, with forty expressions each; ``make parity`` takes more.
"""

from __future__ import annotations

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

from tests.support.generated_parity import Outcome, compare, examples_of, expressions, tables

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
