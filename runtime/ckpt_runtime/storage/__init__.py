"""Snapshots and high-availability data on any file system; the only package that uses fsspec."""
