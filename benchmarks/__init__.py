"""Benchmarks: ``python -m benchmarks.NAME`` prints progress on stderr and one JSON line, last, on stdout."""
