"""What operators keep per key: the interface of a backend, the backends in memory and on RocksDB, and the stable hash.

``docs/state-backends.md`` says how to write a backend; ``backend.py`` has its interface.

* A hash never changes. Equal keys hash equally whatever their width, encoding or offset in a batch.
* A snapshot shows the moment at which it was taken, whatever happens while it is written.
* An increment refers only to files that exist until it is subsumed, even if notifications come late or never.
* Restoring at another parallelism gives each part its keys, and back.
* State that no operator asks for survives the job that does not use it.
* A value that does not fit its schema is refused, and the error names state and field. An unsafe evolution is
  refused, and the error names both schemas.
* A backend never touches a file in storage: it is given streams and readers.
* A key is forgotten only by a TTL, or when event time has passed what a join's rows can match.
* The backend in memory never spills to disk: its state has to fit into memory.
* Rows of a key in a join are in memory or in a run, never in both, so that they keep their order.
* No process that others are forked from opens a RocksDB database, which has threads; only a backend imports it.
"""
