"""Rows per second of count and sum per key by a ``StatefulProcessor`` in Python, one row out per row in."""

from __future__ import annotations

from benchmarks.harness import add_keyed_options, emit, parser_for, run_main
from benchmarks.keyed_run import measure

NAME = "keyed_process"


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    add_keyed_options(parser)
    options = parser.parse_args()
    run = measure(NAME, options)
    emit(NAME, options, {"rows_per_s": round(run.rows_per_s), "checkpoints": len(run.checkpoints)}, run.peak_rss_mb)


if __name__ == "__main__":
    run_main(main)
