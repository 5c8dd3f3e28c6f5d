"""Rows per second of a directory of Parquet files through a filter and windows by a string key into another directory:
with ``--spark``, the same program in the engine and in Structured Streaming, one after the other. The rows of both have
to be equal; without ``--spark`` those of one file are compared.

The time is from the start of the query, in a process that is warm, to its end. Spark's is without its analysis.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness import PIPELINES, measure_here, parser_for, positive_int, run_main
from benchmarks.pipelines.etl import totals
from benchmarks.windows import add_orders_options, beside_spark

NAME = "etl"


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--keys", type=positive_int, default=100_000, help="number of customers")
    add_orders_options(parser, files=10)
    options = parser.parse_args()
    measure_here(NAME, options, partial(beside_spark, program=PIPELINES / "etl.py", totals=totals))


if __name__ == "__main__":
    run_main(main)
