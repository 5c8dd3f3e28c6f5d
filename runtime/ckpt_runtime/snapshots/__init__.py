"""Snapshots without a job: opened by their path, verified, described, copied, converted, written, claimed, deleted.

Everything that reads a snapshot uses ``snapshot.open_snapshot``: the dispatcher for the savepoint that a job starts
from, recovery for the checkpoints of an earlier driver, clean-up, disposal, and tools. Calls block; calls for paths
that users name belong in the thread pool for such paths.

* Invalid metadata raises a ``CorruptFileError`` that names the file and the position. Large metadata is first parsed in
  a process with limits.
* Unavailable storage makes the call fail; it does not count as a problem of the snapshot.
* A copy is published last, after each of its files was compared with its checksum; a failed copy leaves nothing behind.
* Files that a snapshot shares with others are not deleted with it. Only ``storage/checkpoint_storage.py`` deletes.
"""
