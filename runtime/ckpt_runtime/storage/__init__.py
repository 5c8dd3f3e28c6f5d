"""Snapshots and high-availability data on any file system; the only package that uses fsspec.

Invariants:

* A snapshot exists when its ``_metadata`` exists, which is created atomically.
* The directory of a savepoint is recorded in the job's pointers before it is created, until the savepoint is complete
  or deleted. All paths in a savepoint are relative, so that it may be moved.
* Deleting a savepoint deletes what its metadata refers to, then its entry, and no other file, wherever it was moved to.
  Forged paths and symbolic links do not lead out of a directory.
* Only regular files are read, and the type is checked on the open descriptor: a FIFO or a device never blocks a reader.
* Only one layer retries a failed request. A failed write is either certainly without effect, or reports that its
  outcome is unknown.
* Object stores are never read from a cached listing. Their directories and buckets are neither made nor deleted.
* Stored bytes are JSON and Arrow only; they are never unpickled or evaluated.
"""
