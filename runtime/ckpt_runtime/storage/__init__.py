"""Snapshots and high-availability data on any file system; the only room that uses fsspec."""
