"""Rows per second of count and sum per key by an ``ArrowStatefulProcessor``, one row out per row in.

``--rows-first`` measures ``keyed_process`` before it, with the same options: the ratio is then of one run.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import add_keyed_options, emit, parser_for, progress, run_main
from benchmarks.keyed_run import measure

NAME = "keyed_vector"


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    add_keyed_options(parser)
    parser.add_argument("--rows-first", action="store_true", help="also measure keyed_process, for the ratio")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.rows_first:
        by_row = measure("keyed_process", options).rows_per_s
        progress(f"row by row: {by_row:,.0f} rows/s")
        results["by_row_rows_per_s"] = round(by_row)
    run = measure(NAME, options)
    results |= {"rows_per_s": round(run.rows_per_s), "checkpoints": len(run.checkpoints)}
    if options.rows_first:
        results["ratio"] = round(run.rows_per_s / results["by_row_rows_per_s"], 1)
    emit(NAME, options, results, run.peak_rss_mb)


if __name__ == "__main__":
    run_main(main)
