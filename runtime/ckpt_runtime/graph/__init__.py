"""The logical plan, its compilation to a job graph, uids, chaining and key groups.

* Compiling is deterministic: every process that compiles a pipeline gets the same fingerprint, and a worker refuses a
  job whose fingerprint differs from its own.
* A uid belongs to one operator.
* The functions for the key group of a hash, the key group range of a subtask and the owner of a key group are
  consistent with each other. This arithmetic never changes, because snapshots depend on it.
* ``withWatermark`` after a PySpark reader advances event time between ranges only. A plan is refused unless all
  operators between the two forward the ends of ranges and are connected by chains or forward edges.
* A PySpark reader is compiled to an enumerator and readers, a writer to a writer and a committer; their uids are
  derived from the original's.
* Compiling never opens a connector.
"""
