"""The oracle itself: it accepts what is right and names what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chaos import oracle
from tests.chaos.oracle import Input, WrongOutput, check_content

ROWS = 300


@pytest.fixture
def made() -> Input:
    return Input.generate(7, ROWS)


def write(made: Input, output: Path) -> None:
    """What a job without any mistake leaves."""
    start = int(oracle._EPOCH.timestamp() * 1000)
    united = [(row[0],) for row in made.orders] + [(row[0] + oracle.PAYMENT_BASE,) for row in made.payments]
    thirtieth = [(row[0],) for row in made.payments if row[0] % 30 == 0]
    put(output / "totals", oracle._totals(made), "key", "orders", "amount", "id")
    put(output / "windows", oracle._windows(made, start), "key", "start", "orders", "amount")
    put(output / "joined", oracle._joined(made), "number", "paid_at")
    put(output / "united", united, "id")
    put(output / "thirtieth", thirtieth, "number")


def put(directory: Path, rows: list[tuple[Any, ...]], *columns: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(zip(columns, zip(*rows, strict=True), strict=True)))
    pq.write_table(table, directory / "part-0.parquet")


def test_right_output_passes(made: Input, tmp_path: Path) -> None:
    write(made, tmp_path)
    check_content(made, tmp_path)


@pytest.mark.parametrize("name", ["totals", "windows", "joined", "united", "thirtieth"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda table: table.slice(1), "1 rows of"),
        (lambda table: pa.concat_tables([table, table.slice(0, 1)]), "1 are"),
    ],
    ids=["lost", "doubled"],
)
def test_a_lost_and_a_doubled_row_are_found(
    made: Input, tmp_path: Path, name: str, harm: Callable[[pa.Table], pa.Table], message: str
) -> None:
    write(made, tmp_path)
    file = tmp_path / name / "part-0.parquet"
    pq.write_table(harm(pq.read_table(file)), file)
    with pytest.raises(WrongOutput, match=f"{name}.*{message}"):
        check_content(made, tmp_path)


def test_rows_of_a_key_in_another_order_are_found(made: Input, tmp_path: Path) -> None:
    """As if two rows of one key had overtaken each other: all other outputs are right."""
    first, second = [index for index, order in enumerate(made.orders) if order[1] == made.orders[0][1]][:2]
    swapped = Input(ROWS, list(made.orders), made.payments)
    swapped.orders[first], swapped.orders[second] = made.orders[second], made.orders[first]
    write(swapped, tmp_path)
    with pytest.raises(WrongOutput, match="totals: 2 rows"):
        check_content(made, tmp_path)


def test_hidden_files_are_not_read(made: Input, tmp_path: Path) -> None:
    write(made, tmp_path)
    (tmp_path / "united" / "part-0.parquet").rename(tmp_path / "united" / ".part-0.parquet.pending")
    with pytest.raises(WrongOutput, match="united"):
        check_content(made, tmp_path)
