"""Keyed state of operators: the backend interface, the memory and RocksDB backends, and the stable hash of keys.

``docs/state-backends.md`` says how to write a backend; ``backend.py`` has its interface.

* The hash of a key never changes. Equal keys have equal hashes at any width, encoding or offset in a batch.
* A snapshot contains the state of the moment at which it was taken, also if the state changes while it is written.
* An incremental checkpoint refers only to files that exist until it is subsumed, even if notifications arrive late or
  never.
* A restore at another parallelism gives each subtask exactly its keys, and so does rescaling back.
* State that no operator requests is kept, and written into the job's next snapshots.
* A value that does not fit its schema is refused, and the error names state and field. An unsafe evolution is
  refused, and the error names both schemas.
* A backend never opens a file in storage itself: the task gives it streams and readers.
* State of a key is removed automatically only when its TTL expires, or when event time has passed the point up to which
  a join's rows can match.
* The backend in memory never spills to disk: its state has to fit into memory.
* Rows of a key in a join are in memory or in a run, never in both, so that they keep their order.
* Template processes never open a RocksDB database, because its threads do not survive a fork; only the RocksDB backend
  imports it.
"""
