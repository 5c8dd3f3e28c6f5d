"""The logical plan, its compilation to a job graph, uids, chaining and key groups.

* Compiling is deterministic: every process that compiles a pipeline gets the same fingerprint, and a worker refuses
  another.
* A uid belongs to one operator.
* The key group of a hash, the range of a subtask and the owner of a key group agree with each other. The arithmetic
  of key groups never changes, because snapshots depend on it.
* ``withWatermark`` behind a PySpark reader moves event time between ranges. A plan is refused unless only chains and
  forward edges of operators that pass ends of ranges on lie between them.
* A PySpark reader becomes an enumerator and readers, and a writer gets a committer behind it, with uids derived from
  its own.
* Compiling never opens a connector.
"""
