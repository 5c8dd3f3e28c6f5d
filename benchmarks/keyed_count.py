"""Rows per second of count and sum per key by the built-in aggregate, and what its checkpoints cost."""

from __future__ import annotations

from benchmarks.expected import KEY_FORMS
from benchmarks.harness import BACKENDS, add_keyed_options, emit, parser_for, percentile, positive_int, run_main
from benchmarks.keyed_run import measure
from benchmarks.state_memory import bytes_per_key

NAME = "keyed_count"


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    add_keyed_options(parser)
    parser.add_argument("--key", choices=KEY_FORMS, default="int", help="keys below --keys, far apart, or as text")
    parser.add_argument("--cached-keys", type=positive_int, help="keys that the job keeps in memory with rocksdb")
    options = parser.parse_args()
    cache: dict[str, str] = {}
    if options.cached_keys:
        cache["state.backend.rocksdb.cache.max-keys"] = str(max(1, options.cached_keys // options.parallelism))
    run = measure(NAME, options, cache)
    per_key = bytes_per_key(BACKENDS[options.backend], options.keys, options.key, cache)
    durations = [checkpoint.duration_ms for checkpoint in run.checkpoints]
    measures = {
        "rows_per_s": round(run.rows_per_s),
        "checkpoints": len(run.checkpoints),
        "checkpoint_ms_p50": percentile(durations, 0.5),
        "checkpoint_ms_p95": percentile(durations, 0.95),
        "checkpoint_ms_max": max(durations, default=None),
        "sync_ms_p99": percentile(run.sync_ms, 0.99),
        "checkpoint_bytes_p50": percentile([checkpoint.checkpointed_size for checkpoint in run.checkpoints], 0.5),
        "state_bytes_per_key": per_key,
    }
    emit(NAME, options, measures, run.peak_rss_mb)


if __name__ == "__main__":
    run_main(main)
